"""A real etcd as the store: the common contract, lost answers, lost members, TLS, logins."""

from __future__ import annotations

import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from phalanx.cluster.torch_store_adapter import StoreFacade
from phalanx.core.rounds import participant_events as happen
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.store_commands import (
    Add,
    Change,
    Command,
    Compact,
    Delete,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Txn,
    Watch,
    When,
)
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.client import State
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.etcd.client import EtcdClient, etcd_client_from
from phalanx.store.etcd.http import Address
from phalanx.store.net.tls import Tls
from tests.conftest import HUNG
from tests.support.etcd_process import Cluster, etcd_program
from tests.support.store_contract import StoreContract
from tests.system.test_rounds_over_store import Node, starts
from tests.system.test_store_server import Proxy
from tests.system.test_tls import Authority

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    etcd_program()
    with Cluster(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def etcd(shared: Cluster) -> Cluster:
    """The shared etcd, emptied."""
    with EtcdClient(shared.addresses) as client:
        client.request(Delete("", prefix=True), HUNG)
    return shared


@pytest.fixture
def client(etcd: Cluster) -> Iterator[EtcdClient]:
    with EtcdClient(etcd.addresses) as connected:
        yield connected


class OverEtcd:
    """An etcd client with the interface of the contract."""

    def __init__(self, addresses: list[Address], stack: ExitStack) -> None:
        self._addresses, self._stack = addresses, stack
        self._seen: dict[int, queue.Queue[Change]] = {}
        self._client = stack.enter_context(EtcdClient(addresses, on_notice=self._note))

    def request(self, command: Command) -> Reply:
        return self._client.request(command, HUNG)

    def changes(self, watch: int, count: int) -> list[Change]:
        return [self._queue(watch).get(timeout=HUNG) for _ in range(count)]

    def second(self) -> OverEtcd:
        return OverEtcd(self._addresses, self._stack)

    def _queue(self, watch: int) -> queue.Queue[Change]:
        return self._seen.setdefault(watch, queue.Queue())

    def _note(self, notice: Notice) -> None:
        for change in notice.changes:
            self._queue(notice.watch).put(change)


class TestEtcd(StoreContract):
    @pytest.fixture
    def store(self, etcd: Cluster) -> Iterator[OverEtcd]:
        with ExitStack() as stack:
            yield OverEtcd(etcd.addresses, stack)


def test_a_request_whose_answer_was_lost_is_carried_out_once(etcd: Cluster) -> None:
    with Proxy(etcd.addresses[0]) as proxy, EtcdClient([Address(*proxy.address)]) as client:
        assert client.request(Add("n", 1)).number == 1
        created = 0
        for expected in range(2, 8):
            proxy.swallow.set()
            assert client.request(Add("n", 1), HUNG).number == expected
            proxy.swallow.set()
            reply = client.request(Txn((When("k", "mod", created),), (Put("k", b"x"),)), HUNG)
            assert reply.ok
            created = reply.entries[0].mod
            proxy.swallow.set()
            lease = client.request(Grant(30.0), HUNG).number
            assert client.request(KeepAlive(lease), HUNG).ok


def test_many_add_at_once_and_none_is_lost(etcd: Cluster) -> None:
    def count() -> None:
        with EtcdClient(etcd.addresses) as mine:
            for _ in range(10):
                mine.request(Add("n", 1), HUNG)

    threads = [threading.Thread(target=count) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    with EtcdClient(etcd.addresses) as client:
        assert client.request(Add("n", 0)).number == 50


def test_a_watch_continues_over_broken_connections_without_gap_or_repeat(
    etcd: Cluster, client: EtcdClient
) -> None:
    seen: queue.Queue[bytes] = queue.Queue()
    with Proxy(etcd.addresses[0]) as proxy, EtcdClient([Address(*proxy.address)]) as watcher:
        watcher.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
        for number in range(60):
            client.put("k", b"%d" % number)
            if number % 20 == 0:
                proxy.cut()
        assert [seen.get(timeout=HUNG) for _ in range(60)] == [b"%d" % n for n in range(60)]


def test_a_watch_after_a_compaction_gets_a_snapshot(etcd: Cluster, client: EtcdClient) -> None:
    seen: queue.Queue[Notice] = queue.Queue()
    states: queue.Queue[State] = queue.Queue()
    client.put("w/old", b"1")
    with (
        Gate(etcd.addresses[0]) as gate,
        EtcdClient([Address(*gate.address)], on_state=states.put) as watcher,
    ):
        watcher.watch("w/", seen.put, prefix=True)
        assert states.get(timeout=HUNG).what == "connected"
        gate.shut()
        assert states.get(timeout=HUNG).what == "disconnected"
        client.request(Delete("w/old"))
        latest = client.put("w/new", b"2").revision
        assert client.request(Compact(latest)).ok
        gate.closed = False
        notice = seen.get(timeout=HUNG)
        assert notice.reset
        assert [(c.entry.key, c.entry.value) for c in notice.changes] == [("w/new", b"2")]
        client.put("w/new", b"3")
        assert [c.entry.value for c in seen.get(timeout=HUNG).changes] == [b"3"]


class Gate(Proxy):
    """A network that can be interrupted."""

    closed = False

    def shut(self) -> None:
        self.closed = True
        self.cut()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        if self.closed:
            for link in (source, sink):
                try:
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        else:
            super()._pump(source, sink, is_reply)


def test_lease_loss_is_reported_and_a_new_lease_works(client: EtcdClient) -> None:
    lease = client.request(Grant(3.0)).number
    gone: queue.Queue[Notice] = queue.Queue()
    client.put("mine", b"1", lease)
    client.watch("mine", gone.put)
    assert gone.get(timeout=HUNG).changes[0].deleted
    assert client.request(KeepAlive(lease)).error == "lease"
    late = client.request(Txn((When("mine", "mod", 0),), (Put("mine", b"2", lease),)))
    assert (late.error, late.entries[0].mod) == ("lease", 0)
    fresh = client.request(Grant(30.0)).number
    assert client.put("mine", b"2", fresh).ok


def test_the_session_key_may_expire(etcd: Cluster, client: EtcdClient) -> None:
    assert client.put("k", b"1").ok
    with EtcdClient(etcd.addresses) as other:
        other.request(Delete("phalanx.once/", prefix=True))
    assert client.put("k", b"2").ok
    assert client.request(Add("n", 1)).number == 1
    assert client.request(Txn((When("k", "value", value=b"no"),), (Put("k", b"3"),))).error == "condition"


def test_a_client_that_closed_leaves_nothing_in_etcd(etcd: Cluster, client: EtcdClient) -> None:
    with EtcdClient(etcd.addresses) as passing:
        passing.put("k", b"v")
        assert len(client.request(Get("phalanx.once/", prefix=True)).entries) == 1
    assert client.request(Get("phalanx.once/", prefix=True)).entries == ()


def test_what_was_sent_before_close_arrives(etcd: Cluster, client: EtcdClient) -> None:
    for number in range(5):
        with EtcdClient(etcd.addresses) as brief:
            brief.send(Put(f"last/{number}", b"words"), lambda reply: None)
    assert len(client.request(Get("last/", prefix=True)).entries) == 5


def test_a_request_that_is_too_large_fails_alone(client: EtcdClient) -> None:
    assert client.put("big", bytes(4 << 20)).error == "size"
    many = tuple(Put(f"k{n}", b"") for n in range(200))
    assert client.request(Txn((), many)).error == "size"
    assert client.put("small", b"v").ok
    with pytest.raises(StoreError, match="no empty keys"):
        client.put("", b"")
    with pytest.raises(StoreError, match="cannot be sent"):
        client.get("\ud800")


def test_a_key_written_twice_in_a_transaction_has_the_last_value(client: EtcdClient) -> None:
    txn = Txn((), (Put("a", b"1"), Put("a", b"2"), Put("b", b"3")), (Delete("b"), Delete("c/", prefix=True)))
    assert client.request(txn).ok
    assert [client.get(key) and client.get(key).value for key in ("a", "b")] == [b"2", None]  # type: ignore[union-attr]


def test_facade_works_over_etcd(client: EtcdClient) -> None:
    store = StoreFacade(client, "user/", timedelta(seconds=HUNG))
    store.set("a", "text")
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.compare_set("a", "text", "new") == b"new"
    store.append("a", b"+")
    assert store.multi_get(["a", "n"]) == [b"new+", b"5"]
    assert store.num_keys() == 2
    got: queue.Queue[bytes] = queue.Queue()
    waiter = threading.Thread(target=lambda: got.put(store.get("late")))
    waiter.start()
    store.set("late", "1")
    assert got.get(timeout=HUNG) == b"1"
    waiter.join(HUNG)
    with pytest.raises(StoreTimeoutError, match="did not come: never"):
        store.wait(["never"], timedelta(seconds=0.1))


def test_no_server_is_reported_after_the_grace_period() -> None:
    client = EtcdClient([Address("127.0.0.1", 1), Address("127.0.0.1", 2)], grace=0.3)
    with pytest.raises(StoreConnectionError, match=r"127\.0\.0\.1:1,127\.0\.0\.1:2 could not be reached"):
        client.connect(HUNG)
    client.close()


def test_another_http_server_is_reported() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Teapot(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(418)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Teapot) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = EtcdClient([Address(*server.server_address[:2])])  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="is this etcd's client port"):
            client.connect(HUNG)
        client.close()
        server.shutdown()
        thread.join(HUNG)


def test_a_server_without_http_is_reported() -> None:
    states: queue.Queue[str] = queue.Queue()
    with Server("127.0.0.1", 0) as server:
        client = EtcdClient(
            [Address(*server.address)],
            grace=0.3,
            on_state=lambda state: states.put(f"{state.what}: {state.why}"),
        )
        with pytest.raises(StoreConnectionError, match="the server there is not etcd"):
            client.connect(HUNG)
        client.close()
    assert states.get(timeout=HUNG) == "failed: the server there is not etcd"


@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"]
)
def test_an_answer_that_drips_is_none(begin: bytes) -> None:
    over = threading.Event()

    def drip(sock: socket.socket) -> None:
        with sock:
            try:
                sock.sendall(begin)
                while not over.wait(0.02):
                    sock.sendall(b" ")
            except OSError:
                pass  # the client has given up

    threads = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while not over.is_set():
                try:
                    threads.append(threading.Thread(target=drip, args=(server.accept()[0],)))
                except OSError:
                    return
                threads[-1].start()

        serving = threading.Thread(target=serve)
        serving.start()
        client = EtcdClient([Address(*server.getsockname())], grace=0.2, patience=1.0)
        try:
            with pytest.raises(StoreConnectionError, match="could not be reached"):
                client.connect(HUNG / 4)
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
            for thread in (serving, *threads):
                thread.join(HUNG)
            client.close()


