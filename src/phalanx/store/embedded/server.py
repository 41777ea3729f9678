"""The embedded store: one thread, one selector, the model behind it, an optional journal beside it.

    with Server("127.0.0.1", 0, token=find_token()) as server:
        host, port = server.address

A server without a host does not listen: it serves the connections that another listener hands it (`adopt`).

Invariants:
- Nothing a client sends is parsed before it has proved the token; nothing is allocated for a
  length that is over the cap; a client that is silent in the handshake, garbles a frame or does not
  read what it is sent loses its own connection and disturbs no other client.
- A crowd of strangers keeps no node out: the oldest of the address with the most of them makes room for the
  next connection, and a node needs milliseconds to prove the token. They cannot fill the log either.
- What a turn of the loop changed is in the journal before any of it is answered.
- A client that hung up has `linger` seconds to come back before its leases end. A connection that was
  reset, or that the server itself gave up, shortens nothing: a firewall can reset one side alone, and the
  client, whose workers run until it notices, may not know of it yet.
- A server that was stopped (a debugger, SIGSTOP, a suspended host) starts all leases again: its
  clients could not have reached it, and a lease may always last longer, never shorter.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from phalanx.core.record import Record
from phalanx.core.rounds.store_commands import Command, Notice, Put, Reply, Watch
from phalanx.errors import StoreError, UsageError
from phalanx.store.model import Model, Notices, mutates
from phalanx.store.net import wire
from phalanx.store.net.strangers import Complaints, Strangers, descriptors
from phalanx.store.net.token import Token, key_of
from phalanx.store.net.wake_up import WakeUp

if TYPE_CHECKING:
    import ssl

    from phalanx.store.net.tls import Tls

HANDSHAKE_TIME = 5.0  # for each of its steps, of the time in which the store waits for its peers
UNREAD_CAP = 128 << 20  # what may wait for one client to read it
STRANGERS = 4096  # connections that have not proved the token yet; fewer where descriptors are few
_ACCEPTS_IN_A_ROW = 64
STALLED = 1.0
FORGET_AFTER = 900.0
_CHUNK = 256 << 10


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


class _Peer:
    """One accepted connection."""

    __slots__ = (
        "closing",
        "deadline",
        "frames",
        "host",
        "nonce",
        "out",
        "raw",
        "seal",
        "session",
        "sock",
        "stage",
        "theirs",
        "where",
    )

    def __init__(self, sock: socket.socket, host: str, port: int) -> None:
        self.sock, self.host, self.where, self.deadline = sock, host, f"{host}:{port}", 0.0
        self.stage, self.raw, self.out = "greeting", b"", bytearray()
        self.nonce, self.theirs = os.urandom(wire.NONCE), b""
        self.frames = wire.Frames(wire.HELLO_CAP)
        self.seal: wire.Seal = wire.NoSeal()
        self.session = ""
        self.closing = False


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
        linger: float = 1.0,
        tls: Tls | None = None,
        on_incident: Callable[[str], None] = lambda text: None,
        on_failure: Callable[[str], None] = lambda text: None,
        on_refused: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        """`seed`: the first keys; `on_incident`: for what the store outlives, `on_failure`: for the rest.

        `on_refused`: for hosts that look like nodes of this job and are turned away."""
        self.token, self.linger = token, linger
        self.on_incident, self.on_failure, self.on_refused = on_incident, on_failure, on_refused
        self._sealing: ssl.SSLContext | None = None
        self._key = key_of(token)  # now: it may take a while
        self._binding = b""  # ties the proof of the token to this server's certificate
        if tls is not None:
            from phalanx.store.net.tls import own_fingerprint, server_context

            self._sealing, self._binding = server_context(tls), own_fingerprint(tls)
        self._listener: socket.socket | None = None
        self.address: tuple[str, int] = ("", 0)
        if host is not None:
            host = host or "127.0.0.1"
            self._listener = _bind(host, port, token)
            self.address = self._listener.getsockname()[:2]
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
            if self._listener is not None and host is not None:
                _listen(self._listener, host, port)
        except BaseException:
            if self._listener is not None:
                self._listener.close()
            if self._journal is not None:
                self._journal.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, _Peer] = {}
        self._strangers: Strangers[_Peer] = Strangers()  # have not said Hello yet; in order of deadlines
        self._waited = 0.0  # seconds that the store has waited for its peers: the clock of their deadlines
        self._complaints = Complaints(lambda text: self.on_incident(text))
        self._current: dict[str, _Peer] = {}
        self._gone: dict[str, float] = {}
        self._dirty: dict[_Peer, None] = {}
        self._accept_at: float | None = None
        self._adopted: deque[tuple[socket.socket, tuple[Any, ...]]] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        self._commands: dict[str, int] = {}
        self._refused, self._expired = 0, 0
        self._wakes = WakeUp()
        self._closing, self._flush = False, 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Server:
        """Serve in a thread of its own."""
        self._selector.register(self._wakes, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="phalanx-store", daemon=True)
        self._thread.start()
        return self

    def close(self, flush: float = 2.0) -> None:
        """Say what is still to be said, for at most `flush` seconds, and stop; idempotent."""
        if self._closing:
            return
        self._closing, self._flush = True, flush
        if self._thread is not None:
            self._wakes.ring()
            self._thread.join()
        for sock in (self._listener, self._wakes, *(sock for sock, _ in self._adopted)):
            if sock is not None:
                sock.close()
        self._selector.close()
        if self._journal is not None:
            self._journal.close()

    def adopt(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        """Serve a connection that another listener accepted and has not read from; from any thread."""
        try:
            _set_options(sock)
        except OSError:
            pass  # it has gone again already
        self._adopted.append((sock, where))
        self._wakes.ring()

    def post(self, call: Callable[[], None]) -> None:
        """Call this in the server's thread; from any thread."""
        self._posted.append(call)
        self._wakes.ring()

    def sample(self) -> ServerSample:
        """The server now; in its thread."""
        return ServerSample(
            clients=len(self._current),
            strangers=len(self._strangers),
            keys=self._model.keys,
            leases=self._model.leases,
            revision=self._model.revision,
            commands=dict(self._commands),
            refused=self._refused,
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
            for peer in list(self._peers.values()):
                self._forget(peer)
            if self._listener is not None:
                self._listener.close()
            said = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            self.on_failure(f"the store failed and is gone: {said}")
        finally:
            self._say_goodbye()

    def _turn_around(self) -> None:
        while not self._closing:
            now = time.monotonic()
            timeout = self._timeout(now)
            expected = now + (timeout if timeout is not None else float("inf"))
            events = self._selector.select(timeout)
            began, now = now, time.monotonic()
            self._waited += min(now, expected + STALLED) - began  # its own delay is not that of its peers
            if now > expected + STALLED:
                self._model.renew_all(now)
            for key, mask in events:
                if peer := self._peers.get(key.fileobj):  # type: ignore[call-overload] # sockets only
                    self._serve(peer, mask, now)
            # Last: a stranger whose answer has arrived does not have to make room for the next one.
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept(now)
                elif key.fileobj is self._wakes:
                    self._take_adopted()
            self._pass_time(now)
            self._end_turn()

    def _timeout(self, now: float) -> float | None:
        times = [now + peer.deadline - self._waited for peer in islice(self._strangers, 1)]
        if (expiry := self._model.next_expiry(now)) is not None:
            times.append(expiry)
        if self._accept_at is not None:
            times.append(self._accept_at)
        return max(0.0, min(times) - now) if times else None

    def _pass_time(self, now: float) -> None:
        for lease in self._model.expired(now):
            self._expired += 1
            if self._journal is not None:
                self._journal.record_expiry(lease)
            self._notify(self._model.revoke(lease))
        while (peer := next(iter(self._strangers), None)) and peer.deadline <= self._waited:
            self._drop(peer, "did not finish the handshake in time")
        if self._accept_at is not None and now >= self._accept_at and self._listener is not None:
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while (session := next(iter(self._gone), None)) and now - self._gone[session] > FORGET_AFTER:
            del self._gone[session]
            self._model.forget(session)

    def _end_turn(self) -> None:
        if self._journal is not None:
            self._journal.commit(self._model, self.store)
        dirty, self._dirty = self._dirty, {}
        for peer in dirty:
            if peer.sock in self._peers:
                self._flush_peer(peer)

    def _say_goodbye(self) -> None:
        end = time.monotonic() + self._flush
        for peer in list(self._peers.values()):
            try:
                peer.sock.settimeout(max(0.01, end - time.monotonic()))
                peer.sock.sendall(peer.out)
            except (OSError, wire.WireError):
                pass  # it did not read; it sees the closed connection
            self._forget(peer)

    # Connections

    def _take_adopted(self) -> None:
        self._wakes.take()
        while self._adopted:
            self._admit(*self._adopted.popleft())
        while self._posted:
            self._posted.popleft()()

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._strangers:  # out of descriptors
                    self._drop(self._strangers.next_to_go(), "")
                    continue
                # The listener stays readable, so look away for a moment instead of spinning.
                self._complaints.say(f"the store cannot accept connections: {error}", now)
                self._selector.unregister(self._listener)
                self._accept_at = now + 0.2
                return
            self._admit(sock, where)

    def _admit(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        sock.setblocking(False)
        while len(self._strangers) >= min(STRANGERS, max(16, descriptors() // 4)):
            self._drop(self._strangers.next_to_go(), "")
        try:
            if self._sealing is not None:
                sock = self._sealing.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it has gone again already
            sock.close()
            return
        peer = _Peer(sock, str(where[0]), int(where[1]))
        self._peers[sock] = peer
        self._await(peer)
        self._selector.register(sock, selectors.EVENT_READ)
        self._write(peer, wire.greeting(peer.nonce))

    def _await(self, peer: _Peer) -> None:
        """Wait for a stranger's next step."""
        peer.deadline = self._waited + HANDSHAKE_TIME
        self._strangers.discard(peer)
        self._strangers.add(peer, peer.host)

    def _serve(self, peer: _Peer, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE or peer.out:
            self._dirty[peer] = None
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = peer.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except wire.WireError as error:
            self._drop(peer, str(error))
            return
        except OSError as error:
            self._lost(peer, error, now)
            return
        if not data:
            self._hung_up(peer, now)
            return
        try:
            self._received(peer, data, now)
        except (wire.WireError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, wire.SpeaksTorch):
                self.on_refused(peer.host, str(error))
            # The last four would be defects here; they cost the client its connection, not the store.
            self._drop(peer, f"{type(error).__name__}: {error}")

    def _received(self, peer: _Peer, data: bytes, now: float) -> None:
        if peer.stage == "greeting":
            peer.raw += data
            if len(peer.raw) < wire.GREETING:
                if not wire.MAGIC.startswith(peer.raw[: len(wire.MAGIC)]):
                    wire.read_greeting(peer.raw)
                return
            peer.theirs = wire.read_greeting(peer.raw[: wire.GREETING])
            peer.raw, data, peer.stage = peer.raw[wire.GREETING :], b"", "proof"
            self._await(peer)
        if peer.stage == "proof":
            peer.raw += data
            if len(peer.raw) < wire.PROOF:
                return
            given, data, peer.raw = peer.raw[: wire.PROOF], peer.raw[wire.PROOF :], b""
            key = self._key
            if not wire.proves(given, key, "client", peer.nonce + self._binding, peer.theirs):
                peer.closing = True
                self._refused += 1
                self._write(peer, wire.REFUSED if self.token else wire.OPEN)
                source = f" (ours is from {self.token.source})" if self.token else ""
                self._complaints.say(f"{peer.where} showed a wrong token{source}", now)
                what = (
                    f"its token is not ours{source}"
                    if self.token
                    else "it has a token, and this job has none"
                )
                self.on_refused(peer.host, f"{what}; give the same token to every node")
                return
            self._write(peer, wire.proof(key, "server", peer.theirs + self._binding, peer.nonce))
            if self._sealing is None:
                peer.frames.seal, peer.seal = wire.seals(key, peer.theirs, peer.nonce)
            peer.stage = "hello"
            self._await(peer)
        if peer.closing:
            return
        for frame in peer.frames.feed(data):
            self._frame(peer, frame, now)

    def _frame(self, peer: _Peer, frame: wire.Frame, now: float) -> None:
        body = frame.body
        if peer.stage == "hello":
            if not isinstance(body, wire.Hello):
                raise wire.WireError(f"{type(body).__name__} before Hello")
            peer.session, peer.stage, peer.frames.cap = body.session, "open", wire.CAP
            self._strangers.discard(peer)
            old = self._current.get(body.session)
            if old is not None:
                self._drop(old, "")
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

    def _look_for_losses(self, peer: _Peer, hello: wire.Hello) -> None:
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
            self._drop(other, "")  # they learn of the epoch when they connect again

    def _carry_out(self, peer: _Peer, number: int, done: int, command: Command, now: float) -> None:
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

    def _send(self, peer: _Peer, frame: bytes) -> None:
        self._write(peer, peer.seal.sealed(frame))

    def _write(self, peer: _Peer, data: bytes) -> None:
        if len(peer.out) + len(data) > UNREAD_CAP:
            self._drop(peer, f"did not read {len(peer.out)} bytes that were sent to it")
            return
        peer.out += data
        self._dirty[peer] = None

    def _flush_peer(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.sock.send(peer.out[:_CHUNK])]
        except BlockingIOError:
            pass
        except wire.WireError as error:
            self._drop(peer, str(error))
            return
        except OSError as error:
            self._lost(peer, error, time.monotonic())
            return
        if peer.closing and not peer.out:
            self._forget(peer)
            return
        # A TLS handshake that waits for the client is not helped by a socket that could take more.
        blocked = peer.out and not getattr(peer.sock, "waits_to_read", False)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
        if self._selector.get_key(peer.sock).events != wanted:
            self._selector.modify(peer.sock, wanted)

    def _lost(self, peer: _Peer, error: OSError, now: float) -> None:
        """A broken pipe is a reset after the client had hung up; anything else may come from the network."""
        if isinstance(error, BrokenPipeError):
            self._hung_up(peer, now)
        else:
            self._forget(peer)

    def _hung_up(self, peer: _Peer, now: float) -> None:
        """The client closed the connection, so it knows."""
        if self._current.get(peer.session) is peer:
            self._model.shorten(peer.session, now + self.linger)
        self._forget(peer)

    def _drop(self, peer: _Peer, why: str) -> None:
        if why and peer.sock in self._peers:
            text = f"connection from {peer.where} closed: {why}"
            if peer in self._strangers:
                self._complaints.say(text, time.monotonic())
            else:
                self.on_incident(text)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._strangers.discard(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if self._current.get(peer.session) is peer:
            del self._current[peer.session]
            self._model.hang_up(peer.session)
            self._gone[peer.session] = time.monotonic()


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
        _set_options(sock)  # those that it accepts have them, too
        sock.bind(where)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StoreError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _listen(sock: socket.socket, host: str, port: int) -> None:
    try:
        sock.listen(4096)
    except OSError as error:  # another process has bound it as well, and listens already
        raise StoreError(f"the store cannot listen on {host}:{port}: {error.strerror}") from error
