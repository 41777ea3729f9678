"""Asks the debug servers of workers, all at once and within a deadline, in a thread of its own.

The servers are torch's (worker/torch_collectives.py). A worker may have none, may be stopped, or may
answer with anything: whatever is not a complete answer of a sane size is no answer.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Mapping

MAX_ANSWER = 32 << 20
"""Bytes; the recorder's default of 2,000 entries makes about 2 MB."""
_LOOK = 0.1
"""Seconds between two questions whether the others may still answer."""


TraceKey = tuple[int, str]
"""A rank, and what it is asked for: the path of a handler."""


def ask(
    sockets: Mapping[TraceKey, str],
    timeout: float,
    awaited: Callable[[set[int], set[int]], bool] | None = None,
) -> dict[TraceKey, bytes]:
    """The bodies of the answers of the servers at these paths; waits for at most `timeout`.

    `awaited` gets the ranks that have not answered, and those of them that have begun to: whether to wait.
    """
    end = time.monotonic() + timeout
    open_: dict[int, TraceConnection] = {}
    found: dict[TraceKey, bytes] = {}
    poll = select.poll()
    try:
        for key, path in sockets.items():
            connection = TraceConnection.to(path, key)
            if connection is not None:
                open_[connection.fileno()] = connection
                poll.register(connection.fileno(), select.POLLIN | select.POLLOUT)
        while open_ and (left := end - time.monotonic()) > 0:
            silent = {one.key[0] for one in open_.values()}
            begun = {one.key[0] for one in open_.values() if one.begun}
            goes_on = awaited is None or awaited(silent, begun)
            found_now = poll.poll(1000 * (left if awaited is None else min(left, _LOOK) if goes_on else 0))
            if not found_now and not goes_on:
                break
            for fd, _ in found_now:
                connection = open_[fd]
                if connection.advance():
                    poll.unregister(fd)
                    connection.close()
                    del open_[fd]
                    body = connection.body()
                    if body is not None:
                        found[connection.key] = body
                elif connection.sent:
                    poll.modify(fd, select.POLLIN)
    finally:
        for connection in open_.values():
            connection.close()
    return found


class TraceConnection:
    """One request to one worker."""

    def __init__(self, link: socket.socket, key: TraceKey) -> None:
        self._link, self.key = link, key
        # HTTP/1.0: the answer is complete when the connection ends, and comes in one piece.
        self._left = f"POST {key[1]} HTTP/1.0\r\nHost: worker\r\nContent-Length: 0\r\n\r\n".encode()
        self._answer = bytearray()
        self._failed = False

    @classmethod
    def to(cls, path: str, key: TraceKey) -> TraceConnection | None:
        """A connection to the server at `path`; None if there is none."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            link.setblocking(False)
            link.connect(path)  # at once, or not at all: EAGAIN for a full queue, as of a stopped process
        except (OSError, ValueError):
            link.close()
            return None
        return cls(link, key)

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def sent(self) -> bool:
        return not self._left

    @property
    def begun(self) -> bool:
        """A part of the answer has arrived."""
        return bool(self._answer)

    def advance(self) -> bool:
        """Send and receive what is possible now; True when the answer has ended, for better or worse."""
        try:
            if self._left:
                self._left = self._left[self._link.send(self._left) :]
            while True:
                more = self._link.recv(1 << 18)
                if not more:
                    return True
                self._answer += more
                if len(self._answer) > MAX_ANSWER:
                    self._failed = True
                    return True
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return False
            self._failed = True
            return True

    def body(self) -> bytes | None:
        """The body of a complete answer."""
        head, found, body = bytes(self._answer).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status = lines[0].split(b" ", 2)
        if self._failed or not found or len(status) < 2 or status[1] != b"200":
            return None
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                return body if value.strip() == str(len(body)).encode() else None
        return body

    def close(self) -> None:
        self._link.close()
