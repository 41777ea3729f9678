"""Exchanges and barriers over a store, ours and torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from phalanx.elastic.utils.store import barrier, get_all, store_timeout, synchronize
from phalanx.errors import StoreConnectionError, StoreTimeoutError
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.conftest import HUNG


class Clients:
    """As many clients of one server as are asked for."""

    def __init__(self) -> None:
        self.server = TorchStoreServer()
        self.server.start()
        self.made: list[TorchStoreClient] = []

    def __call__(self) -> TorchStoreClient:
        self.made.append(TorchStoreClient("127.0.0.1", self.server.port, HUNG))
        return self.made[-1]

    def close(self) -> None:
        for client in self.made:
            client.close()
        self.server.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients()
    yield made
    made.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls made at the same time, or what they raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - it is the result
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    return results


def test_everybody_gets_everybodys_data_by_rank(clients: Clients) -> None:
    stores = [clients() for _ in range(4)]

    def call(rank: int) -> Callable[[], Any]:
        return lambda: synchronize(stores[rank], b"%d" % rank, rank, 4, "s/", HUNG)

    assert together(*map(call, range(4))) == [[b"0", b"1", b"2", b"3"]] * 4


def test_the_exchange_runs_out(clients: Clients) -> None:
    store = clients()
    with pytest.raises(StoreTimeoutError, match="s/1"):
        synchronize(store, b"x", 0, 2, "s/", 0.05)
    assert store.timeout == timedelta(seconds=HUNG), "the store's own time-out is put back"


def test_rank_0_stays_until_all_have_read(clients: Clients) -> None:
    zero, one = clients(), clients()
    for rank in range(2):
        zero.set(f"g/{rank}", str(rank))
    zero.set_timeout(0.05)
    with pytest.raises(StoreTimeoutError):
        get_all(zero, 0, "g/", 2)
    zero.set_timeout(HUNG)
    for rank in range(2):
        zero.set(f"h/{rank}", str(rank))
    assert together(lambda: get_all(zero, 0, "h/", 2), lambda: get_all(one, 1, "h/", 2)) == [[b"0", b"1"]] * 2


def test_a_barrier_lets_go_when_all_are_there(clients: Clients) -> None:
    stores = [clients() for _ in range(3)]

    def call(rank: int) -> Callable[[], Any]:
        return lambda: barrier(stores[rank], 3, "b", HUNG, rank=rank)

    assert together(*map(call, range(3))) == [None] * 3
    nameless = [lambda store=store: barrier(store, 3, "c", HUNG) for store in stores]
    assert together(*nameless) == [None] * 3


def test_every_rank_names_the_missing_ones(clients: Clients) -> None:
    stores = [clients(), clients()]
    results = together(
        lambda: barrier(stores[0], 4, "b", 0.1, rank=0),
        lambda: barrier(stores[1], 4, "b", 0.1, rank=2, rank_tracing_decoder=lambda rank: f"host{rank}"),
    )
    assert all(isinstance(result, StoreTimeoutError) for result in results), results
    assert "rank 1, 3 of 4 did not come" in str(results[0])
    assert "rank host1, host3 of 4" in str(results[1])


def test_without_a_rank_it_says_how_many_came(clients: Clients) -> None:
    with pytest.raises(StoreTimeoutError, match=r"only 1 of 3 came within 0\.05 s"):
        barrier(clients(), 3, "b", 0.05)


def test_a_store_that_goes_away_is_not_called_a_timeout(clients: Clients) -> None:
    store = clients()
    waiting = clients()
    results = together(
        lambda: barrier(store, 2, "b", HUNG, rank=0),
        lambda: (waiting.wait(["b/num_members"]), clients.server.reset()),
    )
    assert isinstance(results[0], StoreConnectionError)


def test_nobody_is_left_waiting_when_rank_0_closes_the_server_at_once(clients: Clients) -> None:
    for number in range(50):
        zero, one = clients(), clients()
        errors = together(
            lambda zero=zero, number=number: (
                barrier(zero, 2, f"b{number}", HUNG, rank=0) or clients.server.reset()
            ),
            lambda one=one, number=number: barrier(one, 2, f"b{number}", HUNG, rank=1),
        )
        assert errors == [None, None]


def test_store_timeout_is_put_back_after_an_error(clients: Clients) -> None:
    store = clients()
    with store_timeout(store, 1.5):
        assert store.timeout == timedelta(seconds=1.5)
    with pytest.raises(ZeroDivisionError), store_timeout(store, 1.5):
        _ = 1 / 0
    assert store.timeout == timedelta(seconds=HUNG)


def test_torchs_stores_fit() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    assert synchronize(store, b"x", 0, 1, "s/", HUNG) == [b"x"]
    barrier(store, 1, "b", HUNG, rank=0)
    with pytest.raises(StoreTimeoutError, match="rank 1 of 2 did not come"):
        barrier(store, 2, "c", 0.05, rank=0)
