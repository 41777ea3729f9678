"""A static round as its nodes hold it, and waiting for its end: one thread, one connection, one key."""

from __future__ import annotations

import json
import threading

from phalanx.errors import RendezvousStateError, StoreError
from phalanx.membership.handler import RendezvousInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.group_events import Event
    from phalanx.membership.handler import RendezvousStoreInfo
    from phalanx.store.torch.client import TorchStoreClient


class StaticInfo(RendezvousInfo):
    """A round with its number and the job's count of restarts, the same on every node."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        where: RendezvousStoreInfo | None,
        number: int,
        attempt: int,
    ) -> None:
        super().__init__(store, rank, world_size, where)
        self.round = number
        self.attempt = attempt


class StaticWatch:
    """A thread that waits until round `number` is called for, and tells of it, or of the loss of node 0."""

    def __init__(
        self, client: TorchStoreClient, number: int, rank: int, tell: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._client = client
        self._number = number
        self._rank = rank
        self._tell = tell
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="phalanx-static-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        key = f"round/{self._number}"
        try:
            self._client.wait([key], None)
            news = load(self._client.get(key))
            if news.get("over"):
                self._client.set(f"seen/{self._number}/{self._rank}", b"1")
        except (StoreError, RendezvousStateError):
            news = {"node": 0, "lost": True, "summary": "the agent of node 0 is gone"}
        if not self._ended:
            self._tell(self._number, news)

    def end(self) -> None:
        """Stop waiting; on return the thread is gone, unless it is the caller."""
        self._ended = True
        self._client.close()
        if self._thread is not threading.current_thread():
            self._thread.join()


def event_of(news: dict[str, Any], number: int, used: int) -> Event:
    """What news of another node mean for round `number`, of a job that has used `used` restarts."""
    from phalanx.core.group_events import MembershipChanged, PeerFailed

    node, attempt, final = str(news["node"]), int(news.get("attempt", 0)), bool(news.get("over"))
    if final or attempt > used:
        summary, delay = str(news["summary"]), float(news.get("delay", 0.0))
        return PeerFailed(node, number, attempt, summary, final=final, delay=delay)
    if news.get("left") or news.get("lost"):
        return MembershipChanged(lost=(f"node {node}",), round=number)
    return MembershipChanged(waiting=1, round=number)


def load(value: bytes) -> dict[str, Any]:
    """A record of ours; anything else at that place is somebody else's."""
    try:
        record = json.loads(value)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise RendezvousStateError(
            f"not a record of a Phalanx agent: {value[:60]!r}; is another job at this port?"
        )
    return record
