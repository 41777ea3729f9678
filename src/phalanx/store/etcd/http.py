"""HTTP to etcd's JSON gateway: one connection at a time, several addresses to choose from, a login.

`EtcdConnection` is one connection of one thread; `Members` is what all connections of a client share:
the addresses, which of them is in use, and the login's token. Nothing here retries; the caller decides.
"""

from __future__ import annotations

import http.client
import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from phalanx.errors import StoreAuthError, StoreError

if TYPE_CHECKING:
    import ssl

UNAUTHENTICATED, DENIED, NOT_FOUND, PRECONDITION, OUT_OF_RANGE = 16, 7, 5, 9, 11
_PASSING = (1, 4, 10, 13, 14)  # cancelled, too slow, aborted, internal, unavailable: ask somebody else
_EXHAUSTED, _INVALID = 8, 3
Failure = (OSError, http.client.HTTPException)  # of the connection, not of the request


class EtcdError(StoreError):
    """etcd's own answer that it will not; `code` is gRPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"etcd: {message.removeprefix('etcdserver: ')}")
        self.code = code

    @property
    def passing(self) -> bool:
        """Whether another member, or the same one a little later, may say something else."""
        return self.code in _PASSING or (self.code == _EXHAUSTED and "too many requests" in str(self))

    @property
    def expired_login(self) -> bool:
        """Whether logging in again is the answer."""
        return self.code == UNAUTHENTICATED or "auth revision in the header is old" in str(self)

    @property
    def too_large(self) -> bool:
        """Whether less at a time is the answer."""
        text = str(self)
        return "too large" in text or "too many operations" in text or "larger than max" in text


class Address(NamedTuple):
    """Where one member listens."""

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
        self._present = 0
        self._login: str | None = None

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))

    @property
    def present(self) -> int:
        """Which address everybody uses now."""
        return self._present

    def move_on(self, from_: int) -> bool:
        """Away from an address that failed, unless somebody has done so; whether it changed anything."""
        with self._lock:
            if self._present != from_ or len(self.addresses) == 1:
                return False
            self._present = (from_ + 1) % len(self.addresses)
            return True

    def login(self, line: EtcdConnection, stale: str | None, timeout: float) -> str:
        """The token to show; a new one when the old one is `stale`."""
        with self._lock:
            if self._user and (self._login is None or self._login == stale):
                body = {"name": self._user, "password": self._password}
                try:
                    self._login = str(line.post("/v3/auth/authenticate", body, timeout, "")["token"])
                except EtcdError as error:
                    if error.passing:
                        raise
                    raise StoreAuthError(
                        f"{error} (user {self._user!r} at {line.address}): set PHALANX_ETCD_PASSWORD, or "
                        "password_file in --rdzv-conf, to this user's password"
                    ) from None
            return self._login or ""

    def explain(self, error: EtcdError) -> StoreError:
        """An answer that no retry will change, in words that help."""
        if "user name is empty" in str(error) or error.expired_login:
            return StoreAuthError(
                f"{error}: etcd at {self} wants a login; add user=NAME to --rdzv-conf and set "
                "PHALANX_ETCD_PASSWORD"
            )
        if error.code == DENIED:
            return StoreAuthError(f"{error}: user {self._user!r} needs read and write permission in etcd")
        if "space exceeded" in str(error):
            return StoreError(f"{error} at {self}: compact and defragment it, then `etcdctl alarm disarm`")
        return error


class EtcdConnection:
    """One connection to the present member; belongs to one thread, except `cut`."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.member = -1
        self.address = members.addresses[0]
        self.token = ""
        self._connection: http.client.HTTPConnection | None = None
        self._sock: socket.socket | None = None
        self._cut = False

    def call(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Ask the present member, logged in; EtcdError, or a Failure after which the line is down."""
        self._point()
        self.token = self.members.login(self, None, timeout)
        try:
            return self.post(path, body, timeout, self.token)
        except EtcdError as error:
            if not error.expired_login or not self.token:
                raise
        self.token = self.members.login(self, self.token, timeout)
        return self.post(path, body, timeout, self.token)

    def post(self, path: str, body: dict[str, Any], timeout: float, token: str) -> dict[str, Any]:
        """One request and its whole answer."""
        try:
            response = self._send(path, body, timeout, token)
            raw = response.read()
        except BaseException:
            self.hang_up()
            raise
        answer = _decode(raw, response.status)
        if response.status != http.client.OK or "error" in answer:
            raise _error(answer, response.status)
        result = answer.get("result", answer)  # streams wrap what they say
        return result if isinstance(result, dict) else {}

    def stream(self, path: str, body: dict[str, Any], timeout: float) -> http.client.HTTPResponse:
        """An answer without an end, to be read line by line; only its beginning has a time limit."""
        self._point()
        self.token = self.members.login(self, None, timeout)
        response = self._send(path, body, timeout, self.token)
        if response.status != http.client.OK:
            raise _error(_decode(response.read(), response.status), response.status)
        assert self._sock is not None
        self._sock.settimeout(None)
        return response

    def _point(self) -> None:
        """Towards the member that everybody uses now."""
        present = self.members.present
        if present != self.member:
            self.hang_up()
            self.member, self.address = present, self.members.addresses[present]

    def _send(self, path: str, body: dict[str, Any], timeout: float, token: str) -> http.client.HTTPResponse:
        connection = self._connection
        if connection is None:
            connection = self._open(timeout)
        assert self._sock is not None
        self._sock.settimeout(timeout)
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
        connection.connect()
        self._connection, self._sock = connection, connection.sock
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A watch is silent for hours by right; the kernel finds out whether the host is still there.
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            self._sock.setsockopt(level, option, value)
        if self._cut:  # while it was being opened
            self.cut()
        return connection

    def hang_up(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._sock = None

    def cut(self) -> None:
        """From any thread: whoever reads or writes on this line finds it broken."""
        self._cut = True
        sock = self._sock
        if sock is not None:
            try:
                # The plain one: SSLSocket.shutdown takes the TLS state away from under the reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                pass

    def mend(self) -> None:
        """Usable again after a cut."""
        self._cut = False
        self.hang_up()


def _decode(raw: bytes, status: int) -> dict[str, Any]:
    try:
        # A stream that ended after one message leaves a newline behind it.
        found = msgspec.json.decode(raw.strip() or b"{}")
    except msgspec.DecodeError:
        raise EtcdError(0, f"HTTP {status} and no JSON: {raw[:80]!r}; is this etcd's client port?") from None
    return found if isinstance(found, dict) else {}


def _error(answer: dict[str, Any], status: int) -> EtcdError:
    inner = answer.get("error")
    told = inner if isinstance(inner, dict) else answer
    code = told.get("code") or told.get("grpc_code") or 0
    fallback = inner if isinstance(inner, str) else f"HTTP {status}"
    return EtcdError(int(code), str(told.get("message") or fallback))
