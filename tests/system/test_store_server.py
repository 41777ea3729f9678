"""The embedded store over real sockets: the common contract, the facade, trust, and faults."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from phalanx.cluster.torch_store_adapter import StoreFacade
from phalanx.core.rounds.store_commands import Add, Change, Command, Get, Grant, KeepAlive, Notice, Put, Reply
from phalanx.errors import StoreAuthError, StoreConnectionError, StoreError, StoreTimeoutError, UsageError
from phalanx.store.client import State
from phalanx.store.embedded import dialling
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net import wire
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port
from tests.support.store_contract import StoreContract

TOKEN = Token(b"test secret", "the test")


class OverTcp:
    """A client of a server, as the contract wants it."""

    def __init__(self, address: tuple[str, int], stack: ExitStack) -> None:
        self._address, self._stack = address, stack
        self._seen: dict[int, queue.Queue[Change]] = {}
        self._client = stack.enter_context(Client(*address, token=TOKEN, on_notice=self._note))

    def request(self, command: Command) -> Reply:
        return self._client.request(command, HUNG)

    def changes(self, watch: int, count: int) -> list[Change]:
        return [self._queue(watch).get(timeout=HUNG) for _ in range(count)]

    def second(self) -> OverTcp:
        return OverTcp(self._address, self._stack)

    def _queue(self, watch: int) -> queue.Queue[Change]:
        return self._seen.setdefault(watch, queue.Queue())

    def _note(self, notice: Notice) -> None:
        for change in notice.changes:
            self._queue(notice.watch).put(change)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(token=TOKEN) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(*server.address, token=TOKEN) as connected:
        yield connected


class TestServer(StoreContract):
    @pytest.fixture
    def store(self, server: Server) -> Iterator[OverTcp]:
        with ExitStack() as stack:
            yield OverTcp(server.address, stack)


class TestServerWithJournal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[OverTcp]:
        with ExitStack() as stack:
            server = stack.enter_context(Server(token=TOKEN, journal=str(tmp_path / "journal")))
            yield OverTcp(server.address, stack)


class Proxy:
    """A network between client and server that can be broken."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.swallow = threading.Event()  # replies vanish, the connection then breaks
        self.passing = [threading.Event(), threading.Event()]  # of the first connection, and of the others
        for passing in self.passing:
            passing.set()
        self._hushed: set[socket.socket] = set()
        self._hush_next = 0
        self.links: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        for passing in self.passing:
            passing.set()
        self.cut()
        for thread in self.threads:
            thread.join(HUNG)
        self.listener.close()
        for link in self.links:
            link.close()

    def hush(self, more: int) -> None:
        """No connection passes anything any more, nor do the next ones; all stay open."""
        self._hush_next = more
        self._hushed |= set(self.links)

    def reset(self) -> None:
        """The store's side of all connections is reset, as by a firewall; the client's side stays open."""
        self._hushed |= set(self.links)
        for far in self.links[1::2]:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.shutdown(socket.SHUT_RD)  # so that the thread that reads there lets go of it
            far.close()

    def cut(self) -> None:
        for link in self.links:
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            if self._hush_next:
                self._hush_next -= 1
                self._hushed |= {near, far}
            self.links += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink, source is far))
                self.threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65536):
                if is_reply and self.swallow.is_set():
                    self.swallow.clear()
                    break
                self.passing[source not in self.links[:2]].wait()
                if source not in self._hushed:
                    sink.sendall(data)
        except OSError:
            pass
        if source in self._hushed:
            return
        for link in (source, sink):
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def test_a_request_whose_answer_was_lost_is_done_once(server: Server) -> None:
    with Proxy(server.address) as proxy, Client(*proxy.address, token=TOKEN) as client:
        assert client.request(Add("n", 1)).number == 1
        for expected in range(2, 12):
            proxy.swallow.set()
            assert client.request(Add("n", 1), HUNG).number == expected


def test_a_watch_goes_on_over_broken_connections_without_gap_or_repeat(
    server: Server, client: Client
) -> None:
    seen: queue.Queue[bytes] = queue.Queue()
    with Proxy(server.address) as proxy, Client(*proxy.address, token=TOKEN) as watcher:
        watcher.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
        for number in range(200):
            client.put("k", b"%d" % number)
            if number % 40 == 0:
                proxy.cut()
        assert [seen.get(timeout=HUNG) for _ in range(200)] == [b"%d" % n for n in range(200)]


