"""The embedded store: one thread, one selector, the model behind it, an optional journal beside it.

    with Server("127.0.0.1", 0, token=find_token()) as server:
        host, port = server.address

A server without a host does not listen: it serves the connections that another listener hands it (`adopt`).

Invariants:
- What a turn of the loop changed is in the journal before any of it is answered.
- A client that hung up has `linger` seconds to come back before its leases end. A connection that was
  reset, or that the server itself gave up, shortens nothing: a firewall can reset one side alone, and the
  client, whose workers run until it notices, may not know of it yet.
- A server that was stopped (a debugger, SIGSTOP, a suspended host) starts all leases again: its
  clients could not have reached it, and a lease may always last longer, never shorter.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from phalanx.core.record import Record
from phalanx.core.rounds.store_commands import Command, Notice, Put, Reply, Watch
from phalanx.errors import StoreError, UsageError
from phalanx.job.time_budgets import LINGER
from phalanx.store.model import Model, Notices, mutates
from phalanx.store.net import wire
from phalanx.store.net.connections import Connections, Peer, set_options
from phalanx.store.net.token import Token, key_of

if TYPE_CHECKING:
    from phalanx.store.net.tls import Tls

FORGET_AFTER = 900.0


class ServerSample(Record):
    """A server at one moment; `commands` by kind, `refused` tokens and `expired` leases since its start."""

    clients: int
    strangers: int
    keys: tuple[str, ...]
    leases: int
    revision: int
    commands: dict[str, int]
    refused: int
    expired: int
    journal: str  # the file; empty: none


class Server:
    """A store that listens; `start` and `close`, or a `with` block."""

    def __init__(
        self,
        host: str | None = "127.0.0.1",
        port: int = 0,
        *,
        token: Token | None = None,
        seed: Mapping[str, bytes] | None = None,
        journal: str | None = None,
        linger: float = LINGER,
        tls: Tls | None = None,
        on_incident: Callable[[str], None] = lambda text: None,
        on_failure: Callable[[str], None] = lambda text: None,
        on_refused: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        """`seed`: the first keys; `on_incident`: for what the store outlives, `on_failure`: for the rest.

        `on_refused`: for hosts that look like nodes of this job and are turned away."""
        self.token, self.linger = token, linger
        self.on_incident, self.on_failure, self.on_refused = on_incident, on_failure, on_refused
        key_of(token)  # now: it may take a while
        listener: socket.socket | None = None
        self.address: tuple[str, int] = ("", 0)
        if host is not None:
            host = host or "127.0.0.1"
            listener = _bind(host, port, token)
            self.address = listener.getsockname()[:2]
        self.store = os.urandom(8).hex()
        # Lease numbers of a store that lost its data must not mean anything to its successor.
        self._model = Model(first_lease=int.from_bytes(os.urandom(5), "big") << 20 | 1)
        for number, (key, value) in enumerate((seed or {}).items()):
            self._model.apply("", number, 0, Put(key, value), 0.0)
        self._journal = None
        try:
            if journal is not None:
                from phalanx.store.embedded.journal import Journal

                self._journal = Journal(journal)
                self.store = self._journal.load(self._model, self.store, time.monotonic())
            # Not before the journal is read: clients that are refused know that the store is down, and their
            # workers run on; an unanswered connection would be ambiguous.
            if listener is not None and host is not None:
                _listen(listener, host, port)
            self._connections = Connections(self, token, listener, tls=tls)
        except BaseException:
            if listener is not None:
                listener.close()
            if self._journal is not None:
                self._journal.close()
            raise
        self._current: dict[str, Peer] = {}
        self._gone: dict[str, float] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._commands: dict[str, int] = {}
        self._expired = 0
        self._closing, self._flush = False, 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Server:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="phalanx-store", daemon=True)
        self._thread.start()
        return self

    def close(self, flush: float = 2.0) -> None:
        """Say what is still to be said, for at most `flush` seconds, and stop; idempotent."""
        if self._closing:
            return
        self._closing, self._flush = True, flush
        if self._thread is not None:
            self._connections.wakes.ring()
            self._thread.join()
        self._connections.close()
        if self._journal is not None:
            self._journal.close()

    def adopt(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        """Serve a connection that another listener accepted and has not read from; from any thread."""
        self._connections.adopt(sock, where)

    def post(self, call: Callable[[], None]) -> None:
        """Call this in the server's thread; from any thread."""
        self._posted.append(call)
        self._connections.wakes.ring()

    def sample(self) -> ServerSample:
        """The server now; in its thread."""
        return ServerSample(
            clients=len(self._current),
            strangers=len(self._connections.strangers),
            keys=self._model.keys,
            leases=self._model.leases,
            revision=self._model.revision,
            commands=dict(self._commands),
            refused=self._connections.refused,
            expired=self._expired,
            journal="" if self._journal is None else self._journal.path,
        )

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The loop

    def _run(self) -> None:
        try:
            self._turn_around()
        except Exception as error:  # noqa: BLE001 - reported; clients see the closed connection
            # What is not in the journal must not be answered, and refusing is clearer than silence.
            self._connections.end(None)
            said = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            self.on_failure(f"the store failed and is gone: {said}")
        finally:
            self._connections.end(self._flush)

    def _turn_around(self) -> None:
        while not self._closing:
            now = time.monotonic()
            now, was_stopped = self._connections.wait(self._next_time(now), now)
            if was_stopped:
                self._model.renew_all(now)
            self._connections.serve(now)
            while self._posted:
                self._posted.popleft()()
            self._pass_time(now)
            if self._journal is not None:
                self._journal.commit(self._model, self.store)
            self._connections.flush()

    def _next_time(self, now: float) -> float:
        expiry = self._model.next_expiry(now)
        return min(self._connections.next_time(now), inf if expiry is None else expiry)

    def _pass_time(self, now: float) -> None:
        for lease in self._model.expired(now):
            self._expired += 1
            if self._journal is not None:
                self._journal.record_expiry(lease)
            self._notify(self._model.revoke(lease))
        while (session := next(iter(self._gone), None)) and now - self._gone[session] > FORGET_AFTER:
            del self._gone[session]
            self._model.forget(session)

    # Connections

    def on_proven(self, peer: Peer) -> None:
        """Its Hello is next."""

    def on_data(self, peer: Peer, data: bytes, now: float) -> None:
        """Carry out what a client asks."""
        for frame in peer.frames.feed(data):
            self._frame(peer, frame, now)

    def on_gone(self, peer: Peer, hung_up: bool) -> None:
        """A connection has ended; its client may come back."""
        if self._current.get(peer.session) is peer:
            now = time.monotonic()
            if hung_up:
                self._model.shorten(peer.session, now + self.linger)
            del self._current[peer.session]
            self._model.hang_up(peer.session)
            self._gone[peer.session] = now

    def _frame(self, peer: Peer, frame: wire.Frame, now: float) -> None:
        body = frame.body
        if peer in self._connections.strangers:
            if not isinstance(body, wire.Hello):
                raise wire.WireError(f"{type(body).__name__} before Hello")
            peer.session, peer.frames.cap = body.session, wire.CAP
            self._connections.admit(peer)
            old = self._current.get(body.session)
            if old is not None:
                self._connections.drop(old, "")
            self._current[body.session] = peer
            self._gone.pop(body.session, None)
            self._look_for_losses(peer, body)
            self._send(peer, wire.encode(0, 0, self._welcome()))
        elif isinstance(body, (wire.Hello, wire.Welcome, Reply, Notice)):
            raise wire.WireError(f"{type(body).__name__} is not for a server")
        else:
            self._carry_out(peer, frame.number, frame.done, body, now)

    def _welcome(self) -> wire.Welcome:
        revision = self._model.revision
        if self._journal is None:
            return wire.Welcome(self.store, False, self.linger, 1, revision, self.store)
        journal = self._journal
        return wire.Welcome(self.store, True, self.linger, journal.epoch, revision, journal.incarnation)

    def _look_for_losses(self, peer: Peer, hello: wire.Hello) -> None:
        """Begin a new epoch if this client has seen changes that the journal does not have."""
        if self._journal is None or hello.store != self.store:
            return
        if not self._journal.has_lost(hello.incarnation, hello.revision):
            return
        self._journal.begin_epoch(self._model, self.store, hello.incarnation)
        self.on_incident(
            f"the journal has lost changes that {peer.where} has seen (an old copy, or a damaged disk): "
            f"epoch {self._journal.epoch} begins, and all jobs re-form"
        )
        for other in [one for one in self._current.values() if one is not peer]:
            self._connections.drop(other, "")  # they learn of the epoch when they connect again

    def _carry_out(self, peer: Peer, number: int, done: int, command: Command, now: float) -> None:
        reply, notices = self._model.apply(peer.session, number, done, command, now)
        kind = type(command).__name__
        self._commands[kind] = self._commands.get(kind, 0) + 1
        if self._journal is not None and mutates(command):
            # After it worked: a command that cannot be carried out must not meet the next server too.
            self._journal.record(peer.session, number, done, command)
        try:
            packed = wire.encode(number, done, reply)
        except StoreError:
            packed = wire.encode(number, done, Reply(False, reply.revision, error="size"))
        self._send(peer, packed)
        if isinstance(command, Watch):
            missed = self._model.replay(peer.session, command)
            if missed is not None:
                notices = [(peer.session, missed), *notices]
        self._notify(notices)

    def _notify(self, notices: Notices) -> None:
        packed: dict[Notice, bytes] = {}  # the same notice for thousands is packed once
        for session, notice in notices:
            peer = self._current.get(session)
            if peer is not None:
                if notice not in packed:
                    packed[notice] = wire.encode(0, 0, notice)
                self._send(peer, packed[notice])

    def _send(self, peer: Peer, frame: bytes) -> None:
        self._connections.write(peer, peer.seal.sealed(frame))


def _bind(host: str, port: int, token: Token | None) -> socket.socket:
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StoreError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
    address = str(where[0])
    if token is None and not (address.startswith("127.") or address == "::1"):
        raise UsageError(
            f"--listen {host}:{port}: a store on a network address needs a token (PHALANX_TOKEN)"
        )
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        set_options(sock)  # those that it accepts have them, too
        sock.bind(where)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StoreError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def _listen(sock: socket.socket, host: str, port: int) -> None:
    try:
        sock.listen(4096)
    except OSError as error:  # another process has bound it as well, and listens already
        raise StoreError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
