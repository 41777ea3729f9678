"""A session with a service that is asked one request after the other, by a thread."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from typing import Any

from phalanx.core.rounds.store_commands import Command
from phalanx.store.client import State, StoreClient, Waiting

CLOSE_TIMEOUT = 2.0
"""Seconds for what was asked before `close`."""


class QueuedClient(StoreClient):
    """The commands that wait for the thread, and for how long the service has not answered."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of StoreClient."""
        super().__init__(**options)
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        self._number = 0
        self._closed = threading.Event()
        self._delivering = threading.RLock()  # callbacks come one at a time
        self._away_since: float | None = self.clock()

    def close(self) -> None:
        """Finish earlier requests, then end the thread; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._end_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT)
            self._abandon_call()
        super().close()

    def _end_thread(self) -> None:
        self._commands.put(None)

    @abstractmethod
    def _abandon_call(self) -> None:
        """End a call to the service that still waits, or leave it behind."""

    def _ask(self, command: Command, waiting: Waiting) -> int:
        with self._lock:
            self._check_open(self._closed.is_set())
            self._number += 1
            self._waiting[self._number] = waiting
            self._commands.put((self._number, command))
            return self._number

    def _came_back(self) -> None:
        """The service has answered."""
        if self._away_since is not None and self.welcome is not None:
            self._away_since = None
            self._connected.set()
            with self._delivering:
                self.on_state(State("connected", self.clock()))

    def _is_away_too_long(self, began: float, why: str, at_first: str) -> bool:
        """The service has not answered a request; `at_first`: why, while there was no answer at all yet."""
        if self.welcome is None:
            self.on_state(State("failed", began, at_first))
        if self._away_since is None:
            self._away_since = began
            with self._delivering:
                self.on_state(State("disconnected", began, why))
        return self.clock() - self._away_since >= self.grace
