"""`--otel`: one OpenTelemetry trace per incident, sent by a process of its own.

The SDK takes half a second and tens of megabytes to load. The agent stays what it is: when an incident is
over, a process (trace_process.py) gets it as JSON, sends it by OTLP over HTTP as the `OTEL_*` variables say,
and exits. Of a job of several nodes, the node where something failed sends the trace, and node 0 those of
changes of members.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from phalanx.observe.outbox import Outbox, Undelivered
from phalanx.observe.stream import IncidentChanged
from phalanx.plugins import MISSING
from phalanx.python_command import python_command

if TYPE_CHECKING:
    from phalanx.observe.notifier import JobNames
    from phalanx.observe.stream import Happened

ABSENT = 78  # exit code: the SDK is not there
_LIMIT = 60.0  # seconds; its imports take one, and any time on a busy machine
_OF_ALL_NODES = ("membership", "preemption", "request")


class TraceSender(Outbox):
    """Sends the incidents of an agent."""

    def __init__(self, names: JobNames) -> None:
        super().__init__("--otel", "trace")
        self._names = names

    def take(self, happened: Happened) -> None:
        if not isinstance(happened, IncidentChanged):
            return
        incident = happened.incident
        if not incident.over or incident.trigger == "peer failure":
            return
        if incident.trigger in _OF_ALL_NODES and happened.node_rank:
            return
        self.put(json.dumps({"names": self._names.as_dict(), "incident": incident.as_dict()}).encode())

    def deliver(self, body: bytes) -> None:
        code = self.run(python_command("phalanx.observe.trace_process"), body, _LIMIT)
        if code == ABSENT:
            raise Undelivered(MISSING["otel"], final=True)
        if code:
            raise Undelivered("the collector did not accept a trace; see OTEL_EXPORTER_OTLP_ENDPOINT")
