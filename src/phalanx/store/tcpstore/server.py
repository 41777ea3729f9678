"""Serves torch's TCPStore protocol to the workers of a round: one thread of its own, and no torch.

The port is held from construction on (so it can be announced as MASTER_PORT before any worker exists) until
`close`. Each round begins with `reset`: an empty store, and no connection left over from the round before, so
that a worker of the dead attempt that is still on its way out cannot write into the new one.

Invariants:
- Only the server's thread uses the loop. Other threads hand it a call and wake it.
- A thread that waits for a call gets an answer, even if the store is reset or closed meanwhile.
- The protocol has no authentication, like torch's own: bind it only to the address that the workers use.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.net.wake_up import WakeUp
from phalanx.store.tcpstore.protocol import (
    ADD,
    CHECK,
    DELETE_KEY,
    GET,
    GETNUMKEYS,
    INT64,
    SET,
    SILENT,
    WAIT,
    Request,
    TorchProtocolError,
)
from phalanx.store.tcpstore.torch_selector import Adopt, StoreLoop

_BACKLOG = 4096


class _Call:
    """Something another thread wants done in the server's thread, and how it ended."""

    __slots__ = ("action", "done", "error", "expired", "reply")

    def __init__(self, action: Callable[[_Call], None]) -> None:
        self.action = action
        self.done = threading.Event()
        self.reply = b""
        self.error = ""
        self.expired = False

    def finish(self, reply: bytes = b"", *, error: str = "", expired: bool = False) -> None:
        """Let the other thread go on."""
        self.reply, self.error, self.expired = reply, error, expired
        self.done.set()


