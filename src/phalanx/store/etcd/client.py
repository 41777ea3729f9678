"""etcd as the store: the interface of the embedded store's client over etcd's v3 API.

    client = etcd_client_from("a:2379,b:2379,c:2379", {"protocol": "https", "cacert": "ca.pem"})
    client.connect(timeout=30)

One thread sends the requests in order over HTTP to etcd's JSON gateway; each watch has its own thread. When
a member fails, is too slow or has no leader, requests and watches move to the next one; a request whose
answer was lost is not carried out twice (requests.py). Requests fail only after `grace` seconds without an
answer from any member, or of an etcd that is out of space: writes then wait in order, and only the requests
that keep leases alive overtake them.

Differences from the embedded store: etcd knows leases, not connections. A dead process is noticed when its
lease expires, not when its socket closes, so `welcome.linger` is infinite, and a broken connection shortens
no lease. Leases last whole seconds, at least two. A plain `Delete` whose answer was lost is repeated; its
count may then be that of the second try.

Invariant: callbacks come one at a time, and the reply to a watch before its changes.
"""

from __future__ import annotations

import queue
import ssl
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from phalanx.core.rounds.store_commands import (
    Add,
    Command,
    Get,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Txn,
    Unwatch,
    Watch,
)
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, UsageError
from phalanx.job.environment import ETCD_PASSWORD, ETCD_PORT, variables
from phalanx.log import warn
from phalanx.store.client import Waiting, words
from phalanx.store.etcd import requests
from phalanx.store.etcd.http import CONNECTION_ERRORS, Address, EtcdConnection, EtcdError, Members
from phalanx.store.etcd.watch import WatchStream
from phalanx.store.net import wire
from phalanx.store.queued_client import QueuedClient

_MAX_REQUEST_TIMEOUT = 10.0  # a request's timeout grows up to this
_FULL_PAUSE = 0.2  # between two tries of a write, while etcd is out of space
_WRITES = ("/v3/kv/txn", "/v3/kv/put", "/v3/lease/grant")
_LINEARIZABLE = ("/v3/kv/range", "/v3/kv/txn", "/v3/kv/deleterange")  # their revision is the majority's


class _Abandoned(Exception):
    """The caller no longer waits for this answer, or the client is closing."""


