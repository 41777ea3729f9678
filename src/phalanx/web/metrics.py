"""`/metrics` for Prometheus: a sample of the agent, in the text that prometheus-client makes of it.

prometheus-client is optional and takes longer to import than everything that starts a worker, so it is
imported by the first request. Names, units and labels follow Prometheus' conventions; docs/monitoring.md
lists them. Labels are few and bounded: the run id, ranks of this node, and words of ours. A recovery of the
job is counted by each of its nodes: a rule takes the maximum by run_id, not the sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.core.ledger.goodput import LOST, PRODUCTIVE, RUNNING
from phalanx.core.record import Record
from phalanx.job.time_budgets import METRICS
from phalanx.observe.incident_counters import DurationCounts
from phalanx.observe.worker_states import MARKS
from phalanx.plugins import MISSING

_FRESH = 0.5  # seconds for which a sample serves every client: many of them must not keep the agent busy

Page = tuple[int, str, bytes]
"""A status code, the type of the text, and the text."""


class RankSample(Record):
    """A worker: its state, and if it sends heartbeats their number and the time of the last one."""

    rank: int
    state: str
    steps: int = 0
    last_step: float | None = None


class MetricsSample(Record):
    """An agent at one moment; `seconds`: rank-seconds by category, `goodput`: None without heartbeats."""

    run_id: str
    name: str
    role: str
    host: str
    since: float
    goodput: float | None
    seconds: dict[str, float]
    restarts: dict[tuple[str, str], int]
    recovery: dict[str, DurationCounts]
    workers: list[RankSample]
    round: int
    nodes: int
    standbys: int
    log_bytes: dict[str, int]
    store_operations: dict[str, int]


class MetricsPage:
    """Answers requests for `/metrics`, in the threads of the health server."""

    def __init__(self, sample: Callable[[], Any], post: Callable[[Callable[[], None]], None]) -> None:
        """`sample` runs in the owner's thread, which `post` reaches."""
        self._sample, self._post = sample, post
        self._lock = threading.Lock()
        self._last: MetricsSample | None = None
        self._taken_at = 0.0
        self._largest: dict[str, float] = {}
        self._warned = False

    def answer(self, accept: str = "") -> Page:
        """The page; `accept`: what the client says it can read."""
        try:
            from prometheus_client import CollectorRegistry, exposition
        except ImportError:
            return 501, "text/plain; charset=utf-8", f"/metrics {MISSING['metrics']}\n".encode()
        with self._lock:
            sample = self._fresh_sample()
            if sample is None:
                return 503, "text/plain; charset=utf-8", b"the agent does not respond\n"
            collector = self._collector(sample)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        encode, kind = exposition.choose_encoder(accept)
        return 200, kind, encode(registry)

    def _collector(self, sample: MetricsSample) -> Any:
        return SampleCollector(sample, self._grown(sample.seconds))

    def _fresh_sample(self) -> MetricsSample | None:
        if self._last is not None and time.monotonic() - self._taken_at < _FRESH:
            return self._last
        taken: list[MetricsSample] = []
        done = threading.Event()

        def take() -> None:
            try:
                taken.append(self._sample())
            except Exception as error:  # noqa: BLE001 - this is the agent's loop: the job is more important
                self._warn(f"/metrics: {type(error).__name__}: {error}")
            finally:
                done.set()

        self._post(take)
        if not done.wait(METRICS) or not taken:
            return None
        self._last, self._taken_at = taken[0], time.monotonic()
        return taken[0]

    def _warn(self, line: str) -> None:
        if not self._warned:
            from phalanx.log import warn

            self._warned = True
            warn(line)

    def _grown(self, seconds: dict[str, float]) -> dict[str, float]:
        """A counter never falls, but the ledger may book a moment elsewhere once it knows better."""
        for name, value in seconds.items():
            self._largest[name] = max(value, self._largest.get(name, 0.0))
        return dict(self._largest)