class TorchStoreServer:
    """A TCPStore server for torch's clients: `start` it, `reset` it for each round, `close` it."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        sock: socket.socket | None = None,
        log: Callable[[str], None] | None = None,
        adopt: Adopt | None = None,
        foreign: bytes = b"",
        on_client: Callable[[str], None] = lambda host: None,
    ) -> None:
        """`adopt` gets connections whose first byte is in `foreign`: another protocol on the port.

        `on_client` gets the host of every other connection, in the server's thread."""
        self._listener = sock if sock is not None else _bind(host, port)
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        name = self._listener.getsockname()
        self._address: tuple[str, int] = (name[0], name[1])
        self._wakes = WakeUp()
        self._loop = StoreLoop(
            self._listener,
            self._wakes,
            on_wake=self._run_calls,
            on_reply=self._answer,
            log=log if log is not None else _warn,
            adopt=adopt,
            foreign=foreign,
            on_client=on_client,
        )
        self._waiting: dict[int, _Call] = {}  # calls whose reply is still to come; the server's thread's own
        self._numbers = itertools.count(-1, -1)  # negative: never that of a connection
        self._lock = threading.Lock()  # guards the rest
        self._calls: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._released = False

    @property
    def address(self) -> tuple[str, int]:
        """The address and port that the server is bound to."""
        return self._address

    @property
    def operations(self) -> int:
        """Requests answered since the store was last emptied."""
        return self._loop.operations

    @property
    def port(self) -> int:
        """The port to announce as MASTER_PORT."""
        return self._address[1]

    def start(self) -> None:
        """Begin to serve, in a thread of its own."""
        with self._lock:
            if self._closing or self._thread is not None:
                raise StoreError(f"torch store at port {self.port}: start() works once, and before close()")
            self._thread = threading.Thread(target=self._serve, name="phalanx-torch-store", daemon=True)
            self._thread.start()

    def reset(self) -> None:
        """Empty the store and drop every connection made so far; on return the new round may begin."""

        def empty(call: _Call) -> None:
            self._loop.reset()
            self._fail_waiting("it was reset for a new round")
            call.finish()

        call = self._post(empty)
        call.done.wait()
        if call.error:
            raise StoreError(f"torch store at port {self.port}: {call.error}")

    def close(self) -> None:
        """Stop serving and give everything back; safe to call again, and before `start`."""
        with self._lock:
            self._closing = True
            self._loop.stopping = True
            thread = self._thread
            self._wakes.ring()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> TorchStoreServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the store for this process, from any thread but the server's ------------------------------------

    def set(self, key: str, value: bytes) -> None:
        """Store a value, as a client's `set(key, value)`."""
        self._request((SET, [_wire_key(key), value]))

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """The value of a key; waits for it as a client's `get(key)` does."""
        self.wait([key], timeout)
        return self._request((GET, [_wire_key(key)]))[8:]

    def add(self, key: str, amount: int) -> int:
        """Count a key up; its new number."""
        total: int = INT64.unpack(self._request((ADD, [_wire_key(key), amount])))[0]
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Are all of these keys there?"""
        return self._request((CHECK, [_wire_key(key) for key in keys])) == b"\0"

    def wait(self, keys: Sequence[str], timeout: float | None = None) -> None:
        """Until all of these keys are there; `StoreTimeoutError` after `timeout` seconds."""
        self._request((WAIT, [_wire_key(key) for key in keys]), timeout)

    def delete_key(self, key: str) -> bool:
        """Remove a key; was it there?"""
        return self._request((DELETE_KEY, [_wire_key(key)])) != INT64.pack(0)

    def num_keys(self) -> int:
        """How many keys have a value."""
        count: int = INT64.unpack(self._request((GETNUMKEYS, [])))[0]
        return count

    def _request(self, request: Request, timeout: float | None = None) -> bytes:
        number = next(self._numbers)

        def step(call: _Call) -> None:
            self._waiting[number] = call
            try:
                self._loop.step(number, request)
            except TorchProtocolError as error:
                self._waiting.pop(number).finish(error=str(error))
                return
            if request[0] in SILENT:
                self._answer(number, b"")

        def give_up(call: _Call) -> None:
            late = self._waiting.pop(number, None)
            if late is not None:
                self._loop.give_up(number)
                late.finish(expired=True)
            call.finish()

        call = self._post(step)
        if not call.done.wait(timeout):
            self._post(give_up)
            call.done.wait()  # the answer may have come just in time
        if call.expired:
            keys = ", ".join(repr(key[1:].decode(errors="replace")) for key in request[1][:8])
            raise StoreTimeoutError(
                f"torch store at port {self.port}: not all of these keys are there after {timeout} s: {keys}"
            )
        if call.error:
            raise StoreError(f"torch store at port {self.port}: {call.error}")
        return call.reply

    def _post(self, action: Callable[[_Call], None]) -> _Call:
        call = _Call(action)
        with self._lock:
            if self._thread is None or self._closing or self._released:
                raise StoreError(f"torch store at port {self.port} is not being served: start() it first")
            self._calls.append(call)
            self._wakes.ring()
        return call

    # -- in the server's thread --------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._loop.run()
        finally:
            # Even if a defect ends the loop: clients then see a closed connection, not silence.
            self._release()

    def _run_calls(self) -> None:
        self._wakes.take()
        while self._calls:
            call = self._calls.popleft()
            call.action(call)

    def _answer(self, number: int, reply: bytes) -> None:
        call = self._waiting.pop(number, None)
        if call is not None:
            call.finish(reply)

    def _fail_waiting(self, error: str) -> None:
        for call in self._waiting.values():
            call.finish(error=error)
        self._waiting.clear()

    def _release(self) -> None:
        """Close everything, and let every thread go that waits for an answer."""
        with self._lock:
            if self._released:
                return
            self._released = True
            self._loop.close()
            self._listener.close()
            self._wakes.close()
            self._fail_waiting("it was closed")
            while self._calls:
                self._calls.popleft().finish(error="it was closed")


def _warn(text: str) -> None:
    from phalanx.log import warn  # not on the way to the first worker

    warn(text)


def _wire_key(key: str) -> bytes:
    # torch's client puts a slash in front of every key that its user names.
    return b"/" + key.encode()


def _bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; "" and "::" listen on IPv6 and IPv4 alike, where the machine has IPv6."""
    if host in ("", "::", "*"):
        candidates = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    else:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise StoreConnectionError(
                f"torch store: {host!r} cannot be resolved ({error}): name an address of this machine"
            ) from error
        candidates = [(family, str(address[0])) for family, _, _, _, address in found]
    failure: OSError | None = None
    for family, address in candidates:
        try:
            return _bind_one(family, address, port)
        except OSError as error:
            failure = error
    raise StoreConnectionError(
        f"torch store: cannot listen on {host or '::'} port {port} ({failure}): "
        "name an address of this machine and a free port, or port 0 to have one chosen"
    ) from failure


def _bind_one(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
