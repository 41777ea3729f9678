"""The time until which the workers of a node may run, as a timer that agent, zygote and keeper share.

The agent sets it with every lease. If the agent is stopped it does not, and the zygote, which waits for the
same timer, kills the workers: another node may run the same ranks by then. If the zygote is stopped too, the
keeper kills it, and the workers with it. No helper is woken by a renewal, and an earlier time counts at once.
The clock is that of the leases: it counts time asleep.
"""

from __future__ import annotations

import os
import select
import time

from phalanx import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from select import poll as Poll

_ZYGOTE_GRACE = 0.3  # seconds after the lease for a zygote that is not stopped, but may be short of CPU time


class LeaseTimer:
    """The agent's end."""

    def __init__(self) -> None:
        self._fd = kernel.timer()
        self._until = float("inf")
        self._ran_out = 0

    def fileno(self) -> int:
        return self._fd

    def set(self, when: float) -> None:
        """Set the time (CLOCK_BOOTTIME); infinity: no limit."""
        self._ran_out = self.ran_out()
        self._until = when
        if self._fd >= 0:
            kernel.set_timer(self._fd, when)

    def ran_out(self) -> int:
        """How often that time has come: more often than before, and the helpers have killed the workers."""
        return self._ran_out + (time.clock_gettime(time.CLOCK_BOOTTIME) >= self._until)

    def close(self) -> None:
        """Close it; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LeaseWitness:
    """The keeper's end: it sees whether the zygote does its work."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._fd = -1
        self.due: float | None = None  # the time has come, and the zygote has until then

    def take(self, fds: list[int]) -> None:
        """Watch this timer from now on; none: the zygote has killed the workers, or has none."""
        old, self._fd = self._fd, fds[0] if fds else -1
        if old >= 0:
            if self.due is None:
                self._poll.unregister(old)
            os.close(old)
        self.due = None
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLIN)

    def is_over(self, zygote: int) -> bool:
        """Whether the zygote has to be killed, because it has not killed the workers."""
        if self._fd < 0:
            return False
        now = time.monotonic()
        over = kernel.is_readable(self._fd)
        if over and self.due is None:
            self._poll.unregister(self._fd)  # it stays readable
            self.due = now if kernel.is_stopped(zygote) else now + _ZYGOTE_GRACE
        elif not over and self.due is not None:  # renewed at the last moment
            self._poll.register(self._fd, select.POLLIN)
            self.due = None
        return self.due is not None and now >= self.due
