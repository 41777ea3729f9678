"""The socket of a job: for this machine and its own user, answered by the agent's loop.

    client   connects; sends one JSON object and a line break, or nothing
    agent    sends one JSON object, and the end of the stream

A client that sends nothing gets the state of the node; what can be asked for is in agent/requests.py. The
socket has a name in the kernel and none in the file system (Linux's abstract namespace): a killed agent
leaves nothing behind. `phalanx status` finds it in the kernel's own list. Such a name has no owner and no
mode: both sides check the other's user.

Everything is bounded: clients at a time, the size of a request, the time to make it, to answer it and to read
the answer. No client makes the loop wait, and without one nothing wakes it up.
"""

from __future__ import annotations

import os
import select
import time

from phalanx.job.environment import AGENT_SOCKET, socket_scope
from phalanx.kernel import user_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.group.group import Phase

    Answer = Callable[[dict[str, Any]], None]

_BUFFER = 1 << 20
_QUICK = 0.05  # seconds in which a start mostly is over
_MOST = 16  # clients at a time; more wait in the kernel's queue
_LONGEST = 1 << 16  # bytes of a request
_ASKING = 0.2  # seconds to send one: a client that sends nothing is an old one, and gets the state
_WORKING = 20.0  # seconds to answer it
_TELLING = 10.0  # seconds to read the answer


class StatusSocket:
    """Listens from the loop's first wait until it is closed; where the system has no such sockets, never.

    `handle(request, answer)` is called for every request, and calls `answer` then or later."""

    def __init__(self, handle: Callable[[dict[str, Any], Answer], None]) -> None:
        self._handle = handle
        self._socket: socket.socket | None = None
        self._open_at: float | None = 0.0  # None: it has been opened
        self._clients: list[StatusClient] = []
        self.name = ""
        """Of the socket, once it listens."""

    def _open(self) -> None:
        import socket

        self._open_at = None
        if not hasattr(socket, "SO_PEERCRED"):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A random part: two agents in different containers may have one pid and one network.
            name = f"\0{AGENT_SOCKET}{socket_scope()}{os.getpid()}-{os.urandom(4).hex()}"
            listener.bind(name)
            listener.listen(16)
            self._socket, self.name = listener, name
        except (OSError, ValueError):  # ValueError: a namespace that is not valid, in an embedded agent
            listener.close()

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        """Readable when a client connects. Opened in the first wait, but not in the way of a quick start."""
        if self._open_at is not None:
            if phase != "STARTING":
                self._open()
            elif not self._open_at:
                self._open_at = time.monotonic() + _QUICK
        if self._socket is None:
            return []
        self._forget()
        found = [(one.peer.fileno(), one.mask) for one in self._clients if one.mask]
        if len(self._clients) < _MOST:
            found.append((self._socket.fileno(), select.POLLIN))
        return found

    def deadline(self, phase: Phase) -> float | None:
        return min((one.until for one in self._clients), default=self._open_at)

    def look(self, phase: Phase, now: float) -> None:
        if self._open_at and now >= self._open_at:
            self._open()
        self._accept(now)
        for client in self._clients:
            client.advance(now)
        self._forget()

    def _forget(self) -> None:
        """Those that are done with; an answer may also end outside of `look`."""
        if any(one.closed for one in self._clients):
            self._clients = [one for one in self._clients if not one.closed]

    def _accept(self, now: float) -> None:
        while self._socket is not None and len(self._clients) < _MOST:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            if user_of(peer) in (os.geteuid(), 0):
                self._clients.append(StatusClient(peer, self._handle, now))
            else:
                peer.close()

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._open_at = None
        clients, self._clients = self._clients, []
        for one in clients:
            one.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class StatusClient:
    """One client, from its connection to the end of the answer; never waits."""

    def __init__(
        self, peer: socket.socket, handle: Callable[[dict[str, Any], Answer], None], now: float
    ) -> None:
        import socket

        self.peer = peer
        self.closed = False
        self.until = now + _ASKING
        self._handle = handle
        self._asked: bytearray | None = bytearray()  # None: the request is complete
        self._told: memoryview | None = None
        peer.setblocking(False)
        try:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        except OSError:
            pass

    @property
    def mask(self) -> int:
        """What to poll for; 0 while the answer is being made."""
        if self._told is not None:
            return select.POLLOUT
        return select.POLLIN if self._asked is not None else 0

    def advance(self, now: float) -> None:
        """Go on as far as possible."""
        if self._asked is not None:
            self._listen(now)
        elif self._told is not None:
            self._tell()
        if not self.closed and now >= self.until:
            if self._told is None:
                self.answer({"error": "no answer in time"})
            self.close()

    def _listen(self, now: float) -> None:
        assert self._asked is not None
        ended = False
        try:
            data = self.peer.recv(_LONGEST + 1)
            ended = not data
            self._asked += data
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        line, found, _ = self._asked.partition(b"\n")
        if len(line) > _LONGEST:
            self.close()
        elif found or ended or now >= self.until:
            self._asked = None
            self.until = now + _WORKING
            self._ask(bytes(line))

    def _ask(self, line: bytes) -> None:
        request: object = {}
        if line.strip():
            import json

            try:
                request = json.loads(line)
            except (ValueError, RecursionError):
                request = None
        if not isinstance(request, dict):
            self.answer({"error": "a request is one JSON object"})
            return
        try:
            self._handle(request, self.answer)
        except Exception as error:  # noqa: BLE001 - a request must never end the job, but the fault is reported
            from phalanx.log import warn

            warn(f"status: no answer, because of {type(error).__name__}: {error}")
            self.answer({"error": f"{type(error).__name__}: {error}"})

    def answer(self, told: dict[str, Any]) -> None:
        """Send the answer; in the owner's thread, once."""
        if self.closed or self._told is not None:
            return
        if told.get("peers"):
            import msgspec  # loaded when they were asked; their answers pass as they are

            self._told = memoryview(msgspec.json.encode(told))
        else:
            import json

            self._told = memoryview(json.dumps(told).encode())
        self.until = time.monotonic() + _TELLING
        self._tell()

    def _tell(self) -> None:
        assert self._told is not None
        try:
            while self._told:
                self._told = self._told[self.peer.send(self._told) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # the client has gone; it may ask again
        self.close()

    def close(self) -> None:
        """Hang up; idempotent."""
        if not self.closed:
            self.closed = True
            self.peer.close()
