"""Consensus of many nodes: its cost, stores that fail, and malformed data."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.agent.status import StatusSocket
from phalanx.agent.supervision.hang_consensus import HangConsensus
from phalanx.agent.supervision.hang_detector import HangDetector
from phalanx.agent.supervision.incident_log import IncidentLog
from phalanx.agent.supervision.round_broadcast import RoundBroadcast
from phalanx.agent.supervision.stack_collection import Findings
from phalanx.cluster.torch_store_adapter import StoreFacade
from phalanx.core.diagnosis.collective_progress import RankPulse, marks, observe
from phalanx.core.diagnosis.collectives import GroupTrace, Operation, RankTrace
from phalanx.core.diagnosis.patience import NODE
from phalanx.core.diagnosis.progress import Beat, Verdict, View, WatchPolicy, judge
from phalanx.core.group.group import Phase
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.tcpstore.client import TorchStoreClient
from tests.conftest import HUNG, wait_until

NODES = 64


class Shared:
    """A store in memory with subscriptions; counts requests and notifications."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.notified = 0
        self._subscribers: list[tuple[str, Callable[[str, bytes], None]]] = []
        self._lock = threading.RLock()

    def subscribe(self, prefix: str, callback: Callable[[str, bytes], None]) -> Callable[[], None]:
        with self._lock:
            self._subscribers.append((prefix, callback))
        return lambda: None

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.requests["add"] += 1
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self.requests["set"] += 1
            self.values[key] = value
            for prefix, callback in self._subscribers:
                if key.startswith(prefix):
                    self.notified += 1
                    callback(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            self.requests["check"] += 1
            return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._lock:
            self.requests["get"] += 1
            return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: list[str], timeout: Any) -> None:
        try:
            wait_until(lambda: all(key in self.values for key in keys), "keys", timeout.total_seconds())
        except AssertionError as error:
            raise TimeoutError from error


class Owners:
    """The owners of all nodes in one thread: `run` carries out what was posted."""

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
        """Carry out all requests of all nodes."""
        for _ in range(3):  # requests may lead to more
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


def test_a_window_of_rates_costs_a_few_requests_per_node_and_no_message(
    owners: Owners, store: Shared
) -> None:
    for _ in range(2):  # in the first one, several nodes may find no lower one yet
        store.requests.clear()
        for node, consensus in enumerate(owners.members):
            consensus.publish_rates({node: 1.0}, 10.0)
        owners.run()
    assert sum(store.requests.values()) <= 4 * NODES, store.requests
    assert store.notified == 0


def test_a_hang_that_all_notice_costs_one_message_and_one_report_each(owners: Owners, store: Shared) -> None:
    now = time.monotonic()
    for node, consensus in enumerate(owners.members):
        consensus.publish_hang(Verdict("heartbeat", (node,), "no heartbeat"), now)
    owners.run()
    first = next(message for message in owners.received[0] if message["kind"] == "hang")
    findings = []
    for node, consensus in enumerate(owners.members):
        assert [message["case"] for message in owners.received[node]] == [
            message["case"] for message in owners.received[0]
        ]
        opened = [consensus.open_case(message, now) for message in owners.received[node]]
        assert opened == [True] + [False] * (NODES - 1)
        found = Findings(View(now, (Beat(node, now, count=1),)), now, {}, {node: f"pid {node}"})
        findings.append(found)
        consensus.proceed(found, now)
    owners.run()
    author = int(first["node"])
    assert owners.members[author].proceed(findings[author], now) == "conclude"
    assert len(findings[author].view.alive) == NODES
    assert not findings[author].silent
    assert sum(store.requests.values()) <= 5 * NODES, store.requests
    assert store.notified == NODES * NODES