def test_restarted_under_its_clients(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        member, states, seen = cluster.members[0], queue.Queue[State](), queue.Queue[bytes]()
        with EtcdClient(cluster.addresses, on_state=states.put) as client:
            lease = client.request(Grant(600.0)).number
            client.put("leased", b"x", lease)
            client.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
            assert states.get(timeout=HUNG).what == "connected"
            for number in range(2):
                client.put("k", b"%d" % number)
                member.kill()
                assert states.get(timeout=HUNG).what == "disconnected"
                answer: queue.Queue[Reply] = queue.Queue()
                client.send(Add("n", 1), answer.put)
                member.start()
                assert answer.get(timeout=HUNG).number == number + 1
                assert states.get(timeout=HUNG).what == "connected"
                assert seen.get(timeout=HUNG) == b"%d" % number
            assert client.request(KeepAlive(lease), HUNG).ok


def test_a_recreated_etcd_is_not_mistaken_for_the_old_one(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, EtcdClient(cluster.addresses) as client:
        client.put("k", b"v")
        member = cluster.members[0]
        member.kill()
        member.name, member.cluster = "other", ""  # so it uses another data directory
        member.start()
        with pytest.raises(StoreConnectionError, match="the state of this job is lost"):
            client.request(Get("k"), HUNG)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    etcd_program()
    with Cluster(tmp_path_factory.mktemp("three"), 3) as running:
        yield running


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_clients_continue_when_the_leader(three: Cluster, blow: signal.Signals) -> None:
    """Started at the leader, so that requests and watches must move."""
    leader = next(m for m in three.members if m.leads())
    others = [m for m in three.members if m is not leader]
    order = [m.address for m in (leader, *others)]
    seen: queue.Queue[bytes] = queue.Queue()
    with EtcdClient(order, patience=1.0) as client, EtcdClient(order[1:]) as writer:
        key = f"k/{blow}"
        lease = client.request(Grant(60.0)).number
        client.watch(key, lambda notice: [seen.put(c.entry.value) for c in notice.changes])
        writer.put(key, b"before")
        assert seen.get(timeout=HUNG) == b"before"
        leader.signal(blow)
        try:
            assert client.request(Add(f"n/{blow}", 1), HUNG).number == 1
            assert client.request(KeepAlive(lease), HUNG).ok
            writer.put(key, b"after")
            assert seen.get(timeout=HUNG) == b"after"
            assert client.request(Add(f"n/{blow}", 1), HUNG).number == 2
        finally:
            if blow == signal.SIGSTOP:
                leader.signal(signal.SIGCONT)
            else:
                leader.kill()


def test_a_rendezvous_over_a_cluster_that_loses_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd_program()
    options = Options(
        min_nodes=2,
        max_nodes=4,
        last_call=HUNG,
        prefix="job/",
        ttl=HUNG,
        linger=float("inf"),
        store_grace=HUNG,
    )
    said: queue.Queue[tuple[str, object]] = queue.Queue()
    with Cluster(tmp_path, 3) as cluster:

        class FromAddresses(EtcdClient):
            def __init__(self, *_: object, token: object = None, **rest: object) -> None:
                super().__init__(cluster.addresses, **{**rest, "patience": 1.0})  # type: ignore[arg-type]

        monkeypatch.setattr("tests.system.test_rounds_over_store.Client", FromAddresses)
        names = [f"node{n}" for n in range(1, 5)]
        nodes = {name: Node(name, (), options, said) for name in reversed(names)}  # type: ignore[arg-type]
        assert starts(said, 1, 4) == names
        next(m for m in cluster.members if m.leads()).kill()
        nodes["node3"].inbox.put(happen.WorkersFailed(1, NodeFailure("exit code 1")))
        assert starts(said, 2, 4) == names
        nodes["node4"].inbox.put(happen.LeaveRequested("SIGTERM"))
        assert said.get(timeout=HUNG)[1].outcome == "left"  # type: ignore[attr-defined]
        assert starts(said, 3, 3) == names[:3]
        for name in names[:3]:
            nodes[name].inbox.put(happen.WorkersSucceeded(3))
        assert {said.get(timeout=HUNG)[1].outcome for _ in range(3)} == {"succeeded"}  # type: ignore[attr-defined]
        for node in nodes.values():
            node.join(HUNG)


def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    etcd_program()
    authority = Authority(tmp_path)
    server, mine = authority.sign("etcd"), authority.sign("me")
    foreign: Tls = Authority(tmp_path, "foreign").sign("stranger")
    extra = ("--cert-file", server.cert, "--key-file", server.key)
    extra += ("--client-cert-auth", "--trusted-ca-file", server.ca)
    with Cluster(tmp_path, extra=extra) as cluster:
        endpoint = f"localhost:{cluster.addresses[0].port}"

        def talk(**config: str) -> Client:
            return etcd_client_from(endpoint, config)

        with talk(protocol="https", cacert=mine.ca, cert=mine.cert, key=mine.key) as client:
            seen: queue.Queue[Notice] = queue.Queue()
            client.watch("k", seen.put)
            assert client.put("k", b"v").ok
            assert seen.get(timeout=HUNG).changes[0].entry.value == b"v"
        for config, words in (
            ({"cacert": foreign.ca}, "its certificate is not trusted"),
            ({"cacert": mine.ca}, "set cert=FILE and key=FILE"),
        ):
            client = talk(**config)
            with pytest.raises(StoreAuthError, match=words):
                client.connect(HUNG)
            client.close()


def test_logins(tmp_path: Path) -> None:
    with Cluster(tmp_path, extra=("--auth-token", "simple")) as cluster:
        member = cluster.members[0]
        member.ask("/v3/auth/role/add", {"name": "root"})
        member.ask("/v3/auth/user/add", {"name": "root", "password": "all power"})
        member.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        member.ask("/v3/auth/user/add", {"name": "weak", "password": "none"})
        member.ask("/v3/auth/enable")
        endpoint, seen = str(member.address), queue.Queue[Notice]()

        def talk(user: str, password: str) -> Client:
            return etcd_client_from(
                endpoint, {"user": user} if user else {}, environ={"PHALANX_ETCD_PASSWORD": password}
            )

        with talk("root", "all power") as client:
            client.watch("k", seen.put)
            assert client.put("k", b"1").ok
            assert seen.get(timeout=HUNG).changes[0].entry.value == b"1"
            # etcd keeps simple tokens in memory: after a restart every login is stale.
            member.kill()
            member.start()
            assert client.request(Put("k", b"2"), HUNG).ok
            assert seen.get(timeout=HUNG).changes[0].entry.value == b"2"
        for user, password, words in (
            ("root", "wrong", "PHALANX_ETCD_PASSWORD"),
            ("", "", "requires a login; add user=NAME"),
            ("weak", "none", "'weak' needs read and write permission"),
        ):
            client = talk(user, password)
            with pytest.raises(StoreAuthError, match=words) as caught:
                client.connect(HUNG)
            client.close()
            assert "all power" not in str(caught.value)


def test_watch_numbers_can_be_reused(client: EtcdClient) -> None:
    seen: queue.Queue[Notice] = queue.Queue()
    client.on_notice = seen.put
    for key in ("one", "two"):
        assert client.request(Watch(7, key)).ok
    client.put("one", b"no longer watched")
    client.put("two", b"yes")
    assert seen.get(timeout=HUNG).changes[0].entry.key == "two"
