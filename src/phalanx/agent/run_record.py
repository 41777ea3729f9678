"""What one agent records: the calls of its loop and its parts, each published once (observe/stream.py)."""

from __future__ import annotations

import sys
import time
from collections import deque

from phalanx.agent.job_history import JobHistory
from phalanx.core.exit_codes import DO_NOT_RETRY
from phalanx.observe.stream import (
    HangWarned,
    HostQuarantined,
    IncidentChanged,
    NoteWritten,
    RunEnded,
    StepTaken,
    Stream,
    WorkersRunning,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.agent.spec import AgentOptions, WorkerGroup
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.workers.result import RunResult
    from phalanx.core.group.events import Command, Event, Finish, ReportFailure
    from phalanx.core.group.group import GroupState
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.core.ledger.incidents import Incident
    from phalanx.observe.progress_line import Progress
    from phalanx.observe.stream import Happened

_FAILURES = frozenset({"WorkerFailed", "StartFailed", "Uninterruptible", "Hang"})
"""Events of the node where it happened; the others learn of it as PeerFailed."""


class RunRecord:
    """The stream of one agent, and the subscribers that the agent itself asks."""

    def __init__(
        self, group: WorkerGroup, options: AgentOptions, policy: RestartPolicy, supervision: Supervision
    ) -> None:
        self.job_name = options.job_name or group.spec.get_entrypoint_name()
        self.progress = options.progress
        self.workers_recorded = False  # by torch's methods of a subclass
        self._group, self._policy = group, policy
        self.stream = Stream()
        self.history = JobHistory(group.spec.local_world_size, supervision, self._incident)
        self._lines = ShownLines(options.note, options.reason, options.progress)
        self._failures = FailureReports(self.job_name, supervision)
        self.stream.subscribers += [self._lines, self.history, self._failures, *options.subscribers]
        supervision.incidents.on_warning = lambda summary: self.stream.publish(HangWarned(summary))

    def open(self) -> None:
        """Begin the run's events and metrics.

        Metrics are recorded only in a process that imported them to configure a handler, so that otherwise
        nothing is imported for them here.
        """
        destination = self._group.spec.event_log_handler
        if destination == "null" and "phalanx.observe.metrics" not in sys.modules:
            return
        from phalanx.observe.run_log import RunLog

        self.stream.subscribers.append(RunLog(destination, self._group, self._policy))

    # -- what happens -------------------------------------------------------------------------------

    def step(
        self, event: Event, state: GroupState, commands: Sequence[Command], reason: str, result: RunResult
    ) -> None:
        """One step of the core."""
        self._group.state = state.worker_state
        self.stream.publish(StepTaken(event, state, commands, reason, result))

    def started(self, attempt: int, placed_in: float, started_in: float, recovery: str = "") -> None:
        """The workers run; seconds that their ranks and their start took; `recovery`: how they did again."""
        self.stream.publish(WorkersRunning(attempt, placed_in, started_in, recovery))

    def note(self, line: str) -> None:
        """One line per incident, for a person."""
        self.stream.publish(NoteWritten(time.time(), line))

    def show_waiting(self, line: str) -> None:
        """What the nodes wait for, where there is no terminal to draw it on; from another thread."""
        if self.progress is None:
            self.note(line)

    def quarantined(self, line: str) -> None:
        """A host is kept out, most often because of the incident at hand."""
        self.stream.publish(HostQuarantined(line))
        self.note(line)

    def settle(self) -> None:
        """Complete the record of an incident, where that is possible by now."""
        self.history.settle()
        if not self.history.is_recovering:
            self.stream.settle()

    def end(self, finish: Finish | None, result: RunResult, attempt: int) -> None:
        self.stream.publish(RunEnded(finish, result, attempt, self.workers_recorded))

    def _incident(self, incident: Incident) -> None:
        self.stream.publish(IncidentChanged(incident, self._group.group_rank))

    # -- what is known ------------------------------------------------------------------------------

    @property
    def notes(self) -> Sequence[tuple[float, str]]:
        """The last ones, with the time."""
        return self._lines.last

    def clear_progress(self) -> None:
        """Make room for a line on the terminal."""
        self._lines.clear_progress()

    def cause(self) -> tuple[str, float]:
        """The report of the last failure or hang of this node, and when."""
        return self._failures.last()

    def report(self, command: ReportFailure, result: RunResult) -> tuple[str, int, bool]:
        """The report that all nodes show should this failure end the job, the exit code, and whether the
        workers here only lost their peers."""
        return self._failures.describe(result, command.summary, command.code)


class ShownLines:
    """Shows a person every note and, where asked for, the reason of every step."""

    def __init__(
        self,
        note: Callable[[str], None] | None,
        reason: Callable[[str], None] | None,
        progress: Progress | None,
    ) -> None:
        self.last: deque[tuple[float, str]] = deque(maxlen=20)
        self._note, self._reason, self._progress = note, reason, progress

    def take(self, happened: Happened) -> None:
        if isinstance(happened, NoteWritten):
            self.last.append((happened.at, happened.line))
            self.clear_progress()
            if self._note is not None:
                self._note(happened.line)
            else:
                import logging

                logging.getLogger("phalanx").info(happened.line)
        elif isinstance(happened, StepTaken) and self._reason is not None:
            self._reason(f"{type(happened.event).__name__}: {happened.reason}")

    def clear_progress(self) -> None:
        """Make room for a line on the terminal."""
        if self._progress is not None:
            self._progress.clear()


class FailureReports:
    """Writes the report of a failure, when somebody asks for it."""

    def __init__(self, job_name: str, supervision: Supervision) -> None:
        self._job_name, self._supervision = job_name, supervision
        self._began = time.time()
        self._failure: tuple[float, RunResult, str] | None = None  # when, and the summary of a hang
        self._written = "", 0.0

    def take(self, happened: Happened) -> None:
        if isinstance(happened, StepTaken) and happened.commands:
            event = happened.event
            if type(event).__name__ in _FAILURES:
                summary = getattr(event, "summary", "") or happened.reason
                self._failure = time.time(), happened.result, summary

    def last(self) -> tuple[str, float]:
        """The report of the last failure or hang of this node, and when; empty: there was none."""
        if self._failure is None:
            return "", 0.0
        when, result, summary = self._failure
        if self._written[1] != when:
            self._written = self.describe(result, summary)[0], when
        return self._written

    def describe(self, result: RunResult, summary: str, code: int = 1) -> tuple[str, int, bool]:
        """The report, the exit code, and whether the workers here only lost their peers."""
        if not result.failures:
            return self._supervision.report(summary) or summary, code, False
        from phalanx.observe.report import diagnosis_of, format_report

        everyone = {**result.failures, **result.stopped}
        report = format_report(self._job_name, everyone, started_at=self._began, width=100)
        found = diagnosis_of(everyone, self._began)
        code = code if code == DO_NOT_RETRY else found.exit_code
        return report, code, bool(found.echoes) and not found.failed
