"""The connections of a server: accepted, proven, read and written in one thread, which waits for no peer.

The store (embedded/server.py) and the connections between agents (door.py) are served through it.

Invariants:
- Nothing a peer sends is parsed before it has proved the token. One that is silent in the handshake, breaks
  the protocol or does not read what it is sent loses its own connection and disturbs no other.
- A crowd of strangers keeps no node out: one of them makes room for the next (strangers.py). They cannot fill
  the log either.
- A process that is out of descriptors accepts again when it has some.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.job.time_budgets import HANDSHAKE_TIME
from phalanx.store.net import wire
from phalanx.store.net.strangers import Complaints, Strangers, descriptors
from phalanx.store.net.token import Token, key_of
from phalanx.store.net.wake_up import WakeUp

if TYPE_CHECKING:
    import ssl

    from phalanx.store.net.tls import Tls

UNREAD_CAP = 128 << 20  # what may wait for one peer to read it
STRANGERS = 4096  # connections that have not proved the token yet; fewer where descriptors are few
STALLED = 1.0
_ACCEPTS_IN_A_ROW = 64
_ACCEPT_PAUSE = 0.2
_CHUNK = 256 << 10


class Peer:
    """One accepted connection; `session` is for the service."""

    __slots__ = (
        "closing", "deadline", "frames", "host", "is_proven", "nonce", "out", "raw", "seal", "session",
        "sock", "theirs", "where",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, host: str, port: int) -> None:
        self.sock, self.host, self.where, self.deadline = sock, host, f"{host}:{port}", 0.0
        self.raw, self.out = b"", bytearray()
        self.nonce, self.theirs = os.urandom(wire.NONCE), b""
        self.frames = wire.Frames(wire.HELLO_CAP)
        self.seal: wire.Seal = wire.NoSeal()
        self.session = ""
        self.is_proven = self.closing = False


class PeerService(Protocol):
    """What the connections are for."""

    def on_proven(self, peer: Peer) -> None:
        """A peer has proved the token; it is a stranger until `Connections.admit`."""

    def on_data(self, peer: Peer, data: bytes, now: float) -> None:
        """Data of a proven peer; WireError costs it the connection."""

    def on_gone(self, peer: Peer, hung_up: bool) -> None:
        """The connection is closed; `hung_up`: by the peer, so it knows."""

    def on_incident(self, text: str) -> None:
        """Something that a person may want to know."""

    def on_refused(self, host: str, why: str) -> None:
        """A host that looks like a node of this job was turned away."""


class Connections:
    """The peers of one service, with or without a listener of its own."""

    def __init__(
        self,
        service: PeerService,
        token: Token | None,
        listener: socket.socket | None = None,
        *,
        binding: bytes = b"",
        tls: Tls | None = None,
        most: Callable[[], int] = lambda: STRANGERS,
    ) -> None:
        """`binding`: what the proof covers besides the nonces, without TLS; `most`: strangers at a time."""
        self._service, self._token, self._key = service, token, key_of(token)
        self._sealing: ssl.SSLContext | None = None
        self._binding = binding
        if tls is not None:
            from phalanx.store.net.tls import own_fingerprint, server_context

            self._sealing, self._binding = server_context(tls), own_fingerprint(tls)
        self._listener, self._most = listener, most
        self._selector = selectors.DefaultSelector()
        self.wakes = WakeUp()
        self._selector.register(self.wakes, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, Peer] = {}
        self.strangers: Strangers[Peer] = Strangers()  # in order of deadlines
        self._waited = 0.0  # seconds that the server has waited for its peers: the clock of their deadlines
        self._complaints = Complaints(lambda text: service.on_incident(text))
        self._dirty: dict[Peer, None] = {}
        self._accept_at: float | None = None
        self._adopted: deque[tuple[socket.socket, tuple[Any, ...]]] = deque()
        self._events: list[tuple[selectors.SelectorKey, int]] = []
        self.refused = 0

    def adopt(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        """Serve a connection that another listener accepted and has not read from; from any thread."""
        try:
            set_options(sock)
        except OSError:
            pass  # it has gone again already
        self._adopted.append((sock, where))
        self.wakes.ring()

    def next_time(self, now: float) -> float:
        """When to `serve` at the latest."""
        times = [now + peer.deadline - self._waited for peer in islice(self.strangers, 1)]
        return min([*times, inf if self._accept_at is None else self._accept_at])

    def wait(self, until: float, now: float) -> tuple[float, bool]:
        """Wait for the peers; the time, and whether this process was stopped meanwhile."""
        self._events = self._selector.select(None if until == inf else max(0.0, until - now))
        began, now = now, time.monotonic()
        expected = max(began, until)
        self._waited += min(now, expected + STALLED) - began  # its own delay is not that of its peers
        return now, now > expected + STALLED

    def serve(self, now: float) -> None:
        """Read what has arrived, and accept."""
        for key, mask in self._events:
            if peer := self._peers.get(key.fileobj):  # type: ignore[call-overload] # sockets only
                self._serve(peer, mask, now)
        # Last: a stranger whose answer has arrived does not have to make room for the next one.
        for key, _ in self._events:
            if key.fileobj is self._listener:
                self._accept(now)
            elif key.fileobj is self.wakes:
                self.wakes.take()
        while self._adopted:
            self._admit(*self._adopted.popleft())
        while (peer := next(iter(self.strangers), None)) and peer.deadline <= self._waited:
            self.drop(peer, "did not finish the handshake in time")
        if self._accept_at is not None and now >= self._accept_at and self._listener is not None:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def flush(self) -> None:
        """Send what was written."""
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            if peer.sock in self._peers:
                self._flush(peer)

    def complain(self, text: str) -> None:
        """Report what strangers can cause as often as they like."""
        self._complaints.say(text, time.monotonic())

    def admit(self, peer: Peer) -> None:
        """It is not a stranger any more."""
        self.strangers.discard(peer)

    def release(self, peer: Peer) -> None:
        """Give its socket to another thread, open."""
        del self._peers[peer.sock]
        self.strangers.discard(peer)
        self._selector.unregister(peer.sock)

    def write(self, peer: Peer, data: bytes) -> None:
        """Send this with the next `flush`, and later where the peer is slow."""
        if len(peer.out) + len(data) > UNREAD_CAP:
            self.drop(peer, f"did not read {len(peer.out)} bytes that were sent to it")
            return
        peer.out += data
        self._dirty[peer] = None

    def drop(self, peer: Peer, why: str) -> None:
        """Close a connection, and report why; '': without a line."""
        if why and peer.sock in self._peers:
            text = f"connection from {peer.where} closed: {why}"
            if peer in self.strangers:
                self.complain(text)
            else:
                self._service.on_incident(text)
        self._forget(peer)

    def end(self, flush: float | None) -> None:
        """Stop accepting, and close all connections; `flush`: seconds for what is still to be sent."""
        if self._listener is not None:
            if self._accept_at is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        until = time.monotonic() + (flush or 0.0)
        for peer in list(self._peers.values()):
            try:
                if flush is not None:
                    peer.sock.settimeout(max(0.01, until - time.monotonic()))
                    peer.sock.sendall(peer.out)
            except (OSError, wire.WireError):
                pass  # it did not read; it sees the closed connection
            self._forget(peer)

    def close(self) -> None:
        """Close everything, when no thread uses it any more."""
        self.end(None)
        self.wakes.close()
        for sock, _ in self._adopted:
            sock.close()
        self._selector.close()

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self.complain(f"connections cannot be accepted: {error}")
                if self.strangers:  # out of descriptors
                    self.drop(self.strangers.next_to_go(), "")
                    continue
                # The listener stays readable, so look away for a moment instead of spinning.
                self._selector.unregister(self._listener)
                self._accept_at = now + _ACCEPT_PAUSE
                return
            self._admit(sock, where)

    def _admit(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        sock.setblocking(False)
        while len(self.strangers) >= min(self._most(), max(16, descriptors() // 4)):
            self.drop(self.strangers.next_to_go(), "")
        try:
            if self._sealing is not None:
                sock = self._sealing.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it has gone again already
            sock.close()
            return
        peer = Peer(sock, str(where[0]), int(where[1]))
        self._peers[sock] = peer
        self._expect(peer)
        self._selector.register(sock, selectors.EVENT_READ)
        self.write(peer, wire.greeting(peer.nonce))

    def _expect(self, peer: Peer) -> None:
        """Wait for a stranger's next step."""
        peer.deadline = self._waited + HANDSHAKE_TIME
        self.strangers.discard(peer)
        self.strangers.add(peer, peer.host)

    def _serve(self, peer: Peer, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE or peer.out:
            self._dirty[peer] = None
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = peer.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except (OSError, wire.WireError) as error:
            self._failed(peer, error)
            return
        if not data:
            self._forget(peer, hung_up=True)
            return
        try:
            if not peer.is_proven:
                data = self._shake_hands(peer, data)
            if data and not peer.closing and peer.sock in self._peers:
                self._service.on_data(peer, data, now)
        except (wire.WireError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, wire.SpeaksTorch):
                self._service.on_refused(peer.host, str(error))
            # The last four would be defects here; they cost the peer its connection, not the others.
            self.drop(peer, f"{type(error).__name__}: {error}")

    def _shake_hands(self, peer: Peer, data: bytes) -> bytes:
        """Take in a stranger's part of the handshake; what came behind it."""
        if peer.closing:
            return b""
        peer.raw += data
        if not peer.theirs:
            if len(peer.raw) < wire.GREETING:
                if not wire.MAGIC.startswith(peer.raw[: len(wire.MAGIC)]):
                    wire.read_greeting(peer.raw)
                return b""
            peer.theirs, peer.raw = wire.read_greeting(peer.raw[: wire.GREETING]), peer.raw[wire.GREETING :]
            self._expect(peer)
        if len(peer.raw) < wire.PROOF:
            return b""
        given, data, peer.raw = peer.raw[: wire.PROOF], peer.raw[wire.PROOF :], b""
        if not wire.proves(given, self._key, "client", peer.nonce + self._binding, peer.theirs):
            self._refuse(peer)
            return b""
        self.write(peer, wire.proof(self._key, "server", peer.theirs + self._binding, peer.nonce))
        if self._sealing is None:
            peer.frames.seal, peer.seal = wire.seals(self._key, peer.theirs, peer.nonce)
        peer.is_proven = True
        self._expect(peer)
        self._service.on_proven(peer)
        return data

    def _refuse(self, peer: Peer) -> None:
        peer.closing = True
        self.refused += 1
        self.write(peer, wire.REFUSED if self._token else wire.OPEN)
        source = f" (ours is from {self._token.source})" if self._token else ""
        self.complain(f"{peer.where} showed a wrong token{source}")
        what = f"its token is not ours{source}" if self._token else "it has a token, and this job has none"
        self._service.on_refused(peer.host, f"{what}; give the same token to every node")

    def _flush(self, peer: Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.sock.send(peer.out[:_CHUNK])]
        except BlockingIOError:
            pass
        except (OSError, wire.WireError) as error:
            self._failed(peer, error)
            return
        if peer.closing and not peer.out:
            self._forget(peer)
            return
        # A TLS handshake that waits for the peer is not helped by a socket that could take more.
        blocked = peer.out and not getattr(peer.sock, "waits_to_read", False)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
        if self._selector.get_key(peer.sock).events != wanted:
            self._selector.modify(peer.sock, wanted)

    def _failed(self, peer: Peer, error: Exception) -> None:
        """A broken pipe is a reset after the peer had hung up; anything else may come from the network."""
        if isinstance(error, wire.WireError):
            self.drop(peer, str(error))
        else:
            self._forget(peer, hung_up=isinstance(error, BrokenPipeError))

    def _forget(self, peer: Peer, *, hung_up: bool = False) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self.strangers.discard(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._service.on_gone(peer, hung_up)


def set_options(sock: socket.socket) -> None:
    """Those of every connection; of a listener, accepted ones inherit them."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
