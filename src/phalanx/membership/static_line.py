"""The line that says whom the nodes of a static round wait for, and the waits that keep it true.

Node 0 sees who has joined and writes it down (`waiting/N`) for the others. Only while a round is not complete
does anybody look again.
"""

from __future__ import annotations

import threading
import time
from itertools import chain, repeat

from phalanx.errors import StoreTimeoutError
from phalanx.membership.static_watch import load
from phalanx.membership.waiting_line import SHOW_AFTER, SHOW_EVERY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.store.torch.client import TorchStoreClient

_FIRST_LOOKS, _LOOK = (0.4, 0.4), 2.0  # the first ones in time for the first line; then many nodes may wait


class WaitingLine:
    """What one join waits for; `show` gets it now and then from a thread of our own, until `end`."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        self.text, self._deadline, self._show = "", 0.0, show
        self._over, self._news = False, threading.Event()
        self._thread: threading.Thread | None = None
        if show is not None:
            self._thread = threading.Thread(target=self._run, name="phalanx-waiting-line", daemon=True)
            self._thread.start()

    def say(self, text: str, deadline: float) -> None:
        """Another wait begins, which ends by then."""
        self.text, self._deadline = text, deadline
        self._news.set()

    @property
    def words(self) -> str:
        """With the seconds that are left."""
        return f"{self.text}, {self.left:.0f} s left"

    @property
    def left(self) -> float:
        """Seconds until the join gives up."""
        return max(0.0, self._deadline - time.monotonic())

    def _run(self) -> None:
        pause = SHOW_AFTER
        while True:
            another = self._news.wait(pause)
            if self._over:
                return
            if another:
                self._news.clear()
                pause = SHOW_AFTER
            elif self._show is not None:
                self._show(self.words)
                pause = SHOW_EVERY

    def end(self) -> None:
        """No more of it; on return nothing more is shown."""
        self._over = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()


def wait_for_joins(client: TorchStoreClient, number: int, nodes: int, line: WaitingLine) -> list[bytes]:
    """Node 0: every node's join of this round; StoreTimeoutError when the time is up."""
    keys = [f"join/{number}/{node}" for node in range(nodes)]
    for pause in chain(_FIRST_LOOKS, repeat(_LOOK)):
        try:
            client.wait(keys, min(pause, line.left))
            return client.multi_get(keys)
        except StoreTimeoutError:
            if not line.left:
                raise
        try:
            line.text = _who_is_missing(client, keys) or line.text
            client.set(f"waiting/{number}", line.text)
        except StoreTimeoutError:
            pass  # one of them has gone again in this very moment
    raise AssertionError("unreachable")


def wait_for_round(client: TorchStoreClient, number: int, line: WaitingLine) -> None:
    """The others: until node 0 has announced the round, with its words for the wait."""
    for pause in chain(_FIRST_LOOKS, repeat(_LOOK)):
        try:
            client.wait([f"formed/{number}"], min(pause, line.left))
            return
        except StoreTimeoutError:
            if not line.left:
                raise
        if client.check([f"waiting/{number}"]):
            line.text = client.get(f"waiting/{number}").decode(errors="replace")


def _who_is_missing(client: TorchStoreClient, keys: list[str]) -> str:
    from phalanx.core.failures import ranks_text
    from phalanx.core.rounds import listing

    missing = [node for node, key in enumerate(keys) if not client.check([key])]
    if not missing:
        return ""
    hosts = [str(load(client.get(key)).get("host")) for node, key in enumerate(keys) if node not in missing]
    names = f" ({listing(hosts)})" if hosts else ""
    numbers = ranks_text(missing).replace("rank", "node")
    return f"{len(hosts)} of {len(keys)} nodes here{names}, waiting for {numbers}"
