"""The client's half of opening a connection: reach the address, prove the token, say which session."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from phalanx.errors import StoreAuthError
from phalanx.store import wire

if TYPE_CHECKING:
    from phalanx.store.client import Client

CONNECT_TIME = 5.0


class Dialling:
    """One attempt to open a connection for a client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def connect(self) -> tuple[socket.socket, wire.Welcome]:
        """A socket that has passed the handshake; OSError, WireError or StoreAuthError."""
        sock = socket.create_connection((self.client.host, self.client.port), timeout=CONNECT_TIME)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock, self._shake_hands(sock)
        except BaseException:
            sock.close()
            raise

    def _shake_hands(self, sock: socket.socket) -> wire.Welcome:
        token = self.client.token
        secret = token.secret if token else b""
        nonce = os.urandom(wire.NONCE)
        sock.sendall(wire.greeting(nonce))
        theirs = wire.read_greeting(_read(sock, wire.GREETING))
        sock.sendall(wire.proof(secret, "client", theirs, nonce))
        given = _read(sock, wire.PROOF)
        ours = f"our token is from {token.source}" if token else "we have no token (set PHALANX_TOKEN)"
        if not wire.proves(given, secret, "server", nonce, theirs):
            what = "refused our token" if given == wire.REFUSED else "does not have our token"
            raise StoreAuthError(
                f"the store at {self.client.where} {what}: {ours}; both sides need the same one"
            )
        sock.sendall(wire.encode(0, 0, wire.Hello(self.client.session)))
        size = int.from_bytes(_read(sock, wire.HEADER), "big")
        if size > wire.HELLO_CAP:
            raise wire.WireError(f"a welcome of {size} bytes")
        body = wire.decode(_read(sock, size)).body
        if not isinstance(body, wire.Welcome):
            raise wire.WireError(f"{type(body).__name__} instead of a welcome")
        return body


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the store closed the connection during the handshake")
        data += more
    return data
