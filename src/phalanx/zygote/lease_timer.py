"""The time until which the workers of a node may run, as a timer that agent and zygote share.

The agent sets it with every lease. If the agent is stopped it does not, and the zygote, which waits for the
same timer, kills the workers: another node may run the same ranks by then. The zygote is not woken by a
renewal, and an earlier time counts at once. The clock is that of the leases: it counts time asleep.
"""

from __future__ import annotations

import os

from phalanx import kernel


class LeaseTimer:
    """The agent's end."""

    def __init__(self) -> None:
        self._fd = kernel.timer()

    def fileno(self) -> int:
        return self._fd

    def set(self, when: float) -> None:
        """Set the time (CLOCK_BOOTTIME); infinity: no limit."""
        if self._fd >= 0:
            kernel.set_timer(self._fd, when)

    def close(self) -> None:
        """Close it; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
