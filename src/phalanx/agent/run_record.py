"""What an agent tells while it runs: notes for a person, reasons of decisions, events and metrics."""

from __future__ import annotations

import sys
import time
from collections import deque

from phalanx.agent.job_history import JobHistory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from phalanx.agent.spec import AgentOptions, RunResult, WorkerGroup
    from phalanx.core.group import GroupState
    from phalanx.core.group_events import Command, Event, Finish, ReportFailure
    from phalanx.core.restarts import RestartPolicy
    from phalanx.observe.run_log import RunLog
    from phalanx.supervision.supervision import Supervision

# Of the node where it happened: the other nodes learn of it as PeerFailed.
_NOTIFIED = {
    "WorkerFailed": "failure",
    "StartFailed": "failure",
    "Uninterruptible": "failure",
    "Hang": "hang",
}


class RunRecord:
    """The records of one agent."""

    def __init__(
        self, group: WorkerGroup, options: AgentOptions, policy: RestartPolicy, supervision: Supervision
    ) -> None:
        self.job_name = options.job_name or group.spec.get_entrypoint_name()
        self.notes: deque[tuple[float, str]] = deque(maxlen=20)  # the last ones, with the time
        self.progress = options.progress
        self._on_note = options.note
        self._on_reason = options.reason
        self._group = group
        self._policy = policy
        self._supervision = supervision
        self._began = time.time()
        self.history = JobHistory(group.spec.local_world_size, supervision)
        self._log: RunLog | None = None  # None where nothing records events or metrics
        self._notifier = options.notifier
        self._told_of_incident = False  # through the notifier; its recovery is told of, too
        if options.notifier is not None:
            supervision.incidents.on_warning = lambda summary: self._notify("hang", summary, 0)
        self._last_failure: tuple[float, RunResult, str] | None = None  # when, and the summary of a hang
        self._cause = "", 0.0
        self.workers_recorded = False  # their last states and the totals, by torch's methods of a subclass

    def open(self) -> None:
        """Begin the run's events and metrics.

        Metrics are recorded only in a process that imported them to configure a handler, so that otherwise
        nothing is imported for them here.
        """
        destination = self._group.spec.event_log_handler
        if destination == "null" and "phalanx.observe.metrics" not in sys.modules:
            return
        from phalanx.observe.run_log import RunLog

        self._log = log = RunLog(destination, self._group, self._policy)
        self.history.listeners.append(log.incident)

    def step(
        self,
        event: Event,
        state: GroupState,
        commands: Sequence[Command],
        reason: str,
        result: RunResult,
    ) -> None:
        """One step of the core."""
        self._group.state = state.worker_state
        if self._on_reason is not None:
            self._on_reason(f"{type(event).__name__}: {reason}")
        self.history.step(event, state, commands, reason, result)
        if commands and type(event).__name__ in _NOTIFIED:
            self._last_failure = time.time(), result, getattr(event, "summary", "") or reason
        if self._log is not None:
            self._log.step(event, state, commands)
        if self._notifier is not None and commands:
            kind = _NOTIFIED.get(type(event).__name__)
            if kind is not None:
                self._told_of_incident = True
                self._notify(kind, getattr(event, "summary", "") or reason, state.attempt, reason=reason)

    def started(self, attempt: int, placed_in: float, started_in: float) -> None:
        """The workers run; seconds that their ranks and their start took."""
        if self._log is not None:
            self._log.started(self._group, attempt, placed_in, started_in)
        if self._told_of_incident:
            self._told_of_incident = False
            self._notify("recovery", "all workers run again", attempt)

    def _notify(self, kind: str, text: str, attempt: int, **more: Any) -> None:
        assert self._notifier is not None
        self._notifier.send(kind, text, restarts=attempt, node_rank=self._group.group_rank, **more)

    def settle(self) -> None:
        """Complete the record of an incident, where that is possible by now."""
        self.history.settle()

    def end(self, finish: Finish | None, result: RunResult, attempt: int) -> None:
        """The run is over."""
        self.history.end()
        if self._log is not None:
            self._log.end(self._group, finish, result, attempt, self.workers_recorded)
            self._log = None

    def note(self, line: str) -> None:
        """One line per incident, for a person."""
        self.notes.append((time.time(), line))
        if self.progress is not None:
            self.progress.clear()
        if self._on_note is not None:
            self._on_note(line)
            return
        import logging

        logging.getLogger("phalanx").info(line)

    def show_waiting(self, line: str) -> None:
        """What the nodes wait for, where there is no terminal to draw it on; from another thread."""
        if self.progress is None:
            self.note(line)

    def cause(self) -> tuple[str, float]:
        """The report of the last failure or hang of this node, and when; made when it is asked for."""
        if self._last_failure is None:
            return "", 0.0
        when, result, summary = self._last_failure
        if self._cause[1] != when:
            self._cause = self._describe(result, summary)[0], when
        return self._cause

    def report(self, command: ReportFailure, result: RunResult) -> tuple[str, int]:
        """The report that all nodes show should this failure end the job, and the exit code."""
        return self._describe(result, command.summary)

    def _describe(self, result: RunResult, summary: str) -> tuple[str, int]:
        if not result.failures:
            return self._supervision.report(summary) or summary, 1
        from phalanx.observe.report import diagnosis_of, format_report

        everyone = {**result.failures, **result.stopped}
        report = format_report(self.job_name, everyone, started_at=self._began, width=100)
        return report, diagnosis_of(everyone, self._began).exit_code
