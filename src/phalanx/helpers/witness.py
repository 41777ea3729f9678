"""The agent's own view of its workers: a pidfd for each, whatever the zygote does.

The zygote opens the pidfds before it can reap the workers, so none of them can belong to another process,
and sends them before any worker runs. All are in one epoll descriptor, the only one that the owner
loop waits for.
"""

from __future__ import annotations

import os
import select

from phalanx import kernel
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Witness:
    """The processes of one start: the workers and the zygote."""

    def __init__(self, pids: Mapping[int, int], fds: list[int]) -> None:
        """`fds`: of the zygote and of the workers, in the order of `pids`."""
        self._pids = dict(pids)
        self._zygote, *workers = fds
        self._fds = dict(zip(self._pids, workers, strict=True))
        self._ended: set[int] = set()
        self._fresh: list[int] = []  # for the next `ended`
        self._epoll = select.epoll()
        for fd in workers:
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when a worker has exited; `ended` must be called before the next wait."""
        return self._epoll.fileno()

    def ended(self) -> list[int]:
        """The ranks that have exited since the last call."""
        self._look()
        fresh, self._fresh = self._fresh, []
        return fresh

    def _look(self) -> None:
        try:
            ready = {fd for fd, _ in self._epoll.poll(0)}
        except ValueError:
            return  # closed, by a thread that ended the group meanwhile
        for rank in [rank for rank, fd in self._fds.items() if fd in ready]:
            self._epoll.unregister(self._fds[rank])  # it stays readable: the loop would not sleep again
            self._ended.add(rank)
            self._fresh.append(rank)

    def alive(self) -> dict[int, int]:
        """Rank → pid of the workers that have not exited."""
        self._look()
        return {rank: pid for rank, pid in self._pids.items() if rank not in self._ended}

    def exit_code(self, rank: int) -> int:
        """How a worker ended that was not reaped yet; as if by SIGKILL where that cannot be read."""
        fields = kernel.stat_fields(self._pids[rank])
        if fields is None or fields[0] != "Z" or len(fields) < 50:
            return -int(signal.SIGKILL)
        return os.waitstatus_to_exitcode(int(fields[49]))

    def signal(self, sig: int) -> None:
        """To the process groups of the workers that have not exited, and SIGCONT after it."""
        for sent in (sig, signal.SIGCONT):
            for rank, pid in self.alive().items():
                try:
                    signal.pidfd_send_signal(self._fds[rank], 0)  # not reaped: the number is still its own,
                    os.killpg(pid, sent)  # and stays it, because a zygote that responds is not bypassed
                except OSError:
                    pass

    def kill(self) -> None:
        """Kill the workers themselves, whether the zygote responds or not; it ends what they have started."""
        for rank in self.alive():
            try:
                signal.pidfd_send_signal(self._fds[rank], signal.SIGKILL)
            except OSError:
                pass  # it has exited

    def kill_zygote(self) -> None:
        """The zygote does not respond, and the keeper did not kill it."""
        try:
            signal.pidfd_send_signal(self._zygote, signal.SIGKILL)
        except OSError:
            pass

    def close(self) -> None:
        """Close all descriptors; idempotent."""
        if not self._epoll.closed:
            self._epoll.close()
            for fd in (self._zygote, *self._fds.values()):
                os.close(fd)
