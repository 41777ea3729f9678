"""The incidents of an agent and its goodput ledger: the steps of the group, turned into both.

Short jobs must not pay for it: the first steps are only kept, with their times, and `core.ledger.incidents`
and `core.ledger.goodput` are imported when something happens, or somebody asks. Both are pure, and take steps
of the past as well.
"""

from __future__ import annotations

import os
import time

from phalanx.observe.stream import HostQuarantined, RunEnded, StepTaken, WorkersRunning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.workers.result import RunResult
    from phalanx.core.group.events import Event
    from phalanx.core.group.group import GroupState
    from phalanx.core.ledger.goodput import GoodputLedger, GoodputTotals, RankProgress
    from phalanx.core.ledger.incidents import Culprit, Incident, IncidentBook
    from phalanx.observe.stream import Happened

_TOGETHER = 2.0  # seconds between two reports of the same thing
SHORT = 1.0
"""Seconds; for a shorter job to which nothing happens, no ledger is made."""
_ORDINARY = frozenset({"Start", "RoundReady", "Started", "AllSucceeded", "BarrierDone"})
"""Events of a job to which nothing happens; each comes once."""


class JobHistory:
    """What one agent knows of its past; a subscriber of its stream.

    `ended`: when a local rank succeeded, None while it has not. `publish`: called with every incident when it
    opens, and again when it is over (`Incident.over`)."""

    def __init__(self, ranks: int, supervision: Supervision, publish: Callable[[Incident], None]) -> None:
        self._publish = publish
        self.ended: Callable[[int], float | None] = lambda _rank: None
        self.node = os.uname().nodename
        self.began = time.monotonic()
        self._ranks = ranks
        self._supervision = supervision
        self._how = ""
        self._kept_out = "", 0.0  # the host that was quarantined last, in words, and when
        self._kept: list[tuple[Event, GroupState, bool, str, float, float]] = []
        self._book: IncidentBook | None = None
        self._ledger: GoodputLedger | None = None

    # -- what happens -------------------------------------------------------------------------------

    def take(self, happened: Happened) -> None:
        match happened:
            case StepTaken():
                self._step(happened)
            case WorkersRunning():
                self._how = happened.recovery  # before the step of their start
            case HostQuarantined():
                self._quarantined(happened.line)
            case RunEnded():
                self._end()

    def _step(self, step: StepTaken) -> None:
        event, acts = step.event, bool(step.commands)
        seen = event, step.state, acts, step.reason, time.monotonic(), time.time()
        if self._ledger is None and type(event).__name__ in _ORDINARY:
            self._kept.append(seen)
            return
        if self._ledger is None and not acts:
            return  # nothing has happened yet, and this changed nothing
        try:
            self._enter(*seen, step.result)
        except OSError:  # of an import, where no descriptor is left; nothing was entered
            self._kept.append(seen)

    def _quarantined(self, line: str) -> None:
        """A host is kept out, because of the incident at hand or of one that is about to be reported."""
        if self.is_recovering and self._book is not None:
            self._book = self._book.quarantined(line)
        else:
            self._kept_out = line, time.monotonic()

    def _open(self) -> tuple[IncidentBook, GoodputLedger]:
        if self._ledger is None or self._book is None:
            from phalanx.core.ledger.goodput import GoodputLedger
            from phalanx.core.ledger.incidents import IncidentBook

            self._book, self._ledger = IncidentBook(), GoodputLedger(self._ranks, self.began)
            kept, self._kept = self._kept, []
            for seen in kept:
                self._enter(*seen, None)
        return self._book, self._ledger

    def _enter(
        self,
        event: Event,
        state: GroupState,
        acts: bool,
        reason: str,
        now: float,
        wall: float,
        result: RunResult | None,
    ) -> None:
        from phalanx.core.ledger.incidents import GroupStep, observe, trigger_of

        book, ledger = self._open()
        opens = acts and bool(trigger_of(event))
        step = GroupStep(
            event,
            state,
            acts,
            reason,
            now,
            wall,
            self.node,
            _culprit(result) if opens and type(event).__name__ == "WorkerFailed" else None,
            sum(1 for rank in self._supervision.progress() if rank.count) if opens else 0,
            how=self._how if type(event).__name__ == "Started" else "",
        )
        after = observe(book, step)
        if after.count > book.count and now < self._kept_out[1] + _TOGETHER:
            after = after.quarantined(self._kept_out[0])
        self._turn(after)
        current = self._book.current if self._book is not None else None
        number = current.incident.number if current is not None else 0
        quiet = self._supervision.quiet_since(now) if type(event).__name__ == "Hang" else None
        ledger.step(event, state.phase.value, now, number, self.progress, quiet or 0.0)

    def _turn(self, book: IncidentBook) -> None:
        """Take the next book, and publish what is new in it."""
        before, self._book = self._book, book
        assert before is not None
        if book is before:
            return
        if book.closed is not before.closed and book.closed:
            self._publish(book.closed[-1])
        if book.count > before.count and book.current is not None:
            self._publish(book.current.record())

    def settle(self) -> None:
        """Complete the incident at hand, where the workers have come far enough; cheap without one."""
        if self._book is None or self._book.current is None:
            return
        from phalanx.core.ledger.incidents import reached

        beats = tuple(rank.first_at for rank in self._supervision.progress() if rank.count)
        self._turn(reached(self._book, self._supervision.begun(), beats))

    def _end(self) -> None:
        """The job is over for this node, and the incident at hand with it; the last look at the boards."""
        self.settle()
        self.close_ledger()
        if self._book is not None:
            self._turn(self._book.close())

    def close_ledger(self) -> None:
        """Make a ledger of what was kept, unless the job was short."""
        if time.monotonic() - self.began >= SHORT:
            self._open()

    # -- what is known ------------------------------------------------------------------------------

    def progress(self) -> list[RankProgress]:
        """The boards of the last start, with the ends of the ranks that have succeeded."""
        apart = time.time() - time.monotonic()
        found = self._supervision.progress()
        for rank, board in enumerate(found):
            at = self.ended(rank)
            if at is not None:
                found[rank] = board.replace(ended_at=at - apart)
        return found

    @property
    def marks(self) -> Sequence[int | None]:
        """The step that each rank has reached in earlier starts."""
        return () if self._ledger is None else self._ledger.marks

    @property
    def is_known(self) -> bool:
        """Whether there is a ledger: not for a short job to which nothing happened."""
        return self._ledger is not None

    @property
    def is_recovering(self) -> bool:
        """Whether workers are being started again after an incident."""
        current = None if self._book is None else self._book.current
        return current is not None and current.at("started") is None

    @property
    def incident_count(self) -> int:
        """How many incidents there were."""
        return 0 if self._book is None else self._book.count

    def incidents(self) -> tuple[Incident, ...]:
        """The last ones, the one at hand included."""
        return () if self._book is None else self._book.incidents()

    def totals(self) -> GoodputTotals:
        """The ledger up to now."""
        return self._open()[1].totals(time.monotonic(), self.progress)


def _culprit(result: RunResult | None) -> Culprit | None:
    if result is None or not result.failures:
        return None
    from phalanx.core.ledger.incidents import Culprit
    from phalanx.observe.report import root_cause

    failure = root_cause(result.failures)[1]
    return Culprit(failure.rank, failure.pid, failure.reported_exitcode, failure.failed_at, failure.host)
