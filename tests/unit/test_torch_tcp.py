"""torch's TCPStore protocol: the parser, the model, and the server with plain sockets. No torch."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import StoreConnectionError, StoreError, StoreTimeoutError
from phalanx.store.tcpstore import protocol as tcp
from phalanx.store.tcpstore.model import TorchStoreModel
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.conftest import HUNG, needs_ipv6

HELLO = b"\x00" + struct.pack("=I", tcp.MAGIC)
SIZE = struct.Struct("=Q")
NUMBER = struct.Struct("=q")


def text(data: bytes) -> bytes:
    return SIZE.pack(len(data)) + data


def encode(request: tcp.Request) -> bytes:
    """The bytes a client would send; written from the protocol's table, not from the parser."""
    op, args = request
    out = bytearray([op])
    if op in (tcp.CHECK, tcp.WAIT, tcp.MULTI_GET):
        out += SIZE.pack(len(args))
    if op == tcp.MULTI_SET:
        out += SIZE.pack(len(args) // 2)
    for arg in args:
        if isinstance(arg, bytes):
            out += text(arg)
        else:
            out += struct.pack("=I" if op == tcp.PING else "=q", arg)
    return bytes(out)


keys = st.binary(max_size=12)
values = st.binary(max_size=40)
int64 = st.integers(-(2**63), 2**63 - 1)
requests = st.one_of(
    st.tuples(st.sampled_from([tcp.SET, tcp.APPEND, tcp.QUEUE_PUSH]), st.tuples(keys, values).map(list)),
    st.tuples(st.just(tcp.COMPARE_SET), st.tuples(keys, values, values).map(list)),
    st.tuples(
        st.sampled_from([tcp.GET, tcp.DELETE_KEY, tcp.QUEUE_POP, tcp.QUEUE_LEN]), st.tuples(keys).map(list)
    ),
    st.tuples(st.sampled_from([tcp.ADD, tcp.BARRIER]), st.tuples(keys, int64).map(list)),
    st.tuples(st.sampled_from([tcp.CHECK, tcp.WAIT, tcp.MULTI_GET]), st.lists(keys, max_size=5)),
    st.tuples(
        st.just(tcp.MULTI_SET),
        st.lists(st.tuples(keys, values), max_size=4).map(lambda pairs: [x for pair in pairs for x in pair]),
    ),
    st.tuples(st.sampled_from([tcp.GETNUMKEYS, tcp.CANCEL_WAIT, tcp.LIST_KEYS]), st.just([])),
    st.tuples(st.just(tcp.PING), st.tuples(st.integers(0, 2**32 - 1)).map(list)),
)


def chunks(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            yield data[begin:end]


class TestParser:
    @given(st.lists(requests, max_size=8), st.lists(st.integers(0, 10_000), max_size=20))
    def test_any_chunking_gives_the_same_requests(self, sent: list[tcp.Request], cuts: list[int]) -> None:
        parser = tcp.RequestParser()
        data = HELLO + b"".join(map(encode, sent))
        got = [request for chunk in chunks(data, cuts) for request in parser.feed(chunk)]
        assert got == sent
        assert parser.error is None

    @given(st.lists(requests, max_size=4))
    def test_byte_by_byte(self, sent: list[tcp.Request]) -> None:
        parser = tcp.RequestParser()
        got = [r for byte in HELLO + b"".join(map(encode, sent)) for r in parser.feed(bytes([byte]))]
        assert got == sent

    @settings(max_examples=300)
    @given(st.booleans(), st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=10))
    def test_random_bytes_only_end_in_the_protocol_error(
        self, hello: bool, noise: bytes, cuts: list[int]
    ) -> None:
        data = (HELLO if hello else b"") + noise
        whole, cut = tcp.RequestParser(), tcp.RequestParser()
        expected = whole.feed(data)
        got = [request for chunk in chunks(data, cuts) for request in cut.feed(chunk)]
        assert got == expected
        assert str(cut.error) == str(whole.error)
        assert whole.error is None or isinstance(whole.error, tcp.TorchProtocolError)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"GET / HTTP/1.1\r\n", "not a client of torch"),
            (b"\x00abcd", "magic number 0x"),
            (HELLO + HELLO, "second VALIDATE"),
            (HELLO + b"\x13", "opcode 19 is unknown"),
            (HELLO + b"\x03" + SIZE.pack(tcp.MAX_KEY + 1), "key of 8193 bytes"),
            (HELLO + b"\x01" + text(b"k") + SIZE.pack(tcp.MAX_PAYLOAD + 1), "value of 8388609 bytes"),
            (HELLO + b"\x06" + SIZE.pack(tcp.MAX_KEYS + 1), "131073 keys"),
            (HELLO + b"\x0b" + SIZE.pack(2**64 - 1), "18446744073709551615 keys"),
        ],
    )
    def test_refused_as_soon_as_the_claim_is_read(self, data: bytes, words: str) -> None:
        parser = tcp.RequestParser()
        assert parser.feed(data) == []
        assert words in str(parser.error)
        assert parser.feed(encode((tcp.GET, [b"k"]))) == []

    def test_good_requests_before_a_bad_one_count(self) -> None:
        parser = tcp.RequestParser()
        assert parser.feed(HELLO + encode((tcp.SET, [b"k", b"v"])) + b"\xff") == [(tcp.SET, [b"k", b"v"])]
        assert parser.error is not None

    def test_limits_themselves_are_allowed(self) -> None:
        parser = tcp.RequestParser()
        request = (tcp.SET, [b"k" * tcp.MAX_KEY, b"v" * tcp.MAX_PAYLOAD])
        data = HELLO + encode(request)
        got = [r for i in range(0, len(data), 1 << 16) for r in parser.feed(data[i : i + (1 << 16)])]
        assert got == [request]
        many = (tcp.CHECK, [b"k"] * tcp.MAX_KEYS)
        assert parser.feed(encode(many)) == [many]


