"""One watch on etcd: a thread that reads a stream for as long as the watch stands.

The gateway has no way to put several watches on one connection, so each has its own. It follows the
client: when requests move to another member, the streams are cut and opened there, so that a member
that has fallen silent is found by the requests and never trusted by a watch. Changes are told by
revision: wherever a stream ends, the next one begins after the last change that was told; where
etcd has compacted that away, everything that is there is told again (`reset`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.core.store_commands import Notice, Watch
from phalanx.errors import StoreAuthError
from phalanx.store.etcd import translation as words
from phalanx.store.etcd.http import EtcdConnection, EtcdError, Failure, Members

if TYPE_CHECKING:
    import http.client

LONGEST_PAUSE = 1.0
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)  # JSON of a shape that etcd never sends


class Stream(threading.Thread):
    """A watch; `stop` ends it, `follow` makes it go where the client has gone."""

    def __init__(
        self,
        members: Members,
        watch: Watch,
        start: int,
        *,
        patience: float,
        tell: Callable[[Stream, Notice], None],
        doubt: Callable[[], None],
    ) -> None:
        """`tell` takes what was seen; `doubt` is called when the stream broke and may not come back."""
        super().__init__(name=f"phalanx-etcd-watch-{watch.watch}", daemon=True)
        self.watch, self._next, self._patience = watch, start, patience
        self._line, self._tell, self._doubt = EtcdConnection(members), tell, doubt
        self._over = threading.Event()
        self._moved = threading.Event()

    def stop(self) -> None:
        """No more of it; does not wait."""
        self._over.set()
        self._moved.set()
        self._line.cut()

    def follow(self) -> None:
        """The client uses another member now."""
        self._moved.set()
        self._line.cut()

    def run(self) -> None:
        """Read, and open again what ended, until stopped."""
        pause = 0.0
        while not self._over.is_set():
            self._moved.clear()
            self._line.mend()
            before = self._next
            try:
                self._read()
            except (EtcdError, StoreAuthError, *MALFORMED, *Failure):
                pass  # whatever it was: the requests find out what is wrong, this waits for it to pass
            if self._over.is_set():
                break
            self._doubt()
            pause = 0.0 if self._next > before else min(LONGEST_PAUSE, pause * 2 or 0.05)
            self._moved.wait(pause)
        self._line.hang_up()

    def _read(self) -> None:
        request = words.watch_request(self.watch, self._next)
        response = self._line.stream("/v3/watch", request, self._patience)
        while raw := self._next_line(response):
            message = msgspec.json.decode(raw).get("result", {})
            told = words.notice(self.watch.watch, message)
            if told is not None:
                self._pass_on(told)
            elif words.compacted_to(message):
                self._start_over()
                return
            elif message.get("canceled"):
                return

    def _next_line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (AttributeError, ValueError):
            return b""  # http.client's way of saying that the stream was cut under it

    def _start_over(self) -> None:
        self._line.hang_up()  # the stream's connection is of no use for anything else
        where = words.where(self.watch.key, self.watch.prefix)
        answer: dict[str, Any] = self._line.call("/v3/kv/range", where, self._patience)
        self._pass_on(words.snapshot(self.watch.watch, answer))

    def _pass_on(self, told: Notice) -> None:
        self._next = told.revision + 1
        if not self._over.is_set():
            self._tell(self, told)
