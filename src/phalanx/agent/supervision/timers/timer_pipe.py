"""How timer requests travel: as lines of JSON in a pipe, which torch's client writes too; ours add `started`.

The pipe has a name, or is that of a `multiprocessing.Queue`, where lines are framed (phalanx.elastic.timer).

Invariants
- A line is at most PIPE_BUF long and written in one call, so those of several writers never mix.
- A line begins with a mark that cannot occur inside of one, so a partial line, left by a killed writer or by
  garbage, does not damage the next line.
- A named pipe is readable and writable by its owner only, and other users cannot replace it. A path that
  holds anything else is refused, never replaced: it may be a symbolic link of another user.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from abc import ABC, abstractmethod
from json.encoder import encode_basestring_ascii as quoted
from math import ceil, inf
from signal import SIGKILL
from tempfile import mkdtemp
from typing import Annotated, Any
from zlib import crc32

import msgspec

from phalanx.trusted_files import check_directory, make_directory

RELEASE = -1.0
"""The expiration time of a release; any negative number is one."""
MAX_LINE = select.PIPE_BUF
_MARK = b'{"version"'
_JSON = '{"version": 1, "pid": %s, "scope_id": %s, "expiration_time": %r, "signal": %d'
_MAX_SCOPE, _SHORT = 3700, 300  # of a line: the rest are numbers
_NEVER = 1e12  # seconds since 1970; JSON has no infinity
_READ_SIZE = 1 << 16
_CAPACITY = 1 << 20
_F_SETPIPE_SZ = 1031
_MAX_SLEEP = 3600.0  # a deadline years away must fit into the kernel's integer
_BURST = 0.0005
"""Requests less than this many seconds apart are a burst; a reader pauses as long to take several at once."""


class TimerRequest:
    """A worker acquires the timer of a scope, or releases it (negative expiration time)."""

    started = 0
    """When the sender started, in clock ticks since boot: a later process may have its pid. 0: unknown."""
    signal = int(SIGKILL)

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]  # mutable, and unhashable in torch too

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._fields()!r}"

    def _fields(self) -> tuple[Any, ...]:
        return self.worker_id, self.scope_id, self.expiration_time, self.signal


class FileTimerRequest(TimerRequest):
    """A request through a named pipe: the worker is a pid and chooses the signal."""

    version = 1

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.signal = int(signal)

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

    def to_json(self) -> str:
        """The request as torch writes it into the pipe, without the newline."""
        return _JSON % (self.worker_id, quoted(self.scope_id), self.expiration_time, self.signal) + "}"


def encode_line(request: TimerRequest, started: int = 0) -> bytes:
    """The line of a request; a scope that is too long is cut, with a checksum of all of it."""
    scope, at = request.scope_id, min(request.expiration_time, _NEVER)
    name = quoted(scope if scope.isascii() else scope.encode("utf-8", "backslashreplace").decode())
    if len(name) > _MAX_SCOPE:
        name = quoted(f"{scope[:_SHORT]}~{crc32(name.encode()):08x}")
    return (_JSON % (request.worker_id, name, at, request.signal) + f', "started": {started}}}\n').encode()


class _Line(msgspec.Struct):
    """What a server needs of a line, by anybody."""

    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    scope_id: str
    expiration_time: float
    signal: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    started: int = 0


_decoder = msgspec.json.Decoder(_Line)


def decode_line(line: bytes) -> FileTimerRequest:
    """The request of a line; raises ValueError or RecursionError for garbage."""
    found = _decoder.decode(line)
    request = FileTimerRequest(found.pid, found.scope_id, found.expiration_time, found.signal)
    request.started = found.started
    return request


class LineReader:
    """Finds requests in lines of data of any chunk size."""

    def __init__(self) -> None:
        self.garbage = 0
        self._rest = b""

    def feed(self, data: bytes) -> list[FileTimerRequest]:
        """The requests in the lines completed by `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            # Too long for a line: keep only what could be the beginning of the next one.
            self.garbage += 1
            mark = self._rest.rfind(_MARK)
            self._rest = self._rest[mark:] if mark >= len(self._rest) - MAX_LINE else b"?"
        requests = []
        for line in filter(None, lines):
            mark = max(0, line.rfind(_MARK))
            self.garbage += mark > 0
            try:
                requests.append(decode_line(line[mark:]))
            except (ValueError, RecursionError):
                self.garbage += 1
        return requests


def open_pipe(path: str, flags: int) -> int:
    """Open a pipe and nothing else: writing into a regular file would damage it."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileExistsError(
            f"{path} is not a named pipe; use the path that the timer server was started with"
        )
    return fd


def write_message(fd: int, message: bytes, timeout: float) -> bool:
    """Write to a pipe, if it is full once there is room; False after `timeout` seconds."""
    end = 0.0
    while True:
        try:
            return os.write(fd, message) > 0
        except BlockingIOError:
            end = end or time.monotonic() + timeout
            if (left := end - time.monotonic()) <= 0:
                return False
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(int(left * 1000) + 1)


class RequestQueue(ABC):
    """The source of a server's requests."""

    @abstractmethod
    def size(self) -> int:
        """The approximate number of waiting requests."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[Any]:
        """Up to `size` requests; waits at most `timeout` seconds for them."""


class PipeQueue(RequestQueue):
    """A pipe as the source of requests."""

    named: os.stat_result | None = None
    """The pipe, if it is a named one and open."""

    def __init__(self) -> None:
        self._lines = LineReader()
        self._ready: list[Any] = []
        self._fd: int | None = None
        self._wake = -1

    @property
    def garbage(self) -> int:
        """The number of messages that were not requests."""
        return self._lines.garbage

    @abstractmethod
    def _open(self) -> int:
        """A non-blocking descriptor."""

    def open(self) -> int:
        """Open the pipe, if it is not."""
        if self._fd is None:
            self._fd = self._open()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._fd

    def close(self) -> None:
        """Close all descriptors; `open` opens them again."""
        if self._fd is not None:
            os.close(self._wake)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = None

    def size(self) -> int:
        """See `RequestQueue.size`."""
        return len(self._ready)

    def get(self, size: int, timeout: float) -> list[Any]:
        """See `RequestQueue.get`; returns at once after a `wake`."""
        end = time.monotonic() + timeout
        while len(self._ready) < size and self._is_readable(max(0.0, end - time.monotonic())):
            self._ready += self._read()
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def wake(self) -> None:
        """End the wait of another thread."""
        if self._fd is not None:
            os.eventfd_write(self._wake, 1)

    def _is_readable(self, timeout: float) -> bool:
        poll, fd, slept_at = select.poll(), self.open(), time.monotonic()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        events = dict(poll.poll(None if timeout == inf else ceil(min(timeout, _MAX_SLEEP) * 1000)))
        if self._wake in events:
            os.eventfd_read(self._wake)
        elif timeout and fd in events and time.monotonic() - slept_at < _BURST:
            time.sleep(_BURST)  # not a poll: only in a burst, where every wake-up slows down the writers
        return fd in events

    def _read(self) -> list[Any]:
        try:
            data = os.read(self.open(), _READ_SIZE)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError("the queue of requests has been closed")
        return self._lines.feed(self._unframed(data))

    def _unframed(self, data: bytes) -> bytes:
        """The lines in this data."""
        return data


def private_path() -> str:
    """A path for a named pipe in a new directory that only this user can enter; the caller removes it."""
    return os.path.join(mkdtemp(prefix="phalanx_"), "timers")


class NamedPipe(PipeQueue):
    """A server's end of a named pipe."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._writer = -1

    def _open(self) -> int:
        """Make the pipe, or reuse one that an earlier server of this user left."""
        parent = os.path.dirname(os.path.abspath(self.path))
        make_directory(parent)
        check_directory(parent)
        try:
            os.mkfifo(self.path, 0o600)
        except FileExistsError:
            found = os.lstat(self.path)
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
                raise FileExistsError(
                    f"{self.path} exists and is not a named pipe of this user; use another path or remove it"
                ) from None
            os.chmod(self.path, 0o600)
        fd = open_pipe(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        # A writer of our own: without one, the reader would see end-of-file when the last client leaves.
        self._writer = open_pipe(self.path, os.O_WRONLY | os.O_NOFOLLOW)
        try:  # more room, so that workers do not wait during bursts
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _CAPACITY)
        except OSError:
            pass
        self.named = os.fstat(fd)
        return fd

    def close(self) -> None:
        """Close both ends, which writers notice."""
        if self._fd is not None:
            os.close(self._writer)
        super().close()
        self.named = None

    def remove(self) -> None:
        """Remove the pipe, if the path still names this one."""
        try:
            if self.named is not None and os.path.samestat(self.named, os.lstat(self.path)):
                os.unlink(self.path)
        except OSError:
            pass
