"""Messages that all nodes of a round receive in the same order, over both kinds of stores."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.agent.supervision.round_broadcast import RoundBroadcast, supports_broadcast
from phalanx.cluster.torch_store_adapter import StoreFacade
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.conftest import HUNG


class Member:
    """A node with its own connection."""

    def __init__(self, store: Any) -> None:
        self.received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.broadcast = RoundBroadcast(store, "p/", self.received.put)

    def next(self) -> dict[str, Any]:
        return self.received.get(timeout=HUNG)

    def fetch(self, *names: str, timeout: float = 0.0, enough: int | None = None) -> dict[str, Any]:
        found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.broadcast.fetch(list(names), timeout, found.put, enough)
        return found.get(timeout=HUNG)


@pytest.fixture(params=["elastic", "static"])
def members(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    if request.param == "elastic":
        server: Any = Server()
        server.start()
        clients: list[Any] = [Client(*server.address).connect(HUNG) for _ in range(3)]
        stores: list[Any] = [StoreFacade(client, "round/") for client in clients]
    else:
        server = TorchStoreServer()
        server.start()
        clients = stores = [TorchStoreClient("127.0.0.1", server.port, prefix="round/") for _ in range(3)]
    made = [Member(store) for store in stores]
    try:
        yield made
    finally:
        for member in made:
            member.broadcast.close()
            member.broadcast.close()  # idempotent
        for client in clients:
            client.close()
        server.close()


def test_all_nodes_receive_all_messages_in_the_same_order(members: list[Member]) -> None:
    for turn in range(20):
        for node, member in enumerate(members):
            member.broadcast.publish({"node": node, "turn": turn})
    received = [[member.next() for _ in range(60)] for member in members]
    assert received[0] == received[1] == received[2]
    assert sorted((one["node"], one["turn"]) for one in received[0]) == [
        (n, t) for n in range(3) for t in range(20)
    ]
    for node in range(3):
        assert [one["turn"] for one in received[0] if one["node"] == node] == list(range(20))


def test_a_late_node_receives_earlier_messages(members: list[Member]) -> None:
    members[0].broadcast.publish({"a": 1})
    assert members[1].next() == {"a": 1}
    late = Member(members[2].broadcast._store)
    try:
        assert late.next() == {"a": 1}
    finally:
        late.broadcast.close()


def test_values_are_fetched_without_a_message(members: list[Member]) -> None:
    members[0].broadcast.put("rates/0", {"rate": 1})
    members[0].broadcast.put("rates/0", {"rate": 2})
    members[0].broadcast.put("rates/1", {})
    assert members[0].fetch("rates/0", "rates/1", "rates/2") == {
        "rates/0": {"rate": 2}
    }  # an empty one counts as missing
    assert members[1].fetch("rates/0", "rates/2", enough=1) == {"rates/0": {"rate": 2}}
    assert members[1].received.empty()


def test_fetch_waits_for_missing_values_but_not_forever(members: list[Member]) -> None:
    members[0].broadcast.put("a", {"x": 1})
    found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    members[1].broadcast.fetch(["a", "b"], HUNG, found.put)
    members[2].broadcast.put("b", {"x": 2})
    assert found.get(timeout=HUNG) == {"a": {"x": 1}, "b": {"x": 2}}
    assert members[1].fetch("a", "c", timeout=0.05) == {"a": {"x": 1}}


def test_a_store_that_goes_away_ends_only_the_broadcast() -> None:
    with TorchStoreServer() as server:
        store = TorchStoreClient("127.0.0.1", server.port)
        member = Member(store)
        member.broadcast.publish({"a": 1})
        assert member.next() == {"a": 1}
    member.broadcast.publish({"a": 2})
    member.broadcast.close()
    store.close()


def test_a_store_without_a_second_connection_is_not_used() -> None:
    assert not supports_broadcast(object())
