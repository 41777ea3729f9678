"""A session with a store: commands that callers send or wait for, and watches.

What carries them is the subclass's: a connection to the embedded store (embedded/client.py), or requests to a
service that a thread makes one after the other (queued_client.py).

Callbacks run in the session's thread and must not block or wait for replies.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from phalanx.core.rounds.store_commands import Command, Entry, Get, Notice, Put, Reply, Unwatch, Watch
from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.net.wire import Welcome

Own = TypeVar("Own", bound="StoreClient")

OWN_WATCHES = 1_000_000  # numbers of `StoreClient.watch`; callers that number their own watches stay below


class State(NamedTuple):
    """Of the connection: reset, connected, disconnected, lost; of a try begun at `at`: refused, failed."""

    what: str
    at: float
    why: str = ""


class Waiting:
    """A caller, or a callback, that waits for a reply."""

    __slots__ = ("callback", "event", "reply")

    def __init__(self, callback: Callable[[Reply], None] | None) -> None:
        self.callback = callback
        self.event = threading.Event() if callback is None else None
        self.reply: Reply | None = None

    def answer(self, reply: Reply) -> None:
        """Let the caller go on."""
        self.reply = reply
        if self.callback is not None:
            self.callback(reply)
        elif self.event is not None:
            self.event.set()


class StoreClient(ABC):
    """A session with a store; one thread, any number of callers."""

    def __init__(
        self,
        *,
        grace: float = 60.0,
        patience: float = 5.0,
        on_state: Callable[[State], None] = lambda state: None,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Requests fail after `grace` seconds without the store."""
        self.grace, self.patience, self.clock = grace, patience, clock
        self.on_state, self.on_notice = on_state, on_notice
        self.session = os.urandom(12).hex()
        self.welcome: Welcome | None = None
        self.lost: StoreError | None = None
        self._lock = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._watches: dict[int, Callable[[Notice], None]] = {}
        self._lost_callbacks: dict[Callable[[], None], None] = {}
        self._next_watch = OWN_WATCHES
        self._connected = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    @abstractmethod
    def where(self) -> str:
        """The store, as people write its address."""

    @abstractmethod
    def _stay_connected(self) -> None:
        """What the thread does until the session is closed or lost."""

    @abstractmethod
    def _end_thread(self) -> None:
        """Make the thread end, without waiting for it."""

    @abstractmethod
    def _ask(self, command: Command, waiting: Waiting) -> int:
        """Pass a command to the thread; its number."""

    def connect(self: Own, timeout: float | None = None) -> Own:
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
        """End the session; requests that wait fail; idempotent."""
        if not self._closing:
            self._closing = True
            self._end_thread()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            self._give_up(StoreConnectionError(f"the connection to {self.where} was closed by this side"))

    def __enter__(self: Own) -> Own:
        return self.connect(self.grace)

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, command: Command, callback: Callable[[Reply], None]) -> int:
        """Ask without waiting; `callback` gets the reply in the client's thread, if there ever is one."""
        return self._ask(command, Waiting(callback))

    def request(self, command: Command, timeout: float | None = None) -> Reply:
        """Ask and wait; by default as long as the session lives."""
        waiting = Waiting(None)
        number = self._ask(command, waiting)
        assert waiting.event is not None
        if not waiting.event.wait(timeout):
            with self._lock:
                self._forget(number)
            raise StoreTimeoutError(f"the store at {self.where} did not answer within {timeout:g} s")
        if waiting.reply is None:
            raise self.lost or StoreConnectionError(f"no connection to the store at {self.where}")
        return waiting.reply

    def get(self, key: str) -> Entry | None:
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
        timeout: float | None = None,
    ) -> tuple[int, Reply]:
        """Watch, and wait until it stands: its number, and what was there."""
        with self._lock:
            self._next_watch += 1
            number = self._next_watch
            self._watches[number] = callback
        try:
            reply = self.request(Watch(number, key, prefix), timeout)
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

    def _check_open(self, closed: bool) -> None:
        if self.lost is not None or closed:
            raise self.lost or StoreConnectionError(f"the connection to {self.where} is closed")

    def _forget(self, number: int) -> None:
        """The caller does not wait any more."""
        self._waiting.pop(number, None)

    def _run(self) -> None:
        try:
            self._stay_connected()
        except Exception as error:  # noqa: BLE001 - a failing callback must not leave callers waiting for ever
            self._give_up(StoreError(f"the store's client failed: {type(error).__name__}: {error}"))

    def _unreachable(self, error: Exception) -> StoreConnectionError:
        return StoreConnectionError(
            f"the store at {self.where} could not be reached for {self.grace:g} s ({words(error)}): "
            "is it running, and is the address right?"
        )

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


def words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