def test_without_the_store_a_node_concludes_alone() -> None:
    class Away(Shared):
        def add(self, key: str, amount: int) -> int:
            raise OSError("away")

    owners = Owners(Away(), 2)
    now = time.monotonic()
    consensus = owners.members[0]
    consensus.publish_hang(Verdict("heartbeat", (0,), "no heartbeat"), now)
    found = Findings(View(now, (Beat(0, now, count=1),)), now, {}, {0: "pid 1"})
    assert consensus.proceed(found, now) == "wait"
    assert consensus.proceed(found, now + NODE + 0.01) == "conclude"
    assert found.silent == ["the other nodes"]
    consensus.publish_verdict({})
    owners.close()


@pytest.mark.parametrize("how", ["acknowledged", "found it, too", "frozen"])
def test_a_node_without_a_report_is_waited_for_if_it_knows_of_the_hang(how: str) -> None:
    owners = Owners(Shared(), 2)
    try:
        consensus, other = owners.members
        since = time.monotonic()
        consensus.publish_hang(Verdict("heartbeat", (0,), "no heartbeat"), since)
        owners.run()
        if how == "found it, too":
            other.publish_hang(Verdict("heartbeat", (1,), "no heartbeat"), since)
            owners.run()
        if how != "frozen":
            assert other.open_case(owners.received[1][0], since)
            owners.run()
        opened = [consensus.open_case(message, since) for message in owners.received[0]]
        assert opened == [True, False][: len(opened)]
        found = Findings(View(since, (Beat(0, since, count=1),)), since, {}, {0: "pid 1"})
        assert consensus.proceed(found, since + NODE - 0.1) == "wait"  # the first fetch does not wait
        if how == "frozen":
            owners.run()
            assert consensus.proceed(found, since + NODE) == "conclude"
            assert found.silent == ["node 1"]
            return
        # The report arrives while the second fetch waits for it.
        late = Findings(View(since, (Beat(1, since, count=1),)), since, {}, {1: "pid 2"})
        assert other.proceed(late, since + NODE) == "wait"
        owners.run()
        assert consensus.proceed(found, since + NODE) == "conclude"
        assert [beat.rank for beat in found.view.alive] == [0, 1]
        assert not found.silent
    finally:
        owners.close()


MALFORMED_VALUES: list[Any] = [
    {"window": float("inf"), "host": "x", "rates": [[0, 1]]},
    {"window": 1, "host": "x", "rates": [[float("inf"), 1]]},
    {"window": 1, "host": "x", "rates": 7},
    {"ranks": [{"rank": float("inf")}], "finished": []},
    {"ranks": 3, "finished": None},
    [1, 2],
    "text",
]


@pytest.mark.parametrize("record", MALFORMED_VALUES, ids=repr)
def test_malformed_values_in_the_store_are_ignored(record: Any, owners: Owners, store: Shared) -> None:
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


MALFORMED_MESSAGES: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("message", MALFORMED_MESSAGES, ids=repr)
def test_malformed_messages_are_ignored(message: dict[str, Any]) -> None:
    with watching(WatchPolicy(silence_timeout=60.0, on_hang="warn")) as (detector, incidents, _):
        detector._receive(message)
        quiet_since = detector.quiet_since(time.monotonic())
        assert quiet_since is None or quiet_since <= time.monotonic()
        assert all(isinstance(line, str) for line in incidents.last_hang)
        "\n".join(incidents.last_hang)


def test_a_sample_that_arrives_during_the_collection_does_not_hide_what_has_moved() -> None:
    """Rank 0 entered the operation after it was sampled; the next sample, already under way, has it."""

    def trace(entered: int) -> RankTrace:
        return RankTrace(0, (GroupTrace("0", "", (0,), (Operation(entered, "all_reduce"),), entered),))

    policy = WatchPolicy(hang_timeout=1.5, on_hang="warn")
    with watching(policy) as (detector, incidents, _):
        now = detector._started_at + 10.0
        assert detector._consensus is not None
        detector._consensus.close()
        detector._consensus = None  # one node
        known = observe({}, [RankPulse(0, marks(trace(6)), True)], now - 2.0)
        watch = SimpleNamespace(progress=known, recent_traces=lambda _now: {}, close=lambda: None)
        detector._collectives = watch  # type: ignore[assignment]
        view = View(now - 10.0, (Beat(0, waits=True, numbers_at=now - 2.0),))
        verdict = judge(view, now, policy)
        assert verdict is not None
        detector._collect(verdict, view, now)
        incident = detector._incident
        assert incident is not None
        found = incident.collect()
        found.traces[0] = trace(7)
        incident.collect = lambda: found  # type: ignore[method-assign]
        watch.progress = observe(known, [RankPulse(0, marks(trace(7)), True)], now + 0.01)
        assert detector.look(now + 0.1) is None
        assert detector._incident is None, "withdrawn"
        assert not incidents.findings


