"""The one clock of everything that has to do with leases."""

from __future__ import annotations

import time


def clock() -> float:
    """A clock that counts the time this machine was asleep: leases do not stop meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
