"""The nodes of a round compared: what it costs among many, and what a bad store or a bad word can do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.agent.status import StatusSocket
from phalanx.core.progress import Beat, Verdict, View, WatchPolicy
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.torch.client import TorchStoreClient
from phalanx.store.torch.torch_store_adapter import StoreFacade
from phalanx.supervision.hang_consensus import HangConsensus
from phalanx.supervision.hang_detector import HangDetector
from phalanx.supervision.incident_log import IncidentLog
from phalanx.supervision.round_broadcast import RoundBroadcast
from phalanx.supervision.stack_collection import Findings
from tests.conftest import HUNG, wait_until

NODES = 64


class Shared:
    """A store in memory: it tells whoever subscribed, and counts what it is asked and what it tells."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.told = 0
        self._heard: list[tuple[str, Callable[[str, bytes], None]]] = []
        self._lock = threading.RLock()

    def subscribe(self, prefix: str, heard: Callable[[str, bytes], None]) -> Callable[[], None]:
        with self._lock:
            self._heard.append((prefix, heard))
        return lambda: None

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.asked["add"] += 1
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self.asked["set"] += 1
            self.values[key] = value
            for prefix, heard in self._heard:
                if key.startswith(prefix):
                    self.told += 1
                    heard(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self.asked["check"] += 1
            return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._lock:
            self.asked["get"] += 1
            return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: list[str], timeout: Any) -> None:
        wait_until(lambda: all(key in self.values for key in keys), "keys", timeout.total_seconds())


class Owners:
    """The nodes' own threads, all of them this one: what was posted is carried out by `run`."""

    def __init__(self, store: Any, count: int) -> None:
        self.posted: list[Callable[[], None]] = []
        self.received: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self.members = [
            HangConsensus(
                SimpleNamespace(group_rank=node, group_world_size=count, store=store),  # type: ignore[arg-type]
                1,
                f"host{node}",
                self.posted.append,
                self.received[node].append,
            )
            for node in range(count)
        ]

    def run(self) -> None:
        """All that is asked, by anybody, to its end."""
        for _ in range(3):  # what is carried out may ask for more
            for consensus in self.members:
                done = threading.Event()
                consensus._broadcast._requests.put(lambda _store, done=done: done.set())
                assert done.wait(HUNG)
            while self.posted:
                self.posted.pop(0)()

    def close(self) -> None:
        for consensus in self.members:
            consensus.close()


@pytest.fixture
def store() -> Shared:
    return Shared()


@pytest.fixture
def owners(store: Shared) -> Iterator[Owners]:
    made = Owners(store, NODES)
    yield made
    made.close()


def test_a_window_of_rates_costs_a_few_requests_per_node_and_no_news(owners: Owners, store: Shared) -> None:
    for _ in range(2):  # in the first one, several may find nobody below them yet
        store.asked.clear()
        for node, consensus in enumerate(owners.members):
            consensus.publish_rates({node: 1.0}, 10.0)
        owners.run()
    assert sum(store.asked.values()) <= 4 * NODES, store.asked
    assert store.told == 0


def test_a_hang_that_all_notice_costs_one_piece_of_news_and_one_testimony_each(
    owners: Owners, store: Shared
) -> None:
    now = time.monotonic()
    for node, consensus in enumerate(owners.members):
        consensus.publish_hang(Verdict("heartbeat", (node,), "no heartbeat"), now)
    owners.run()
    first = next(news for news in owners.received[0] if news["kind"] == "hang")
    findings = []
    for node, consensus in enumerate(owners.members):
        assert [news["case"] for news in owners.received[node]] == [
            news["case"] for news in owners.received[0]
        ]
        opened = [consensus.open_case(news, now) for news in owners.received[node]]
        assert opened == [True] + [False] * (NODES - 1)
        found = Findings(View(now, (Beat(node, now, count=1),)), now, {}, {node: f"pid {node}"})
        findings.append(found)
        consensus.proceed(found, now)
    owners.run()
    author = int(first["node"])
    assert owners.members[author].proceed(findings[author], now) == "conclude"
    assert len(findings[author].view.alive) == NODES
    assert not findings[author].silent
    assert sum(store.asked.values()) <= 5 * NODES, store.asked
    assert store.told == NODES * NODES


