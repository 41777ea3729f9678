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
from select import POLLIN, poll

from phalanx.kernel import list_dir, read_text, stat_fields

GONE = "it is gone"
REUSED = "pid of an earlier process"
ENDED = ("unknown pid", "dead worker", REUSED)  # refused, because the process that asked has ended

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


class WatchedProcess:
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
        exited = poll()
        exited.register(self.fd, POLLIN)
        return not exited.poll(0)

    def signal(self, sig: int) -> str:
        """Send a signal to this process; returns why it could not be sent, or ''."""
        if not self.alive():
            return GONE
        try:
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, sig)
            else:
                os.kill(self.pid, sig)
        except ProcessLookupError:
            return GONE
        except OSError as error:
            return str(error.strerror)
        return ""

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def admit(pid: object, started: int, pipe: os.stat_result | None) -> WatchedProcess | str:
    """The process behind a request, or a short reason why it is refused.

    `pipe`: the named pipe that the request comes from, if it comes from one.
    """
    if type(pid) is not int or not 1 < pid < 1 << 31:
        return "impossible pid"
    try:
        fd: int | None = os.pidfd_open(pid)
    except (AttributeError, OSError) as error:
        code = getattr(error, "errno", errno.ENOSYS)
        if code in (errno.ESRCH, errno.EINVAL):
            return "unknown pid"
        if code not in (errno.ENOSYS, errno.EPERM):
            return "no descriptor left"
        fd = None
    process = WatchedProcess(pid, fd, start_time(pid))
    reason, problem = _refusal(process, started, pipe), process.signal(0)
    if problem == GONE or (problem and not reason):
        reason = "dead worker"
    if not reason:
        return process
    process.close()
    return reason


def _refusal(process: WatchedProcess, started: int, pipe: os.stat_result | None) -> str:
    """Why a request with this start time, out of this pipe, cannot be one of the process; '' if it can."""
    pid, me = process.pid, os.getpid()
    if not (pid in client_pids if pid == me else _descends(pid, me)):
        return "foreign pid"
    if started and process.started and started != process.started:
        return REUSED
    if pipe is None or pid == me or _holds(pid, pipe):
        return ""
    # Lines of torch have no start time.
    torchs = not started and "/libtorch" in read_text(f"/proc/{pid}/maps") and not _is_helper(pid)
    return "" if torchs else "a process that did not ask"


def _descends(pid: int, ancestor: int) -> bool:
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


def _holds(pid: int, pipe: os.stat_result) -> bool:
    """Whether a process has the pipe open."""
    for fd in list_dir(f"/proc/{pid}/fd"):
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), pipe):
                return True
        except OSError:
            continue
    return False


def _is_helper(pid: int) -> bool:
    """Whether a process is in a session that a child of this process leads: a keeper, or its zygote."""
    fields = stat_fields(pid)
    session = int(fields[3]) if fields else 0
    leader = stat_fields(session) if session != os.getsid(0) else None
    return leader is not None and int(leader[1]) == os.getpid()
