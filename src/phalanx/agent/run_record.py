"""What an agent tells while it runs: notes for a person, reasons of decisions, events and metrics."""

from __future__ import annotations

import sys
import time
from collections import deque

from phalanx.agent.job_history import JobHistory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.agent.spec import AgentOptions, RunResult, WorkerGroup
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.core.group.events import Command, Event, Finish, ReportFailure
    from phalanx.core.group.group import GroupState
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.observe.event_file import EventFile
    from phalanx.observe.run_log import RunLog

_FAILURES = frozenset({"WorkerFailed", "StartFailed", "Uninterruptible", "Hang"})
"""Events of the node where it happened; the others learn of it as PeerFailed."""


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
        self.events: EventFile | None = None  # where this agent has logs of its own
        self._log: RunLog | None = None  # None where nothing records events or metrics
        self._notifier = options.notifier
        if self._notifier is not None:
            self._notifier.listen(self.history, supervision.incidents)
        if options.traces is not None:
            options.traces.node_rank = lambda: group.group_rank
            self.history.listeners.append(options.traces.incident)
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
        if commands and type(event).__name__ in _FAILURES:
            self._last_failure = time.time(), result, getattr(event, "summary", "") or reason
        if self._log is not None:
            self._log.step(event, state, commands)

    def started(self, attempt: int, placed_in: float, started_in: float, recovery: str = "") -> None:
        """The workers run; seconds that their ranks and their start took; `recovery`: how they did again."""
        self.history.recovered(recovery)
        if self._log is not None:
            self._log.started(self._group, attempt, placed_in, started_in)
        if self._notifier is not None:
            self._notifier.started(attempt)

    def settle(self) -> None:
        """Complete the record of an incident, where that is possible by now."""
        self.history.settle()
        if self.events is not None and not self.history.is_recovering:
            self.events.flush()

    def end(self, finish: Finish | None, result: RunResult, attempt: int) -> None:
        """The run is over."""
        self.history.end()
        if self.events is not None:
            self.events.flush()
        if self._log is not None:
            self._log.end(self._group, finish, result, attempt, self.workers_recorded)
            self._log = None

    def note(self, line: str) -> None:
        """One line per incident, for a person."""
        self.notes.append((time.time(), line))
        if self.events is not None:
            self.events.note(line)
        self.clear_progress()
        if self._on_note is not None:
            self._on_note(line)
            return
        import logging

        logging.getLogger("phalanx").info(line)

    def clear_progress(self) -> None:
        """Make room for a line on the terminal."""
        if self.progress is not None:
            self.progress.clear()

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

    def report(self, command: ReportFailure, result: RunResult) -> tuple[str, int, bool]:
        """The report that all nodes show should this failure end the job, the exit code, and whether the
        workers here only lost their peers."""
        return self._describe(result, command.summary, command.code)

    def quarantined(self, line: str) -> None:
        """A host is kept out, most often because of the incident at hand."""
        self.history.quarantined(line)
        self.note(line)

    def _describe(self, result: RunResult, summary: str, code: int = 1) -> tuple[str, int, bool]:
        if not result.failures:
            return self._supervision.report(summary) or summary, code, False
        from phalanx.observe.report import diagnosis_of, format_report

        everyone = {**result.failures, **result.stopped}
        report = format_report(self.job_name, everyone, started_at=self._began, width=100)
        found = diagnosis_of(everyone, self._began)
        return report, found.exit_code, bool(found.echoes) and not found.failed
