"""The processes that may be signalled: only those that asked, only while they are the same ones.

A request names a pid, and a pid is only a number: it may be garbage, belong to somebody else, or have passed
to another process since. So a pidfd is taken when the first request of a worker arrives, and everything
after that goes through it: it names that one process for ever.

Invariants
- Nothing is admitted that is not this server's own: a descendant of this process (or what `owns` says
  instead), or this process itself if it made a client. Being *allowed* to signal is not enough: root may
  signal everybody.
- Where the kernel has no pidfds the start time stands in: it is compared right before a signal.
- The order of admission is: take the pidfd, look at the process, then see that it still lives. What was seen
  in between was seen of that process and of no other.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 4096
"""Workers of one server: each costs a descriptor."""

_TOO_BIG = 1 << 31

GONE = ("unknown pid", "dead worker", "pid of an earlier process")
"""Reasons that mean that there is nobody to signal any more."""

asking: set[int] = set()
"""The pids in which a client was made, this process's own among them if it made one."""

_own: tuple[int, int] = (0, 0)


def _stat(pid: int | str) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name: state, parent, …; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode("ascii", "replace").rpartition(")")[2].split() or None
    except OSError:
        return None


def start_time(pid: int | str) -> int:
    """When a process started, in clock ticks since boot; 0 when it cannot be told."""
    fields = _stat(pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def identity() -> tuple[int, int]:
    """For clients: this process's pid and start time; right in a forked child too."""
    global _own
    pid = os.getpid()
    if _own[0] != pid:
        asking.add(pid)
        _own = (pid, start_time("self"))
    return _own


def descends(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is among the parents of `pid`."""
    for _ in range(256):
        fields = _stat(pid)
        if not fields:
            return False
        pid = int(fields[1])
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
    return False


class TimedWorker:
    """One admitted process."""

    __slots__ = ("fd", "pid", "started")

    def __init__(self, pid: int, fd: int | None, started: int) -> None:
        self.pid = pid
        self.fd = fd
        self.started = started

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        if self.fd is None:
            fields = _stat(self.pid)
            return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.started
        from select import POLLIN, poll

        look = poll()
        look.register(self.fd, POLLIN)
        return not look.poll(0)

    def signal(self, sig: int) -> str:
        """Sends a signal to this very process; why it could not be sent, or ''."""
        if not self.alive():
            return "it is gone"
        try:
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, sig)
            else:
                os.kill(self.pid, sig)
        except ProcessLookupError:
            return "it is gone"
        except OSError as error:
            return str(error.strerror)
        return ""

    def close(self) -> None:
        """Gives the descriptor back."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Workers:
    """The workers of one server, by pid; `joined` and `left` are told of every change."""

    def __init__(self, joined: Callable[[TimedWorker], None], left: Callable[[TimedWorker], None]) -> None:
        self.owns: Callable[[int], bool] = self._is_ours
        self.known: dict[int, TimedWorker] = {}
        self._joined = joined
        self._left = left

    def admit(self, pid: int, started: int = 0) -> TimedWorker | str:
        """The worker, or in two or three words why it is none."""
        worker = self.known.get(pid)
        if worker is not None and worker.alive() and started in (0, worker.started):
            return worker
        if worker is not None:
            self.remove(pid)
        if not 1 < pid < _TOO_BIG:
            return "impossible pid"
        if len(self.known) >= MOST:
            return "too many workers"
        try:
            fd: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError) as error:
            code = getattr(error, "errno", errno.ENOSYS)
            if code in (errno.ESRCH, errno.EINVAL):
                return "unknown pid"
            if code not in (errno.ENOSYS, errno.EPERM):
                return "no descriptor left"
            fd = None
        worker = TimedWorker(pid, fd, start_time(pid))
        reason = self._look(worker, started)
        if reason:
            worker.close()
            return reason
        self.known[pid] = worker
        self._joined(worker)
        return worker

    def remove(self, pid: int) -> None:
        """Forgets a worker."""
        worker = self.known.pop(pid, None)
        if worker is not None:
            self._left(worker)
            worker.close()

    def close(self) -> None:
        """Forgets everybody."""
        for pid in list(self.known):
            self.remove(pid)

    def _look(self, worker: TimedWorker, started: int) -> str:
        if not self.owns(worker.pid):
            return "foreign pid" if worker.alive() else "dead worker"
        if started and worker.started and started != worker.started:
            return "pid of an earlier process"
        return worker.signal(0) and "dead worker"

    @staticmethod
    def _is_ours(pid: int) -> bool:
        me = os.getpid()
        return me in asking if pid == me else descends(pid, me)
