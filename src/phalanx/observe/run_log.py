"""What one run leaves in events and metrics: worker states, durations, restarts, incidents, totals.

Subscribed only where a handler is configured. Event and metric names, and the names in an event's
metadata, are torch's, so that what reads them keeps working; what torch packs into a list inside a JSON
string inside the metadata is there as plain values too. Every incident (`core.ledger.incidents`) becomes one
record with what its recovery cost.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from phalanx.core.group import events as group_events
from phalanx.core.group.events import Outcome
from phalanx.core.group.restarts import remaining
from phalanx.observe import events, metrics
from phalanx.observe.stream import IncidentChanged, RunEnded, StepTaken, WorkersRunning

if TYPE_CHECKING:
    from phalanx.agent.spec import Worker, WorkerGroup
    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.core.group.group import GroupState
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.observe.events import EventMetadataValue
    from phalanx.observe.stream import Happened

AGENT_METRICS = "torchelastic"

RENDEZVOUS = "SimpleElasticAgent._rendezvous"
INITIALIZE = "SimpleElasticAgent._initialize_workers"
RESTART = "SimpleElasticAgent._restart_workers"
STOP = "LocalElasticAgent._stop_workers"
"""Steps of torch whose durations come from the moves of the core, also where no step is called."""


class RunLog:
    """Turns the steps of one agent into records."""

    def __init__(
        self,
        destination: str,
        group: WorkerGroup,
        policy: RestartPolicy,
    ) -> None:
        """The run starts now."""
        self._destination = destination
        self._group = group
        self._policy = policy
        self._begin = time.monotonic()
        if destination != "null":
            events.host_name()  # now: it may wait for DNS, and the owner loop must not
        self._since: dict[str, float] = {}  # when the steps that are under way began

    def take(self, happened: Happened) -> None:
        match happened:
            case StepTaken():
                self._step(happened)
            case WorkersRunning():
                self._started(happened)
            case IncidentChanged() if happened.incident.over:
                events.record_incident(happened.incident, self._destination)
            case RunEnded():
                self._end(happened)

    def _step(self, step: StepTaken) -> None:
        now, state = time.monotonic(), step.state
        for command in step.commands:
            match command:
                case group_events.Join():
                    self._since.setdefault(RENDEZVOUS, now)
                    self._since.setdefault(INITIALIZE, now)
                case group_events.StopWorkers() | group_events.RecallWorkers():
                    self._since.setdefault(STOP, now)
                    if state.ending is None:
                        self._since.setdefault(RESTART, now)
        match step.event:
            case group_events.Started():
                self._over(INITIALIZE, now)
                self._over(RESTART, now)
                self._states("healthy", state)
            case group_events.Stopped():
                self._over(STOP, now, ok=not step.event.unkillable)
            case group_events.RoundReady():
                self._joined(state, now)
            case group_events.AllSucceeded():
                self._states("succeeded", state)
            case group_events.WorkerFailed() if step.commands:  # without commands it changed nothing
                self._states("failed", state)
            case group_events.Hang() | group_events.Uninterruptible() if step.commands:
                self._states("unhealthy", state)
            case _:
                pass

    def _joined(self, state: GroupState, now: float) -> None:
        took = 1000 * (now - self._since.setdefault(RENDEZVOUS, now))
        self._over(RENDEZVOUS, now)
        self._record("RENDEZVOUS", restarts=state.attempt, duration_ms=took)

    def _started(self, start: WorkersRunning) -> None:
        self._duration("SimpleElasticAgent._assign_worker_ranks", start.placed_in * 1000)
        self._duration("LocalElasticAgent._start_workers", start.started_in * 1000)
        self._record("ASSIGN_WORKER_RANKS", restarts=start.attempt, duration_ms=start.placed_in * 1000)
        for worker in self._group.workers:
            self._record("START", worker, restarts=start.attempt)

    # -- the end ------------------------------------------------------------------------------------

    def _end(self, end: RunEnded) -> None:
        """The states of all workers, the agent's own, and the totals."""
        finish, result, restarts, done = end.finish, end.result, end.attempt, end.workers_recorded
        now = time.monotonic()
        for name in tuple(self._since):
            self._over(name, now, ok=False)
        took = 1000 * (now - self._begin)
        outcome = finish.outcome if finish is not None else Outcome.FAILED
        clean = outcome in (Outcome.SUCCEEDED, Outcome.CLOSED, Outcome.LEFT)
        for worker in self._group.workers:
            if worker.id is None or done:
                continue  # it was never started
            failure = {**result.failures, **result.stopped}.get(worker.global_rank)
            state = "FAILED" if failure is not None and not failure.is_victim else "TERMINATED"
            if outcome is Outcome.SUCCEEDED:
                state, failure = "SUCCEEDED", None
            self._record(state, worker, failure, restarts=restarts)
        agent_state = "SUCCEEDED" if clean else "FAILED"
        error = finish.message if finish is not None and not clean else None
        self._record(agent_state, restarts=restarts, duration_ms=took, error=error)
        self._duration("SimpleElasticAgent.run", took, ok=finish is not None)
        if not done:
            self._totals(clean, restarts)

    def _record(
        self,
        state: str,
        worker: Worker | None = None,
        failure: ProcessFailure | None = None,
        *,
        restarts: int,
        duration_ms: float | None = None,
        error: str | None = None,
    ) -> None:
        """One status event, of a worker or (without one) of the agent; built only where it is handled."""

        def build() -> events.Event:
            source = events.EventSource.AGENT if worker is None else events.EventSource.WORKER
            ran = int(time.monotonic() - self._begin)
            code = failure.exitcode if failure is not None else None
            pid = worker.id if worker is not None and isinstance(worker.id, int) else None
            metadata = metadata_of(self._group, state, worker, ran, exit_code=code, worker_pid=pid)
            if failure is not None:
                metadata["raw_error"] = json.dumps(failure.error_file_data, default=str)
            if error is not None:
                metadata["raw_error"] = error
            metadata["agent_restarts"] = restarts
            metadata["duration_ms"] = None if duration_ms is None else round(duration_ms, 3)
            name = f"torchelastic.worker.status.{state}"  # torch's name for the agent's events as well
            return events.Event(name, source, int(time.time()), metadata)

        events.record(build, self._destination)

    # -- metrics ------------------------------------------------------------------------------------

    def _over(self, name: str, now: float, ok: bool = True) -> None:
        """A step has ended, if it was under way."""
        began = self._since.pop(name, None)
        if began is not None:
            self._duration(name, 1000 * (now - began), ok)

    def _duration(self, name: str, milliseconds: float, ok: bool = True) -> None:
        metrics.put_metric(f"{name}.{'success' if ok else 'failure'}", 1, AGENT_METRICS)
        metrics.put_metric(f"{name}.duration.ms", int(milliseconds), AGENT_METRICS)

    def _of_role(self, name: str, value: int) -> None:
        metrics.put_metric(f"workers.{self._group.spec.role}.{name}", value, AGENT_METRICS)

    def _states(self, name: str, state: GroupState) -> None:
        left = remaining(state.history, time.monotonic(), self._policy)
        self._of_role("remaining_restarts", left)
        self._of_role(name, 1)

    def _totals(self, succeeded: bool, restarts: int) -> None:
        allowed = self._group.spec.max_restarts
        flakiness = 100 * restarts // (allowed + 1) if succeeded else 100
        self._of_role("flakiness", min(100, flakiness))
        self._of_role("run_total", 1)
        for name, it_did in (("success", succeeded), ("failed", not succeeded)):
            self._of_role(f"run_{name}_with_retries", int(it_did and restarts > 0))
            self._of_role(f"run_{name}_no_retries", int(it_did and restarts == 0))


