"""One watch on etcd: a thread that reads a stream as long as the watch exists.

The gateway cannot carry several watches on one connection, so each has its own. When the client's requests
move to another member, the streams are cut and opened there: so a member that no longer answers is found by
the requests, and no watch stays with it. Changes are delivered by revision: a new stream starts after the
last delivered change; if etcd has compacted that away, all current entries are delivered (`reset`).
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from phalanx.core.rounds.store_commands import Notice, Watch
from phalanx.errors import StoreAuthError
from phalanx.job.time_budgets import REDIAL
from phalanx.store.etcd import requests
from phalanx.store.etcd.http import CONNECTION_ERRORS, EtcdConnection, EtcdError, Members

MALFORMED = (LookupError, TypeError, ValueError, AttributeError)  # raised by JSON of a shape etcd never sends


class WatchStream(threading.Thread):
    """A watch; `stop` ends it, `follow` moves it to the client's current member."""

    def __init__(
        self,
        members: Members,
        watch: Watch,
        start: int,
        *,
        timeout: float,
        on_notice: Callable[[WatchStream, Notice], None],
        on_broken: Callable[[], None],
    ) -> None:
        super().__init__(name=f"phalanx-etcd-watch-{watch.watch}", daemon=True)
        self.watch, self._next, self._timeout = watch, start, timeout
        self._connection, self._on_notice, self._on_broken = EtcdConnection(members), on_notice, on_broken
        self._stopped = threading.Event()
        self._moved = threading.Event()

    def stop(self) -> None:
        """End the watch; does not wait."""
        self._stopped.set()
        self.follow()

    def follow(self) -> None:
        """Move to the member that the client uses now."""
        self._moved.set()
        self._connection.cut()

    def run(self) -> None:
        """Read, and reopen a stream that ended, until stopped."""
        pause = 0.0
        while not self._stopped.is_set():
            self._moved.clear()
            self._connection.reset()
            before = self._next
            try:
                self._read()
            except (EtcdError, StoreAuthError, *MALFORMED, *CONNECTION_ERRORS):
                pass  # the client's requests find the reason; the watch only retries
            if self._stopped.is_set():
                break
            self._on_broken()
            pause = 0.0 if self._next > before else min(REDIAL, pause * 2 or 0.05)
            self._moved.wait(pause)
        self._connection.close()

    def _read(self) -> None:
        request = requests.watch_request(self.watch, self._next)
        response = self._connection.stream("/v3/watch", request, self._timeout)
        while raw := self._next_line(response):
            message = msgspec.json.decode(raw).get("result", {})
            notice = requests.decode_notice(self.watch.watch, message)
            if notice is not None:
                self._deliver(notice)
            elif requests.compacted_to(message):
                self._connection.close()  # a stream's connection cannot be reused
                keys = requests.key_range(self.watch.key, self.watch.prefix)
                answer: dict[str, Any] = self._connection.call("/v3/kv/range", keys, self._timeout)
                self._deliver(requests.snapshot(self.watch.watch, answer))
                return
            elif message.get("canceled"):
                return

    def _next_line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (AttributeError, ValueError):
            return b""  # raised by http.client when another thread cuts the stream

    def _deliver(self, notice: Notice) -> None:
        self._next = notice.revision + 1
        if not self._stopped.is_set():
            self._on_notice(self, notice)