def test_coming_back_keeps_the_lease_and_staying_away_ends_it(server: Server, client: Client) -> None:
    ended = threading.Event()
    states: queue.Queue[State] = queue.Queue()
    with Proxy(server.address) as proxy, Client(*proxy.address, token=TOKEN, on_state=states.put) as holder:
        lease = holder.request(Grant(600.0)).number
        holder.put("held", b"", lease)
        client.watch("held", lambda notice: ended.set())
        proxy.cut()
        while states.get(timeout=HUNG).what != "disconnected":
            pass
        assert holder.request(KeepAlive(lease), HUNG).ok
        assert client.get("held") is not None
    # Both ends of the proxy are closed: to the server that is a process that died.
    assert ended.wait(HUNG)
    assert client.get("held") is None


def test_a_connection_that_only_the_store_sees_end_shortens_no_lease(server: Server, client: Client) -> None:
    """Its holder runs workers until it notices, and nobody else may run them meanwhile."""
    with Proxy(server.address) as proxy, Client(*proxy.address, token=TOKEN, patience=60.0) as holder:
        lease = holder.request(Grant(600.0)).number
        holder.put("held", b"", lease)
        # Another one hangs up at the same time: when its lease is over, this one's would be.
        with Proxy(server.address) as other, Client(*other.address, token=TOKEN) as witness:
            witness.put("witness", b"", witness.request(Grant(600.0)).number)
            ended = threading.Event()
            client.watch("witness", lambda notice: ended.set())
            proxy.reset()
            other.cut()
            witness.close()
        assert ended.wait(HUNG)
        assert client.get("held") is not None


def told_by(states: queue.Queue[State]) -> list[str]:
    """What the client has reported so far."""
    return [states.get().what for _ in range(states.qsize())]


def test_a_silent_connection_is_replaced_while_the_lease_lasts(server: Server) -> None:
    """One that passes nothing and stays open, and so does the next one, in its handshake."""
    states: queue.Queue[State] = queue.Queue()
    with Proxy(server.address) as proxy:
        with Client(*proxy.address, token=TOKEN, patience=6.0, on_state=states.put) as holder:
            lease = holder.request(Grant(12.0)).number
            proxy.hush(1)
            assert holder.request(KeepAlive(lease), HUNG).ok, "the lease is over"
            told = told_by(states)
        assert "disconnected" not in told, "the store has not seen the end of a connection"
        assert told[-1] == "connected"


def test_a_store_that_is_slow_keeps_its_connections(server: Server) -> None:
    states: queue.Queue[State] = queue.Queue()
    with (
        Proxy(server.address) as proxy,
        Client(*proxy.address, token=TOKEN, patience=3.0, on_state=states.put) as client,
    ):
        assert told_by(states) == ["connected"]
        for passing in proxy.passing:
            passing.clear()
        asked = threading.Event()
        client.send(Put("k", b""), lambda reply: asked.set())
        wait_until(lambda: len(proxy.links) > 2, "another connection")
        proxy.passing[0].set()
        assert asked.wait(HUNG)
        proxy.passing[1].set()
        client.request(Put("k", b""), HUNG)
        assert not told_by(states)


def test_the_end_of_a_silent_connection_is_told_although_another_is_being_opened(server: Server) -> None:
    """The store may have seen it as well, and the lease is shorter from then on."""
    states: queue.Queue[State] = queue.Queue()
    with (
        Proxy(server.address) as proxy,
        Client(*proxy.address, token=TOKEN, patience=1.5, on_state=states.put) as client,
    ):
        proxy.hush(1000)
        client.send(Put("k", b""), lambda reply: None)
        wait_until(lambda: len(proxy.links) > 2, "another connection")
        proxy.cut()
        while states.get(timeout=HUNG).what != "disconnected":
            pass


def test_wrong_token_names_where_ours_is_from(server: Server) -> None:
    stranger = Client(*server.address, token=Token(b"other", "the file /home/me/token"))
    with pytest.raises(StoreAuthError, match="refused our token: our token is from the file /home/me/token"):
        stranger.connect(HUNG)
    stranger.close()


