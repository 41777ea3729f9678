"""The owner loop: the only code of the agent that waits.

One thread owns everything: the one that called `run`. Signal handlers and other threads only `post` events
to its queue and wake it. Each event goes to `core.group.group.step`; the loop carries out the commands that
come back, by telling the workers and the other nodes (protocols.py). Nothing that it calls waits, so that a
signal, a status request or a health probe is answered at once in every phase.

It overlaps what the core allows to overlap: the stop of the old workers and the next rendezvous.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque

from phalanx.core.group import events
from phalanx.core.group import group as core
from phalanx.errors import SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.agent.protocols import LoopPart, Nodes, NodeWorkers
    from phalanx.agent.run_record import RunRecord
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.core.group.events import Command, Event, Finish
    from phalanx.core.group.group import GroupPolicy, Phase
    from phalanx.observe.progress_line import Progress

    Posted = Event | Callable[[], None]

_HURRIED = 1.0  # seconds for the rest of a departure after a signal


class OwnerLoop:
    """Queue, clock and wait of one agent, and the state of its group."""

    def __init__(
        self,
        policy: GroupPolicy,
        nodes: Nodes,
        workers: NodeWorkers,
        supervision: Supervision,
        record: RunRecord,
    ) -> None:
        self.policy = policy
        self.nodes = nodes
        self.workers = workers
        self.state = core.GroupState()
        self.finish: Finish | None = None  # set by the last step
        self.parts: list[LoopPart] = [workers, supervision]
        self._supervision = supervision
        self._record = record
        self._wake_at: float | None = None
        self._posted: deque[Posted] = deque()
        self._wake_read, self._wake_write = -1, -1
        self._wakeup_fd: int | None = None  # the one before; None: not replaced
        self._asleep = False
        self._stopping = False

    @property
    def number(self) -> int:
        """The current round; 0 before the first."""
        return 0 if self.state.round is None else self.state.round.number

    def post(self, event: Posted) -> None:
        """Queue an event, or a call for the owner thread; from any thread and from signal handlers."""
        self._posted.append(event)
        if not self._asleep:
            return  # the owner looks at the queue before it sleeps
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            pass  # it is full, so the owner wakes; or the loop is over

    def run(self) -> Finish:
        """From the first rendezvous to the end."""
        self.step(events.Start())
        while self.finish is None:
            event = self._next_event()
            assert event is not None, "the wait had no other end"
            self.step(event)
        return self.finish

    def step(self, event: Event) -> None:
        """Have the core decide, and carry out what it decided."""
        made = core.step(self.state, event, time.monotonic(), self.policy)
        self.state = made.state
        self._record.step(event, made.state, made.commands, made.reason, self.workers.result)
        for command in made.commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case events.Join():
                self.enter_rendezvous()
            case events.StartWorkers():
                self.workers.start(self.nodes.take(command.round.number), command)
            case events.StopWorkers():
                self._announce_ending()
                self._stopping = True
                self.workers.stop(command.sig, command.grace)
            case events.RecallWorkers():
                self._stopping = True
                self.workers.recall(command)
            case events.EnterBarrier():
                self.nodes.finished(command.round)
            case events.ReportFailure():
                result = self.workers.result
                self.nodes.failed(command, lambda: self._record.report(command, result))
            case events.RequestRound():
                self.nodes.request_round(command)
            case events.Leave():
                self.nodes.leave(self.number, self.state.ending.message if self.state.ending else "left")
            case events.CloseRendezvous():
                self.nodes.close(self.number, command, self._supervision.job_failed)
            case events.WakeAt():
                self._wake_at = command.time
            case events.Note():
                self._record.note(command.line)
            case events.Finish():
                self.finish = command

    def enter_rendezvous(self) -> None:
        """Join the next round, once this node is found fit."""

        def go() -> None:
            self.nodes.join(None if self._stopping else self.number, self.state.attempt)

        self._supervision.join(go)

    def _announce_ending(self) -> None:
        if self.state.ending is not None:
            self.nodes.ending(self.state.ending)

    # -- waiting ------------------------------------------------------------------------------------

    def _next_event(
        self, done: Callable[[], bool] = lambda: False, until: float | None = None
    ) -> Event | None:
        """The next event; None once `done`, or when `until` has passed."""
        while True:
            event = self._look()
            if event is not None:
                return self._seen(event)
            if done() or (until is not None and time.monotonic() >= until):
                return None
            if not self._posted:
                self._sleep(until)

    def _look(self) -> Event | None:
        """What has happened by now."""
        while self._posted:
            event = self._posted.popleft()
            if not callable(event):
                return event
            event()
        now, phase = time.monotonic(), self.state.phase
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            return events.Tick()
        for part in self.parts:
            found = part.look(phase, now)
            if found is not None:
                return found
        return None

    def _seen(self, event: Event) -> Event:
        if isinstance(event, events.Stopped):
            self._stopping = False
            if not event.unkillable:
                self.nodes.workers_gone(self.number)
        elif isinstance(event, events.Started):
            self.nodes.running()
        return event

    def _sleep(self, until: float | None) -> None:
        self.open()
        phase = self.state.phase
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        times = [] if until is None else [until]
        if self._wake_at is not None:
            times.append(self._wake_at)
        for part in self.parts:
            for fd, mask in part.fds(phase):
                poll.register(fd, mask)
            deadline = part.deadline(phase)
            if deadline is not None:
                times.append(deadline)
        self._asleep = True  # before the look at the queue: a thread that posts does it the other way round
        try:
            if self._posted:
                return
            # Rounded up: a wait that ends a fraction early would look, find nothing, and wait again.
            timeout = max(0.0, min(times) - time.monotonic()) * 1000 + 0.999 if times else None
            ready = poll.poll(timeout)
        finally:
            self._asleep = False
        if any(fd == self._wake_read for fd, _ in ready):
            os.read(self._wake_read, 4096)

    def drain(
        self, done: Callable[[], bool], hurry: Callable[[], None] = lambda: None, limit: float | None = None
    ) -> None:
        """Wait for `done` at the end; a signal calls `hurry`, and the wait ends a little later."""
        until = None if limit is None else time.monotonic() + limit
        while not done():
            event = self._next_event(done, until)
            if event is None:
                return
            if isinstance(event, events.Signal):
                hurry()
                until = min(until or float("inf"), time.monotonic() + _HURRIED)

    def open(self) -> None:
        """Make the pipe that wakes the loop; idempotent."""
        if self._wake_read < 0:
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            try:
                # A signal that another thread receives, or that comes just before `poll`, ends no wait.
                self._wakeup_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
            except ValueError:
                pass  # not the main thread: no handler runs here

    def close(self) -> None:
        """Close the pipe; idempotent."""
        read, write = self._wake_read, self._wake_write
        self._wake_read = self._wake_write = -1  # first, for a thread that still has something to post
        before, self._wakeup_fd = self._wakeup_fd, None
        if before is not None:
            signal.set_wakeup_fd(before)
        if read >= 0:
            os.close(read)
            os.close(write)


class ProgressPart:
    """The progress line of a terminal as a part of the loop."""

    def __init__(self, line: Progress, words: Callable[[], str]) -> None:
        self._line = line
        self._words = words

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        return []

    def deadline(self, phase: Phase) -> float | None:
        now = time.monotonic()
        left = self._line.limit(self._words(), now, None)
        return None if left is None else now + left

    def look(self, phase: Phase, now: float) -> None:
        self._line.show(now)


def signal_exception(sig: int) -> SignalException:
    """What a caller of `run` gets for a signal."""
    name = signal.Signals(sig).name
    return SignalException(f"process {os.getpid()} got {name}", signal.Signals(sig))