def test_a_store_that_is_away_leaves_a_node_to_judge_by_itself() -> None:
    class Away(Shared):
        def add(self, key: str, amount: int) -> int:
            raise OSError("away")

    owners = Owners(Away(), 2)
    now = time.monotonic()
    consensus = owners.members[0]
    consensus.publish_hang(Verdict("heartbeat", (0,), "no heartbeat"), now)
    found = Findings(View(now, (Beat(0, now, count=1),)), now, {}, {0: "pid 1"})
    assert consensus.proceed(found, now) == "wait"
    assert consensus.proceed(found, now + 1.0) == "conclude"
    assert found.silent == ["the other nodes"]
    consensus.publish_verdict({})
    owners.close()


NONSENSE: list[Any] = [
    {"window": float("inf"), "host": "x", "rates": [[0, 1]]},
    {"window": 1, "host": "x", "rates": [[float("inf"), 1]]},
    {"window": 1, "host": "x", "rates": 7},
    {"ranks": [{"rank": float("inf")}], "finished": []},
    {"ranks": 3, "finished": None},
    [1, 2],
    "text",
]


@pytest.mark.parametrize("record", NONSENSE, ids=repr)
def test_what_another_version_or_a_worker_keeps_there_harms_nobody(
    record: Any, owners: Owners, store: Shared
) -> None:
    consensus, other = owners.members[:2]
    text = json.dumps(record).encode()
    store.values["phalanx/progress/1/values/rates/1"] = text
    consensus.publish_rates({0: 1.0}, 10.0)
    owners.run()
    now = time.monotonic()
    consensus.publish_hang(Verdict("heartbeat", (0,), "no heartbeat"), now)
    owners.run()
    consensus.open_case(owners.received[0][0], now)
    other.open_case(owners.received[1][0], now)
    for node in range(1, NODES):
        store.values[f"phalanx/progress/1/values/0-1/{node}"] = text
    found = Findings(View(now, (Beat(0, now, count=1),)), now, {}, {0: "pid 1"})
    consensus.proceed(found, now)
    owners.run()
    assert consensus.proceed(found, now) == "conclude"
    assert len(found.silent) == NODES - 1


NEWS: list[dict[str, Any]] = [
    {"kind": "hang", "node": float("inf"), "case": "x", "after": 0, "rule": "r", "ranks": [], "reason": ""},
    {"kind": "hang"},
    {"kind": "verdict", "node": 1, "hang": {"rule": 1, "report": [1, None], "summary": 3}},
    {"kind": "verdict", "node": 1, "hang": "text"},
    {"kind": "output", "age": float("-inf")},
    {"kind": "output", "age": "old"},
    {"kind": "exit", "ranks": 3},
    {"kind": "straggler", "ranks": [0], "host": "x", "reason": 5},
    {"kind": "from a later version"},
    {},
]


@pytest.mark.parametrize("news", NEWS, ids=repr)
def test_news_that_make_no_sense_harm_nobody(news: dict[str, Any]) -> None:
    with watching(WatchPolicy(silence_timeout=60.0, on_hang="warn")) as (detector, incidents, _):
        detector._receive(news)
        assert detector._output_elsewhere <= time.monotonic()
        assert all(isinstance(line, str) for line in incidents.last_hang)
        "\n".join(incidents.last_hang)