class Driver:
    """Drives a model and gathers what each connection was sent."""

    def __init__(self) -> None:
        self.model = TorchStoreModel()
        self.sent: dict[int, bytes] = {}

    def __call__(self, conn: int, op: int, *args: bytes | int) -> bytes:
        """Step, and take what this connection has been sent since it was last looked at."""
        for to, reply in self.model.step(conn, (op, list(args))):
            self.sent[to] = self.sent.get(to, b"") + reply
        return self.take(conn)

    def drop(self, conn: int) -> None:
        for to, reply in self.model.drop(conn):
            self.sent[to] = self.sent.get(to, b"") + reply

    def take(self, conn: int) -> bytes:
        return self.sent.pop(conn, b"")


@pytest.fixture
def do() -> Driver:
    return Driver()


class TestModel:
    def test_values(self, do: Driver) -> None:
        assert do(1, tcp.SET, b"a", b"1") == b""
        assert do(1, tcp.GET, b"a") == text(b"1")
        assert do(1, tcp.GET, b"none") == text(b"")
        assert do(1, tcp.APPEND, b"a", b"2") == b""
        assert do(1, tcp.APPEND, b"a", b"3") == b""
        assert do(1, tcp.GET, b"a") == text(b"123")
        assert do(1, tcp.ADD, b"a", 7) == NUMBER.pack(130)
        assert do(1, tcp.GET, b"a") == text(b"130")
        assert do(1, tcp.MULTI_SET, b"x", b"X", b"y", b"") == b""
        assert do(1, tcp.MULTI_GET, b"x", b"none", b"y") == text(b"X") + text(b"") + text(b"")
        assert do(1, tcp.GETNUMKEYS) == NUMBER.pack(3)
        assert do(1, tcp.LIST_KEYS) == NUMBER.pack(3) + text(b"a") + text(b"x") + text(b"y")
        assert do(1, tcp.DELETE_KEY, b"x") == NUMBER.pack(1)
        assert do(1, tcp.DELETE_KEY, b"x") == NUMBER.pack(0)
        assert do(1, tcp.PING, 7) == struct.pack("=I", 7)

    @pytest.mark.parametrize(
        ("stored", "expected", "reply", "after"),
        [
            (None, b"", b"new", b"new"),
            (None, b"old", b"old", b""),
            (b"old", b"old", b"new", b"new"),
            (b"old", b"other", b"old", b"old"),
            (b"old", b"", b"old", b"old"),
        ],
    )
    def test_compare_set(
        self, do: Driver, stored: bytes | None, expected: bytes, reply: bytes, after: bytes
    ) -> None:
        if stored is not None:
            do(1, tcp.SET, b"k", stored)
        assert do(1, tcp.COMPARE_SET, b"k", expected, b"new") == text(reply)
        assert do(1, tcp.GET, b"k") == text(after)

    @pytest.mark.parametrize(
        ("stored", "sum_"),
        [
            (b"12", 15),
            (b" -5", -2),
            (b"+4x", 7),
            (b"0000000000000000000000009", 12),
            (b"%d" % (2**63 - 1), 2 - 2**63),
        ],
    )
    def test_add_reads_numbers_as_c_does(self, do: Driver, stored: bytes, sum_: int) -> None:
        do(1, tcp.SET, b"k", stored)
        assert do(1, tcp.ADD, b"k", 3) == NUMBER.pack(sum_)

    @pytest.mark.parametrize("stored", [b"", b"abc", b"-", b"9" * 19, b"9" * 5000, b"1_0"[1:]])
    def test_add_to_what_is_no_number_is_refused(self, do: Driver, stored: bytes) -> None:
        do(1, tcp.SET, b"k", stored)
        with pytest.raises(tcp.TorchProtocolError, match="no 64-bit number"):
            do(1, tcp.ADD, b"k", 1)

    @pytest.mark.parametrize(
        "write",
        [
            (tcp.SET, b"k", b""),
            (tcp.ADD, b"k", 1),
            (tcp.APPEND, b"k", b"v"),
            (tcp.COMPARE_SET, b"k", b"", b"v"),
            (tcp.MULTI_SET, b"k", b"v"),
            (tcp.QUEUE_PUSH, b"k", b"v"),
            (tcp.BARRIER, b"k", 2),
        ],
    )
    def test_every_write_wakes_a_wait(self, do: Driver, write: tuple[int, bytes]) -> None:
        assert do(1, tcp.CHECK, b"k") == b"\1"
        assert do(1, tcp.WAIT, b"k") == b""
        do(2, *write)
        assert do.take(1) == b"\0"
        assert do(1, tcp.CHECK, b"k") == b"\0"
        assert do(1, tcp.WAIT, b"k") == b"\0"

    def test_wait_for_several_keys(self, do: Driver) -> None:
        assert do(1, tcp.WAIT) == b"\0"
        assert do(1, tcp.WAIT, b"a", b"b", b"a") == b""
        do(2, tcp.SET, b"a", b"")
        assert do.take(1) == b""
        do(2, tcp.DELETE_KEY, b"a")
        do(2, tcp.SET, b"b", b"")
        assert do.take(1) == b"\0"

    def test_a_cancelled_wait_is_not_woken(self, do: Driver) -> None:
        assert do(1, tcp.CANCEL_WAIT) == b"\1"
        do(1, tcp.WAIT, b"a", b"b")
        assert do(1, tcp.CANCEL_WAIT) == b"\1"
        do(2, tcp.MULTI_SET, b"a", b"", b"b", b"")
        assert do.take(1) == b""
        assert do(1, tcp.WAIT, b"a") == b"\0"

    def test_a_second_wait_is_refused(self, do: Driver) -> None:
        do(1, tcp.WAIT, b"a")
        for op, arg in ((tcp.WAIT, b"b"), (tcp.BARRIER, b"c")):
            with pytest.raises(tcp.TorchProtocolError, match="second wait"):
                do(1, op, arg, *([2] if op == tcp.BARRIER else []))

    def test_dropped_connections_leave_nothing_behind(self, do: Driver) -> None:
        do(1, tcp.WAIT, b"a", b"b")
        do(2, tcp.BARRIER, b"bar", 2)
        do.drop(1)
        do.drop(2)
        do.drop(3)
        assert do(4, tcp.MULTI_SET, b"a", b"", b"b", b"") == b""
        assert not do.sent

    def test_queue(self, do: Driver) -> None:
        assert do(1, tcp.QUEUE_POP, b"q") == NUMBER.pack(0)
        do(1, tcp.QUEUE_PUSH, b"q", b"1")
        do(1, tcp.QUEUE_PUSH, b"q", b"2")
        assert do(1, tcp.QUEUE_LEN, b"q") == NUMBER.pack(2)
        assert do(1, tcp.GETNUMKEYS) == NUMBER.pack(0)
        assert do(1, tcp.CHECK, b"q") == b"\0"
        assert do(1, tcp.QUEUE_POP, b"q") == NUMBER.pack(2) + text(b"1")
        assert do(1, tcp.QUEUE_POP, b"q") == NUMBER.pack(1) + text(b"2")
        assert do(1, tcp.CHECK, b"q") == b"\1"

    def test_a_push_wakes_one_in_turn(self, do: Driver) -> None:
        for conn in (1, 2, 3):
            do(conn, tcp.WAIT, b"q")
        do(9, tcp.QUEUE_PUSH, b"q", b"v")
        assert [do.take(conn) for conn in (1, 2, 3)] == [b"\0", b"", b""]
        do(9, tcp.QUEUE_PUSH, b"q", b"v")
        assert [do.take(conn) for conn in (1, 2, 3)] == [b"", b"\0", b""]

    @pytest.mark.parametrize("leave", ["drop", "cancel", "other"])
    def test_a_wake_up_that_is_not_used_passes_on(self, do: Driver, leave: str) -> None:
        do(1, tcp.WAIT, b"q")
        do(2, tcp.WAIT, b"q")
        do(9, tcp.QUEUE_PUSH, b"q", b"v")
        if leave == "drop":
            do.drop(1)
        elif leave == "cancel":
            assert do(1, tcp.CANCEL_WAIT) == b"\0\1"
        else:
            do(1, tcp.GET, b"x")
        assert do.take(2) == b"\0"

    def test_a_wake_up_that_is_used_does_not_pass_on(self, do: Driver) -> None:
        do(1, tcp.WAIT, b"q")
        do(2, tcp.WAIT, b"q")
        do(9, tcp.QUEUE_PUSH, b"q", b"v")
        do.take(1)
        assert do(1, tcp.QUEUE_POP, b"q") == NUMBER.pack(1) + text(b"v")
        assert do.take(2) == b""

    def test_barrier(self, do: Driver) -> None:
        assert do(1, tcp.BARRIER, b"b", 3) == b""
        assert do(2, tcp.BARRIER, b"b", 3) == b""
        assert do(9, tcp.GET, b"b") == text(b"2")
        assert do(3, tcp.BARRIER, b"b", 3) == b"\0"
        assert (do.take(1), do.take(2)) == (b"\0", b"\0")
        assert do(4, tcp.BARRIER, b"b", 3) == b"\0"

    @pytest.mark.parametrize("leave", ["drop", "cancel"])
    def test_a_withdrawn_arrival_does_not_count(self, do: Driver, leave: str) -> None:
        do(1, tcp.BARRIER, b"b", 3)
        do(2, tcp.BARRIER, b"b", 3)
        if leave == "drop":
            do.drop(1)
        else:
            assert do(1, tcp.CANCEL_WAIT) == b"\1"
        assert do(3, tcp.BARRIER, b"b", 3) == b""
        assert do(1, tcp.BARRIER, b"b", 3) == b"\0"
        assert (do.take(2), do.take(3)) == (b"\0", b"\0")

    def test_a_reply_has_a_limit(self, do: Driver) -> None:
        do(1, tcp.SET, b"k", b"v" * tcp.MAX_PAYLOAD)
        with pytest.raises(tcp.TorchProtocolError, match="ask for fewer keys"):
            do(1, tcp.MULTI_GET, *[b"k"] * 128)

    @given(st.lists(st.tuples(st.integers(1, 4), requests), max_size=30))
    def test_nothing_but_the_protocol_error(self, script: list[tuple[int, tcp.Request]]) -> None:
        model = TorchStoreModel()
        for conn, request in script:
            try:
                model.step(conn, request)
            except tcp.TorchProtocolError:
                model.drop(conn)
        for conn in range(1, 5):
            model.drop(conn)
        # With every connection gone nothing may be left that belongs to one.
        left = (model._waits, model._waiters, model._barriers, model._arrived, model._granted)
        assert not any(left)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def server(said: list[str]) -> Iterator[TorchStoreServer]:
    before = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    with TorchStoreServer(log=said.append) as server:
        yield server
    assert set(threading.enumerate()) == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


