"""Makes the kernel kill a worker's process group when the zygote ends, however it ends.

The parent-death signal reaches the workers only, not what they started. A guard is a pipe whose both ends
the zygote holds. Its read end is set to send SIGKILL to the worker's process group when the last write end
closes. The kernel closes a dying process's descriptors before it signals the children, and the latest ones
first: `os.pipe` gives the read end the lower number, so that it is still open when the write end closes.

The read end refers to the group itself, not to its number: a guard stays safe after the worker is reaped,
when `killpg` could reach another group.
"""

from __future__ import annotations

import os

from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class GroupGuard:
    """One worker's process group, killed when this object's process ends or at `fire`."""

    __slots__ = ("_read", "_write")

    def __init__(self, pid: int) -> None:
        import fcntl

        self._read, self._write = os.pipe()
        try:
            fcntl.fcntl(self._read, fcntl.F_SETOWN, -pid)
            fcntl.fcntl(self._read, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self._read, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        except BaseException:
            self.release()
            raise

    def fds(self) -> list[int]:
        """What a fork must close."""
        return [self._read, self._write]

    def fire(self) -> None:
        """Kill what is left of the group, and release it."""
        os.close(self._write)
        os.close(self._read)

    def release(self) -> None:
        """End the guard without a signal."""
        os.close(self._read)
        os.close(self._write)


def guards_for(pids: Iterable[int]) -> dict[int, GroupGuard]:
    """A guard for each of these groups; none where the system does not offer it or is out of descriptors."""
    made: dict[int, GroupGuard] = {}
    for pid in pids:
        try:
            made[pid] = GroupGuard(pid)
        except (OSError, AttributeError):
            break
    return made
