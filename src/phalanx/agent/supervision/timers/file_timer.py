"""Timers over a named pipe: the pipe, the client, and the server, which is the agent's watchdog.

Invariants
- The pipe is readable and writable by its owner only, and other users cannot replace it. A path that holds
  anything but a pipe of this user is refused, never replaced: it may be a symbolic link of another user.
- A writer waits for room in the pipe, but not forever. It reconnects to a restarted server. Its descriptor
  keeps its number when the pipe is opened again, so that another thread never writes into an unrelated file.
- A release without a server is complete: a server that is gone keeps no timers.
- A signal goes only to a process that sent a request itself, is admitted (watched_processes.py), and is still
  the same process.
- Scopes expire independently: if the worker survives the signal it chose, its other scopes stay armed.
- Facts about the worker are read before the signal and logged after it, because a killed process has none and
  a slow log must not delay the signal. `log_event` is called before the signal.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from errno import ENOENT, ENXIO, EPIPE
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from phalanx.agent.supervision.timers import pipe_codec
from phalanx.agent.supervision.timers.api import FileTimerRequest, TimerClient
from phalanx.agent.supervision.timers.watchdog import Watchdog, changed, log
from phalanx.agent.supervision.timers.watched_processes import identity
from phalanx.trusted_files import check_directory, make_directory

if TYPE_CHECKING:
    from collections.abc import Callable

WRITE_TIMEOUT = 5.0
"""Seconds a worker waits for room in the pipe: a server that has not read for this long is stuck."""
SERVER_TIMEOUT = 1.0
"""Seconds a worker waits for a server to open the pipe."""
_MAX_NAMES = 256
_CAPACITY = 1 << 20
_F_SETPIPE_SZ = 1031


def private_path() -> str:
    """A path for a pipe in a new directory that only this user can enter; the caller removes it."""
    from tempfile import mkdtemp

    return os.path.join(mkdtemp(prefix="phalanx_"), "timers")


def _make_pipe(path: str) -> None:
    """Make the pipe, or reuse one that an earlier server of this user left."""
    parent = os.path.dirname(os.path.abspath(path))
    make_directory(parent)
    check_directory(parent)
    try:
        os.mkfifo(path, 0o600)
        return
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        raise FileExistsError(
            f"{path} exists and is not a named pipe of this user; choose another path or remove it"
        )
    os.chmod(path, 0o600)


def _open_pipe(path: str, flags: int) -> int:
    """Open a pipe and nothing else: writing into a regular file would damage it."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(
            f"{path} is not a named pipe; use the path that the timer server was started with"
        )
    return fd


