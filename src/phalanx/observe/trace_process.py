"""The process that sends the trace of one incident; see trace_sender.py.

The root span is the incident, from the failure to the last stage that was reached; its children are the
stages, with their own times. What is known of the root cause is in the attributes of the root span.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from phalanx.observe.trace_sender import ABSENT

_ATTRIBUTES = (
    "number", "trigger", "recovery", "reason", "round", "attempt", "node", "rank", "pid", "exit_code",
)  # fmt: skip
_NOTHING_FAILED = ("membership", "preemption", "request")


def stages(incident: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The stages that were reached: name, begin and end in seconds since 1970.

    Stop and re-form begin together, when the failure was detected; the next stages follow one another."""
    at = float(incident["timestamp"])
    found = []

    def add(name: str, begin: float) -> float:
        took = incident.get(name)
        if took is None:
            return begin
        found.append((name, begin, begin + took))
        return begin + float(took)

    detected = add("detect", at)
    at = max(add("stop", detected), add("reform", detected))
    for name in ("start", "first_line", "first_step"):
        at = add(name, at)
    return found


def send(message: dict[str, Any]) -> bool:
    """Make the spans and send them; whether the collector has accepted them."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    names, incident = message["names"], message["incident"]
    base = Resource(
        {"service.name": "phalanx", "service.instance.id": names["host"], "host.name": names["host"]}
    )
    spans = InMemorySpanExporter()
    provider = TracerProvider(resource=base.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("phalanx")
    attributes = {f"phalanx.incident.{k}": incident[k] for k in _ATTRIBUTES if incident.get(k) is not None}
    attributes |= {"phalanx.job": names["job"], "phalanx.run_id": names["run_id"]}
    found = stages(incident)
    begin = float(incident["timestamp"])
    end = max((until for _, _, until in found), default=begin)
    root = tracer.start_span(f"incident: {incident['trigger']}", start_time=_ns(begin), attributes=attributes)
    if incident["trigger"] not in _NOTHING_FAILED:
        root.set_status(trace.Status(trace.StatusCode.ERROR, incident["reason"]))
    inside = trace.set_span_in_context(root)
    for name, since, until in found:
        span = tracer.start_span(name, context=inside, start_time=_ns(since))
        span.end(end_time=_ns(until))
    root.end(end_time=_ns(end))
    finished = spans.get_finished_spans()
    if not finished:
        return True  # the sampler left it out, or the SDK is switched off
    exporter = OTLPSpanExporter()
    try:
        return bool(exporter.export(finished) is SpanExportResult.SUCCESS)
    finally:
        exporter.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def main() -> None:
    """Send what is on stdin; the exit code tells how that went."""
    message = json.loads(sys.stdin.buffer.read())
    try:
        sent = send(message)
    except ImportError:
        sys.exit(ABSENT)
    sys.exit(not sent)


if __name__ == "__main__":
    main()