class SampleCollector:
    """What prometheus-client asks for the metrics of a sample."""

    def __init__(self, sample: MetricsSample, seconds: dict[str, float]) -> None:
        self._sample, self._seconds = sample, seconds

    def collect(self) -> Iterator[Any]:
        """All metrics, with the run id: the nodes of one job are several instances."""
        for part in (self._job, self._time, self._incidents, self._workers, self._rest):
            for family in part():
                family.samples = [
                    one._replace(labels={"run_id": self._sample.run_id, **one.labels})
                    for one in family.samples
                ]
                yield family

    def _job(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        one = self._sample
        about = {"name": one.name, "role": one.role, "node": one.host}
        yield InfoMetricFamily("phalanx_job", "The job and the node of this agent.", value=about)
        yield GaugeMetricFamily(
            "phalanx_start_time_seconds", "When the agent started, in seconds since 1970.", value=one.since
        )
        yield GaugeMetricFamily("phalanx_round", "Number of the current round; 0: none yet.", value=one.round)
        yield GaugeMetricFamily("phalanx_nodes", "Nodes of the current round.", value=one.nodes)
        yield GaugeMetricFamily(
            "phalanx_standbys", "Standby processes that wait on this node.", value=one.standbys
        )

    def _time(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if self._sample.goodput is not None:
            yield GaugeMetricFamily(
                "phalanx_goodput_ratio",
                "Part of all rank-seconds of this node since its start that were productive.",
                value=self._sample.goodput,
            )
        yield CounterMetricFamily(
            "phalanx_productive_seconds",
            "Rank-seconds of this node that were productive.",
            value=self._seconds.get(PRODUCTIVE, 0.0),
        )
        yield CounterMetricFamily(
            "phalanx_running_seconds",
            "Rank-seconds of this node that were not lost, if no rank has sent a heartbeat.",
            value=self._seconds.get(RUNNING, 0.0),
        )
        lost = CounterMetricFamily(
            "phalanx_lost_seconds", "Rank-seconds of this node that were lost.", labels=["reason"]
        )
        for name in LOST:
            lost.add_metric([name], self._seconds.get(name, 0.0))
        yield lost

    def _incidents(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        restarts = CounterMetricFamily(
            "phalanx_restarts",
            "Recoveries of the job that this node took part in; every node counts them.",
            labels=["cause", "kind"],
        )
        for (cause, kind), count in sorted(self._sample.restarts.items()):
            restarts.add_metric([cause, kind], count)
        yield restarts
        recovery = HistogramMetricFamily(
            "phalanx_recovery_seconds", "How long recoveries took, by phase.", labels=["phase"]
        )
        for phase, counts in self._sample.recovery.items():
            recovery.add_metric([phase], counts.cumulative(), counts.sum)
        yield recovery

    def _workers(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        states = GaugeMetricFamily("phalanx_workers", "Workers of this node by state.", labels=["state"])
        for state in MARKS:
            states.add_metric([state], sum(1 for one in self._sample.workers if one.state == state))
        yield states
        last = GaugeMetricFamily(
            "phalanx_worker_last_step_timestamp_seconds",
            "When a worker last sent a heartbeat, in seconds since 1970.",
            labels=["rank"],
        )
        steps = CounterMetricFamily(
            "phalanx_worker_steps", "Heartbeats of a worker since its start.", labels=["rank"]
        )
        for one in self._sample.workers:
            if one.last_step is not None:
                last.add_metric([str(one.rank)], one.last_step)
                steps.add_metric([str(one.rank)], one.steps)
        yield last
        yield steps

    def _rest(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        logs = CounterMetricFamily(
            "phalanx_log_bytes",
            "Bytes that the workers of this start wrote into their log files.",
            labels=["stream"],
        )
        for stream, count in self._sample.log_bytes.items():
            logs.add_metric([stream], count)
        yield logs
        store = CounterMetricFamily(
            "phalanx_store_operations",
            "Commands sent to the store of the nodes, and requests of workers to the store served here.",
            labels=["store"],
        )
        for name, count in self._sample.store_operations.items():
            store.add_metric([name], count)
        yield store