def test_a_server_that_does_not_have_the_token_gets_nothing_from_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        client = Client(*impostor.getsockname()[:2], token=TOKEN)
        caught: list[bytes] = []

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(wire.greeting(os.urandom(wire.NONCE)))
                sock.recv(wire.GREETING, socket.MSG_WAITALL)
                sock.recv(wire.PROOF, socket.MSG_WAITALL)
                sock.sendall(os.urandom(wire.PROOF))
                caught.append(sock.recv(65536))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StoreAuthError, match="does not have our token"):
            client.connect(HUNG)
        thread.join(HUNG)
        client.close()
    assert caught == [b""]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (b"", "it accepts connections and sends nothing"),
        (b"SSH-2.0\r\n", "does not speak Phalanx's protocol"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak Phalanx's protocol"),
    ],
    ids=["silence", "a short greeting", "a long one"],
)
def test_another_service_at_the_address_is_told(
    monkeypatch: pytest.MonkeyPatch, says: bytes, words: str
) -> None:
    monkeypatch.setattr(dialling, "CONNECT_TIME", 3.0 if says else 0.2)  # what comes must be in time
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(*listener.getsockname(), token=TOKEN, grace=0.0)
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(client.connect, HUNG)
            with listener.accept()[0] as stranger:
                stranger.sendall(says)
                with pytest.raises(StoreConnectionError, match=words):
                    error.result(HUNG)
        client.close()


def test_a_network_address_needs_a_token() -> None:
    with pytest.raises(UsageError, match="needs a token"):
        Server("0.0.0.0", 0)


