"""A connection between two agents: both prove the token on it, as on one to the store.

`binding` is what the proof covers besides the nonces: the server's certificate under TLS, or the purpose of
the connection, so that a proof made for one purpose is of no use for another.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import StoreAuthError
from phalanx.store.net import wire
from phalanx.store.net.token import Token

if TYPE_CHECKING:
    from phalanx.store.net.tls import Tls


class Proven(NamedTuple):
    """A connection on which both sides have proved the token, and the seals of its frames."""

    sock: socket.socket
    outgoing: wire.Seal
    incoming: wire.Seal | None  # None: TLS protects the frames


def dial(
    address: tuple[str, int], token: Token, seconds: float, *, purpose: bytes = b"", tls: Tls | None = None
) -> Proven:
    """Connect to another agent, with so much time for each step; OSError, WireError or StoreAuthError."""
    sock = socket.create_connection(address, timeout=seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            from phalanx.store.net import tls as sealing

            sock, purpose = sealing.dial(sealing.client_context(tls), sock)
        return prove_as_client(sock, token, address[0], purpose, is_sealed=tls is not None)
    except BaseException:
        sock.close()
        raise


def hang_up(sock: socket.socket) -> None:
    """End the calls of the thread that uses it, from another one.

    It does not close the descriptor: OpenSSL might be about to use its number, which another file may have by
    then. For the same reason it is the plain socket that is shut down.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass


def prove_as_client(
    sock: socket.socket, token: Token, host: str, binding: bytes = b"", *, is_sealed: bool = False
) -> Proven:
    """For the side that has connected; `is_sealed`: TLS protects the connection."""
    nonce = os.urandom(wire.NONCE)
    sock.sendall(wire.greeting(nonce))
    theirs = wire.read_greeting(read_exactly(sock, wire.GREETING))
    sock.sendall(wire.proof(token.key, "client", theirs + binding, nonce))
    if not wire.proves(read_exactly(sock, wire.PROOF), token.key, "server", nonce + binding, theirs):
        raise StoreAuthError(f"{host} has another token than {token.source}")
    outgoing, incoming = wire.seals(token.key, nonce, theirs)
    return Proven(sock, wire.NoSeal(), None) if is_sealed else Proven(sock, outgoing, incoming)


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
