"""Messages between the agent and its zygote: marshal over a private socket pair, with descriptors.

Both ends are the same interpreter and nobody else can reach the socket, so marshal is safe here
(it is never used on bytes from a network) and costs no import. A message is a tuple whose first
item names it. Descriptors ride on the header, which is why the header is read with recvmsg alone.
"""

from __future__ import annotations

import _socket  # not socket, which brings selectors and enum along: every start waits for this
import array
import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = tuple[Any, ...]

_HEADER = struct.Struct("=II")  # body length, number of descriptors
_CLOEXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
_FDS_PER_FRAME = 200  # the kernel takes 253 at most in one message


class TooManyFilesError(Exception):
    """A message came without all of its descriptors; they are closed again, the message is kept."""

    def __init__(self, message: Message) -> None:
        super().__init__(message[0])
        self.message = message


class Channel:
    """One end of the conversation. `receive` blocks; `pending` only takes what has arrived."""

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self._inbox = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Send one message; descriptors beyond one frame travel ahead of it in empty frames."""
        fds = fds or []
        while len(fds) > _FDS_PER_FRAME:
            head, fds = fds[:_FDS_PER_FRAME], fds[_FDS_PER_FRAME:]
            self._send_frame(b"", head)
        self._send_frame(marshal.dumps(message), fds)

    def _send_frame(self, body: bytes, fds: list[int]) -> None:
        header = _HEADER.pack(len(body), len(fds))
        if not fds:
            self.sock.sendall(header + body)
            return
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))]
        # Eight bytes into a stream socket are taken whole or not at all.
        self.sock.sendmsg([header], rights)
        if body:
            self.sock.sendall(body)

    def receive(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors, blocking; EOFError when the other end is gone."""
        fds: list[int] = []
        expected = 0
        while True:
            space = _socket.CMSG_LEN(_FDS_PER_FRAME * array.array("i").itemsize)
            header, ancillary, _flags, _addr = self.sock.recvmsg(_HEADER.size, space, _CLOEXEC)
            for level, kind, data in ancillary:
                if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                    got = array.array("i")
                    got.frombytes(data[: len(data) - len(data) % got.itemsize])
                    fds.extend(got)
                    if not _CLOEXEC:
                        for fd in got:
                            os.set_inheritable(fd, False)
            if len(header) < _HEADER.size:
                header += self._exactly(_HEADER.size - len(header), eof_is_end=not header)
            length, count = _HEADER.unpack(header)
            expected += count
            if length:
                message = marshal.loads(self._exactly(length))
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

    def pending(self) -> tuple[list[Message], bool]:
        """Messages that have arrived (never blocks), and whether the other end is gone."""
        gone = False
        while True:
            try:
                chunk = self.sock.recv(1 << 16, _socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                gone = True
                break
            if not chunk:
                gone = True
                break
            self._inbox += chunk
        messages: list[Message] = []
        while len(self._inbox) >= _HEADER.size:
            length, _count = _HEADER.unpack_from(self._inbox)
            end = _HEADER.size + length
            if len(self._inbox) < end:
                break
            messages.append(marshal.loads(bytes(self._inbox[_HEADER.size : end])))
            del self._inbox[:end]
        return messages, gone

    def close(self) -> None:
        self.sock.close()

    def detach(self) -> int:
        """The descriptor alone, for whoever closes it; -1 where it is closed already.

        Else Python would warn of an unclosed socket in a fork that closes descriptors by their numbers.
        """
        return self.sock.detach()