def test_an_errand_that_fails_does_not_end_the_owner(
    owners: Owners, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("in an errand")

    monkeypatch.setattr(owners.members[0], "_compare", broken)
    owners.members[0].publish_rates({0: 1.0}, 10.0)
    owners.run()
    assert "in an errand" in caplog.text


def test_many_who_ask_for_output_get_one_answer() -> None:
    with watching(WatchPolicy(silence_timeout=60.0)) as (detector, _, store):
        now = time.monotonic()
        detector._output = SimpleNamespace(last=lambda _now: now)  # type: ignore[assignment]
        for node in range(1, NODES):
            detector._receive({"kind": "output?", "node": node})
        wait_until(lambda: store.asked["add"], "the answer")
        assert detector._consensus is not None
        detector._consensus.close()
        assert store.asked["add"] == 1


def test_findings_are_kept_but_not_without_end() -> None:
    incidents = IncidentLog()
    for number in range(1000):
        incidents.add_straggler({"ranks": [number], "host": "", "reason": str(number)})
    assert incidents.findings[-1]["summary"] == "999"
    assert len(incidents.findings) <= 100


class watching:
    """A lookout of one node of many, without processes."""

    def __init__(self, policy: WatchPolicy) -> None:
        self.store, self.incidents = Shared(), IncidentLog()
        group = SimpleNamespace(
            workers=[SimpleNamespace(local_rank=0, global_rank=0)],
            group_rank=0,
            group_world_size=NODES,
            store=self.store,
        )
        context = SimpleNamespace(running=set(), pids=dict, error_files={})
        self.detector = HangDetector(
            context,  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            group,  # type: ignore[arg-type]
            policy,
            self.incidents,
            lambda errand: errand(),
            number=1,
            host="host0",
            now=time.monotonic(),
        )

    def __enter__(self) -> tuple[HangDetector, IncidentLog, Shared]:
        return self.detector, self.incidents, self.store

    def __exit__(self, *_: object) -> None:
        self.detector.close()


# ---- stores that do not answer -----------------------------------------------------------------------


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    answer = threading.Event()

    class Hanging(Shared):
        def add(self, key: str, amount: int) -> int:
            self.asked["add"] += 1
            answer.wait()
            return super().add(key, amount)

    store = Hanging()
    broadcast = RoundBroadcast(store, "p/", lambda news: None)
    broadcast.publish({"a": 1})
    wait_until(lambda: store.asked["add"], "the request")
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (broadcast.close(), closed.set()))
    closing.start()
    try:
        assert closed.wait(HUNG / 2)
    finally:
        answer.set()
        closing.join()
        wait_until(lambda: not broadcast.alive, "the end of the thread")


def test_closing_does_not_wait_for_a_connection_that_is_half_open() -> None:
    """The machine is there, its store is not: it takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = SimpleNamespace(
            beside=lambda give_up: TorchStoreClient(
                "127.0.0.1", silent.getsockname()[1], HUNG, give_up=give_up
            )
        )
        broadcast = RoundBroadcast(store, "p/", lambda news: None)
        connections = [silent.accept()[0] for _ in range(2)]
        begin = time.monotonic()
        broadcast.close()
        took = time.monotonic() - begin
        for connection in connections:
            connection.close()
    wait_until(lambda: not any(t.is_alive() for t in broadcast._threads), "the end of the threads")
    assert took < 5.0  # a try to connect takes up to ten


def test_a_thousand_rounds_leave_nothing_behind() -> None:
    with Server() as server, Client(*server.address) as client:
        before = threading.active_count()
        for number in range(1000):
            group: Any = SimpleNamespace(group_rank=0, group_world_size=2, store=StoreFacade(client, "r/"))
            consensus = HangConsensus(group, number, "host", lambda errand: None, lambda news: None)
            consensus.publish_rates({0: 1.0}, 10.0)
            consensus.publish_exit((0,))
            consensus.close()
        wait_until(lambda: threading.active_count() == before, "the end of the threads")
        assert not client._watches
        client.get("r/nothing")  # after all that was asked before
        assert not client._waiting


def test_status_is_told_to_some_at_once_and_to_the_rest_at_the_next_turn() -> None:
    status = StatusSocket(lambda: {"a": 1})
    if not status.fds():
        pytest.skip("needs abstract sockets")
    assert status._socket is not None
    askers = []
    try:
        for _ in range(17):
            asker = socket.socket(socket.AF_UNIX)
            asker.settimeout(HUNG)
            asker.connect(status._socket.getsockname())
            askers.append(asker)
        status.answer()
        askers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            askers[-1].recv(100)
        status.answer()
        askers[-1].settimeout(HUNG)
        assert [asker.recv(100) for asker in askers] == [b'{"a": 1}'] * 17
    finally:
        for asker in askers:
            asker.close()
        status.close()
