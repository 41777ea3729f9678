"""Both halves of the proof of the token on a connection between two agents, as on one to the store.

`binding` is what the proof covers besides the nonces: the server's certificate under TLS, or the purpose of
the connection, so that a proof made for one purpose is of no use for another.
"""

from __future__ import annotations

import os
import socket

from phalanx.errors import StoreAuthError
from phalanx.store.net import wire
from phalanx.store.net.token import Token


def prove_as_client(
    sock: socket.socket, token: Token, host: str, binding: bytes = b""
) -> tuple[wire.Seal, wire.Seal]:
    """For the side that has connected: the seals of what it sends, and of what it receives."""
    nonce, theirs = _greet(sock)
    sock.sendall(wire.proof(token.key, "client", theirs + binding, nonce))
    if not wire.proves(read_exactly(sock, wire.PROOF), token.key, "server", nonce + binding, theirs):
        raise StoreAuthError(f"{host} has another token than {token.source}")
    return wire.seals(token.key, nonce, theirs)


def prove_as_server(sock: socket.socket, token: Token, binding: bytes = b"") -> tuple[wire.Seal, wire.Seal]:
    """For the side that has accepted: the seals of what it sends, and of what it receives."""
    nonce, theirs = _greet(sock)
    if not wire.proves(read_exactly(sock, wire.PROOF), token.key, "client", nonce + binding, theirs):
        sock.sendall(wire.REFUSED)
        raise StoreAuthError("a connection with another token")
    sock.sendall(wire.proof(token.key, "server", theirs + binding, nonce))
    incoming, outgoing = wire.seals(token.key, theirs, nonce)
    return outgoing, incoming


def _greet(sock: socket.socket) -> tuple[bytes, bytes]:
    """Exchange nonces: this side's, and the other's."""
    nonce = os.urandom(wire.NONCE)
    sock.sendall(wire.greeting(nonce))
    return nonce, wire.read_greeting(read_exactly(sock, wire.GREETING))


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes; ConnectionResetError when the other side has closed before."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        count = sock.recv_into(view[have:])
        if not count:
            raise ConnectionResetError("the other agent closed the connection")
        have += count
    return bytes(data)
