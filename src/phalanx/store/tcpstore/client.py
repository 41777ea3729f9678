"""A client of torch's TCPStore protocol without torch: what agents use to meet at MASTER_ADDR:MASTER_PORT.

It has the methods of torch's `Store`, sees the same keys as torch's own client of the same server, and can be
given to whatever expects such a store.

Invariants:
- One connection, one request at a time: calls from several threads take turns. For a long wait
  beside other work, make another client.
- Every wait is bounded by a time-out, unless `None` was asked for. A wait that runs out is taken back, and
  the client can be used on; any other reply that is late closes the client, because what arrives next could
  not be told apart.
- `close` may come from any thread and ends a wait in another one.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.tcpstore import protocol as op
from phalanx.store.tcpstore.torch_errors import as_torchs

DEFAULT_TIMEOUT = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
_HELLO = bytes([op.VALIDATE]) + op.UINT32.pack(op.MAGIC)
_NONCE = 0x70686C78  # any number will do; the reply must be the same
_ONE_BYTE = struct.Struct("=B")

T = TypeVar("T")


def connect(
    host: str, port: int, timeout: float, give_up: Callable[[], bool] = lambda: False
) -> socket.socket:
    """A connection to a TCPStore server, tried again until it is there or the time is up."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        left = deadline - time.monotonic()
        try:
            return _attempt(host, port, min(max(left, 0.05), 10.0))
        except OSError as error:
            if time.monotonic() + pause >= deadline or give_up():
                raise StoreConnectionError(
                    f"no TCPStore server at {host}:{port} within {timeout:g} s ({error}): "
                    "is node 0 running, and can its port be reached from here?"
                ) from error
        time.sleep(pause)  # there is no event for a port that opens on another machine
        pause = min(pause * 2, _LONGEST_PAUSE)


def _attempt(host: str, port: int, timeout: float) -> socket.socket:
    # As bytes: of a string, Python first loads the rules for names in other scripts, which takes 10 ms.
    name: Any = host.encode() if host.isascii() else host
    sock = socket.create_connection((name, port), timeout)
    try:
        if sock.getsockname() == sock.getpeername():
            # A loopback connection to a free port can meet itself, and would then keep the
            # port from the server.
            raise ConnectionRefusedError("no server listens there yet")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that vanished is noticed within half a minute, also while nothing is being sent.
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        sock.sendall(_HELLO + bytes([op.PING]) + op.UINT32.pack(_NONCE))
        reply = b""
        while len(reply) < 4:
            data = sock.recv(4 - len(reply))
            if not data:
                raise ConnectionResetError("the peer hung up on the handshake; it may serve something else")
            reply += data
        if op.UINT32.unpack(reply)[0] != _NONCE:
            raise ConnectionError("the peer does not speak torch's TCPStore protocol")
    except BaseException:
        sock.close()
        raise
    return sock


def answers(host: str, port: int, timeout: float) -> bool:
    """Whether a server there speaks the protocol."""
    try:
        _attempt(host, port, timeout).close()
    except OSError:
        return False
    return True


