"""The ledgers of all nodes become one, over a real store, and nobody waits for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest

from phalanx.cluster import job_goodput
from phalanx.cluster.job_goodput import (
    GoodputExchange,
    JobGoodput,
    NodeGoodput,
    add_up,
    decode_ledger,
    decode_total,
    encode_ledger,
    exchange,
    ledgers_prefix,
    next_report,
    total_key,
)
from phalanx.core.ledger.goodput import CATEGORIES, GoodputTotals, goodput_line, read_totals
from phalanx.core.rounds.store_commands import Delete, Get
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG

TOKEN = Token(b"0123456789abcdef0123456789abcdef", "the test")
NODES = "job/r/node/"


def totals(ranks: int, productive: float, recovering: float = 0.0, incident: int = 0) -> GoodputTotals:
    seconds = {**dict.fromkeys(CATEGORIES, 0.0), "productive": productive, "recovering": recovering}
    lost = {incident: {"recovering": recovering, "recomputed": 0.0, "hung": 0.0}} if incident else {}
    return GoodputTotals(ranks, seconds, lost)


def node(figures: GoodputTotals) -> NodeGoodput:
    return NodeGoodput(figures, lambda total: goodput_line(total, ()))


@pytest.fixture
def connect() -> Iterator[Callable[[], Client]]:
    clients: list[Client] = []
    with Server("127.0.0.1", 0, token=TOKEN) as server:

        def make() -> Client:
            clients.append(Client(*server.address[:2], token=TOKEN, grace=HUNG).connect(HUNG))
            return clients[-1]

        try:
            yield make
        finally:
            for client in clients:
                client.close()


def together(*calls: Callable[[], JobGoodput | None]) -> list[JobGoodput | None]:
    found: list[JobGoodput | None] = [None] * len(calls)

    def run(number: int) -> None:
        found[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_every_node_has_the_same_total_and_a_lost_one_counts_as_last_known(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOODPUT_SUM", "GOODPUT_TOTAL"):  # on a slow machine; nobody waits for it
        monkeypatch.setattr(job_goodput, name, HUNG)
    first, second = connect(), connect()
    for name in ("a", "b"):
        first.put(NODES + name, b"{}")
    ledgers = ledgers_prefix("r")
    first.put(ledgers + "gone", encode_ledger(3, totals(2, 10.0), final=False))
    first.put(ledgers + "old", encode_ledger(2, totals(2, 1000.0), final=True))
    first.put(ledgers + "broken", b'{"job": 3, "ledger": {"ranks": -1}}')
    one, two = GoodputExchange(first, "r", "a", 3), GoodputExchange(second, "r", "b", 3)
    found = together(
        lambda: one.collect(node(totals(2, 60.0, 20.0, 1)), NODES), lambda: two.receive(node(totals(2, 90.0)))
    )
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].line == found[1].line
    assert found[0].line.startswith("goodput 88.9 %: 5.0 s lost to")
    assert found[0].line.endswith("(1 lost node as last known)")
    assert [(one.nodes, one.lost) for one in found if one] == [(3, 1)] * 2
    assert found[1].totals.seconds["productive"] == 160.0
    assert found[1].totals.ranks == 4
    assert first.request(Get(ledgers, prefix=True)).entries == ()


def test_nobody_waits_for_a_node_that_is_gone(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOODPUT_SUM", "GOODPUT_TOTAL"):  # a wait would be a hang
        monkeypatch.setattr(job_goodput, name, 4 * HUNG)
    first, second = connect(), connect()
    first.put(NODES + "a", b"{}")
    first.put(NODES + "b", b"{}")
    one, two = GoodputExchange(first, "r", "a", 1), GoodputExchange(second, "r", "b", 1)

    def leave() -> None:
        exchange(lambda: two.part(node(totals(1, 5.0))))
        second.request(Delete(NODES + "b"))

    found = together(lambda: one.collect(node(totals(1, 5.0)), NODES), leave)
    assert found[0] is not None
    assert (found[0].nodes, found[0].lost) == (2, 0)
    second.put(NODES + "b", b"{}")
    one, two = GoodputExchange(first, "r", "a", 2), GoodputExchange(second, "r", "b", 2)
    both = together(lambda: one.collect(None), lambda: two.receive(node(totals(1, 5.0))))
    assert both == [None, None]


def test_a_silent_store_or_a_silent_node_costs_a_moment(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOODPUT_SUM", "GOODPUT_TOTAL"):
        monkeypatch.setattr(job_goodput, name, 0.1)
    client = connect()
    client.put(NODES + "a", b"{}")
    client.put(NODES + "stopped", b"{}")
    here = GoodputExchange(client, "r", "a", 1)
    found = here.collect(node(totals(1, 5.0)), NODES)
    assert found is not None
    assert found.nodes == 1
    client.request(Delete(total_key("r")))
    assert here.receive(node(totals(1, 5.0))) is None
    client.close()
    assert exchange(lambda: here.receive(node(totals(1, 5.0)))) is None


def test_the_host_of_a_stopped_job_adds_up_what_the_others_leave_behind(
    connect: Callable[[], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_goodput, "GOODPUT_PART", HUNG)
    first, second = connect(), connect()
    one, two = GoodputExchange(first, "r", "a", 1), GoodputExchange(second, "r", "b", 1)
    second.put(ledgers_prefix("r") + "b", encode_ledger(1, totals(1, 2.0), final=False))
    found = together(
        lambda: one.collect(node(totals(1, 5.0))), lambda: exchange(lambda: two.part(node(totals(1, 7.0))))
    )
    assert found[0] is not None
    assert (found[0].nodes, found[0].lost, found[0].totals.total) == (2, 0, 12.0)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"nonsense",
        b"[" * 100_000,
        b'{"job": 2}',
        b'{"job": 1, "ledger": []}',
        b'{"job": 1, "ledger": {"ranks": "2", "seconds": {}, "lost": {}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {"productive": NaN}, "lost": {}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {"productive": -1}, "lost": {}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {"productive": 1e99}, "lost": {}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {}, "lost": {"x": {}}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {}, "lost": {"1": 2}}}',
        b'{"job": 1, "ledger": {"ranks": 2, "seconds": {}, "lost": {}}, "pad": "' + b"x" * 70_000 + b'"}',
    ],
)
def test_what_is_not_a_ledger_is_left_out(value: bytes) -> None:
    assert decode_ledger(value, 1) is None
    assert decode_total(value, 1) is None


def test_a_total_travels_whole_and_its_line_is_printable() -> None:
    own = NodeGoodput(totals(2, 30.0, 10.0, 4), lambda _total: "goodput \x1b[31m75 %")
    found, value = add_up(own, {}, 7)
    read = decode_total(value, 7)
    assert read is not None
    assert read.totals.as_dict() == found.totals.as_dict()
    assert read.totals.lost[4]["recovering"] == 10.0
    assert read.line == "goodput ?[31m75 %"
    assert decode_total(value, 8) is None
    assert read_totals(json.loads(json.dumps(totals(1, 1.0).as_dict()))) == totals(1, 1.0)


def test_a_node_reports_less_and_less_often() -> None:
    assert next_report(0.0, 2.5) == 62.5
    assert next_report(0.0, 36_000.0) == 39_600.0
