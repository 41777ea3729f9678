"""Where followed output goes: a terminal, a pipe, a socket, a file, or any Python text stream.

Invariants
- A sink holds at most one block (`pending`), and no more is read from a log before that block is written. A
  blocked destination therefore costs bounded memory; what it has not shown waits in the log files.
- A descriptor never blocks the caller. Pipes and terminals are opened a second time, because O_NONBLOCK on
  the inherited description would make the writes of the shell and the workers fail with EAGAIN. A
  descriptor that cannot be opened again is written in small pieces when poll reports room.
- Bytes are passed unchanged. Only a stream with neither descriptor nor `.buffer` gets decoded text.
- `push` does not raise: a full disk loses the block, a closed destination becomes `dead`; both are reported
  through `lose`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from select import POLLERR, POLLHUP, POLLNVAL, POLLOUT, poll
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from phalanx.agent.logs.followed_file import FollowedFile
    from phalanx.agent.logs.repeated_tracebacks import RepeatedTracebacks

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PIPE = 512 * 1024  # bytes that a console's pipe should hold
_PIECE = 512  # POSIX's smallest PIPE_BUF: fits whenever poll reports "writable"
_HOLD_TERMINAL = 0.1  # seconds of silence after which another file may interrupt an open line
_HOLD_PIPE = 1.0


class Sink:
    """One destination: the block on its way, the file that owns the current line, and the files to read."""

    def __init__(self, name: str, tty: bool) -> None:
        self.name = name
        self.tty = tty
        self.hold = _HOLD_TERMINAL if tty else _HOLD_PIPE
        self.fd = -1  # polled for room; -1 if there is none to poll
        self.pending: list[memoryview] = []
        self.pending_source: FollowedFile | None = None
        self.pending_raw = 0  # how many bytes of the followed file the pending block represents
        self.moved = time.monotonic()  # when the destination last accepted bytes
        self.dead = ""  # why it accepts nothing any more
        self.unread = False  # dead because its reader has exited
        self.torn = False  # a block was dropped halfway: the next one starts on a new line
        self.owner: FollowedFile | None = None  # the file whose line is open
        self.overwrites: FollowedFile | None = None  # on a terminal: whose progress bar has the cursor
        self.ready: list[FollowedFile] = []
        self.repeated_tracebacks: RepeatedTracebacks | None = None  # a console shows each only once
        self.lose: Callable[[Sink, FollowedFile | None, int, str], None] = lambda *_: None

    def ignore_terminal(self) -> None:
        """Write to a terminal as to a pipe: no colours, and a carriage return does not end a line."""
        self.tty, self.hold = False, _HOLD_PIPE

    def put(self, source: FollowedFile, block: list[memoryview], raw: int) -> None:
        """Accepts the next block; the previous one must be written."""
        if self.torn:
            block.insert(0, memoryview(b"\n"))
            self.torn = False
        self.pending, self.pending_source, self.pending_raw = block, source, raw

    def push(self) -> bool:
        """Writes what the destination accepts now; True if nothing is left pending."""
        while self.pending:
            if self.dead:
                self._drop(self.dead)
                break
            try:
                n = self._write(self.pending)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self._failed(error)
                break
            except Exception as error:  # noqa: BLE001 - a user's stream may raise anything
                self.dead = f"{self.name} failed: {type(error).__name__}: {error}"
                continue
            if n == 0:
                return False
            self.moved = time.monotonic()
            self._advance(n)
        self.pending_source = None
        self.pending_raw = 0
        return True

    def unshown(self) -> int:
        """About how many bytes of the followed file are in the pending block and not written."""
        return min(self.pending_raw, sum(map(len, self.pending)))

    def close(self) -> None:
        """Frees the sink's own descriptor; a given stream stays open."""

    def _write(self, block: list[memoryview]) -> int:
        raise NotImplementedError

    def _advance(self, n: int) -> None:
        block = self.pending
        while n:
            first = len(block[0])
            if n < first:
                block[0] = block[0][n:]
                return
            n -= first
            del block[0]

    def _failed(self, error: OSError) -> None:
        if error.errno in _NO_ROOM:
            self.torn = True
            self._drop(f"{self.name}: {os.strerror(error.errno or 0)}")
        else:
            self.unread = error.errno == errno.EPIPE
            self.dead = f"{self.name} is closed: {error.strerror or error}"
            self._drop(self.dead)

    def _drop(self, why: str) -> None:
        count = self.unshown()
        self.pending = []
        self.lose(self, self.pending_source, count, why)


