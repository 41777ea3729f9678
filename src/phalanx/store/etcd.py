"""A real etcd as the store: the same client for rendezvous code, etcd's v3 API behind it.

    client = etcd_client_from("a:2379,b:2379,c:2379", {"protocol": "https", "cacert": "ca.pem"})
    client.connect(timeout=30)

One thread carries out the requests in order, over HTTP to etcd's JSON gateway; each watch has a
thread of its own. When a member fails, is too slow, or has no leader, the next one is asked, and the
watches follow; a request whose answer was lost is not done twice (`etcd_translation`). Only after
`grace` seconds in which no member answered do requests fail.

What differs from our own store: etcd knows leases, not connections. A process that dies is noticed
when its lease is over, not when its socket closes, so `welcome.linger` is without end here, and a
connection that breaks shortens nothing. Leases last whole seconds, and two at least.
A plain `Delete` whose answer was lost is repeated; its count may then be that of the second try.

Invariant: callbacks come one at a time; a watch's reply before its changes.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.core.commands import (
    Add,
    Command,
    Compact,
    Delete,
    Entry,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Revoke,
    Txn,
    Unwatch,
    Watch,
    When,
)
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, UsageError
from phalanx.store import etcd_translation as words
from phalanx.store import wire
from phalanx.store.client import Client, State, _Waiting
from phalanx.store.etcd_http import (
    NOT_FOUND,
    OUT_OF_RANGE,
    PRECONDITION,
    Address,
    EtcdError,
    Failure,
    Line,
    Members,
)
from phalanx.store.etcd_watch import Stream
from phalanx.store.model import LARGEST, LONGEST

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
MEMORY_TTL = 600  # of the key that remembers the last request; one that is gone costs a round trip
SLOWEST = 10.0  # the patience with a single request grows up to this


class _Abandoned(Exception):
    """Nobody waits for this answer any more, or the client is closing."""


class EtcdClient(Client):
    """A session with an etcd cluster, in place of one with our own server."""

    def __init__(
        self,
        addresses: list[Address],
        *,
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        grace: float = 60.0,
        patience: float = 2.0,
        on_state: Callable[[State], None] = lambda state: None,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            addresses[0].host, addresses[0].port,
            grace=grace, patience=patience, on_state=on_state, on_notice=on_notice, clock=clock,
        )  # fmt: skip
        self._members = Members(addresses, context, user, password)
        self._line = Line(self._members)
        self._todo: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._number = 0
        self._doing = 0
        self._streams: dict[int, Stream] = {}
        self._ended: list[Stream] = []
        self._delivering = threading.RLock()
        self._closed = threading.Event()
        self._away_since: float | None = clock()
        self._tries = 0  # of the request in hand
        self._newest = 0
        self._memory = Entry(f"phalanx.once/{self.session}")

    @property
    def where(self) -> str:
        """The addresses, as people write them."""
        return str(self._members)

    # What `Client` leaves to us

    def close(self) -> None:
        """End the session: watches, threads, and the key in etcd that belongs to it; idempotent."""
        if not self._closing:
            self._closed.set()
            self._todo.put(None)
            super().close()
            for stream in [*self._streams.values(), *self._ended]:
                stream.stop()
            for stream in [*self._streams.values(), *self._ended]:
                if stream is not threading.current_thread():
                    stream.join()

    def _ask(self, command: Command, waiting: _Waiting) -> int:
        _check(command)
        with self._lock:
            if self.lost is not None or self._closing:
                raise self.lost or StoreConnectionError(f"the connection to {self.where} is closed")
            self._number += 1
            self._waiting[self._number] = waiting
            self._todo.put((self._number, command))
            return self._number

    def _stay_connected(self) -> None:
        try:
            self._range(words.where(self._memory.key, False))  # the first contact
            while (item := self._todo.get()) is not None:
                self._answer(*item)
        except _Abandoned:
            pass
        except EtcdError as error:
            self._give_up(self._members.explain(error))
        except StoreError as error:
            self._give_up(error)
        finally:
            self._forget_me()
            self._line.hang_up()

    def _answer(self, number: int, command: Command) -> None:
        if number not in self._waiting:
            return
        self._doing = number
        try:
            reply = self._carry_out(command)
        except _Abandoned:
            if self._closing:
                raise
            return
        except EtcdError as error:
            if not error.too_large:
                raise
            reply = Reply(False, self._newest, error="size")
        waiting = self._waiting.pop(number, None)
        with self._delivering:
            if waiting is not None:
                waiting.reply = reply
                if waiting.callback is not None:
                    waiting.callback(reply)
                elif waiting.event is not None:
                    waiting.event.set()
        if isinstance(command, Watch) and reply.ok:
            self._open(command, command.start or reply.revision + 1)

    # Commands

    def _carry_out(self, command: Command) -> Reply:
        match command:
            case Put():
                return self._txn(Txn((), (command,)))._replace(entries=())
            case Txn():
                return self._txn(command)
            case Get(name, prefix):
                answer = self._range(words.where(name, prefix))
                return Reply(True, words.revision(answer), words.entries(answer))
            case Delete(name, prefix):
                answer = self._call("/v3/kv/deleterange", words.where(name, prefix))
                return Reply(True, words.revision(answer), number=int(answer.get("deleted", 0)))
            case Add(name, amount):
                return self._add(name, amount)
            case Grant():
                return self._grant(command)
            case KeepAlive(lease):
                answer = self._call("/v3/lease/keepalive", {"ID": str(lease)})
                alive = int(answer.get("TTL", 0)) > 0
                return Reply(alive, self._newest, number=lease * alive, error="" if alive else "lease")
            case Revoke(lease):
                return self._revoke(lease)
            case Watch():
                return self._look(command)
            case Unwatch(number):
                self._shut(number)
                return Reply(True, self._newest)
            case Compact(revision):
                return self._compact(revision)
        raise TypeError(f"{command!r} is no command of the store")

    def _txn(self, txn: Txn) -> Reply:
        """A transaction, done once however often it has to be sent."""
        fresh = False
        while True:
            once = self._once() if txn.puts or txn.deletes else None
            try:
                answer = self._call("/v3/kv/txn", words.transaction(txn, once))
            except EtcdError as error:
                if error.code != NOT_FOUND:
                    raise
                if not fresh:  # is it the lease of our own key?
                    self._memory, fresh = Entry(self._memory.key), True
                    continue
                return self._show(txn, "lease")
            done = words.outcome(txn, once, answer)
            if once is not None and (done.ok or done.memory is not None):
                seen = done.memory or Entry(once.key, once.value, 0, done.revision, once.lease)
                ours, known = seen.value == once.value, self._memory.mod
                self._memory = seen
                if not done.ok and not ours and seen.mod != known:
                    continue  # it ran out while we were idle: what failed was not the caller's condition
                if ours:
                    return Reply(True, done.revision, done.entries)
            return Reply(done.ok, done.revision, done.entries, error="" if done.ok else "condition")

    def _once(self) -> words.Once:
        if not self._memory.lease or not self._memory.mod:
            lease = self._grant(Grant(MEMORY_TTL)).number
            self._memory = Entry(self._memory.key, lease=lease)
        return words.Once(self._memory.key, str(self._doing).encode(), self._memory.mod, self._memory.lease)

    def _show(self, txn: Txn, why: str) -> Reply:
        looked = words.outcome(txn, None, self._call("/v3/kv/txn", words.transaction(Txn(txn.when), None)))
        return Reply(False, looked.revision, looked.entries, error=why)

    def _add(self, name: str, amount: int) -> Reply:
        found = Entry(name)
        known = False
        while True:
            if not known:
                answer = self._range(words.where(name, False))
                found = (words.entries(answer) or (Entry(name),))[0]
            try:
                total = int(found.value or b"0") + amount
            except ValueError:
                total = LARGEST + 1
            if not -LARGEST <= total <= LARGEST:
                return Reply(False, self._newest, (found,), error="number")
            reply = self._txn(Txn((When(name, "mod", found.mod),), (Put(name, str(total).encode()),)))
            if reply.ok:
                return reply._replace(entries=(), number=total)
            found, known = reply.entries[0], True

    def _grant(self, command: Grant) -> Reply:
        if not 0 < command.ttl <= LONGEST:
            return Reply(False, self._newest, error="ttl")
        # A number of our own choice makes the second of two tries harmless.
        lease = random.SystemRandom().randrange(1, 2**63)
        try:
            self._call("/v3/lease/grant", {"ID": str(lease), "TTL": str(words.lease_seconds(command))})
        except EtcdError as error:
            if error.code != PRECONDITION:
                raise
        return Reply(True, self._newest, number=lease)

    def _revoke(self, lease: int) -> Reply:
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease)})
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
            if self._tries == 1:  # else an earlier try may have done it
                return Reply(False, self._newest, error="lease")
        return Reply(True, self._newest)

    def _compact(self, revision: int) -> Reply:
        try:
            answer = self._call("/v3/kv/compaction", {"revision": str(revision)})
        except EtcdError as error:
            if error.code != OUT_OF_RANGE:
                raise
            future = "future" in str(error)
            return Reply(not future, self._newest, error="future" if future else "")
        return Reply(True, words.revision(answer))

    # Watches

    def _look(self, command: Watch) -> Reply:
        """What is there, or whether the past from `start` on still is."""
        self._shut(command.watch)
        where = words.where(command.key, command.prefix)
        if not command.start:
            answer = self._range(where)
            return Reply(True, words.revision(answer), words.entries(answer))
        revision = words.revision(self._range({**where, "count_only": True}))
        if command.start > revision + 1:
            return Reply(False, revision, error="future")
        try:
            self._range({**where, "count_only": True, "revision": str(max(1, command.start - 1))})
        except EtcdError as error:
            if error.code != OUT_OF_RANGE:
                raise
            return Reply(False, revision, number=revision + 1, error="compacted")
        return Reply(True, revision)

    def _open(self, command: Watch, start: int) -> None:
        stream = Stream(
            self._members, command, start, patience=self.patience, tell=self._tell, doubt=self._doubt
        )
        with self._lock:
            if self._closing:
                return
            self._streams[command.watch] = stream
            stream.start()

    def _shut(self, number: int) -> None:
        with self._lock:
            stream = self._streams.pop(number, None)
            self._ended = [one for one in self._ended if one.is_alive()]
            if stream is not None:
                self._ended.append(stream)
        if stream is not None:
            stream.stop()

    def _tell(self, stream: Stream, notice: Notice) -> None:
        with self._delivering:
            if self._streams.get(notice.watch) is stream and self.lost is None:
                self._watches.get(notice.watch, self.on_notice)(notice)

    def _doubt(self) -> None:
        """A stream broke: ask something, so that a member that is gone is found out."""
        try:
            self.send(Get(self._memory.key), lambda reply: None)
        except StoreError:
            pass  # that is known already

    # Asking

    def _range(self, body: words.Json) -> words.Json:
        answer = self._call("/v3/kv/range", body)
        revision = words.revision(answer)
        if revision < self._newest:
            raise StoreConnectionError(
                f"etcd at {self.where} has gone back from revision {self._newest} to {revision}: "
                "it was restored from a backup, and what this job knew is gone"
            )
        self._newest = revision
        return answer

    def _call(self, path: str, body: words.Json) -> words.Json:
        """Ask one member after the other until one answers, or the grace is over."""
        self._tries, pause = 0, 0.05
        while True:
            if self._closing or (self._doing and self._doing not in self._waiting):
                raise _Abandoned
            began = self.clock()
            patience = min(SLOWEST, self.patience * 2 ** (self._tries // len(self._members.addresses)))
            self._tries += 1
            try:
                answer = self._line.call(path, body, patience)
            except EtcdError as error:
                if not error.passing:
                    raise
                problem: Exception = error
            except Failure as error:
                problem = _certificate_trouble(error, self.where)
            else:
                self._reached(answer)
                return answer
            self._move_on()
            if self._tries >= len(self._members.addresses):
                self._away(began, problem)
            if self._tries % len(self._members.addresses) == 0:
                self._closed.wait(pause)
                pause = min(1.0, pause * 2)

    def _move_on(self) -> None:
        if self._members.move_on(self._line.member):
            with self._lock:
                streams = list(self._streams.values())
            for stream in streams:
                stream.follow()

    def _reached(self, answer: words.Json) -> None:
        cluster = str(answer.get("header", {}).get("cluster_id", ""))
        if self.welcome is None:
            self.welcome = wire.Welcome(cluster, durable=True, linger=float("inf"))
        elif cluster and cluster != self.welcome.store:
            raise StoreConnectionError(
                f"etcd at {self.where} is another cluster than it was (its data was made anew): "
                "what this job knew is gone"
            )
        if self._away_since is not None:
            self._away_since = None
            self._connected.set()
            with self._delivering:
                self.on_state(State("connected", self.clock()))

    def _away(self, began: float, problem: Exception) -> None:
        """No member answered; for how long now?"""
        if self._away_since is None:
            self._away_since = began
            with self._delivering:
                self.on_state(State("disconnected", began, str(problem)))
        if self.clock() - self._away_since >= self.grace:
            raise self._unreachable(problem)

    def _forget_me(self) -> None:
        """Take our key out of etcd; if that fails, its lease will."""
        if self._memory.lease and self._away_since is None:
            try:
                self._line.call("/v3/lease/revoke", {"ID": str(self._memory.lease)}, 0.5)
            except (StoreError, *Failure):
                pass


def _certificate_trouble(error: Exception, where: str) -> Exception:
    """A certificate that does not fit will not fit later either: say so at once."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        raise StoreAuthError(
            f"etcd at {where}: its certificate is not trusted ({error.verify_message}): "
            "check cacert in --rdzv-conf, and that the certificate names this host"
        ) from None
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        raise StoreAuthError(
            f"etcd at {where} refused the TLS connection ({error.reason}): "
            "give cert=FILE and key=FILE in --rdzv-conf if it wants a certificate from its clients"
        ) from None
    return error


