"""Health and `/metrics` of `phalanx store`: a sample of the server, taken in its thread."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from phalanx.store.embedded.server import Server, ServerSample
from phalanx.web.health import HealthServer, LoopProbe
from phalanx.web.metrics import MetricsPage

_MOST_JOBS = 1000  # series; the largest ones


def store_endpoints(server: Server, host: str, port: int, *, metrics: bool) -> HealthServer:
    """/healthz, /readyz and, if asked for, /metrics of a store; not started yet."""
    probe = LoopProbe(lambda answered: server.post(answered.set))
    pages = {"/metrics": _StorePage(server.sample, server.post).answer} if metrics else {}
    return HealthServer(host, port, probe.live, pages=pages)


class _StorePage(MetricsPage):
    def _collector(self, sample: Any) -> Any:
        return StoreCollector(sample)


class StoreCollector:
    """What prometheus-client asks for the metrics of a server."""

    def __init__(self, sample: ServerSample) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        one = self._sample
        for name, text, value in (
            ("clients", "Connections that have proved the token.", one.clients),
            ("strangers", "Connections that have not proved the token yet.", one.strangers),
            ("keys", "Keys.", len(one.keys)),
            ("leases", "Leases that are held.", one.leases),
            ("revision", "Number of the last change.", one.revision),
        ):
            yield GaugeMetricFamily(f"phalanx_store_{name}", text, value=value)
        nodes = GaugeMetricFamily(
            "phalanx_store_job_nodes", "Nodes that are connected, by job.", labels=["run_id"]
        )
        for run, count in nodes_by_job(one.keys).most_common(_MOST_JOBS):
            nodes.add_metric([run], count)
        yield nodes
        commands = CounterMetricFamily(
            "phalanx_store_commands", "Commands of clients by kind.", labels=["command"]
        )
        for kind, count in sorted(one.commands.items()):
            commands.add_metric([kind.lower()], count)
        yield commands
        yield CounterMetricFamily(
            "phalanx_store_refused", "Connections with a wrong token.", value=one.refused
        )
        yield CounterMetricFamily(
            "phalanx_store_expired_leases", "Leases that ran out: lost nodes.", value=one.expired
        )
        if one.journal:
            size = os.stat(one.journal).st_size if os.path.exists(one.journal) else 0
            yield GaugeMetricFamily("phalanx_store_journal_bytes", "Size of the journal.", value=size)


def nodes_by_job(keys: tuple[str, ...]) -> Counter[str]:
    """How many nodes each job has: the keys job/<run>/node/<id>."""
    parts = (key.removeprefix("job/").partition("/node/") for key in keys if key.startswith("job/"))
    return Counter(run for run, node, _ in parts if node)
