"""HTTP to etcd's JSON gateway: connections, member addresses and the login.

`EtcdConnection` is one connection of one thread; `Members` is shared by all connections of a client: the
addresses, the one in use, and the login's token. Nothing here retries; the caller decides.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from typing import Any, NamedTuple

import msgspec

from phalanx.errors import StoreAuthError, StoreError

UNAUTHENTICATED, DENIED, NOT_FOUND, PRECONDITION, OUT_OF_RANGE = 16, 7, 5, 9, 11
_TEMPORARY = (1, 4, 10, 13, 14)  # cancelled, deadline exceeded, aborted, internal, unavailable
_EXHAUSTED, _UNAVAILABLE = 8, 14
_GATEWAY_STATUS = (429, 502, 503, 504)  # of a proxy in front of etcd
CONNECTION_ERRORS = (OSError, http.client.HTTPException)
_WHOLE = 3  # times the timeout, which is for each part of an answer, for all of it


class EtcdError(StoreError):
    """An error that etcd answers with; `code` is gRPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"etcd: {message.removeprefix('etcdserver: ')}")
        self.code = code

    @property
    def temporary(self) -> bool:
        """Whether another member, or the same one later, may succeed."""
        return self.code in _TEMPORARY or (self.code == _EXHAUSTED and "too many requests" in str(self))

    @property
    def out_of_space(self) -> bool:
        """Whether etcd refuses writes until an operator has freed space; it still renews leases."""
        return self.code == _EXHAUSTED and "space exceeded" in str(self)

    @property
    def expired_login(self) -> bool:
        """Whether a new login may help."""
        return self.code == UNAUTHENTICATED or "auth revision in the header is old" in str(self)

    @property
    def too_large(self) -> bool:
        text = str(self)
        return "too large" in text or "too many operations" in text or "larger than max" in text


class Address(NamedTuple):
    """The address of one member; a tuple, as sockets take it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Members:
    """The addresses and the login, shared by the threads of one client."""

    def __init__(
        self, addresses: list[Address], context: ssl.SSLContext | None, user: str, password: str
    ) -> None:
        self.addresses, self.context = addresses, context
        self._user, self._password = user, password
        self._lock = threading.Lock()
        self.current = 0  # the index of the address that all connections use
        self._login: str | None = None

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))

    def move_on(self, failed: int) -> bool:
        """Switch from an address that failed, unless another thread has; returns whether it did."""
        with self._lock:
            if self.current != failed or len(self.addresses) == 1:
                return False
            self.current = (failed + 1) % len(self.addresses)
            return True

    def login(self, connection: EtcdConnection, stale: str | None, timeout: float) -> str:
        """The login's token; a new one if the old one is `stale`."""
        with self._lock:
            if self._user and (self._login is None or self._login == stale):
                body = {"name": self._user, "password": self._password}
                try:
                    self._login = str(connection.post("/v3/auth/authenticate", body, timeout, "")["token"])
                except EtcdError as error:
                    if error.temporary:
                        raise
                    raise StoreAuthError(
                        f"{error} (user {self._user!r} at {connection.address}): set PHALANX_ETCD_PASSWORD "
                        "or password_file in --rdzv-conf to this user's password"
                    ) from None
            return self._login or ""

    def explain(self, error: EtcdError) -> StoreError:
        """A permanent error with advice."""
        if "user name is empty" in str(error) or error.expired_login:
            return StoreAuthError(
                f"{error}: etcd at {self} requires a login; add user=NAME to --rdzv-conf and set "
                "PHALANX_ETCD_PASSWORD"
            )
        if error.code == DENIED:
            return StoreAuthError(f"{error}: user {self._user!r} needs read and write permission in etcd")
        if error.out_of_space:
            return StoreError(f"{error} at {self}: compact and defragment it, then `etcdctl alarm disarm`")
        return error


class _TimedAnswer(io.RawIOBase):
    """The bytes of an answer, until its time is over: a server that drips them is as good as silent."""

    def __init__(self, connection: EtcdConnection, sock: socket.socket) -> None:
        self._connection, self._sock = connection, sock
        self._bytes = sock.makefile("rb", 0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._connection.patience())
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


