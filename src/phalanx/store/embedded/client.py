"""A connection to the embedded store that heals: one socket, one thread, any number of callers.

    client = Client("host", 29400, token=find_token())
    client.connect(timeout=30)
    client.request(Put("key", b"value"))

The thread owns the socket (client_loop). Callers number their requests (store.session) and wait; when the
connection breaks or is silent, what is unanswered is asked again on the next one, and watches go on where
they were. Only after `grace` seconds without a connection, a token that is refused at the first one, or a
store without a journal that was restarted do requests fail. Callbacks run in the client's thread and must not
block or wait for replies.

Once connected, a refusal is a failure like others: while the store restarts, another user of its machine may
have taken the port. A store with a journal that has lost some of its data (welcome.epoch has grown) or all of
it (welcome.store is another) is announced with the state `reset`, before `connected`, and every watch starts
again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from phalanx.core.rounds.store_commands import Command, Entry, Get, Notice, Put, Reply, Unwatch, Watch
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.embedded.answer_time import AnswerTime
from phalanx.store.embedded.client_session import Request, Session
from phalanx.store.net import wire
from phalanx.store.net.token import Token, key_of

if TYPE_CHECKING:
    import ssl

    from phalanx.store.net.tls import Tls

OWN_WATCHES = 1_000_000  # numbers of `Client.watch`; callers that number their own watches stay below


class State(NamedTuple):
    """Of the connection: reset, connected, disconnected, lost; of a try begun at `at`: refused, failed."""

    what: str
    at: float
    why: str = ""


class _Waiting:
    """A caller, or a callback, that waits for a reply."""

    __slots__ = ("callback", "event", "reply")

    def __init__(self, callback: Callable[[Reply], None] | None) -> None:
        self.callback = callback
        self.event = threading.Event() if callback is None else None
        self.reply: Reply | None = None


class Client:
    """A session with a store."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: Token | None = None,
        grace: float = 60.0,
        patience: float = 5.0,
        tls: Tls | None = None,
        on_state: Callable[[State], None] = lambda state: None,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.port, self.token = host, port, token
        self.grace, self.patience, self.clock = grace, patience, clock
        self.on_state, self.on_notice = on_state, on_notice
        self.tls, self.sealing = tls, _sealing(tls)
        self.session = os.urandom(12).hex()
        self.welcome: wire.Welcome | None = None
        self.answer_time = AnswerTime(patience)
        self.lost: StoreError | None = None
        self._talk = Session()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._sent: dict[int, float] = {}  # what has been asked on this connection, and when
        self._watches: dict[int, Callable[[Notice], None]] = {}
        self._lost_callbacks: dict[Callable[[], None], None] = {}
        self._next_watch = OWN_WATCHES
        self._out: deque[bytes] = deque()
        self._connected = threading.Event()
        self._online = self._closing = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread: threading.Thread | None = None

    @property
    def where(self) -> str:
        """The address, as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout: float | None = None) -> Client:
        """Start, and wait for the first connection; raises what is in the way of it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phalanx-store-client", daemon=True)
            self._thread.start()
        if not self._connected.wait(timeout):
            raise StoreTimeoutError(f"no connection to the store at {self.where} within {timeout:g} s")
        if self.lost is not None:
            raise self.lost
        return self

    def close(self) -> None:
        """End the session's connection; requests that wait fail; idempotent."""
        if not self._closing:
            self._closing = True
            self.wake()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            self._give_up(StoreConnectionError(f"the connection to {self.where} was closed by this side"))
            self._wake_in.close()
            self._wake_out.close()

    def __enter__(self) -> Client:
        return self.connect(self.grace)

    def __exit__(self, *_: object) -> None:
        self.close()

    # Asking

    def send(self, command: Command, callback: Callable[[Reply], None]) -> int:
        """Ask without waiting; `callback` gets the reply in the client's thread, if there ever is one."""
        return self._ask(command, _Waiting(callback))

    def request(self, command: Command, timeout: float | None = None) -> Reply:
        """Ask and wait; by default as long as the session lives."""
        waiting = _Waiting(None)
        number = self._ask(command, waiting)
        assert waiting.event is not None
        if not waiting.event.wait(timeout):
            with self._lock:
                self._waiting.pop(number, None)
                self._sent.pop(number, None)
                self._talk.drop(number)
            raise StoreTimeoutError(f"the store at {self.where} did not answer within {timeout:g} s")
        if waiting.reply is None:
            raise self.lost or StoreConnectionError(f"no connection to the store at {self.where}")
        return waiting.reply

    def get(self, key: str) -> Entry | None:
        """One key, or None."""
        entries = self.request(Get(key)).entries
        return entries[0] if entries else None

    def put(self, key: str, value: bytes, lease: int = 0) -> Reply:
        """Set one key."""
        return self.request(Put(key, value, lease))

    def watch(
        self,
        key: str,
        callback: Callable[[Notice], None],
        *,
        prefix: bool = False,
        start: int = 0,
        timeout: float | None = None,
    ) -> tuple[int, Reply]:
        """Watch, and wait until it stands: its number, and what was there (for start 0)."""
        with self._lock:
            self._next_watch += 1
            number = self._next_watch
            self._watches[number] = callback
        try:
            reply = self.request(Watch(number, key, prefix, start), timeout)
        except StoreTimeoutError:
            self.unwatch(number)
            raise
        if not reply.ok:
            self._watches.pop(number, None)
        return number, reply

    def unwatch(self, number: int) -> None:
        """No more of a watch; does not wait."""
        self._watches.pop(number, None)
        self.send(Unwatch(number), lambda reply: None)

    def when_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once the session is lost for good; call what is returned to take that back."""
        with self._lock:
            self._lost_callbacks[callback] = None
            lost = self.lost is not None
        if lost:
            callback()
        return lambda: self._lost_callbacks.pop(callback, None)

    def _ask(self, command: Command, waiting: _Waiting) -> int:
        with self._lock:
            if self.lost is not None or self._closing:
                raise self.lost or StoreConnectionError(f"the connection to {self.where} is closed")
            request = self._talk.ask(command)
            try:
                packed = wire.encode(*request)
            except StoreError:
                self._talk.drop(request.number)
                raise
            self._waiting[request.number] = waiting
            if self._online:
                self._out.append(packed)
                self._sent[request.number] = self.clock()
        self.wake()
        return request.number

    def wake(self) -> None:
        """Make the thread look at everything again; from any thread."""
        try:
            self._wake_out.send(b"x")
        except OSError:
            pass  # full: a wake-up is pending; closed: the thread has ended

    # The thread

    def _run(self) -> None:
        try:
            key_of(self.token)  # before the first attempt: it may take longer than a server waits
            self._stay_connected()
        except Exception as error:  # noqa: BLE001 - a failing callback must not leave callers waiting for ever
            self._give_up(StoreError(f"the store's client failed: {type(error).__name__}: {error}"))

    def _stay_connected(self) -> None:
        from phalanx.store.embedded.client_loop import ClientLoop

        ClientLoop(self).run()

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def wakes(self) -> socket.socket:
        """Readable when the thread is to look at everything again."""
        return self._wake_in

    def failed(self, error: Exception, began: float, away_since: float) -> None:
        """A connection could not be opened: report it, or give up."""
        rejection = error if isinstance(error, StoreAuthError) else None
        if rejection is not None and self.welcome is None:
            self._give_up(rejection)
            return
        if not isinstance(error, OSError | wire.WireError | StoreAuthError):
            raise error
        refused = isinstance(error, ConnectionRefusedError)
        self.on_state(State("refused" if refused else "failed", began, _words(error)))
        if self.clock() - away_since >= self.grace:
            self._give_up(rejection or self._unreachable(error))

    def welcomed(self, welcome: wire.Welcome) -> None:
        """A new connection is the session's."""
        before = self.welcome
        another = before is not None and welcome.store != before.store
        if before is not None and another and not (before.durable and welcome.durable):
            self._give_up(StoreConnectionError(
                f"the store at {self.where} was restarted and has lost its data: start it with a journal "
                "(phalanx store --journal FILE) to let jobs outlive it"
            ))  # fmt: skip
            return
        self.welcome = welcome
        self._come_online(another or (before is not None and welcome.epoch != before.epoch))

    def hung_up(self, *, offline: bool) -> None:
        """A connection of the session has ended, so that the store may count the session's last seconds."""
        if offline:
            self._online = False
        if not self._closing:
            self.on_state(State("disconnected", self.clock()))

    def heard_again(self) -> None:
        """A connection that was silent is not any more."""
        self.on_state(State("connected", self.clock()))

    def to_send(self) -> list[bytes]:
        """The frames that callers have asked to send since the last time."""
        found = []
        while self._out:
            found.append(self._out.popleft())
        return found

    def asked_at(self) -> float | None:
        """When the oldest request without an answer was sent on this connection."""
        with self._lock:
            return next(iter(self._sent.values()), None)

    def _unreachable(self, error: Exception) -> StoreConnectionError:
        return StoreConnectionError(
            f"the store at {self.where} could not be reached for {self.grace:g} s ({_words(error)}): "
            "is it running, and is the address right?"
        )

    def drain_wakes(self) -> None:
        """Take notice of what woke the thread."""
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            pass

    def hello(self) -> wire.Hello:
        """The first frame of a connection."""
        if self.welcome is None:
            return wire.Hello(self.session)
        return wire.Hello(self.session, self.welcome.store, self.welcome.incarnation, self._talk.revision)

    def _come_online(self, is_reset: bool) -> None:
        assert self.welcome is not None
        with self._lock:
            self._out.clear()
            self._sent.clear()
            now = self.clock()
            self._talk.revision = self.welcome.revision
            for request in self._talk.resume(anew=is_reset):
                self._queue(request, now)
            self._online = True
        self._connected.set()
        if is_reset:
            why = (
                f"the store at {self.where} has lost changes that it had confirmed (an old or a new journal?)"
            )
            self.on_state(State("reset", now, why))
        self.on_state(State("connected", now))

    def _queue(self, request: Request, now: float) -> None:
        self._out.append(wire.encode(*request))
        self._sent[request.number] = now

    def take_in(self, frame: wire.Frame) -> None:
        """Hand a frame of the store to whom it is for; WireError if it is for no client."""
        body = frame.body
        if isinstance(body, Notice):
            with self._lock:
                notice = self._talk.noticed(body)
            if notice is not None:
                self._watches.get(notice.watch, self.on_notice)(notice)
            return
        if not isinstance(body, Reply):
            raise wire.WireError(f"{type(body).__name__} is not for a client")
        with self._lock:
            now = self.clock()
            if (sent := self._sent.pop(frame.number, None)) is not None:
                self.answer_time.answered(now - sent)
            requests, result = self._talk.answered(frame.number, body)
            waiting = self._waiting.pop(frame.number, None)
            for request in requests:
                self._queue(request, now)
        if isinstance(result, Notice):
            self._watches.get(result.watch, self.on_notice)(result)
        elif result is not None and waiting is not None:
            waiting.reply = result
            if waiting.callback is not None:
                waiting.callback(result)
            elif waiting.event is not None:
                waiting.event.set()

    def _give_up(self, error: StoreError) -> None:
        with self._lock:
            first, self.lost = self.lost is None, self.lost or error
            waiting = list(self._waiting.values())
            self._waiting.clear()
            callbacks = list(self._lost_callbacks)
        for callback in callbacks:
            callback()
        for one in waiting:
            if one.event is not None:
                one.event.set()
        self._connected.set()
        if first and not self._closing:
            self.on_state(State("lost", self.clock(), str(error)))


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _sealing(tls: Tls | None) -> ssl.SSLContext | None:
    """What TLS needs, made here so that bad files are the caller's error and not a thread's."""
    if tls is None:
        return None
    from phalanx.store.net.tls import client_context

    return client_context(tls)
