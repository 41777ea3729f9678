"""The client's half of opening a connection: connect, prove the token, name the session."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.errors import StoreAuthError
from phalanx.store.embedded import wire

if TYPE_CHECKING:
    from phalanx.store.embedded.client import Client

CONNECT_TIME = 5.0
_TLS_ALERT = b"\x15\x03"  # how a store with TLS turns down what is not TLS


class Dialling:
    """One attempt to open a connection for a client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def connect(self) -> tuple[socket.socket, wire.Welcome]:
        """A socket that has passed the handshake; OSError, WireError or StoreAuthError."""
        sock = socket.create_connection((self.client.host, self.client.port), timeout=CONNECT_TIME)
        try:
            if sock.getsockname() == sock.getpeername():
                # A loopback connection to a free port can meet itself, and would keep the port from the
                # server.
                raise ConnectionRefusedError("no server listens there yet")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self.client.sealing is None:
                nonce = os.urandom(wire.NONCE)
                sock.sendall(wire.greeting(nonce))
                return sock, self._shake_hands(sock, nonce, self._greeted(sock), b"")
            return self._connect_sealed(sock)
        except BaseException:
            sock.close()
            raise

    def _connect_sealed(self, raw: socket.socket) -> tuple[socket.socket, wire.Welcome]:
        from phalanx.store.embedded import tls

        assert self.client.sealing is not None
        assert self.client.tls is not None
        try:
            sock, binding = tls.dial(self.client.sealing, raw)
            try:
                # Read before the first write: a server that refuses the certificate would answer bytes
                # that it has not read with a reset, which takes its own explanation down with it.
                theirs = self._greeted(sock)
                nonce = os.urandom(wire.NONCE)
                sock.sendall(wire.greeting(nonce))
                return sock, self._shake_hands(sock, nonce, theirs, binding)
            except BaseException:
                sock.close()
                raise
        except tls.TlsError as error:
            raise tls.refusal(self.client.where, self.client.tls, error) from None

    def _greeted(self, sock: socket.socket) -> bytes:
        try:
            wire.read_greeting(_read(sock, len(wire.MAGIC), self._plain_to_tls))
        except TimeoutError:
            raise wire.WireError(
                "it accepts connections and sends nothing: another service, or a store that is stopped"
            ) from None
        return _read(sock, wire.NONCE)

    def _plain_to_tls(self, data: bytes) -> None:
        if self.client.sealing is None and data.startswith(_TLS_ALERT):
            raise StoreAuthError(
                f"the store at {self.client.where} wants TLS: give --tls-ca, or --tls-cert and --tls-key, "
                "as on the other nodes"
            )

    def _shake_hands(self, sock: socket.socket, nonce: bytes, theirs: bytes, binding: bytes) -> wire.Welcome:
        token = self.client.token
        secret = token.secret if token else b""
        sock.sendall(wire.proof(secret, "client", theirs + binding, nonce))
        given = _read(sock, wire.PROOF)
        if not wire.proves(given, secret, "server", nonce + binding, theirs):
            raise self._refusal(given)
        sock.sendall(wire.encode(0, 0, wire.Hello(self.client.session)))
        size = int.from_bytes(_read(sock, wire.HEADER), "big")
        if size > wire.HELLO_CAP:
            raise wire.WireError(f"a welcome of {size} bytes")
        body = wire.decode(_read(sock, size)).body
        if not isinstance(body, wire.Welcome):
            raise wire.WireError(f"{type(body).__name__} instead of a welcome")
        return body

    def _refusal(self, given: bytes) -> StoreAuthError:
        token, where = self.client.token, self.client.where
        if token is None:
            return StoreAuthError(
                f"the store at {where} wants a token and we have no token (set PHALANX_TOKEN): "
                "both sides need the same one"
            )
        ours = f"our token is from {token.source}"
        if given == wire.OPEN:
            return StoreAuthError(
                f"the store at {where} has no token, so its job is not authenticated; {ours}: "
                "give the same token to every node, or to none"
            )
        what = "refused our token" if given == wire.REFUSED else "does not have our token"
        return StoreAuthError(f"the store at {where} {what}: {ours}; both sides need the same one")


def _read(sock: socket.socket, size: int, look: Callable[[bytes], None] = lambda data: None) -> bytes:
    """Exactly so many bytes; `look` may object to what came before it is complete."""
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        look(data + more)
        if not more:
            raise ConnectionResetError("the store closed the connection during the handshake")
        data += more
    return data
