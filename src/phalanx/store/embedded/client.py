"""A connection to the embedded store that heals: one socket, one thread, any number of callers.

    client = Client("host", 29400, token=find_token())
    client.connect(timeout=30)
    client.request(Put("key", b"value"))

The thread owns the socket (client_loop). Callers number their requests (client_session) and wait; when the
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

from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.core.rounds.store_commands import Command, Notice, Reply
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError
from phalanx.store.client import State, StoreClient, Waiting, words
from phalanx.store.embedded.answer_time import AnswerTime
from phalanx.store.embedded.client_session import Request, Session
from phalanx.store.net import wire
from phalanx.store.net.token import Token, key_of
from phalanx.store.net.wake_up import WakeUp

if TYPE_CHECKING:
    import ssl

    from phalanx.store.net.tls import Tls


class Client(StoreClient):
    """A session with an embedded store."""

    def __init__(
        self, host: str, port: int, *, token: Token | None = None, tls: Tls | None = None, **options: Any
    ) -> None:
        """`options`: those of StoreClient."""
        super().__init__(**options)
        self.host, self.port, self.token = host, port, token
        self.tls, self.sealing = tls, _sealing(tls)
        self.answer_time = AnswerTime(self.patience)
        self._talk = Session()
        self._sent: dict[int, float] = {}  # what has been asked on this connection, and when
        self._out: deque[bytes] = deque()
        self._online = False
        self.wakes = WakeUp()  # readable when the thread is to look at everything again

    @property
    def where(self) -> str:
        """The address, as people write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def close(self) -> None:
        """End the session's connection; requests that wait fail; idempotent."""
        super().close()
        self.wakes.close()

    def _ask(self, command: Command, waiting: Waiting) -> int:
        with self._lock:
            self._check_open(self._closing)
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

    def _end_thread(self) -> None:
        self.wake()

    def wake(self) -> None:
        """Make the thread look at everything again; from any thread."""
        self.wakes.ring()

    def _forget(self, number: int) -> None:
        super()._forget(number)
        self._sent.pop(number, None)
        self._talk.drop(number)

    # The thread

    def _stay_connected(self) -> None:
        from phalanx.store.embedded.client_loop import ClientLoop

        key_of(self.token)  # before the first attempt: it may take longer than a server waits
        ClientLoop(self).run()

    @property
    def closing(self) -> bool:
        return self._closing

    def failed(self, error: Exception, began: float, away_since: float) -> None:
        """A connection could not be opened: report it, or give up."""
        rejection = error if isinstance(error, StoreAuthError) else None
        if rejection is not None and self.welcome is None:
            self._give_up(rejection)
            return
        if not isinstance(error, OSError | wire.WireError | StoreAuthError):
            raise error
        refused = isinstance(error, ConnectionRefusedError)
        self.on_state(State("refused" if refused else "failed", began, words(error)))
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
            for request in self._talk.resume(reset=is_reset):
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
            waiting.answer(result)


def _sealing(tls: Tls | None) -> ssl.SSLContext | None:
    """What TLS needs, made here so that bad files are the caller's error and not a thread's."""
    if tls is None:
        return None
    from phalanx.store.net.tls import client_context

    return client_context(tls)
