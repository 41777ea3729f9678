"""A preemption: the machine will be taken away, and the workers get the time to save what they have.

The worker's board says so, and the signal itself goes to those workers that handle it (to the others it would
mean death). Nobody else is told, for one killed rank could break the checkpoint of the rest; when no rank
listens at all there is nothing to wait for, and all are stopped as by SIGTERM.
"""

from __future__ import annotations

import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.supervision.heartbeat import Boards
    from phalanx.workers.failure import ProcessFailure
    from phalanx.workers.worker_group import PContext


class Preemption:
    """The signal that announces it, and how far it has come."""

    def __init__(self, sig: int = 0) -> None:
        self.signal = sig
        self.under_way = False
        self._announced = False
        self._since = 0.0  # by the wall clock, as exits are

    def repeats(self, sig: int) -> bool:
        """Whether this announces what was announced before: once is enough.

        Asked when the signal arrives, so that the second of two in a hurry is known for one, too.
        """
        before = self._announced
        self._announced = before or sig == self.signal
        return before and sig == self.signal

    def begins(self, sig: int) -> bool:
        """Whether a stop with this signal is to be one that lets the workers leave by themselves."""
        return sig == self.signal and not self.under_way

    def stop(self, context: PContext, boards: Boards, grace: float, note: Callable[[str], None]) -> None:
        """Let the workers checkpoint and leave; after the grace they are stopped."""
        from phalanx.supervision.stacks import catches

        # First of all: a worker may be told, and gone, before its parent has heard that this is a stop.
        self.under_way, self._since = True, time.time()
        pids, running = context.pids(), context.running
        handlers = {rank for rank in running if catches(pids[rank], self.signal)}
        if not handlers and not any(boards.read(rank).listens for rank in running):
            note("no worker listens for the preemption; they are stopped")
            context.ask_stop(signal.SIGTERM, grace)
            return
        for rank in running:
            boards.tell(rank)
        context.send_signal(self.signal, handlers, alone=True)
        context.ask_stop(0, grace)

    def excuse(self, failures: Iterable[ProcessFailure]) -> None:
        """Whoever left after the workers were told did so because of it, whatever its exit code."""
        for failure in failures:
            when = failure.exited_at
            if self.under_way and failure.stopped_at is None and when is not None and when >= self._since:
                failure.stopped_at = self._since
