"""A log shared by the nodes of a round: every node receives the same messages in the same order.

It lives in the round's store and uses torch's Store methods, plus a way to wait without blocking other users
of the store: `subscribe`, or a second connection (`beside`).

    count          the number of messages
    messages/K     message K; the sender increments the count, then writes
    values/NAME    a value that a node stores for others to fetch; no node is notified

A message costs one delivery to every node, so messages are for rare events. Repeated data (step rates) are
stored as values, which only the node that needs them fetches.

No call here makes the owner's thread wait for the store: one thread makes all requests in order, and
`receive` is called by the store's thread or by a listener thread. If the store fails, the broadcast stops
silently: the rendezvous detects that on its own, and a job does not fail because its nodes could not compare
their progress.

A node that increments the count and dies before it writes leaves a gap at which the others wait. Its death
also ends the round, and with it this log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from phalanx.errors import PhalanxError

_STORE_ERRORS = (PhalanxError, OSError, RuntimeError, ValueError)  # torch's stores raise RuntimeError
_CLOSE_TIMEOUT = 0.3
"""Seconds for the threads to end. One inside a request ends when the store answers or goes away."""


def supports_broadcast(store: Any) -> bool:
    """Whether one thread can wait on this store while others use it."""
    return hasattr(store, "subscribe") or hasattr(store, "beside")


class RoundBroadcast:
    """This node's end of the log of one round."""

    def __init__(self, store: Any, prefix: str, receive: Callable[[dict[str, Any]], None]) -> None:
        self._store, self._prefix, self._receive = store, prefix, receive
        self._next = 0  # the first message not delivered yet
        self._early: dict[int, dict[str, Any]] = {}  # messages that arrived before their predecessor
        self._lock = threading.Lock()
        self._closed = False
        self._unsubscribe: Callable[[], None] = lambda: None
        self._connections: list[Any] = []
        self._requests: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="phalanx-broadcast", daemon=True)]
        if not hasattr(store, "subscribe"):
            self._threads.append(threading.Thread(target=self._listen, name="phalanx-listener", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- called by the owner; never waits -----------------------------------------------------------

    def publish(self, message: dict[str, Any]) -> None:
        """Send a message to every node, including this one."""
        text = json.dumps(message).encode()

        def request(store: Any) -> None:
            number = store.add(self._prefix + "count", 1) - 1
            store.set(f"{self._prefix}messages/{number}", text)

        self._requests.put(request)

    def put(self, name: str, value: dict[str, Any]) -> None:
        """Store a value for others to fetch; it replaces an earlier one."""
        text = json.dumps(value).encode()
        self._requests.put(lambda store: store.set(f"{self._prefix}values/{name}", text))

    def fetch(
        self,
        names: list[str],
        timeout: float,
        then: Callable[[dict[str, dict[str, Any]]], None],
        enough: int | None = None,
    ) -> None:
        """Fetch the values of these names, waiting up to `timeout` seconds for missing ones.

        With `enough`, stop after that many. `then` runs in the request thread. Empty values count as missing.
        """

        def request(store: Any) -> None:
            end = time.monotonic() + timeout
            found = {}
            keys = [f"{self._prefix}values/{name}" for name in names]
            present = self._get_all(store, keys) if enough is None else []
            for number, name in enumerate(names):
                value = _decode(present[number]) if present else self._get(store, keys[number], end)
                if value:
                    found[name] = value
                if len(found) == enough:
                    break
            if not self._closed:
                then(found)

        self._requests.put(request)

    @property
    def alive(self) -> bool:
        """Whether requests may still be answered."""
        return self._threads[0].is_alive()

    def close(self) -> None:
        """Stop sending and receiving; idempotent, and does not wait for a store that does not answer."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, []
        self._unsubscribe()
        self._requests.put(None)
        for connection in connections:
            connection.close()
        end = time.monotonic() + _CLOSE_TIMEOUT
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    # -- the request thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = self._store
            if hasattr(store, "subscribe"):
                self._unsubscribe = store.subscribe(self._prefix + "messages/", self._arrived)
                if self._closed:
                    self._unsubscribe()
            else:
                store = self._connect()  # one that no barrier waits on
            while (request := self._requests.get()) is not None:
                request(store)
        except _STORE_ERRORS:
            pass

    @staticmethod
    def _get_all(store: Any, keys: list[str]) -> list[bytes]:
        """The values of all keys in one request, or none unless all exist."""
        if len(keys) < 2 or not hasattr(store, "multi_get") or not store.check(keys):
            return []
        return list(store.multi_get(keys))

    @staticmethod
    def _get(store: Any, key: str, end: float) -> dict[str, Any]:
        from datetime import timedelta

        left = end - time.monotonic()
        if not store.check([key]):
            if left <= 0:
                return {}
            try:
                store.wait([key], timedelta(seconds=left))
            except TimeoutError:
                return {}
        return _decode(store.get(key))

    def _connect(self) -> Any:
        """Another connection to the store; `close` closes it, which ends any wait on it."""
        connection = self._store.beside(lambda: self._closed)
        with self._lock:
            if not self._closed:
                self._connections.append(connection)
                return connection
        connection.close()
        raise OSError("closed while connecting")

    # -- receiving ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            store = self._connect()
            while not self._closed:
                key = f"{self._prefix}messages/{self._next}"
                store.wait([key], None)
                self._arrived(key, store.get(key))
        except _STORE_ERRORS:
            pass

    def _arrived(self, key: str, value: bytes) -> None:
        number = key.rpartition("/")[2]
        if not number.isdigit():
            return
        with self._lock:  # held during delivery, or two threads could change the order
            self._early[int(number)] = _decode(value)
            while self._next in self._early and not self._closed:
                self._receive(self._early.pop(self._next))
                self._next += 1


def _decode(value: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        record = json.loads(value)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
