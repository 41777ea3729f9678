"""A log that the nodes of a round share beside the rendezvous: all hear the same news in the same order.

It stands in the round's store, and needs no more of it than torch's Store methods and a way to wait beside
others: `subscribe`, or another connection (`beside`).

    count         how many pieces of news there are
    news/K        the K-th; who has news counts up and writes
    kept/NAME     what a node keeps there to be fetched; nobody is told

News cost a message to every node, so they are for what happens once. What is said again and again is kept,
and fetched by the one who needs it.

Nothing here makes the owner's thread wait for the store: what is asked is done by a thread of its own, one
thing after the other, and `hear` is called by the store's or by a listener's. A store that fails ends the
talk in silence: the rendezvous finds out for itself, and a job does not end because its nodes could not
compare notes.

A node that counts up and dies before it writes leaves a gap in which the others would wait. It is lost with
that, which is the end of the round and so of this log.
"""

from __future__ import annotations

import json
import threading
import time
from queue import SimpleQueue

from phalanx.errors import PhalanxError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_TROUBLE = (PhalanxError, OSError, RuntimeError, ValueError)
"""What a store may raise; torch's own raises RuntimeErrors."""
_CLOSE_PATIENCE = 0.3
"""For our threads to end. One that is in the middle of a request ends with its answer, or with the store."""


def can_carry(store: Any) -> bool:
    """Whether somebody can wait at this store while others use it."""
    return hasattr(store, "subscribe") or hasattr(store, "beside")


class RoundBroadcast:
    """This node's end of the log of one round."""

    def __init__(self, store: Any, prefix: str, hear: Callable[[dict[str, Any]], None]) -> None:
        self._store, self._prefix, self._hear = store, prefix, hear
        self._next = 0  # the first news that we have not heard
        self._early: dict[int, dict[str, Any]] = {}  # written before one that was counted before
        self._lock = threading.Lock()
        self._closed = False
        self._end: Callable[[], None] = lambda: None
        self._own: list[Any] = []  # connections that are ours to close
        self._errands: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="phalanx-bulletin", daemon=True)]
        if not hasattr(store, "subscribe"):
            self._threads.append(threading.Thread(target=self._listen, name="phalanx-news", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- what the owner asks; none of it waits ------------------------------------------------------

    def tell(self, news: dict[str, Any]) -> None:
        """To every node, this one too."""
        text = json.dumps(news).encode()

        def errand(store: Any) -> None:
            number = store.add(self._prefix + "count", 1) - 1
            store.set(f"{self._prefix}news/{number}", text)

        self._errands.put(errand)

    def keep(self, name: str, what: dict[str, Any]) -> None:
        """For whoever fetches it; the last word counts."""
        text = json.dumps(what).encode()
        self._errands.put(lambda store: store.set(f"{self._prefix}kept/{name}", text))

    def fetch(
        self,
        names: list[str],
        patience: float,
        then: Callable[[dict[str, dict[str, Any]]], None],
        enough: int | None = None,
    ) -> None:
        """What is kept under these names, or will be within `patience` seconds; or the first `enough`.

        `then` is called in our thread. What is empty counts as not there.
        """

        def errand(store: Any) -> None:
            end = time.monotonic() + patience
            found = {}
            keys = [f"{self._prefix}kept/{name}" for name in names]
            there = self._all_of(store, keys) if enough is None else []
            for number, name in enumerate(names):
                value = _read(there[number]) if there else self._get(store, keys[number], end)
                if value:
                    found[name] = value
                if len(found) == enough:
                    break
            if not self._closed:
                then(found)

        self._errands.put(errand)

    @property
    def alive(self) -> bool:
        """Whether what is asked may still be answered."""
        return self._threads[0].is_alive()

    def close(self) -> None:
        """Hear and tell no more. Idempotent, and does not wait for a store that does not answer."""
        with self._lock:
            self._closed = True
            own, self._own = self._own, []
        self._end()
        self._errands.put(None)
        for connection in own:
            connection.close()
        end = time.monotonic() + _CLOSE_PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    # -- our thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = self._store
            if hasattr(store, "subscribe"):
                self._end = store.subscribe(self._prefix + "news/", self._heard)
                if self._closed:
                    self._end()
            else:
                store = self._connection()  # one that no barrier waits on
            while (errand := self._errands.get()) is not None:
                errand(store)
        except _TROUBLE:
            pass

    @staticmethod
    def _all_of(store: Any, keys: list[str]) -> list[bytes]:
        """The values of all keys, asked for at once, where all are there; else none."""
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
        return _read(store.get(key))

    def _connection(self) -> Any:
        """A connection of our own, which `close` ends, and with it whatever waits on it."""
        made = self._store.beside(lambda: self._closed)
        with self._lock:
            if not self._closed:
                self._own.append(made)
                return made
        made.close()
        raise OSError("closed meanwhile")

    # -- hearing ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            store = self._connection()
            while not self._closed:
                key = f"{self._prefix}news/{self._next}"
                store.wait([key], None)
                self._heard(key, store.get(key))
        except _TROUBLE:
            pass

    def _heard(self, key: str, value: bytes) -> None:
        number = key.rpartition("/")[2]
        if not number.isdigit():
            return
        with self._lock:  # also while it is told, or two threads could change the order; it only posts
            self._early[int(number)] = _read(value)
            while self._next in self._early and not self._closed:
                self._hear(self._early.pop(self._next))
                self._next += 1


def _read(value: bytes) -> dict[str, Any]:
    """A record of ours; anything else is as good as an empty one."""
    try:
        record = json.loads(value)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