def metadata_of(
    group: WorkerGroup,
    state: str,
    worker: Worker | None,
    run_time: int,
    *,
    exit_code: int | None,
    worker_pid: int | None,
) -> dict[str, EventMetadataValue]:
    """What a status event tells of an agent or, with one, of a worker."""
    spec = group.spec
    own: dict[str, EventMetadataValue] = {}
    packed: dict[str, object] = {
        "group_world_size": group.group_world_size,
        "entry_point": spec.get_entrypoint_name(),
    }
    if worker is not None:
        own = {
            "local_rank": worker.local_rank,
            "role_rank": worker.role_rank,
            "role_world_size": worker.role_world_size,
            "exit_code": exit_code,
            "worker_pid": worker_pid,
        }
        packed.update({name: [value] for name, value in own.items()})
    return {
        "run_id": spec.rdzv_handler.get_run_id(),
        "global_rank": None if worker is None else worker.global_rank,
        "group_rank": group.group_rank,
        "worker_id": None if worker is None else str(worker.id),
        "role": spec.role,
        "hostname": events.host_name(),
        "state": state,
        "total_run_time": run_time,
        "rdzv_backend": spec.rdzv_handler.get_backend(),
        "raw_error": None,
        "metadata": json.dumps(packed),
        **own,
    }