def test_an_address_in_use_says_so(server: Server) -> None:
    with pytest.raises(StoreError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
        Server(*server.address, token=TOKEN)


class Rude:
    """A client that has the token and speaks the protocol by hand."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address)
        self.sock.settimeout(HUNG)
        nonce = os.urandom(wire.NONCE)
        self.sock.sendall(wire.greeting(nonce))
        theirs = wire.read_greeting(self.sock.recv(wire.GREETING, socket.MSG_WAITALL))
        self.sock.sendall(wire.proof(TOKEN.key, "client", theirs, nonce))
        self.sock.recv(wire.PROOF, socket.MSG_WAITALL)
        self.seal, incoming = wire.seals(TOKEN.key, nonce, theirs)
        self.frames = wire.Frames(seal=incoming)

    def __enter__(self) -> Rude:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(map(self.seal.sealed, frames)))


def shake_hands(address: tuple[str, int]) -> Rude:
    return Rude(address)


def closes(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "opening",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(2000), wire.greeting(bytes(32)) + os.urandom(32)],
    ids=["http", "zeros", "wrong proof"],
)
def test_strangers_are_turned_away_and_disturb_nobody(server: Server, client: Client, opening: bytes) -> None:
    with socket.create_connection(server.address) as stranger:
        stranger.settimeout(HUNG)
        stranger.sendall(opening)
        assert closes(stranger)
    assert client.put("k", b"v").ok


@pytest.mark.parametrize(
    "after",
    [
        [(1 << 31).to_bytes(4, "big")],
        [wire.encode(1, 1, Put("k", b"before Hello"))],
        [wire.encode(0, 0, wire.Hello("s")), b"\x00\x00\x00\x05wrong"],
        [wire.encode(0, 0, wire.Hello("s")), wire.encode(0, 0, Reply(True, 1))],
    ],
    ids=["too large", "no hello", "garbage", "not for servers"],
)
def test_those_who_know_the_token_and_misbehave_lose_only_themselves(
    server: Server, client: Client, after: list[bytes]
) -> None:
    with shake_hands(server.address) as rude:
        rude.send(*after)
        assert closes(rude.sock)
    assert client.put("k", b"v").ok


def test_a_client_that_does_not_read_is_dropped_and_the_others_are_served(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.UNREAD_CAP", 4 << 20)
    dropped = threading.Event()
    server.on_incident = lambda text: dropped.set() if "did not read" in text else None
    with shake_hands(server.address) as slow:
        slow.send(wire.encode(0, 0, wire.Hello("slow")))
        client.put("big", bytes(1 << 20))
        slow.send(*(wire.encode(n, 1, Get("big")) for n in range(1, 65)))
        assert dropped.wait(HUNG)
    assert client.put("k", b"v").ok


def test_values_of_megabytes_and_messages_over_the_limit(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = os.urandom(8 << 20)
    client.put("big", big)
    entry = client.get("big")
    assert entry is not None
    assert entry.value == big
    monkeypatch.setattr("phalanx.store.net.wire.CAP", 1 << 20)
    with pytest.raises(StoreError, match="over the store's limit"):
        client.put("big", big)
    assert client.request(Get("big")).error == "size"
    assert client.put("small", b"").ok


SERVE = """
import sys
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
token = Token(b"test secret", "")
with Server("127.0.0.1", int(sys.argv[1]), token=token, journal=sys.argv[2] or None) as server:
    print(server.address[1], flush=True)
    sys.stdin.read()
"""


class Process:
    """A store of its own that can be killed, and started again at the same port."""

    def __init__(self, port: int = 0, journal: str = "") -> None:
        command = [sys.executable, "-c", SERVE, str(port or free_port()), journal]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdout is not None
        self.port = int(self.popen.stdout.readline())

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate()


def test_killed_and_restarted_with_its_journal_nobody_notices(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    process, states, seen = Process(journal=journal), queue.Queue[State](), queue.Queue[bytes]()
    try:
        with Client("127.0.0.1", process.port, token=TOKEN, on_state=states.put) as client:
            lease = client.request(Grant(30.0)).number
            client.put("leased", b"x", lease)
            client.watch("k", lambda notice: [seen.put(c.entry.value) for c in notice.changes])
            for number in range(3):
                client.put("k", b"%d" % number)
                process.kill()
                while states.get(timeout=HUNG).what != "refused":
                    pass
                answer: queue.Queue[Reply] = queue.Queue()
                client.send(Add("n", 1), answer.put)
                process = Process(process.port, journal)
                assert answer.get(timeout=HUNG).number == number + 1
                assert seen.get(timeout=HUNG) == b"%d" % number
            assert client.request(KeepAlive(lease), HUNG).ok
            entry = client.get("leased")
            assert entry is not None
            assert entry.value == b"x"
    finally:
        process.kill()


def test_a_journal_is_held_by_one_store_at_a_time(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    with Server(token=TOKEN, journal=journal), pytest.raises(StoreError, match="another store"):
        Server(token=TOKEN, journal=journal)


def test_the_journal_is_folded_and_still_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.store.embedded.journal.SNAPSHOT_EVERY", 10)
    journal = str(tmp_path / "journal")
    for _ in range(2):
        with Server(token=TOKEN, journal=journal) as server, Client(*server.address, token=TOKEN) as client:
            for _ in range(37):
                total = client.request(Add("n", 1)).number
    assert total == 74


def test_restarted_without_a_journal_ends_the_session_with_the_reason() -> None:
    process, states = Process(), queue.Queue[State]()
    try:
        with Client("127.0.0.1", process.port, token=TOKEN, on_state=states.put) as client:
            client.put("k", b"v")
            process.kill()
            process = Process(process.port)
            while (state := states.get(timeout=HUNG)).what != "lost":
                pass
            assert "lost its data" in state.why
            with pytest.raises(StoreConnectionError, match="journal"):
                client.get("k")
    finally:
        process.kill()


def test_gone_for_longer_than_the_grace_fails_what_waits() -> None:
    process = Process()
    with Client("127.0.0.1", process.port, token=TOKEN, grace=0.5) as client:
        process.kill()
        with pytest.raises(StoreConnectionError, match=r"could not be reached for 0\.5 s"):
            client.request(Put("k", b""), HUNG)


def test_facade_has_torchs_methods(client: Client) -> None:
    store = StoreFacade(client, "user/")
    store.set("a", "text")
    assert store.get("a") == b"text"
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.compare_set("a", "text", "new") == b"new"
    assert store.compare_set("a", "text", "other") == b"new"
    assert store.compare_set("fresh", "", "made") == b"made"
    assert store.compare_set("absent", "something", "x") == b"something"
    assert not store.check(["absent"])
    store.append("a", b"+")
    store.append("b", "first")
    assert store.multi_get(["a", "b"]) == [b"new+", b"first"]
    store.multi_set(["m1", "m2"], ["1", b"2"])
    assert store.check(["m1", "m2"])
    assert (store.num_keys(), StoreFacade(client, "other/").num_keys()) == (6, 0)
    assert (store.delete_key("m1"), store.delete_key("m1")) == (True, False)


def test_facade_waits_by_event_and_names_what_is_missing(client: Client) -> None:
    store = StoreFacade(client)
    got: queue.Queue[list[bytes]] = queue.Queue()
    waiter = threading.Thread(target=lambda: got.put(store.multi_get(["late", "later"])))
    waiter.start()
    store.set("late", "1")
    store.set("later", "2")
    assert got.get(timeout=HUNG) == [b"1", b"2"]
    waiter.join(HUNG)
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(StoreTimeoutError, match="did not come: never"):
        store.wait(["late", "never"])
    with pytest.raises(TimeoutError):
        store.get("never")


def test_facade_is_told_when_the_store_is_lost() -> None:
    process = Process()
    with Client("127.0.0.1", process.port, token=TOKEN, grace=0.2) as client:
        store = StoreFacade(client)
        failed: queue.Queue[BaseException] = queue.Queue()

        def wait() -> None:
            try:
                store.get("never")
            except StoreError as error:
                failed.put(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        process.kill()
        assert isinstance(failed.get(timeout=HUNG), StoreConnectionError)
        waiter.join(HUNG)
