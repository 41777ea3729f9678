"""The client's half of opening a connection: connect, and prove the token.

What is opened belongs to no session yet: only the client's Hello makes it the session's connection. So an
attempt can be made in a thread, beside a connection that may still be alive, and be given up at no cost.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import StoreAuthError
from phalanx.job.time_budgets import CONNECT_TIME
from phalanx.store.net import wire
from phalanx.store.net.token import key_of

if TYPE_CHECKING:
    from phalanx.store.embedded.client import Client

_TLS_ALERT = b"\x15\x03"  # how a store with TLS turns down what is not TLS


class Opened(NamedTuple):
    """A connection on which both sides have proved the token: how to read from it, and how to write to it."""

    sock: socket.socket
    frames: wire.Frames
    seal: wire.Seal


class Silent(wire.WireError):
    """It accepts connections, and that is all."""


class Attempt:
    """Opens a connection in a thread of its own; `done` is called there when `opened` or `error` is set."""

    def __init__(self, client: Client, done: Callable[[], None]) -> None:
        self.began = client.clock()
        self.opened: Opened | None = None
        self.error: Exception | None = None
        self._dialling, self._done = Dialling(client, self._connected), done
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._cancelled = False
        threading.Thread(target=self._run, name="phalanx-store-dial", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether there is a result."""
        return self.opened is not None or self.error is not None

    @property
    def greeted_at(self) -> float | None:
        """When the store greeted: it is there, however long the rest takes."""
        return self._dialling.greeted_at

    def cancel(self) -> None:
        """End it, and whatever it has opened; does not wait."""
        with self._lock:
            self._cancelled = True
            if self.opened is not None:
                self.opened.sock.close()
            elif self._sock is not None:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected

    def _run(self) -> None:
        opened: Opened | None = None
        error: Exception | None = None
        try:
            opened = self._dialling.open()
        except Exception as problem:  # noqa: BLE001 - the client's thread deals with it
            error = problem
        with self._lock:
            self._sock = None
            if self._cancelled:
                if opened is not None:
                    opened.sock.close()
                return
            self.opened, self.error = opened, error
        self._done()

    def _connected(self, sock: socket.socket) -> None:
        with self._lock:
            if self._cancelled:
                raise ConnectionAbortedError("given up")
            self._sock = sock


class Dialling:
    """One attempt to open a connection for a client; each step of it has the same time."""

    def __init__(self, client: Client, connected: Callable[[socket.socket], None]) -> None:
        self.client, self._connected = client, connected
        self.greeted_at: float | None = None

    def open(self) -> Opened:
        """A connection that has passed the handshake; OSError, WireError or StoreAuthError."""
        sock = socket.create_connection((self.client.host, self.client.port), timeout=CONNECT_TIME)
        try:
            self._connected(sock)
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
            return self._open_sealed(sock)
        except Silent:
            sock.close()
            raise
        except (ConnectionResetError, BrokenPipeError, wire.WireError):
            sock.close()
            self._connected(sock)  # raises if the attempt was given up
            self._recognise()
            raise
        except BaseException:
            sock.close()
            raise

    def _recognise(self) -> None:
        """A server that does not want our greeting may be torch's, of a node that runs torchrun."""
        from phalanx.store.tcpstore.client import answers

        if self.client.welcome is not None or self.client.sealing is not None or self.greeted_at is not None:
            return
        if answers(self.client.host, self.client.port, CONNECT_TIME / 2):
            raise wire.SpeaksTorch("the server there")

    def _open_sealed(self, raw: socket.socket) -> Opened:
        from phalanx.store.net import tls

        assert self.client.sealing is not None
        assert self.client.tls is not None
        try:
            raw.settimeout(CONNECT_TIME)
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
            wire.read_greeting(self._read(sock, len(wire.MAGIC), self._plain_to_tls))
        except TimeoutError:
            raise Silent(
                "it accepts connections and sends nothing: another service, or a store that is stopped"
            ) from None
        theirs = self._read(sock, wire.NONCE)
        self.greeted_at = self.client.clock()
        return theirs

    def _plain_to_tls(self, data: bytes) -> None:
        if self.client.sealing is None and data.startswith(_TLS_ALERT):
            raise StoreAuthError(
                f"the store at {self.client.where} wants TLS: give --tls-ca, or --tls-cert and --tls-key, "
                "as on the other nodes"
            )

    def _shake_hands(
        self, sock: socket.socket, nonce: bytes, theirs: bytes, certificate: bytes | None
    ) -> Opened:
        """`certificate`: what identifies the server under TLS."""
        key = key_of(self.client.token)
        binding = certificate or b""
        sock.sendall(wire.proof(key, "client", theirs + binding, nonce))
        given = self._read(sock, wire.PROOF)
        if not wire.proves(given, key, "server", nonce + binding, theirs):
            raise self._refusal(given)
        outgoing, incoming = wire.seals(key, nonce, theirs)
        if certificate is not None:
            outgoing = wire.NoSeal()
        frames = wire.Frames(wire.HELLO_CAP, incoming if certificate is None else None)
        return Opened(sock, frames, outgoing)

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

    def _read(
        self, sock: socket.socket, size: int, look: Callable[[bytes], None] = lambda data: None
    ) -> bytes:
        """Exactly so many bytes; `look` may object to what came before it is complete."""
        data, until = b"", time.monotonic() + CONNECT_TIME
        while len(data) < size:
            sock.settimeout(max(0.001, until - time.monotonic()))
            more = sock.recv(size - len(data))
            look(data + more)
            if not more:
                raise ConnectionResetError("the store closed the connection during the handshake")
            data += more
        return data