class EtcdConnection:
    """One connection to the current member; used by one thread, except `cut`."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.member = -1
        self.address = members.addresses[0]
        self.token = ""
        self._connection: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None
        self._timeout = self._until = 0.0  # of the current answer: for each part, and for all of it
        self._cut = False  # by another thread

    def call(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request to the current member, logged in; CONNECTION_ERRORS close the connection."""
        self._use_current_member()
        self.token = self.members.login(self, None, timeout)
        try:
            return self.post(path, body, timeout, self.token)
        except EtcdError as error:
            if not error.expired_login or not self.token:
                raise
        self.token = self.members.login(self, self.token, timeout)
        return self.post(path, body, timeout, self.token)

    def post(self, path: str, body: dict[str, Any], timeout: float, token: str) -> dict[str, Any]:
        """One request and its complete answer."""
        try:
            response = self._send(path, body, timeout, token)
            raw = response.read()
        except BaseException:
            self.close()
            raise
        answer = _decode(raw, response.status)
        if response.status != http.client.OK or "error" in answer:
            raise _error(answer, response.status)
        result = answer.get("result", answer)  # streams wrap their messages
        return result if isinstance(result, dict) else {}

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> http.client.HTTPResponse:
        """An endless answer, read line by line; only its beginning has a timeout."""
        self._use_current_member()
        self.token = self.members.login(self, None, timeout)
        response = self._send(path, body, timeout, self.token)
        if response.status != http.client.OK:
            raise _error(_decode(response.read(), response.status), response.status)
        self._until = 0.0
        return response

    def patience(self) -> float | None:
        """Seconds for the next part of an answer; None: it may take any time. TimeoutError: it is late."""
        if not self._until:
            return None
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(self._timeout, left)

    def _answer(self, sock: socket.socket, *args: Any, **more: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, *args, **more)
        response.fp.close()
        response.fp = io.BufferedReader(_TimedAnswer(self, sock))
        return response

    def _use_current_member(self) -> None:
        current = self.members.current
        if current != self.member:
            self.close()
            self.member, self.address = current, self.members.addresses[current]

    def _send(self, path: str, body: dict[str, Any], timeout: float, token: str) -> http.client.HTTPResponse:
        connection = self._connection
        if connection is None:
            connection = self._open(timeout)
        assert self._sock is not None
        self._sock.settimeout(timeout)
        self._timeout, self._until = timeout, time.monotonic() + _WHOLE * timeout
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        connection.request("POST", path, msgspec.json.encode(body), headers)
        return connection.getresponse()

    def _open(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self.address
        context = self.members.context
        connection = (
            http.client.HTTPConnection(host, port, timeout=timeout)
            if context is None
            else http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
        )
        connection.response_class = self._answer  # type: ignore[assignment]
        connection.connect()
        self._connection, self._sock = connection, connection.sock
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A watch may be silent for hours; TCP keep-alive detects a host that is gone.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            self._sock.setsockopt(level, option, value)
        if self._cut:  # while it was opening
            self.cut()
        return connection

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._sock = None

    def cut(self) -> None:
        """From any thread: make reads and writes on this connection fail."""
        self._cut = True
        sock = self._sock
        if sock is not None:
            try:
                # Not SSLSocket.shutdown, which removes the TLS state while another thread reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass

    def reset(self) -> None:
        """Make the connection usable again after a cut."""
        self._cut = False
        self.close()


def _decode(raw: bytes, status: int) -> dict[str, Any]:
    try:
        # A stream that ended after one message ends in a newline.
        found = msgspec.json.decode(raw.strip() or b"{}")
    except msgspec.DecodeError:
        code = _UNAVAILABLE if status in _GATEWAY_STATUS else 0
        raise EtcdError(
            code, f"HTTP {status} without JSON: {raw[:80]!r}; is this etcd's client port?"
        ) from None
    return found if isinstance(found, dict) else {}


def _error(answer: dict[str, Any], status: int) -> EtcdError:
    inner = answer.get("error")
    details = inner if isinstance(inner, dict) else answer
    code = details.get("code") or details.get("grpc_code") or 0
    fallback = inner if isinstance(inner, str) else f"HTTP {status}"
    return EtcdError(int(code), str(details.get("message") or fallback))