class EtcdClient(QueuedClient):
    """A session with an etcd cluster."""

    def __init__(
        self,
        addresses: list[Address],
        *,
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        patience: float = 2.0,
        **options: Any,
    ) -> None:
        """`options`: those of StoreClient."""
        super().__init__(patience=patience, **options)
        self.host, self.port = addresses[0].host, addresses[0].port
        self._members = Members(addresses, context, user, password)
        self._connection = EtcdConnection(self._members)
        self._current = 0  # the request that is being carried out
        self._streams: dict[int, WatchStream] = {}
        self._ended: list[WatchStream] = []
        self._full_since: float | None = None  # etcd has refused writes since then
        self._overtaken: deque[tuple[int, Command] | None] = deque()  # commands that wait behind a write
        self._requests = requests.EtcdRequests(self.session, self._call)

    @property
    def where(self) -> str:
        """The addresses as text."""
        return str(self._members)

    def close(self) -> None:
        """Finish earlier requests, then end watches and threads and delete the session's key; idempotent."""
        super().close()
        self._stop_streams()
        for stream in [*self._streams.values(), *self._ended]:
            if stream is not threading.current_thread():
                stream.join()

    def _abandon_call(self) -> None:
        self._connection.cut()

    def _ask(self, command: Command, waiting: Waiting) -> int:
        _check(command)
        return super()._ask(command, waiting)

    def _stay_connected(self) -> None:
        try:
            self._requests.range(requests.key_range(self._requests.session_entry.key, False))  # first contact
            while (item := self._next_command()) is not None:
                self._answer(*item)
        except _Abandoned:
            pass
        except EtcdError as error:
            self._give_up(self._members.explain(error))
        except StoreError as error:
            self._give_up(error)
        finally:
            self._stop_streams()
            self._delete_session_key()
            self._connection.close()

    def _next_command(self) -> tuple[int, Command] | None:
        return self._overtaken.popleft() if self._overtaken else self._commands.get()

    def _answer(self, number: int, command: Command) -> None:
        if number not in self._waiting:
            return
        self._current = number
        try:
            if isinstance(command, Unwatch | Watch):
                self._end_watch(command.watch)
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
                waiting.answer(reply)
        if isinstance(command, Watch) and reply.ok:
            self._start_watch(command, command.start or reply.revision + 1)

    # -- watches ------------------------------------------------------------------------------------

    def _start_watch(self, command: Watch, start: int) -> None:
        stream = WatchStream(
            self._members,
            command,
            start,
            timeout=self.patience,
            on_notice=self._deliver,
            on_broken=self._check_member,
        )
        with self._lock:
            if self._closed.is_set():
                return
            self._streams[command.watch] = stream
            stream.start()

    def _end_watch(self, number: int) -> None:
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

    def _deliver(self, stream: WatchStream, notice: Notice) -> None:
        with self._delivering:
            if self._streams.get(notice.watch) is stream and self.lost is None:
                try:
                    self._watches.get(notice.watch, self.on_notice)(notice)
                except Exception as error:  # noqa: BLE001 - as in Client: no caller may wait forever
                    self._give_up(StoreError(f"the store's client failed: {type(error).__name__}: {error}"))

    def _check_member(self) -> None:
        """A stream broke: send a request, which detects a member that is gone."""
        try:
            self.send(Get(self._requests.session_entry.key), lambda reply: None)
        except StoreError:
            pass  # already known

    # -- requests -----------------------------------------------------------------------------------

    def _call(self, path: str, body: requests.Json) -> requests.Json:
        """Try one member after the other until one answers or the grace period is over."""
        session, members = self._requests, len(self._members.addresses)
        writes = path in _WRITES
        session.tries, pause = 0, 0.05
        while True:
            abandoned = self._current and self._current not in self._waiting
            if abandoned or self._closing or (self._closed.is_set() and session.tries):
                raise _Abandoned
            began = self.clock()
            timeout = min(_MAX_REQUEST_TIMEOUT, self.patience * 2 ** (session.tries // members))
            session.tries += 1
            try:
                answer = self._connection.call(path, body, timeout)
            except EtcdError as error:
                if error.out_of_space:
                    self._wait_for_space(error)
                    continue
                if not error.temporary:
                    raise
                problem: Exception = error
            except CONNECTION_ERRORS as error:
                problem = _explain(error, self.where)
            else:
                self._answered(path, answer)
                if writes:
                    self._full_since = None
                return answer
            if self._members.move_on(self._connection.member):
                with self._lock:
                    streams = list(self._streams.values())
                for stream in streams:
                    stream.follow()
            if session.tries >= members and self._is_away_too_long(began, str(problem), words(problem)):
                raise self._unreachable(problem)
            if session.tries % members == 0:
                self._closed.wait(pause)
                pause = min(1.0, pause * 2)

    def _wait_for_space(self, error: EtcdError) -> None:
        """Before the next try of a write; raises if the grace period is over. Leases stay alive meanwhile."""
        now = self.clock()
        if self._full_since is None:
            self._full_since = now
            warn(f"{self._members.explain(error)}; writes wait for it, at most {self.grace:g} s")
        if now - self._full_since >= self.grace:
            raise error
        until = now + _FULL_PAUSE
        writing, tries = self._current, self._requests.tries
        while not self._closed.is_set() and (left := until - self.clock()) > 0:
            try:
                item = self._commands.get(timeout=left)
            except queue.Empty:
                break
            if item is not None and isinstance(item[1], KeepAlive):
                self._answer(*item)
            else:
                self._overtaken.append(item)
                if item is None:
                    break
        self._current, self._requests.tries = writing, tries

    def _answered(self, path: str, answer: requests.Json) -> None:
        cluster = str(answer.get("header", {}).get("cluster_id", ""))
        if self.welcome is None:
            self.welcome = wire.Welcome(cluster, durable=True, linger=float("inf"))
        elif cluster and cluster != self.welcome.store:
            raise StoreConnectionError(
                f"etcd at {self.where} is another cluster than before (its data was recreated): "
                "the state of this job is lost"
            )
        if path in _LINEARIZABLE:
            newest, self._requests.newest = self._requests.newest, requests.revision_of(answer)
            if self._requests.newest < newest:
                raise StoreConnectionError(
                    f"etcd at {self.where} has gone back from revision {newest} to "
                    f"{self._requests.newest}: it was restored from a backup, the state of this job is lost"
                )
        self._came_back()

    def _delete_session_key(self) -> None:
        lease = self._requests.session_entry.lease
        if lease and self._away_since is None:
            try:
                self._connection.call("/v3/lease/revoke", {"ID": str(lease)}, 0.5)
            except (StoreError, *CONNECTION_ERRORS):
                pass  # the key expires with its lease


def _explain(error: Exception, where: str) -> Exception:
    """A readable error; raises permanent ones, such as a certificate that is not trusted."""
    import ssl

    if not isinstance(error, OSError):  # http.client's message would contain the received bytes
        return StoreConnectionError("the server there is not etcd")
    if isinstance(error, ssl.SSLCertVerificationError):
        raise StoreAuthError(
            f"etcd at {where}: its certificate is not trusted ({error.verify_message}): "
            "check cacert in --rdzv-conf, and that the certificate names this host"
        ) from None
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        raise StoreAuthError(
            f"etcd at {where} refused the TLS connection ({error.reason}): "
            "set cert=FILE and key=FILE in --rdzv-conf if it requires client certificates"
        ) from None
    return error


def _check(command: Command) -> None:
    """Refuse now what etcd would refuse later, for all requests behind it."""
    puts = command.puts if isinstance(command, Txn) else (command,) if isinstance(command, Put | Add) else ()
    for put in puts:
        if not put.key:
            raise StoreError(f"{type(command).__name__}: etcd has no empty keys")
    names = [one.key for one in (*command.when, *puts)] if isinstance(command, Txn) else []
    for name in (*names, getattr(command, "key", "")):
        requests.encode_key(name)


def etcd_client_from(
    endpoint: str,
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> EtcdClient:
    """The client for `--rdzv-backend etcd`; `endpoint` is one HOST:PORT or several, separated by commas.

    `config` (--rdzv-conf): protocol http|https, cacert, cert, key (or, like the options, tls_ca, tls_cert,
    tls_key), user, password_file. The password comes from PHALANX_ETCD_PASSWORD or that file. `options` are
    those of EtcdClient.
    """
    env = variables() if environ is None else environ
    if "password" in config:
        raise UsageError(
            "--rdzv-conf password=…: every user of this machine could read it there; "
            "set PHALANX_ETCD_PASSWORD or password_file=FILE"
        )
    addresses, schemes = _addresses(endpoint)
    names = (("cacert", "tls_ca"), ("cert", "tls_cert"), ("key", "tls_key"))
    files = [str(config.get(ours) or config.get(flag) or "") for ours, flag in names]
    protocol = str(config.get("protocol") or next(iter(schemes), "https" if any(files) else "http"))
    if protocol not in ("http", "https") or len(schemes | {protocol}) > 1:
        raise UsageError(f"--rdzv-conf protocol={protocol}: use http or https, the same for every endpoint")
    context = None
    if protocol == "https":
        from phalanx.store.net.tls import https_context

        context = https_context(*files)
    elif any(files):
        raise UsageError("--tls-ca, --tls-cert, --tls-key (cacert, cert, key) need protocol=https")
    user = str(config.get("user") or "")
    password = _password(user, str(config.get("password_file") or ""), env)
    return EtcdClient(addresses, context=context, user=user, password=password, **options)


def _addresses(endpoint: str) -> tuple[list[Address], set[str]]:
    from phalanx.job.address import parse_rendezvous_endpoint

    addresses, schemes = [], set()
    for part in filter(None, (part.strip() for part in endpoint.split(","))):
        scheme, mark, rest = part.partition("://")
        if mark:
            schemes.add(scheme)
        place = (rest if mark else part).rstrip("/")
        try:
            addresses.append(Address(*parse_rendezvous_endpoint(place, ETCD_PORT)))
        except ValueError as error:
            raise UsageError(str(error)) from None
    if not addresses:
        raise UsageError("--rdzv-endpoint: give at least one HOST:PORT of etcd")
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
    password = environ.get(ETCD_PASSWORD, "")
    if not password:
        raise UsageError(f"etcd user {user!r} has no password: set PHALANX_ETCD_PASSWORD or password_file=")
    return password
