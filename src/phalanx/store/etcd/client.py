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
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.core.store_commands import Add, Command, Get, Notice, Put, Reply, Txn, Unwatch, Watch
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, UsageError
from phalanx.store.embedded import wire
from phalanx.store.embedded.client import Client, State, _Waiting
from phalanx.store.etcd import translation as words
from phalanx.store.etcd.http import Address, EtcdConnection, EtcdError, Failure, Members
from phalanx.store.etcd.requests import EtcdRequests
from phalanx.store.etcd.watch import Stream

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 2379
SLOWEST = 10.0  # the patience with a single request grows up to this
FAREWELL = 2.0  # what was asked before `close` may take this long
_REVISIONED = ("/v3/kv/range", "/v3/kv/txn", "/v3/kv/deleterange")  # whose revision is the majority's


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
        self._line = EtcdConnection(self._members)
        self._todo: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._number = 0
        self._doing = 0
        self._streams: dict[int, Stream] = {}
        self._ended: list[Stream] = []
        self._delivering = threading.RLock()
        self._closed = threading.Event()
        self._away_since: float | None = clock()
        self._requests = EtcdRequests(self.session, self._call)

    @property
    def where(self) -> str:
        """The addresses, as people write them."""
        return str(self._members)

    # What `Client` leaves to us

    def close(self) -> None:
        """Say what was asked before, then end: watches, threads, our key in etcd; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._todo.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(FAREWELL)
            self._line.cut()
        super().close()
        self._stop_streams()
        for stream in [*self._streams.values(), *self._ended]:
            if stream is not threading.current_thread():
                stream.join()

    def _ask(self, command: Command, waiting: _Waiting) -> int:
        _check(command)
        with self._lock:
            if self.lost is not None or self._closed.is_set():
                raise self.lost or StoreConnectionError(f"the connection to {self.where} is closed")
            self._number += 1
            self._waiting[self._number] = waiting
            self._todo.put((self._number, command))
            return self._number

    def _stay_connected(self) -> None:
        try:
            self._requests.range(words.where(self._requests.memory.key, False))  # the first contact
            while (item := self._todo.get()) is not None:
                self._answer(*item)
        except _Abandoned:
            pass
        except EtcdError as error:
            self._give_up(self._members.explain(error))
        except StoreError as error:
            self._give_up(error)
        finally:
            self._stop_streams()
            self._forget_me()
            self._line.hang_up()

    def _answer(self, number: int, command: Command) -> None:
        if number not in self._waiting:
            return
        self._doing = number
        try:
            if isinstance(command, Unwatch | Watch):
                self._shut(command.watch)
            reply = (
                Reply(True, self._requests.newest)
                if isinstance(command, Unwatch)
                else self._requests.carry_out(number, command)
            )
        except _Abandoned:
            if self._closed.is_set():
                raise
            return
        except EtcdError as error:
            if not error.too_large:
                raise
            reply = Reply(False, self._requests.newest, error="size")
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

    # Watches

    def _open(self, command: Watch, start: int) -> None:
        stream = Stream(
            self._members, command, start, patience=self.patience, tell=self._tell, doubt=self._doubt
        )
        with self._lock:
            if self._closed.is_set():
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

    def _stop_streams(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.stop()

    def _tell(self, stream: Stream, notice: Notice) -> None:
        with self._delivering:
            if self._streams.get(notice.watch) is stream and self.lost is None:
                try:
                    self._watches.get(notice.watch, self.on_notice)(notice)
                except Exception as error:  # noqa: BLE001 - as in Client: nobody may be left waiting for ever
                    self._give_up(StoreError(f"the store's client failed: {type(error).__name__}: {error}"))

    def _doubt(self) -> None:
        """A stream broke: ask something, so that a member that is gone is found out."""
        try:
            self.send(Get(self._requests.memory.key), lambda reply: None)
        except StoreError:
            pass  # that is known already

    # Asking

    def _call(self, path: str, body: words.Json) -> words.Json:
        """Ask one member after the other until one answers, or the grace is over."""
        requests, members = self._requests, len(self._members.addresses)
        requests.tries, pause = 0, 0.05
        while True:
            forgotten = self._doing and self._doing not in self._waiting
            if forgotten or self._closing or (self._closed.is_set() and requests.tries):
                raise _Abandoned
            began = self.clock()
            patience = min(SLOWEST, self.patience * 2 ** (requests.tries // members))
            requests.tries += 1
            try:
                answer = self._line.call(path, body, patience)
            except EtcdError as error:
                if not error.passing:
                    raise
                problem: Exception = error
            except Failure as error:
                problem = _explained(error, self.where)
            else:
                self._reached(path, answer)
                return answer
            self._move_on()
            if requests.tries >= members:
                self._away(began, problem)
            if requests.tries % members == 0:
                self._closed.wait(pause)
                pause = min(1.0, pause * 2)

    def _move_on(self) -> None:
        if self._members.move_on(self._line.member):
            with self._lock:
                streams = list(self._streams.values())
            for stream in streams:
                stream.follow()

    def _reached(self, path: str, answer: words.Json) -> None:
        cluster = str(answer.get("header", {}).get("cluster_id", ""))
        if self.welcome is None:
            self.welcome = wire.Welcome(cluster, durable=True, linger=float("inf"))
        elif cluster and cluster != self.welcome.store:
            raise StoreConnectionError(
                f"etcd at {self.where} is another cluster than it was (its data was made anew): "
                "what this job knew is gone"
            )
        if path in _REVISIONED:
            newest, self._requests.newest = self._requests.newest, words.revision(answer)
            if self._requests.newest < newest:
                raise StoreConnectionError(
                    f"etcd at {self.where} has gone back from revision {newest} to "
                    f"{self._requests.newest}: it was restored from a backup, and what this job knew is gone"
                )
        if self._away_since is not None:
            self._away_since = None
            self._connected.set()
            with self._delivering:
                self.on_state(State("connected", self.clock()))

    def _away(self, began: float, problem: Exception) -> None:
        """No member answered; for how long now?"""
        if self.welcome is None:
            self.on_state(State("failed", began, getattr(problem, "strerror", None) or str(problem)))
        if self._away_since is None:
            self._away_since = began
            with self._delivering:
                self.on_state(State("disconnected", began, str(problem)))
        if self.clock() - self._away_since >= self.grace:
            raise self._unreachable(problem)

    def _forget_me(self) -> None:
        """Take our key out of etcd; if that fails, its lease will."""
        lease = self._requests.memory.lease
        if lease and self._away_since is None:
            try:
                self._line.call("/v3/lease/revoke", {"ID": str(lease)}, 0.5)
            except (StoreError, *Failure):
                pass


def _explained(error: Exception, where: str) -> Exception:
    """In words for a person; a certificate that does not fit will not fit later either, so it is raised."""
    import ssl

    if not isinstance(error, OSError):  # the words of http.client would be whatever bytes came
        return StoreConnectionError("what answers there is not etcd")
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

    `config` (--rdzv-conf): protocol http|https, cacert, cert, key (or tls_ca, tls_cert, tls_key, as the
    options are called), user, password_file. A password comes from PHALANX_ETCD_PASSWORD or that file.
    `options` go to EtcdClient.
    """
    env = os.environ if environ is None else environ
    if "password" in config:
        raise UsageError(
            "--rdzv-conf password=…: everybody on this machine could read it there; "
            "set PHALANX_ETCD_PASSWORD, or password_file=FILE"
        )
    addresses, schemes = _addresses(endpoint)
    names = (("cacert", "tls_ca"), ("cert", "tls_cert"), ("key", "tls_key"))
    files = [str(config.get(ours) or config.get(flag) or "") for ours, flag in names]
    protocol = str(config.get("protocol") or next(iter(schemes), "https" if any(files) else "http"))
    if protocol not in ("http", "https") or len(schemes | {protocol}) > 1:
        raise UsageError(f"--rdzv-conf protocol={protocol}: use http or https, the same for every endpoint")
    context = None
    if protocol == "https":
        from phalanx.store.embedded.tls import https_context

        context = https_context(*files)
    elif any(files):
        raise UsageError("--tls-ca, --tls-cert, --tls-key (cacert, cert, key): these are for protocol=https")
    user = str(config.get("user") or "")
    password = _password(user, str(config.get("password_file") or ""), env)
    return EtcdClient(addresses, context=context, user=user, password=password, **options)


def _addresses(endpoint: str) -> tuple[list[Address], set[str]]:
    from phalanx.membership.address import parse_rendezvous_endpoint

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