def _check(command: Command) -> None:
    """What etcd would only refuse later, and for everybody."""
    puts = command.puts if isinstance(command, Txn) else (command,) if isinstance(command, Put | Add) else ()
    for put in puts:
        if not put.key:
            raise StoreError(f"{type(command).__name__}: etcd has no empty keys")
    names = [one.key for one in (*command.when, *puts)] if isinstance(command, Txn) else []
    for name in (*names, getattr(command, "key", "")):
        words.key(name)


def etcd_client_from(
    endpoint: str,
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> EtcdClient:
    """The client for `--rdzv-backend etcd`: HOST:PORT, or several with commas between them.

    `config` (--rdzv-conf): protocol http|https, cacert, cert, key, user, password_file. A password
    comes from PHALANX_ETCD_PASSWORD or that file. `options` go to EtcdClient.
    """
    env = os.environ if environ is None else environ
    if "password" in config:
        raise UsageError(
            "--rdzv-conf password=…: everybody on this machine could read it there; "
            "set PHALANX_ETCD_PASSWORD, or password_file=FILE"
        )
    addresses, schemes = _addresses(endpoint)
    files = [str(config.get(name) or "") for name in ("cacert", "cert", "key")]
    protocol = str(config.get("protocol") or (schemes | {"https" if any(files) else "http"}).pop())
    if protocol not in ("http", "https") or len(schemes | {protocol}) > 1:
        raise UsageError(f"--rdzv-conf protocol={protocol}: use http or https, the same for every endpoint")
    context = None
    if protocol == "https":
        from phalanx.store.tls import https_context

        context = https_context(*files)
    elif any(files):
        raise UsageError("--rdzv-conf cacert, cert, key: these are for protocol=https")
    user = str(config.get("user") or "")
    password = _password(user, str(config.get("password_file") or ""), env)
    return EtcdClient(addresses, context=context, user=user, password=password, **options)


def _addresses(endpoint: str) -> tuple[list[Address], set[str]]:
    from phalanx.rendezvous.address import parse_rendezvous_endpoint

    addresses, schemes = [], set()
    for part in filter(None, (part.strip() for part in endpoint.split(","))):
        scheme, mark, rest = part.partition("://")
        if mark:
            schemes.add(scheme)
        place = (rest if mark else part).rstrip("/")
        try:
            addresses.append(Address(*parse_rendezvous_endpoint(place, DEFAULT_PORT)))
        except ValueError as error:
            raise UsageError(str(error)) from None
    if not addresses:
        raise UsageError("--rdzv-endpoint: name at least one HOST:PORT of etcd")
    return addresses, schemes


def _password(user: str, path: str, environ: Mapping[str, str]) -> str:
    if not user:
        return ""
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--rdzv-conf password_file={path}: {error}") from None
    password = environ.get("PHALANX_ETCD_PASSWORD", "")
    if not password:
        raise UsageError(f"etcd user {user!r} has no password: set PHALANX_ETCD_PASSWORD, or password_file=")
    return password
