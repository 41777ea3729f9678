"""The client's half of opening a connection: connect, prove the token, name the session."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import StoreAuthError
from phalanx.store.embedded import wire
from phalanx.store.embedded.token import key_of

if TYPE_CHECKING:
    from phalanx.store.embedded.client import Client

CONNECT_TIME = 5.0
_TLS_ALERT = b"\x15\x03"  # how a store with TLS turns down what is not TLS


class Connection(NamedTuple):
    """An open connection: what came first, how to read from it, and how to write to it."""

    sock: socket.socket
    welcome: wire.Welcome
    frames: wire.Frames
    seal: wire.Seal


class Dialling:
    """One attempt to open a connection for a client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def connect(self) -> Connection:
        """A connection that has passed the handshake; OSError, WireError or StoreAuthError."""
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
                return self._shake_hands(sock, nonce, self._greeted(sock), None)
            return self._connect_sealed(sock)
        except (ConnectionResetError, BrokenPipeError, wire.WireError):
            sock.close()
            self._recognise()
            raise
        except BaseException:
            sock.close()
            raise

    def _recognise(self) -> None:
        """A server that does not want our greeting may be torch's, of a node that runs torchrun."""
        from phalanx.store.torch.client import answers

        if self.client.sealing is None and answers(self.client.host, self.client.port, CONNECT_TIME / 2):
            raise wire.SpeaksTorch("the server there")

    def _connect_sealed(self, raw: socket.socket) -> Connection:
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
                return self._shake_hands(sock, nonce, theirs, binding)
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

    def _shake_hands(
        self, sock: socket.socket, nonce: bytes, theirs: bytes, certificate: bytes | None
    ) -> Connection:
        """`certificate`: what identifies the server under TLS."""
        key = key_of(self.client.token)
        binding = certificate or b""
        sock.sendall(wire.proof(key, "client", theirs + binding, nonce))
        given = _read(sock, wire.PROOF)
        if not wire.proves(given, key, "server", nonce + binding, theirs):
            raise self._refusal(given)
        outgoing, incoming = wire.seals(key, nonce, theirs)
        if certificate is not None:
            outgoing = wire.NoSeal()
        sock.sendall(outgoing.sealed(wire.encode(0, 0, self.client.hello())))
        frames = wire.Frames(wire.HELLO_CAP, incoming if certificate is None else None)
        size = int.from_bytes(head := _read(sock, wire.HEADER), "big")
        if size > wire.HELLO_CAP:
            raise wire.WireError(f"a welcome of {size} bytes")
        rest = _read(sock, size + (wire.TAG if frames.seal is not None else 0))
        (frame,) = frames.feed(head + rest)
        if not isinstance(frame.body, wire.Welcome):
            raise wire.WireError(f"{type(frame.body).__name__} instead of a welcome")
        frames.cap = wire.CAP
        return Connection(sock, frame.body, frames, outgoing)

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
