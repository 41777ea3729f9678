"""Messages (messages.py) over a private socket pair, with descriptors.

Descriptors ride on the header, which is why the header is read with recvmsg alone.
"""

from __future__ import annotations

import _socket  # not socket, which brings selectors and enum along: every start waits for this
import array
import os
import struct

from phalanx.helpers.messages import dump, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.core.record import Record

_HEADER = struct.Struct("=II")  # body length, number of descriptors
_CLOEXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
_FDS_PER_FRAME = 200  # the kernel takes 253 at most in one message


class TooManyFilesError(Exception):
    """A message came without all of its descriptors; they are closed again, the message is kept."""

    def __init__(self, message: Record) -> None:
        super().__init__(type(message).__name__)
        self.message = message


class Unsent:
    """Bytes that wait for the other end, and the descriptors that ride on the first of them."""

    __slots__ = ("_owned", "data", "fds")

    def __init__(self, data: bytes, fds: list[int]) -> None:
        self.data = data
        self.fds = fds
        self._owned = False

    def keep(self) -> None:
        """Copy the descriptors: their owner may close them before they are sent."""
        self.fds = [os.dup(fd) for fd in self.fds]
        self._owned = True

    def release(self) -> None:
        """The descriptors are sent, or are not going to be."""
        if self._owned:
            for fd in self.fds:
                os.close(fd)
        self.fds = []


class Channel:
    """One end of the conversation.

    The zygote uses `send` and `receive`, which block. The agent uses `post` and `pending`, which never do:
    what the other end does not take yet is kept, and `flush` goes on when the socket is writable.
    """

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self._inbox = bytearray()
        self._inbox_fds: list[int] = []
        self._expected = 0  # descriptors of the message that is being read
        self._outbox: list[Unsent] = []
        self._flushing = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Record, fds: list[int] | None = None) -> None:
        """Send one message, blocking."""
        for data, rights in _frames(message, fds or []):
            if rights:
                # Eight bytes into a stream socket are taken whole or not at all.
                self.sock.sendmsg([data], _ancillary(rights))
            else:
                self.sock.sendall(data)

    def post(self, message: Record, fds: list[int] | None = None) -> None:
        """Send one message without blocking; the caller may close `fds` afterwards.

        May be called from a signal handler that interrupts another `post`.
        """
        frames = [Unsent(data, rights) for data, rights in _frames(message, fds or [])]
        self._outbox.extend(frames)
        self.flush()
        for frame in frames if fds and self._outbox else ():
            frame.keep()

    @property
    def unsent(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Send what the other end takes now."""
        if self._flushing:
            return  # interrupted by a signal handler: the outer call sends this, too
        self._flushing = True
        try:
            while self._outbox:
                frame = self._outbox[0]
                try:
                    sent = self.sock.sendmsg([frame.data], _ancillary(frame.fds), _socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    return
                frame.data = frame.data[sent:]
                frame.release()
                if not frame.data:
                    del self._outbox[0]
        except OSError:
            self._drop_unsent()
            raise
        finally:
            self._flushing = False

    def _drop_unsent(self) -> None:
        unsent, self._outbox = self._outbox, []
        for frame in unsent:
            frame.release()

    def receive(self) -> tuple[Record, list[int]]:
        """The next message and its descriptors, blocking; EOFError when the other end is gone."""
        fds: list[int] = []
        expected = 0
        while True:
            space = _socket.CMSG_LEN(_FDS_PER_FRAME * array.array("i").itemsize)
            header, ancillary, _flags, _addr = self.sock.recvmsg(_HEADER.size, space, _CLOEXEC)
            fds += _rights(ancillary)
            if len(header) < _HEADER.size:
                header += self._exactly(_HEADER.size - len(header), eof_is_end=not header)
            length, count = _HEADER.unpack(header)
            expected += count
            if length:
                message = load(self._exactly(length))
                if len(fds) < expected:  # the kernel drops those that do not fit into this process's table
                    for fd in fds:
                        os.close(fd)
                    raise TooManyFilesError(message)
                return message, fds

    def _exactly(self, count: int, eof_is_end: bool = False) -> bytes:
        chunks = []
        while count:
            chunk = self.sock.recv(min(count, 1 << 20))
            if not chunk:
                raise EOFError("closed" if eof_is_end else "closed in the middle of a message")
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)

    def pending(self) -> tuple[list[tuple[Record, list[int]]], bool]:
        """Messages that have arrived, with their descriptors (never blocks); whether the other end is gone.

        A message has fewer descriptors than it was sent with where this process has no room for more.
        """
        gone = False
        space = _socket.CMSG_LEN(_FDS_PER_FRAME * array.array("i").itemsize)
        flags = _socket.MSG_DONTWAIT | _CLOEXEC
        while True:
            try:
                chunk, ancillary, _flags, _addr = self.sock.recvmsg(1 << 16, space, flags)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                gone = True
                break
            if not chunk:
                gone = True
                break
            self._inbox += chunk
            self._inbox_fds += _rights(ancillary)
        messages: list[tuple[Record, list[int]]] = []
        while len(self._inbox) >= _HEADER.size:
            length, count = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + length
            if len(self._inbox) < end:
                break
            self._expected += count
            if length:
                fds, self._inbox_fds = self._inbox_fds[: self._expected], self._inbox_fds[self._expected :]
                self._expected = 0
                messages.append((load(bytes(self._inbox[_HEADER.size : end])), fds))
            del self._inbox[:end]
        return messages, gone

    def close(self) -> None:
        self._drop_unsent()
        self.sock.close()
        for fd in self._inbox_fds:
            os.close(fd)
        self._inbox_fds = []

    def detach(self) -> int:
        """The descriptor alone, for the caller to close; -1 where it is closed already.

        Else Python would warn of an unclosed socket in a fork that closes descriptors by their numbers.
        """
        return self.sock.detach()


def _frames(message: Record, fds: list[int]) -> list[tuple[bytes, list[int]]]:
    """Header and body; descriptors beyond one frame travel ahead of it in empty frames."""
    frames = []
    while len(fds) > _FDS_PER_FRAME:
        frames.append((_HEADER.pack(0, _FDS_PER_FRAME), fds[:_FDS_PER_FRAME]))
        fds = fds[_FDS_PER_FRAME:]
    body = dump(message)
    header = _HEADER.pack(len(body), len(fds))
    return [*frames, (header, fds), (body, [])] if fds else [*frames, (header + body, [])]


def _rights(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a piece of a message."""
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(data[: len(data) - len(data) % got.itemsize])
            fds.extend(got)
            if not _CLOEXEC:
                for fd in got:
                    os.set_inheritable(fd, False)
    return fds


def _ancillary(fds: list[int]) -> list[tuple[int, int, Any]]:
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