class Peer:
    """A plain socket that speaks the protocol."""

    def __init__(self, server: TorchStoreServer, hello: bytes = HELLO) -> None:
        self.sock = socket.create_connection(server.address, timeout=HUNG)
        self.sock.sendall(hello)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()

    def send(self, op: int, *args: bytes | int) -> None:
        self.sock.sendall(encode((op, list(args))))

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError(data)
            data += part
        return data

    def ping(self) -> None:
        self.send(tcp.PING, 42)
        assert self.read(4) == struct.pack("=I", 42)

    def closed(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


class TestServer:
    def test_one_bad_peer_does_not_disturb_the_others(
        self, server: TorchStoreServer, said: list[str]
    ) -> None:
        with Peer(server) as good:
            good.ping()
            for _ in range(3):
                with Peer(server, b"GET / HTTP/1.1\r\n\r\n") as bad:
                    assert bad.closed()
            with Peer(server) as bad:
                bad.sock.sendall(b"\x63")
                assert bad.closed()
            with Peer(server) as bad:
                bad.send(tcp.SET, b"k", b"text")
                bad.send(tcp.ADD, b"k", 1)
                assert bad.closed()
            good.ping()
        assert [("not a client" in line, "opcode 99" in line, "'text'" in line) for line in said] == [
            (True, False, False),
            (False, True, False),
            (False, False, True),
        ]

    def test_a_slow_reader_is_held_and_disturbs_nobody(self, server: TorchStoreServer) -> None:
        value, times = os.urandom(4 << 20), 40
        with Peer(server) as slow, Peer(server) as quick:
            slow.send(tcp.SET, b"k", value)
            slow.sock.sendall(encode((tcp.GET, [b"k"])) * times)
            for _ in range(50):
                quick.ping()
            # Most of what was asked for has not been made yet: 160 MiB would show.
            held = sum(conn.out_size for conn in server._loop._connections.values())
            assert held <= 2 * len(value)
            for _ in range(times):
                assert slow.read(8 + len(value)) == text(value)
            slow.ping()

    def test_a_request_in_pieces_and_many_in_one_piece(self, server: TorchStoreServer) -> None:
        with Peer(server, b"") as peer:
            for byte in HELLO + encode((tcp.SET, [b"k", b"v"])) + encode((tcp.GET, [b"k"])):
                peer.sock.sendall(bytes([byte]))
            assert peer.read(9) == text(b"v")
            peer.sock.sendall(encode((tcp.ADD, [b"n", 1])) * 1000)
            assert peer.read(8000) == b"".join(NUMBER.pack(i) for i in range(1, 1001))

    def test_reset_is_a_new_round(self, server: TorchStoreServer) -> None:
        with Peer(server) as old, Peer(server) as waiter:
            old.send(tcp.SET, b"k", b"v")
            old.ping()
            waiter.send(tcp.WAIT, b"late")
            server.reset()
            with Peer(server) as new:
                assert old.closed()
                assert waiter.closed()
                new.send(tcp.CHECK, b"k")
                assert new.read(1) == b"\1"
                new.send(tcp.GETNUMKEYS)
                assert new.read(8) == NUMBER.pack(0)

    def test_reset_with_many_that_are_just_connecting(self, server: TorchStoreServer) -> None:
        peers = [Peer(server, HELLO + encode((tcp.SET, [b"old", b""]))) for _ in range(200)]
        server.reset()
        with Peer(server) as new:
            new.send(tcp.CHECK, b"old")
            assert new.read(1) == b"\1"
        for peer in peers:
            assert peer.closed()
            peer.sock.close()

    def test_no_descriptors_left(self, server: TorchStoreServer, said: list[str]) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with Peer(server) as first:
            first.ping()
            late = [socket.socket() for _ in range(3)]
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            holes = [os.dup(0) for _ in range(highest)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + 1, limits[1]))
            try:
                for sock in late:
                    sock.settimeout(30)
                    sock.connect(server.address)
                    sock.sendall(HELLO + encode((tcp.PING, [1])))
                first.ping()
                used = os.times()
                first.ping()
                assert os.times().user - used.user < 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for fd in holes:
                    os.close(fd)
            for sock in late:  # accepted again when the pause is over
                assert sock.recv(4) == struct.pack("=I", 1)
                sock.close()
        assert len(said) == 1
        assert "ulimit -n" in said[0]

    def test_the_process_itself_uses_the_store(self, server: TorchStoreServer) -> None:
        with Peer(server) as peer:
            server.set("k", b"v")
            peer.send(tcp.GET, b"/k")
            assert peer.read(9) == text(b"v")
            peer.send(tcp.ADD, b"/n", 4)
            peer.read(8)
            assert server.add("n", 1) == 5
            assert server.get("n") == b"5"
            assert server.check(["k", "n"])
            assert not server.check(["k", "none"])
            assert server.num_keys() == 2
            assert server.delete_key("k")
            assert not server.delete_key("k")
            with pytest.raises(StoreTimeoutError, match="'none'"):
                server.wait(["none"], 0.01)
            server.set("text", b"x")
            with pytest.raises(StoreError, match="no 64-bit number"):
                server.add("text", 1)

    @pytest.mark.parametrize("end", ["set", "reset", "close"])
    def test_a_wait_of_the_process_ends(self, server: TorchStoreServer, end: str) -> None:
        outcome: list[object] = []

        def wait() -> None:
            try:
                outcome.append(server.get("k"))
            except StoreError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        with Peer(server) as peer:
            if end == "set":
                peer.send(tcp.SET, b"/k", b"v")
            elif end == "reset":
                while not server._waiting:  # until the wait has reached the server's thread
                    peer.ping()
                server.reset()
            else:
                server.close()
            thread.join(HUNG)
        assert not thread.is_alive()
        assert outcome == [b"v"] if end == "set" else isinstance(outcome[0], StoreError)