class FdSink(Sink):
    """A non-blocking descriptor, or a regular file."""

    def __init__(self, name: str, fd: int, tty: bool) -> None:
        super().__init__(name, tty)
        self.fd = fd

    def _write(self, block: list[memoryview]) -> int:
        return os.writev(self.fd, block)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PacedFdSink(FdSink):
    """A blocking descriptor that cannot be opened again: written in small pieces when there is room."""

    def __init__(self, name: str, fd: int, tty: bool) -> None:
        super().__init__(name, fd, tty)
        self._poll = poll()
        self._poll.register(fd, POLLOUT)

    def _write(self, block: list[memoryview]) -> int:
        events = self._poll.poll(0)
        if not events:
            return 0
        if events[0][1] & (POLLERR | POLLHUP | POLLNVAL):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return os.write(self.fd, block[0][:_PIECE])


class SocketSink(FdSink):
    """A stream socket as console (inetd-like supervisors): non-blocking per call."""

    def __init__(self, name: str, fd: int) -> None:
        super().__init__(name, fd, tty=False)
        import socket

        self._flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        self._socket = socket.socket(fileno=fd)

    def _write(self, block: list[memoryview]) -> int:
        return self._socket.sendmsg(block, (), self._flags)

    def close(self) -> None:
        self._socket.close()
        self.fd = -1


class StreamSink(Sink):
    """A Python stream without a descriptor: bytes to its `.buffer`, else text with invalid UTF-8 replaced."""

    def __init__(self, name: str, stream: Any) -> None:
        super().__init__(name, tty=False)
        self._stream = stream
        self._buffer = getattr(stream, "buffer", None)
        self._decoder: Any = None
        if self._buffer is None:
            import codecs

            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _write(self, block: list[memoryview]) -> int:
        data = b"".join(block)
        if self._buffer is not None:
            self._buffer.write(data)
            self._buffer.flush()
        else:
            # Final at the end of a line: half a character must not swallow the start of the next line.
            self._stream.write(self._decoder.decode(data, data.endswith(b"\n")))
            flush = getattr(self._stream, "flush", None)
            if flush is not None:
                flush()
        return len(data)


class NoSink(Sink):
    """A destination that could not be opened: everything is counted as lost."""

    def __init__(self, name: str, why: str, unread: bool = False) -> None:
        super().__init__(name, tty=False)
        self.dead = why
        self.unread = unread


def open_sink(dst: TextIO | str | os.PathLike[str]) -> tuple[Hashable, Sink]:
    """The sink for a stream or for a path to append to, and a key that is equal for the same destination."""
    if isinstance(dst, str | os.PathLike):
        return _open_path(os.fspath(dst))
    try:
        # Python's own buffer must be written first. Only here, in the caller's thread: a daemon thread that
        # is in a flush when the interpreter exits aborts the process.
        dst.flush()
    except (OSError, ValueError, AttributeError):
        pass
    try:
        fd = dst.fileno()
    except (OSError, ValueError, AttributeError):
        name = getattr(dst, "name", None)
        return ("stream", id(dst)), StreamSink(name if isinstance(name, str) else type(dst).__name__, dst)
    given = getattr(dst, "name", None)
    name = {1: "stdout", 2: "stderr"}.get(fd, given if isinstance(given, str) else f"descriptor {fd}")
    return _open_fd(fd, name)


def _open_path(path: str) -> tuple[Hashable, Sink]:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return ("path", path), NoSink(path, f"{path} cannot be opened: {error.strerror}")
    status = os.fstat(fd)
    return ("file", status.st_dev, status.st_ino), FdSink(path, fd, tty=False)


def _open_fd(fd: int, name: str) -> tuple[Hashable, Sink]:
    try:
        status = os.fstat(fd)
    except OSError as error:
        return ("fd", fd), NoSink(name, f"{name} is closed: {error.strerror}")
    key = ("file", status.st_dev, status.st_ino)
    kind = stat.S_IFMT(status.st_mode)
    try:
        if kind == stat.S_IFSOCK:
            return key, SocketSink(name, os.dup(fd))
        if kind not in (stat.S_IFIFO, stat.S_IFCHR):
            # A duplicate shares the file offset; opening again would start at 0 and overwrite.
            return key, FdSink(name, os.dup(fd), tty=False)
        tty = os.isatty(fd)
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            again = os.open(f"/proc/self/fd/{fd}", flags)
            if kind == stat.S_IFIFO:
                _widen(again)
            return key, FdSink(name, again, tty)
        except OSError as error:
            if error.errno == errno.ENXIO and kind == stat.S_IFIFO:
                return key, NoSink(name, f"{name} is closed: the pipe has no reader", unread=True)
            return key, PacedFdSink(name, os.dup(fd), tty)
    except OSError as error:
        return key, NoSink(name, f"{name} cannot be written: {error.strerror}")


def _widen(pipe: int) -> None:
    """Room for two blocks: with the usual 64 KiB, writer and reader wake each other five times as often.

    Not the largest possible size: all pipes of a user share one limit.
    """
    import fcntl

    try:
        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < _PIPE:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
    except (AttributeError, OSError):
        pass  # not supported, or the limit is reached