class TorchStoreClient:
    """torch's `Store` methods over one connection."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        *,
        connect_timeout: float | None = None,
        prefix: str = "",
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout`: of waits; `prefix`: put in front of every key, as torch's PrefixStore does.

        The connection is tried for `connect_timeout` seconds (default: `timeout`), or until `give_up()`.
        """
        self.host = host
        self.port = port
        self._prefix = prefix
        self._timeout = _seconds(timeout) or 0.0
        self._lock = threading.Lock()
        self._closed = False
        limit = self._timeout if connect_timeout is None else connect_timeout
        self._socket = connect(host, port, limit, give_up)

    def __repr__(self) -> str:
        return f"TorchStoreClient({self.host!r}, {self.port}, prefix={self._prefix!r})"

    def __enter__(self) -> TorchStoreClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def timeout(self) -> timedelta:
        """How long waits last."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Change how long waits last."""
        self._timeout = _seconds(timeout) or 0.0

    def close(self) -> None:
        """Give the connection back; a call in another thread ends with StoreConnectionError."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone would not wake a thread in recv
        except OSError:
            pass
        self._socket.close()

    # -- the store --------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        self._silent(bytes([op.SET]) + self._key(key) + _text(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return self._exchange(bytes([op.GET]) + self._key(key), self._bytes)

    def add(self, key: str, amount: int) -> int:
        """Count a key up; its new number."""
        request = bytes([op.ADD]) + self._key(key) + op.INT64.pack(amount)
        return self._exchange(request, self._number)

    def check(self, keys: Sequence[str]) -> bool:
        """Are all of these keys there?"""
        return self._exchange(bytes([op.CHECK]) + self._keys(keys), self._byte) == 0

    def wait(self, keys: Sequence[str], timeout: float | timedelta | None = -1) -> None:
        """Until all of these keys are there; None: for ever, -1: the time-out of the client."""
        limit = _seconds(timeout)
        if limit is not None and limit < 0:
            limit = self._timeout
        request = bytes([op.WAIT]) + self._keys(keys)
        with self._lock:
            try:
                self._socket.settimeout(limit)
                self._socket.sendall(request)
                done = self._byte() == 0
            except TimeoutError:
                done = self._cancel()
            except OSError as error:
                raise self._lost(error) from error
        if not done:
            named = ", ".join(repr(key) for key in keys[:8]) + (" …" if len(keys) > 8 else "")
            text = f"store at {self.host}:{self.port}: not all of these keys came within {limit:g} s: {named}"
            raise as_torchs(StoreTimeoutError(text))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` when the value is `expected` (empty: when there is none); the value there now."""
        request = bytes([op.COMPARE_SET]) + self._key(key) + _text(expected) + _text(desired)
        return self._exchange(request, self._bytes)

    def delete_key(self, key: str) -> bool:
        """Remove a key; was it there?"""
        return self._exchange(bytes([op.DELETE_KEY]) + self._key(key), self._number) > 0

    def num_keys(self) -> int:
        """How many keys the whole store holds."""
        return self._exchange(bytes([op.GETNUMKEYS]), self._number)

    def append(self, key: str, value: bytes | str) -> None:
        """Put bytes at the end of a value."""
        self._silent(bytes([op.APPEND]) + self._key(key) + _text(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, once all of them are there."""
        self.wait(keys)
        request = bytes([op.MULTI_GET]) + self._keys(keys)
        return self._exchange(request, lambda: [self._bytes() for _ in keys])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Store many values at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values; there must be as many")
        pairs = (self._key(key) + _text(value) for key, value in zip(keys, values, strict=True))
        self._silent(bytes([op.MULTI_SET]) + op.UINT64.pack(len(keys)) + b"".join(pairs))

    def has_extended_api(self) -> bool:
        """torch asks this before it uses append and the multi methods."""
        return True

    @property
    def libuvBackend(self) -> bool:
        """Whether torch's clients of this server may use all of its operations."""
        return True

    def join_members(self) -> None:
        """Count this client for a server that is torch's and waits for its clients."""
        key = b"init/"  # without the slash that keys of users have
        request = bytes([op.ADD]) + op.UINT64.pack(len(key)) + key + op.INT64.pack(1)
        self._exchange(request, self._number)

    def clone(self) -> TorchStoreClient:
        """Another client of the same server, for another thread."""
        return TorchStoreClient(self.host, self.port, self._timeout, prefix=self._prefix)

    def beside(self, give_up: Callable[[], bool]) -> TorchStoreClient:
        """As `clone`, for a thread that can be stopped while it still tries to connect."""
        return TorchStoreClient(self.host, self.port, self._timeout, prefix=self._prefix, give_up=give_up)

    # -- the wire ---------------------------------------------------------------------------------------

    def _key(self, key: str) -> bytes:
        # torch's client puts a slash in front of every key that its user names.
        return _text(f"/{self._prefix}{key}")

    def _keys(self, keys: Sequence[str]) -> bytes:
        return op.UINT64.pack(len(keys)) + b"".join(self._key(key) for key in keys)

    def _silent(self, request: bytes) -> None:
        """A request without a reply; confirmed by a ping, so that on return it has been carried out."""
        ping = bytes([op.PING]) + op.UINT32.pack(_NONCE)
        self._exchange(request + ping, lambda: self._receive(4))

    def _exchange(self, request: bytes, read: Callable[[], T]) -> T:
        with self._lock:
            try:
                self._socket.settimeout(self._timeout)
                self._socket.sendall(request)
                return read()
            except TimeoutError as error:
                self.close()
                raise StoreTimeoutError(
                    f"store at {self.host}:{self.port}: no reply within {self._timeout:g} s; gave it up"
                ) from error
            except OSError as error:
                raise self._lost(error) from error

    def _cancel(self) -> bool:
        """Take a wait back; True when it was answered in the last moment after all."""
        try:
            self._socket.settimeout(max(self._timeout, 5.0))
            self._socket.sendall(bytes([op.CANCEL_WAIT]))
            answered = self._byte() == 0
            if answered:
                self._byte()  # the reply to the cancellation
        except OSError as error:
            raise self._lost(error) from error
        return answered

    def _lost(self, error: OSError) -> StoreError:
        why = "closed here" if self._closed else str(error)
        self.close()
        return StoreConnectionError(f"store at {self.host}:{self.port}: the connection is lost ({why})")

    def _receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, have = memoryview(buffer), 0
        while have < size:
            count = self._socket.recv_into(view[have:])
            if not count:
                raise ConnectionResetError("the server closed it")
            have += count
        return bytes(buffer)

    def _byte(self) -> int:
        return int(_ONE_BYTE.unpack(self._receive(1))[0])

    def _number(self) -> int:
        return int(op.INT64.unpack(self._receive(8))[0])

    def _bytes(self) -> bytes:
        size = int(op.UINT64.unpack(self._receive(8))[0])
        if size > op.MAX_PAYLOAD:
            raise ConnectionError(f"a value of {size} bytes is announced: out of step with the server")
        return self._receive(size)


def _text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return op.UINT64.pack(len(data)) + data


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