class TestLife:
    def test_close_without_start_and_again(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        server = TorchStoreServer()
        server.close()
        server.close()
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(StoreError, match="before close"):
            server.start()
        with pytest.raises(StoreError, match="not being served"):
            server.set("k", b"")

    def test_close_ends_connections_and_waits(self) -> None:
        server = TorchStoreServer()
        server.start()
        with Peer(server) as peer:
            peer.ping()
            peer.send(tcp.WAIT, b"never")
            server.close()
            assert peer.closed()
        server.close()

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost", "0.0.0.0", pytest.param("::", marks=needs_ipv6), ""]
    )
    def test_where_it_listens(self, host: str) -> None:
        with TorchStoreServer(host) as server:
            assert server.address[1] == server.port > 0
            with socket.create_connection(("127.0.0.1", server.port), timeout=HUNG) as sock:
                sock.sendall(HELLO + encode((tcp.PING, [5])))
                assert sock.recv(4) == struct.pack("=I", 5)

    def test_a_socket_that_is_given(self) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with TorchStoreServer(sock=sock) as server, Peer(server) as peer:
            assert server.address == ("127.0.0.1", port)
            peer.ping()
        assert sock.fileno() == -1

    def test_a_port_that_is_taken_and_a_name_that_is_not_ours(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(StoreConnectionError, match=f"port {port} .*a free port"):
                TorchStoreServer("127.0.0.1", port)
        with pytest.raises(StoreConnectionError, match="address of this machine"):
            TorchStoreServer("192.0.2.1")
        with pytest.raises(StoreConnectionError, match="cannot be resolved"):
            TorchStoreServer("256.1.1.1.invalid")


def test_an_entry_is_kept_for_whom_it_was_announced_to() -> None:
    """torch's client waits and pops in two requests, and takes an empty queue in the second for an error."""
    model = TorchStoreModel()
    model.step(0, (tcp.QUEUE_PUSH, [b"q", b"one"]))
    assert model.step(1, (tcp.WAIT, [b"q"])) == [(1, b"\x00")]
    assert model.step(2, (tcp.WAIT, [b"q"])) == []
    assert model.step(3, (tcp.QUEUE_POP, [b"q"])) == [(3, tcp.INT64.pack(0))]
    ((to, reply),) = model.step(1, (tcp.QUEUE_POP, [b"q"]))
    assert (to, reply[-3:]) == (1, b"one")
    assert model.step(0, (tcp.QUEUE_PUSH, [b"q", b"two"])) == [(2, b"\x00")]
    assert model.drop(2) == []
    ((to, reply),) = model.step(3, (tcp.QUEUE_POP, [b"q"]))
    assert (to, reply[-3:]) == (3, b"two")
