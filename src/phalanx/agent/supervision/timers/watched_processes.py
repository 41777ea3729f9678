"""The processes that a timer server may signal: those that sent requests, as long as they are the same ones.

The pid in a request may be garbage, belong to an unrelated process, or have been reused since. So the server
opens a pidfd when the first request of a worker arrives and uses only that afterwards: it always refers to
the same process.

Invariants
- Only descendants of this process are admitted, and this process itself if it made a client. Permission to
  signal is not enough: root may signal every process.
- Every process of this user can write any pid into a named pipe. There, a process is admitted only if it
  holds the pipe open itself, as our client does. torch's client closes it after each line: its lines are
  accepted for processes that have loaded torch, but never for the helpers of an agent (keeper and zygote).
- On kernels without pidfds, the start time is compared right before a signal.
- Admission opens the pidfd, inspects the process, then checks that it is still alive: so what was inspected
  is the process behind the pidfd.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING

from phalanx.kernel import list_dir, read_text, stat_fields

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_WORKERS = 4096  # of one server; each takes a descriptor
_MAX_PID = 1 << 31

GONE = ("unknown pid", "dead worker", "pid of an earlier process")
"""Reasons which mean that there is no process left to signal."""

client_pids: set[int] = set()
"""The pids in which a client was made (this process and those it was forked from)."""

_own: tuple[int, int] = (0, 0)


def start_time(pid: int | str) -> int:
    """When a process started, in clock ticks since boot; 0 if unknown."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def identity() -> tuple[int, int]:
    """This process's pid and start time, correct in a forked child too; called by clients."""
    global _own
    pid = os.getpid()
    if _own[0] != pid:
        client_pids.add(pid)
        _own = (pid, start_time("self"))
    return _own


def descends(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is among the parents of `pid`."""
    for _ in range(256):
        fields = stat_fields(pid)
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
        """Whether it still runs; a zombie counts as gone."""
        if self.fd is None:
            fields = stat_fields(self.pid)
            return fields is not None and fields[0] not in "ZX" and int(fields[19]) == self.started
        from select import POLLIN, poll

        exited = poll()
        exited.register(self.fd, POLLIN)
        return not exited.poll(0)

    def signal(self, sig: int) -> str:
        """Send a signal to this process; returns why it could not be sent, or ''."""
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
        """Close the descriptor."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class WatchedProcesses:
    """The workers of one server, by pid; `joined` and `left` are called on every change."""

    def __init__(self, joined: Callable[[TimedWorker], None], left: Callable[[TimedWorker], None]) -> None:
        self.known: dict[int, TimedWorker] = {}
        self.pipe: tuple[int, int] | None = None  # device and inode of the named pipe that requests come from
        self._joined = joined
        self._left = left

    def admit(self, pid: int, started: int = 0) -> TimedWorker | str:
        """The worker, or a short reason why it is refused."""
        worker = self.known.get(pid)
        if worker is not None and worker.alive() and started in (0, worker.started):
            return worker
        if worker is not None:
            self.remove(pid)
        if not 1 < pid < _MAX_PID:
            return "impossible pid"
        if len(self.known) >= _MAX_WORKERS:
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
        reason = self._refusal(worker, started) or self._unasked(worker, started)
        if reason:
            worker.close()
            return reason
        self.known[pid] = worker
        self._joined(worker)
        return worker

    def remove(self, pid: int) -> None:
        """Forget a worker."""
        worker = self.known.pop(pid, None)
        if worker is not None:
            self._left(worker)
            worker.close()

    def close(self) -> None:
        """Forget all workers."""
        for pid in list(self.known):
            self.remove(pid)

    def _unasked(self, worker: TimedWorker, started: int) -> str:
        """Why the process cannot have sent the request itself, or ''. Lines of torch have no start time."""
        if self.pipe is None or worker.pid == os.getpid() or _holds(worker.pid, self.pipe):
            return ""
        if started or not _has_loaded_torch(worker.pid) or _is_helper(worker.pid):
            return "a process that did not ask" if worker.alive() else "dead worker"
        return ""

    @staticmethod
    def _refusal(worker: TimedWorker, started: int) -> str:
        me = os.getpid()
        if not (me in client_pids if worker.pid == me else descends(worker.pid, me)):
            return "foreign pid" if worker.alive() else "dead worker"
        if started and worker.started and started != worker.started:
            return "pid of an earlier process"
        return worker.signal(0) and "dead worker"


def _holds(pid: int, pipe: tuple[int, int]) -> bool:
    """Whether a process has the pipe open."""
    for fd in list_dir(f"/proc/{pid}/fd"):
        try:
            found = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == pipe:
            return True
    return False


def _has_loaded_torch(pid: int) -> bool:
    return "/libtorch" in read_text(f"/proc/{pid}/maps")


def _is_helper(pid: int) -> bool:
    """Whether a process is in a session that a child of this process leads: a keeper, or its zygote."""
    fields = stat_fields(pid)
    session = int(fields[3]) if fields else 0
    leader = stat_fields(session) if session != os.getsid(0) else None
    return leader is not None and int(leader[1]) == os.getpid()