class TimerPipe:
    """The server's end of the pipe."""

    def __init__(self, path: str) -> None:
        _make_pipe(path)
        self.path = path
        self._fd = _open_pipe(path, os.O_RDONLY | os.O_NOFOLLOW)
        # A writer of our own: without one, the reader would see end-of-file when the last client leaves.
        self._own_writer = _open_pipe(path, os.O_WRONLY | os.O_NOFOLLOW)
        self._lines = pipe_codec.LineReader()
        import fcntl

        try:  # more room, so that workers do not wait during bursts
            fcntl.fcntl(self._fd, _F_SETPIPE_SZ, _CAPACITY)
        except OSError:
            pass

    def fileno(self) -> int:
        """Readable when there are requests."""
        return self._fd

    def read(self) -> list[FileTimerRequest]:
        """The available requests, of each timer only the last."""
        try:
            return self._lines.feed(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return []

    @property
    def garbage(self) -> int:
        """The number of lines that were not requests."""
        return self._lines.garbage

    def close(self) -> None:
        """Close both ends, which writers notice; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._own_writer)
        self._fd = self._own_writer = -1

    def remove(self) -> None:
        """Remove the pipe, if the path still names this one."""
        try:
            mine, there = os.fstat(self._fd), os.lstat(self.path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                os.unlink(self.path)
        except OSError:
            pass


class FileTimerClient(TimerClient):
    """Sends the requests of this process through a named pipe; `signal` is sent to it on expiry."""

    _fd: int  # set when the pipe is first opened, then never changed

    def __init__(self, file_path: str, signal: Any = SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal
        self._names: tuple[int, dict[str, bytes]] = (0, {})
        self._held: set[str] = set()
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`; BrokenPipeError if there is no server."""
        line = pipe_codec.acquire(self._name(scope_id), expiration_time, int(self.signal))
        self._held.add(scope_id)
        self._send(line, scope_id, SERVER_TIMEOUT)

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        try:
            self._send(pipe_codec.release(self._name(scope_id)), scope_id, 0.0)
        except BrokenPipeError:
            pass
        self._held.discard(scope_id)

    def __getstate__(self) -> dict[str, Any]:
        return {"_file_path": self._file_path, "signal": self.signal, "_names": (0, {}), "_held": set()}

    def __del__(self) -> None:
        fd = self.__dict__.get("_fd")
        if fd is not None and not self._held:  # the open pipe shows the server that this process asked
            os.close(fd)

    def _name(self, scope: str) -> bytes:
        """The timer's name on the wire; cached, because a loop uses the same scopes again."""
        pid, names = self._names
        if pid != os.getpid() or len(names) > _MAX_NAMES:
            self._names = pid, names = os.getpid(), {}
        found = names.get(scope)
        if found is None:
            found = names[scope] = pipe_codec.name(*identity(), scope)
        return found

    def _send(self, line: bytes, scope: str, server_timeout: float) -> None:
        try:
            os.write(self._open(server_timeout), line)
            return
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._reopen(server_timeout)
        if not pipe_codec.write_when_writable(self._open(0.0), line, WRITE_TIMEOUT):
            raise TimeoutError(
                f"timer {scope!r}: the server has not read {self._file_path} for {WRITE_TIMEOUT:g} s;"
                " is it stuck?"
            )

    def _open(self, server_timeout: float) -> int:
        fd: int | None = self.__dict__.get("_fd")
        return self._reopen(server_timeout) if fd is None else fd

    def _reopen(self, server_timeout: float) -> int:
        """Open the pipe, under the old descriptor number if there is one; waits briefly for a server."""
        end, pause = time.monotonic() + server_timeout, 0.001
        while True:
            try:
                fd = _open_pipe(self._file_path, os.O_WRONLY)
                break
            except OSError as error:
                if error.errno not in (ENXIO, ENOENT):
                    raise
                if time.monotonic() >= end:
                    raise BrokenPipeError(
                        EPIPE,
                        "no timer server reads the pipe; is the agent's watchdog running?",
                        self._file_path,
                    ) from None
            time.sleep(pause)  # back-off: there is no event for a reader that opens a pipe
            pause = min(pause * 2, 0.05)
        # Atomic, because another thread may open it at the same time.
        number = self.__dict__.setdefault("_fd", fd)
        if number != fd:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
        return int(number)


class FileTimerServer:
    """Stops workers that do not leave a scope in time, with the signal they chose.

    The server sleeps until the next deadline. `max_interval` is the longest time between two calls of
    `register_timers` where a subclass has its own.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Callable[[str, FileTimerRequest | None], None] | None = None,
    ) -> None:
        self._file_path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._pipe: TimerPipe | None = None
        self._garbage = 0
        self._watchdog = Watchdog()

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped requests by reason."""
        counts = dict(self._watchdog.dropped)
        garbage = self._garbage + (self._pipe.garbage if self._pipe is not None else 0)
        if garbage:
            counts["garbage"] = garbage
        return counts

    def start(self) -> None:
        """Make the pipe and serve it in a thread, if none does."""
        if self._watchdog.running():
            return
        period = self._max_interval if changed(self, _OWN) else None
        self._watchdog.start(self._open(), self, self._daemon, period)
        self._event("watchdog started", None)

    def stop(self) -> None:
        """Stop serving and remove the pipe."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.remove()
            self._garbage += pipe.garbage
        self._watchdog.stop()
        if pipe is not None:
            pipe.close()
            self._event("watchdog stopped", None)

    def run_once(self) -> None:
        """Handle what has arrived, in the caller's thread, without waiting."""
        if not self._watchdog.running():
            self._watchdog.once(self._open(), self)

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Whether there is such a process (a zombie counts: it still has the pid)."""
        if pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True

    def register_timers(self, timer_requests: list[FileTimerRequest]) -> None:
        """Set or drop deadlines."""
        self._watchdog.register(timer_requests)

    def clear_timers(self, worker_pids: set[int]) -> None:
        """Drop all deadlines of these workers."""
        self._watchdog.forget(worker_pids)

    def get_expired_timers(self, deadline: float) -> dict[int, list[FileTimerRequest]]:
        """By pid, the timers that expire at or before this wall time; changes nothing."""
        return self._watchdog.due_by(deadline)

    def get_last_progress_time(self) -> int:
        """Wall time of the last iteration; now, while the server sleeps as planned."""
        return int(self._watchdog.last_progress())

    def _open(self) -> TimerPipe:
        if self._pipe is None:
            self._pipe = TimerPipe(self._file_path)
            found = os.fstat(self._pipe.fileno())
            self._watchdog.workers.pipe = (found.st_dev, found.st_ino)
        return self._pipe

    def _overdue(self, pid: int, requests: list[FileTimerRequest]) -> None:
        if pid not in self._watchdog.workers.known:
            # It has exited or was never admitted: the pid may belong to another process now.
            self._watchdog.drop("no worker of this server")
            return
        scopes = [request.scope_id for request in requests]
        _call_hooks(self._run_id, {pid: scopes})
        for request in requests:
            self._event("timer expired", request)
        facts = _process_facts(pid)
        # Two scopes may want different signals: each is sent once, in the order of expiry.
        for wanted in dict.fromkeys(request.signal for request in requests):
            if wanted and self._reap_worker(pid, wanted):
                first = next(request for request in requests if request.signal == wanted)
                self._event("kill worker process", first)
        _log_expired(self._run_id, pid, scopes, facts)

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        """Signal the worker if it is still the process that sent the request; True if signalled or gone."""
        return self._watchdog.signal(worker_pid, signal)

    def _event(self, name: str, request: FileTimerRequest | None) -> None:
        if self._log_event is None:
            return
        try:
            self._log_event(name, request)
        except Exception as error:  # noqa: BLE001 - an error of the callback must not end the watchdog
            log("error", f"timers: log_event({name!r}): {type(error).__name__}: {error}")


_OWN = {"register_timers": FileTimerServer.register_timers}

# ---- the log of expired timers -----------------------------------------------------------------------

_HOOKED = ("debug_info_logging", "file_based_local_timer")
"""The modules of `phalanx.elastic.timer` in which programs put a function of their own in place of ours."""


def _call_hooks(run_id: str, expired: dict[int, list[str]]) -> None:
    """Call what replaces `log_debug_info_for_expired_timers`, while the worker can still be looked at."""
    for module in _HOOKED:
        there = sys.modules.get(f"phalanx.elastic.timer.{module}")
        hook = getattr(there, "log_debug_info_for_expired_timers", log_debug_info_for_expired_timers)
        if hook is not log_debug_info_for_expired_timers:
            try:
                hook(run_id, expired)
            except Exception as error:  # noqa: BLE001 - an error of the hook must not end the watchdog
                log("error", f"timers: {module}: {type(error).__name__}: {error}")


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Log for each worker the scopes that it did not leave in time, and what it is doing."""
    for pid, scopes in expired_timers.items():
        _log_expired(run_id, pid, scopes, _process_facts(pid))


def _log_expired(run_id: str, pid: int, scopes: list[str], facts: str) -> None:
    names = ", ".join(map(repr, scopes))
    log("warning", f"timers: run {run_id}: pid {pid} did not leave {names} in time; {facts}")


def _process_facts(pid: int) -> str:
    """State, threads, memory and command of a process."""
    lines = [line.split(":\t", 1) for line in _read_proc(pid, "status").splitlines() if ":\t" in line]
    status = {name: value.strip() for name, value in lines}
    if not status:
        return "gone"
    command = " ".join(_read_proc(pid, "cmdline").split("\0")).strip()
    kernel_function = _read_proc(pid, "wchan").strip()
    known = [
        f"state {status.get('State', '?')}",
        f"{status.get('Threads', '?')} threads",
        f"memory {status.get('VmRSS', '?')}",
    ]
    if kernel_function not in ("", "0"):
        known.append(f"waiting in {kernel_function}")
    return f"{', '.join(known)}; command: {command[:200] or status.get('Name', '?')}"


def _read_proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(1 << 14).decode("utf-8", "replace")
    except OSError:
        return ""