def test_a_call_that_fails_does_not_end_the_owner(
    owners: Owners, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("in a call")

    monkeypatch.setattr(owners.members[0], "_compare", broken)
    owners.members[0].publish_rates({0: 1.0}, 10.0)
    owners.run()
    assert "in a call" in caplog.text


def test_many_output_queries_get_one_answer(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("a line\n")
    logs = {0: str(tmp_path / "stdout.log")}
    with watching(WatchPolicy(silence_timeout=60.0), logs) as (detector, _, store):
        for node in range(1, NODES):
            detector._receive({"kind": "output?", "node": node})
        wait_until(lambda: store.requests["add"], "the answer")
        assert detector._consensus is not None
        detector._consensus.close()
        assert store.requests["add"] == 1


def test_the_number_of_findings_is_limited() -> None:
    incidents = IncidentLog()
    for number in range(1000):
        incidents.add_straggler({"ranks": [number], "host": "", "reason": str(number)})
    assert incidents.findings[-1]["summary"] == "999"
    assert len(incidents.findings) <= 100


class watching:
    """A detector on one of many nodes, without processes."""

    def __init__(self, policy: WatchPolicy, logs: dict[int, str] | None = None) -> None:
        self.store, self.incidents = Shared(), IncidentLog()
        group = SimpleNamespace(
            workers=[SimpleNamespace(local_rank=0, global_rank=0)],
            group_rank=0,
            group_world_size=NODES,
            store=self.store,
        )
        context = SimpleNamespace(
            running=set(),
            pids=dict,
            error_files={},
            send_signal=lambda *_, **__: None,
            stdouts=logs or {},
            stderrs={},
        )
        self.detector = HangDetector(
            context,  # type: ignore[arg-type]
            SimpleNamespace(clear_bell=lambda: False),  # type: ignore[arg-type]
            group,  # type: ignore[arg-type]
            policy,
            self.incidents,
            lambda call: call(),
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
            self.requests["add"] += 1
            answer.wait()
            return super().add(key, amount)

    store = Hanging()
    broadcast = RoundBroadcast(store, "p/", lambda message: None)
    broadcast.publish({"a": 1})
    wait_until(lambda: store.requests["add"], "the request")
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (broadcast.close(), closed.set()))
    closing.start()
    try:
        assert closed.wait(HUNG / 2)
    finally:
        answer.set()
        closing.join()
        wait_until(lambda: not broadcast.alive, "the end of the broadcast thread")


def test_closing_does_not_wait_for_a_connection_that_is_half_open() -> None:
    """The host accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = SimpleNamespace(
            beside=lambda give_up: TorchStoreClient(
                "127.0.0.1", silent.getsockname()[1], HUNG, give_up=give_up
            )
        )
        broadcast = RoundBroadcast(store, "p/", lambda message: None)
        connections = [silent.accept()[0] for _ in range(2)]
        closing = threading.Thread(target=broadcast.close)
        closing.start()
        closing.join(HUNG / 2)  # connecting takes HUNG
        closed = not closing.is_alive()
        for connection in connections:
            connection.close()
    wait_until(lambda: not any(t.is_alive() for t in broadcast._threads), "the end of the threads")
    assert closed


def test_a_thousand_rounds_leave_nothing_behind() -> None:
    with Server() as server, Client(*server.address) as client:
        before = set(threading.enumerate())
        for number in range(1000):
            group: Any = SimpleNamespace(group_rank=0, group_world_size=2, store=StoreFacade(client, "r/"))
            consensus = HangConsensus(group, number, "host", lambda call: None, lambda message: None)
            consensus.publish_rates({0: 1.0}, 10.0)
            consensus.publish_exit((0,))
            consensus.close()
        wait_until(lambda: not set(threading.enumerate()) - before, "the end of the threads")
        assert not client._watches
        client.get("r/nothing")  # after all that was asked before
        assert not client._waiting


def test_status_answers_a_limited_number_of_clients_per_turn() -> None:
    status = StatusSocket(lambda _request, answer: answer({"a": 1}))
    if not status.fds(Phase.RUNNING):
        pytest.skip("needs abstract sockets")
    assert status._socket is not None
    clients = []
    try:
        for _ in range(17):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(HUNG)
            client.connect(status._socket.getsockname())
            clients.append(client)
        status.look(Phase.RUNNING, 100.0)
        assert status.deadline(Phase.RUNNING) is not None, "silent clients are answered after a while"
        assert len(status.fds(Phase.RUNNING)) == 16, "and no more of them are taken meanwhile"
        clients[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[0].recv(100)
        status.look(Phase.RUNNING, 101.0)
        clients[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[-1].recv(100)
        clients[-1].sendall(b'{"ask": "status"}\n')
        status.look(Phase.RUNNING, 101.0)
        for client in clients:
            client.settimeout(HUNG)
        assert [client.recv(100) for client in clients] == [b'{"a": 1}'] * 17
        assert status.deadline(Phase.RUNNING) is None
    finally:
        for client in clients:
            client.close()
        status.close()


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"not json\n", b'{"error": "a request is one JSON object"}'),
        (b"[1]\n", b'{"error": "a request is one JSON object"}'),
        (b"[" * 5000 + b"\n", b'{"error": "a request is one JSON object"}'),
        (b"x" * (1 << 17), b""),
        (b'{"late": true}\n', b'{"error": "no answer in time"}'),
        (b'{"large": true}\n', b'{"text": "' + b"x" * 5_000_000 + b'"}'),
    ],
    ids=["not json", "an array", "deep", "too long", "late", "large"],
)
def test_what_a_client_of_the_socket_may_send(sent: bytes, got: bytes) -> None:
    def handle(request: dict[str, Any], answer: Any) -> None:
        if "large" in request:
            answer({"text": "x" * 5_000_000})

    status = StatusSocket(handle)
    if not status.fds(Phase.RUNNING):
        pytest.skip("needs abstract sockets")
    assert status._socket is not None
    received = b""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(status._socket.getsockname())
        client.setblocking(False)
        now = time.monotonic()
        while True:
            try:
                sent = sent[client.send(sent) :] if sent else sent
            except OSError:
                sent = b""
            now += 0.001 if sent or received else 5.0  # a late answer is given up
            status.look(Phase.RUNNING, now)
            try:
                data = client.recv(1 << 20)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                break
            if not data:
                break
            received += data
    status.close()
    assert received == got


def test_an_answer_that_comes_later_ends_its_client() -> None:
    waiting: list[Any] = []
    status = StatusSocket(lambda _request, answer: waiting.append(answer))
    if not status.fds(Phase.RUNNING):
        pytest.skip("needs abstract sockets")
    assert status._socket is not None
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(HUNG)
        client.connect(status._socket.getsockname())
        client.sendall(b"{}\n")
        status.look(Phase.RUNNING, 100.0)
        assert len(status.fds(Phase.RUNNING)) == 1, "nothing is awaited from a client whose answer is made"
        waiting[0]({"later": True})
        assert all(fd >= 0 for fd, _ in status.fds(Phase.RUNNING))
        assert status.deadline(Phase.RUNNING) is None
        waiting[0]({"again": True})
        assert client.recv(100) == b'{"later": true}'
    status.close()
