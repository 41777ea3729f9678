"""What one run leaves in events and metrics: worker states, durations, restarts, incidents, totals.

Made only when somebody listens; the agent calls `begin`, `step` for every event of its loop, and `end`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from phalanx.core import messages as say
from phalanx.core.messages import Outcome, WorkerState
from phalanx.observe import events, metrics

if TYPE_CHECKING:
    from phalanx.agent.spec import RunResult, WorkerGroup
    from phalanx.core.group import GroupState
    from phalanx.observe.events import EventMetadataValue

AGENT_METRICS = "torchelastic"


class RunLog:
    """Turns the steps of one agent into records."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._group: WorkerGroup | None = None
        self._begin = 0.0
        self._joining = 0.0
        self._incident: events.IncidentMarks | None = None

    def begin(self, group: WorkerGroup) -> None:
        self._group = group
        self._begin = time.monotonic()

    def step(self, event: say.Event, state: GroupState, reason: str) -> None:
        """One step of the loop: durations and incidents."""
        now = time.monotonic()
        match event:
            case say.Start():
                self._joining = now
            case say.RoundReady():
                metrics.put_metric("rendezvous.duration.ms", int((now - self._joining) * 1000), AGENT_METRICS)
                self._mark("reformed", now)
            case say.WorkerFailed() | say.PeerFailed() | say.Hang() | say.MembershipChanged():
                self._open_incident(event, state, reason, now)
            case say.Stopped():
                self._mark("stopped", now)
            case say.Started():
                self._mark("started", now)
                self._close_incident()
            case _:
                pass

    def _open_incident(self, event: say.Event, state: GroupState, reason: str, now: float) -> None:
        self._close_incident()
        self._joining = now
        kind = type(event).__name__
        number = state.round.number if state.round else 0
        incident = events.Incident(kind=kind, reason=reason, round=number, attempt=state.attempt)
        self._incident = events.IncidentMarks(incident)
        self._incident.mark("detected", now)
        if not isinstance(event, say.MembershipChanged):
            metrics.put_metric("workers.restarts", 1, AGENT_METRICS)

    def _mark(self, stage: str, now: float) -> None:
        if self._incident is not None:
            self._incident.mark(stage, now)

    def _close_incident(self) -> None:
        if self._incident is not None:
            events.record_incident(self._incident.incident(), self._destination)
            self._incident = None

    def end(self, group: WorkerGroup, finish: say.Finish | None, result: RunResult, restarts: int) -> None:
        """The totals of the run."""
        self._close_incident()
        took = int((time.monotonic() - self._begin) * 1000)
        succeeded = finish is not None and finish.outcome is Outcome.SUCCEEDED
        for worker in group.workers:
            failure = result.failures.get(worker.global_rank)
            state = "SUCCEEDED" if succeeded else "FAILED" if failure else "TERMINATED"
            error = failure.message if failure else None
            self._record(
                group,
                state,
                worker.global_rank,
                worker.local_rank,
                worker.id,
                error,
                failure.exitcode if failure else None,
                took,
                restarts,
            )
        self._record(
            group,
            "SUCCEEDED" if succeeded else "FAILED",
            None,
            None,
            None,
            finish.message if finish and not succeeded else None,
            None,
            took,
            restarts,
        )
        self._totals(succeeded, restarts, took, group.spec.max_restarts)

    def _record(
        self,
        group: WorkerGroup,
        state: str,
        rank: int | None,
        local_rank: int | None,
        pid: object,
        error: str | None,
        code: int | None,
        took: int,
        restarts: int,
    ) -> None:
        source = events.EventSource.AGENT if rank is None else events.EventSource.WORKER

        def build() -> events.Event:
            metadata: dict[str, EventMetadataValue] = {
                "run_id": group.spec.rdzv_handler.get_run_id(),
                "global_rank": rank,
                "local_rank": local_rank,
                "group_rank": group.group_rank,
                "worker_id": pid if isinstance(pid, int) else None,
                "role": group.spec.role,
                "hostname": os.uname().nodename,
                "state": state,
                "total_run_time": took // 1000,
                "rdzv_backend": group.spec.rdzv_handler.get_backend(),
                "raw_error": error,
                "restarts": restarts,
                "duration_ms": took,
                "exit_code": code,
                "agent_restarts": restarts,
            }
            name = f"torchelastic.{'agent' if rank is None else 'worker'}.status.{state}"
            return events.Event(name, source, int(time.time()), metadata)

        events.record(build, self._destination)

    def _totals(self, succeeded: bool, restarts: int, took: int, allowed: int) -> None:
        put = metrics.put_metric
        retried = "retryable" if restarts else "no_retries"
        put(f"run_{'succeeded' if succeeded else 'failed'}.{retried}", 1, AGENT_METRICS)
        put("run_duration.ms", took, AGENT_METRICS)
        flakiness = 100.0 if not succeeded else 100.0 * restarts / (allowed + 1)
        put("workers.flakiness", int(flakiness), AGENT_METRICS)


__all__ = ["RunLog", "WorkerState"]
