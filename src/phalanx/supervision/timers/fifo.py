"""The named pipe itself, and the client that writes into it.

Invariants
- A pipe is made readable and writable for its owner only, and a path that holds anything but such a pipe
  of ours is refused, never replaced: it may be a symbolic link that somebody laid there.
- A writer waits for room, but never for ever, and is never told to try again. It finds a server that was
  restarted by itself. Its descriptor keeps its number when the pipe is opened again, so that a second
  thread never writes into a file that happens to get the number.
- A release while there is no server is done: a server that is gone keeps no timers.
"""

from __future__ import annotations

import os
import select
import stat
import time
from errno import ENOENT, ENXIO, EPIPE
from signal import SIGKILL
from typing import Any

from phalanx.supervision.timers import wire
from phalanx.supervision.timers.requests import TimerClient
from phalanx.supervision.timers.workers import identity

PATIENCE = 5.0
"""Seconds a worker waits for room in the pipe: a server that has not read for so long is stuck."""

SERVER_TIME = 1.0
"""Seconds a worker waits for a server to open the pipe."""

_KEEP = 256
_CAPACITY = 1 << 20
_F_SETPIPE_SZ = 1031


def private_path(name: str = "timers") -> str:
    """A path for a pipe in a new directory that only this user can enter; the caller removes it."""
    from tempfile import mkdtemp

    return os.path.join(mkdtemp(prefix="phalanx_"), name)


def make(path: str) -> None:
    """Makes the pipe, or takes over one that an earlier server of this user left."""
    parent = os.path.dirname(os.path.abspath(path))
    os.makedirs(parent, mode=0o700, exist_ok=True)
    try:
        os.mkfifo(path, 0o600)
        return
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        raise FileExistsError(
            f"{path} is there and is no named pipe of this user; choose another path or remove it"
        )
    os.chmod(path, 0o600)


def _open(path: str, flags: int) -> int:
    """Opens a pipe, and nothing else: a line written into a plain file would spoil it."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(
            f"{path} is no named pipe; give the path that the timer server was started with"
        )
    return fd


class Pipe:
    """The server's end: made, opened for reading, and kept from ever running dry."""

    def __init__(self, path: str) -> None:
        make(path)
        self.path = path
        self._fd = _open(path, os.O_RDONLY | os.O_NOFOLLOW)
        # A writer of our own: without one, the last client to leave would end the pipe for the reader.
        self._keep = _open(path, os.O_WRONLY | os.O_NOFOLLOW)
        self._lines = wire.LineReader()
        self._grow()

    def fileno(self) -> int:
        """Readable when there are requests."""
        return self._fd

    def read(self) -> list[Any]:
        """What has come, of each timer only the last request."""
        try:
            return self._lines.feed(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return []

    @property
    def garbage(self) -> int:
        """Lines that were no requests."""
        return self._lines.garbage

    def close(self) -> None:
        """Lets writers know that nobody reads any more."""
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._keep)
        self._fd = self._keep = -1

    def remove(self) -> None:
        """Removes the pipe, if the path still names this one."""
        try:
            mine, there = os.fstat(self._fd), os.lstat(self.path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                os.unlink(self.path)
        except OSError:
            pass

    def _grow(self) -> None:
        """More room, so that bursts do not make workers wait; the system may refuse."""
        import fcntl

        try:
            fcntl.fcntl(self._fd, _F_SETPIPE_SZ, _CAPACITY)
        except OSError:
            pass


class FileTimerClient(TimerClient):
    """Sends requests of this process through a named pipe; `signal` is what the worker wants to get."""

    _fd: int  # set when the pipe is first opened, then never changed

    def __init__(self, file_path: str, signal: Any = SIGKILL) -> None:
        super().__init__()
        self._file_path = file_path
        self.signal = signal
        self._names: tuple[int, dict[str, bytes]] = (0, {})
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`; BrokenPipeError when there is no server."""
        self._send(
            wire.acquire(self._name(scope_id), expiration_time, int(self.signal)), scope_id, SERVER_TIME
        )

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        try:
            self._send(wire.release(self._name(scope_id)), scope_id, 0.0)
        except BrokenPipeError:
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {"_file_path": self._file_path, "signal": self.signal, "_names": (0, {})}

    def __del__(self) -> None:
        fd = self.__dict__.get("_fd")
        if fd is not None:
            os.close(fd)

    def _name(self, scope: str) -> bytes:
        """The timer's name on the wire; remembered, because a loop says the same one over and over."""
        pid, names = self._names
        if pid != os.getpid() or len(names) > _KEEP:
            self._names = pid, names = os.getpid(), {}
        found = names.get(scope)
        if found is None:
            found = names[scope] = wire.name(*identity(), scope)
        return found

    def _send(self, line: bytes, scope: str, server_time: float) -> None:
        try:
            os.write(self._open(server_time), line)
        except BlockingIOError:
            self._write_late(line, scope)
        except BrokenPipeError:
            self._reopen(server_time)
            self._write_late(line, scope)

    def _open(self, server_time: float) -> int:
        fd: int | None = self.__dict__.get("_fd")
        return self._reopen(server_time) if fd is None else fd

    def _reopen(self, server_time: float) -> int:
        """Opens the pipe, under the old number if there was one; waits a little for a server to come."""
        end, pause = time.monotonic() + server_time, 0.001
        while True:
            try:
                fd = _open(self._file_path, os.O_WRONLY)
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
            time.sleep(pause)  # back-off: nothing tells when a reader opens a pipe
            pause = min(pause * 2, 0.05)
        # In one step, for another thread may be here too.
        number = self.__dict__.setdefault("_fd", fd)
        if number != fd:
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
        return int(number)

    def _write_late(self, line: bytes, scope: str) -> None:
        """Waits for room."""
        end = time.monotonic() + PATIENCE
        fd = self._open(0.0)
        look = select.poll()
        look.register(fd, select.POLLOUT)
        while True:
            try:
                os.write(fd, line)
                return
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"timer {scope!r}: nobody has read {self._file_path} for {PATIENCE:g} s; is it stuck?"
                    ) from None
                look.poll(int(left * 1000) + 1)
