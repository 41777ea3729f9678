"""torch's methods of an agent for events and metrics.

Phalanx makes events and metrics in one place (`observe.run_log`). An agent class that overrides one of these
methods gets them called instead at the end of its run, in torch's order: `_record_metrics`, then
`_record_worker_events`, which asks `_get_worker_state` and `_construct_event` for each worker. Each can also
be called by itself.
"""

from __future__ import annotations

import sys
import time

from phalanx.core.group.events import WorkerState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from phalanx.agent.spec import Worker, WorkerGroup
    from phalanx.agent.workers.result import RunResult
    from phalanx.observe.events import Event, EventSource

METHODS = (
    "_construct_event",
    "_get_worker_state",
    "_record_flakiness_metric",
    "_record_metric_with_condition",
    "_record_metrics",
    "_record_worker_events",
    "get_event_failed",
    "get_event_succeeded",
    "record_duration",
)


class TorchEvents:
    """The methods, for an agent of one group."""

    _worker_group: WorkerGroup
    _remaining_restarts: int
    _total_execution_time: int

    def get_event_failed(self) -> Event:
        """The event of an agent that failed, with the exception that is being handled."""
        import traceback

        from phalanx.observe.events import EventSource

        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        """The event of an agent whose workers succeeded."""
        from phalanx.observe.events import EventSource

        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    def _record_worker_events(self, result: RunResult) -> None:
        import json

        from phalanx.observe.events import EventSource, record

        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            error = json.dumps(failure.error_file_data, default=str) if failure is not None else None
            event = self._construct_event(
                self._get_worker_state(worker, result),
                EventSource.WORKER,
                worker,
                error,
                exit_code=failure.exitcode if failure is not None else None,
                worker_pid=failure.pid if failure is not None else None,
            )
            record(event, self._worker_group.spec.event_log_handler)

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        rank = worker.global_rank
        if rank in result.failures or rank in result.return_values:
            return str(result.state.value)
        if result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
            return "TERMINATED"  # because of another one
        raise ValueError(f"rank {rank} is neither in the return values nor in the failures of {result}")

    def record_duration(self, state: str) -> _Duration:
        """A context that records how long its body took, as an event of the agent."""
        return _Duration(self, state)

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        from phalanx.observe.events import Event
        from phalanx.observe.run_log import metadata_of

        ran = self._total_execution_time
        about = metadata_of(
            self._worker_group, state, worker, ran, exit_code=exit_code, worker_pid=worker_pid
        )
        about |= {
            "raw_error": raw_error,
            "agent_restarts": self._worker_group.spec.max_restarts - self._remaining_restarts,
            "duration_ms": duration_ms,
        }
        return Event(f"torchelastic.worker.status.{state}", source, int(time.time()), about)

    def _record_metrics(self, group_results: RunResult) -> None:
        failed = group_results.is_failed()
        restarted = self._remaining_restarts != self._worker_group.spec.max_restarts
        self._record_flakiness_metric(failed)
        self._put("run_total", 1)
        for name, it_did in (("success", not failed), ("failed", failed)):
            self._record_metric_with_condition(f"run_{name}_with_retries", it_did and restarted)
            self._record_metric_with_condition(f"run_{name}_no_retries", it_did and not restarted)

    def _record_metric_with_condition(self, metric_name: str, condition: Any) -> None:
        self._put(metric_name, int(bool(condition)))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        allowed = self._worker_group.spec.max_restarts
        used = allowed - self._remaining_restarts
        self._put("flakiness", 100 if is_failed else 100 * used // (allowed + 1))

    def _observed(self, state: WorkerState) -> None:
        """What torch puts after each look at the workers."""
        self._put("remaining_restarts", self._remaining_restarts)
        self._put(state.name.lower(), 1)

    def _put(self, name: str, value: int) -> None:
        metrics = configured_metrics()
        if metrics is not None:
            metrics.put_metric(f"workers.{self._worker_group.spec.role}.{name}", value)


def configured_metrics() -> ModuleType | None:
    """The module of metrics; None where nobody has imported it to configure a handler."""
    return sys.modules.get("phalanx.observe.metrics")


class _Duration:
    """The context of `record_duration`."""

    def __init__(self, agent: TorchEvents, state: str) -> None:
        self._agent = agent
        self._state = state

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        from phalanx.observe.events import EventSource, record

        took = 1000 * (time.perf_counter() - self._began)
        event = self._agent._construct_event(self._state, EventSource.AGENT, duration_ms=took)
        record(event, self._agent._worker_group.spec.event_log_handler)
