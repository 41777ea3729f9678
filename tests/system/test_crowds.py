"""Strangers who open connections and do nothing with them keep nobody out."""

from __future__ import annotations

import http.client
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.joins import join
from phalanx.errors import StoreAuthError, StoreTimeoutError
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net import wire
from phalanx.store.net.token import Token
from phalanx.store.tcpstore import model, protocol, torch_selector
from phalanx.store.tcpstore.server import TorchStoreServer
from phalanx.web import health
from phalanx.web.health import HealthServer
from tests.conftest import HUNG, wait_until
from tests.support.join_crowd import Crowd
from tests.support.run_helpers import Running, plain_environment, script
from tests.system.test_store_server import TOKEN
from tests.unit.test_torch_tcp import HELLO, encode


@contextmanager
def crowd(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """So many connections of another process's kind: made, and then silent."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(HUNG)
            sock.connect(address)
            made.append(sock)
        yield made


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_strangers_do_not_keep_a_node_out(many_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 10 * HUNG)
    with Server(token=TOKEN) as server, crowd(server.address, 700):
        where = server.address
        with Client(*where, token=TOKEN) as client:
            client.put("k", b"v")


def test_strangers_that_keep_coming_do_not_keep_a_node_out(many_files: None) -> None:
    with Server(token=TOKEN) as server, crowd(server.address, 600):
        over = threading.Event()

        def come() -> None:
            with ExitStack() as stack:
                for _ in range(3000):
                    if over.is_set():
                        return
                    try:
                        stack.enter_context(socket.create_connection(server.address))
                    except OSError:
                        return

        thread = threading.Thread(target=come)
        thread.start()
        try:
            for _ in range(5):
                with Client(*server.address, token=TOKEN) as client:
                    assert client.put("k", b"v").ok
        finally:
            over.set()
            thread.join(HUNG)


def test_nodes_that_come_all_at_once_keep_their_connections(many_files: None) -> None:
    with Server(token=TOKEN) as server:
        nodes = Crowd(server.address, 700, TOKEN)
        try:
            found = nodes.form(0.0, HUNG)
        finally:
            nodes.close()
    assert found["dropped"] == 0
    assert found["requests"] <= 3.1, "one to join, and two watches"


@pytest.mark.long
@pytest.mark.parametrize("within", [0.0, 1.0])
def test_two_thousand_nodes_join_a_store_of_its_own(within: float) -> None:
    """As `python -m bench.joins` measures it."""
    found = join(2000, within)
    assert found["dropped"] == 0
    assert found["requests"] <= 3.1


def test_a_store_of_its_own_uses_all_the_descriptors_that_it_may() -> None:
    limited = ["bash", "-c", 'ulimit -Sn 256; exec "$0" "$@"', sys.executable, "-m", "phalanx"]
    with subprocess.Popen(
        [*limited, "store", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as store:
        assert store.stderr is not None
        try:
            assert "listening" in store.stderr.readline()
            soft, hard = resource.prlimit(store.pid, resource.RLIMIT_NOFILE)
        finally:
            store.terminate()
    assert soft == hard


@contextmanager
def stalled(server: Server) -> Iterator[threading.Event]:
    """A store that is stuck in the middle of a turn, until the event is set."""
    stuck, go_on = threading.Event(), threading.Event()

    def complain(text: str) -> None:
        stuck.set()
        go_on.wait(HUNG)

    server.on_incident = complain
    with socket.create_connection(server.address, timeout=HUNG) as stranger:
        stranger.sendall(b"no greeting")
        assert stuck.wait(HUNG)
        server.on_incident = lambda text: None
        try:
            yield go_on
        finally:
            go_on.set()


def test_a_store_that_is_late_does_not_hold_it_against_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 3.0)
    nonce = b"n" * wire.NONCE
    with Server(token=TOKEN) as server, socket.create_connection(server.address, timeout=HUNG) as node:
        node.sendall(wire.greeting(nonce))
        theirs = wire.read_greeting(node.recv(wire.GREETING, socket.MSG_WAITALL))
        with stalled(server) as go_on:
            node.sendall(wire.proof(TOKEN.key, "client", theirs, nonce))
            go_on.wait(3.5)  # nothing sets it: the node's time would be over
        proof = node.recv(wire.PROOF, socket.MSG_WAITALL)
        assert wire.proves(proof, TOKEN.key, "server", nonce, theirs)
        seal, incoming = wire.seals(TOKEN.key, nonce, theirs)
        node.sendall(seal.sealed(wire.encode(0, 0, wire.Hello("node"))))
        assert wire.Frames(seal=incoming).feed(node.recv(4096)), "a Welcome"


def test_a_dripping_handshake_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.store.net.connections.HANDSHAKE_TIME", 0.3)
    with Server(token=TOKEN) as server, socket.create_connection(server.address, timeout=HUNG) as slow:
        slow.settimeout(0.1)
        slow.recv(wire.GREETING)
        for byte in wire.greeting(bytes(wire.NONCE)):
            try:
                slow.sendall(bytes([byte]))
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it may drip for as long as it likes")


def test_a_busy_store_is_not_dialled_again_and_again() -> None:
    with Server(token=TOKEN) as server:
        admitted: list[object] = []
        admit = server._connections._admit
        server._connections._admit = lambda *about: (admitted.append(about), admit(*about))[1]  # type: ignore[method-assign]
        with stalled(server) as go_on:
            client = Client(*server.address, token=TOKEN, patience=6.0)
            with pytest.raises(StoreTimeoutError):
                client.connect(1.5)  # more than the time after which a session looks for another connection
            go_on.set()
            client.connect(HUNG)
        client.close()
    assert len(admitted) == 2, "the one that stalls the store, and the node's"


def test_a_store_that_has_greeted_is_not_asked_whether_it_is_torchs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(HUNG)
        client = Client(*listener.getsockname(), token=TOKEN)
        with pytest.raises(StoreTimeoutError):
            client.connect(0)
        try:
            for _ in range(3):
                with listener.accept()[0] as sock:
                    sock.settimeout(HUNG)
                    sock.sendall(wire.greeting(bytes(wire.NONCE)))
                    assert wire.read_greeting(sock.recv(wire.GREETING, socket.MSG_WAITALL))
        finally:
            client.close()


def test_wrong_tokens_do_not_fill_the_log() -> None:
    said: list[str] = []
    wrong = Token(b"w" * 64, "the test")
    with Server(token=Token(b"t" * 64, "the test"), on_incident=said.append) as server:
        for _ in range(50):
            client = Client(*server.address, token=wrong)
            with pytest.raises(StoreAuthError):
                client.connect(HUNG)
            client.close()
    assert 1 <= len(said) <= 10
    assert all("wrong token" in line for line in said)


def test_dripping_clients_do_not_starve_the_health_port() -> None:
    server = HealthServer("127.0.0.1", 0, lambda: True)
    server.start()
    over = threading.Event()
    try:
        with crowd(("127.0.0.1", server.port), 40) as slow:

            def drip() -> None:
                alive = list(slow)
                while not over.wait(0.2):
                    for sock in list(alive):
                        try:
                            sock.send(b"G")
                        except OSError:
                            alive.remove(sock)

            thread = threading.Thread(target=drip)
            thread.start()
            try:
                for _ in range(10):
                    probe = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HUNG)
                    probe.request("GET", "/healthz")
                    assert probe.getresponse().status == 200
                    probe.close()
            finally:
                over.set()
                thread.join(HUNG)
    finally:
        server.stop()


def test_a_dripping_client_is_served_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HTTP_TOTAL", 0.5)
    server = HealthServer("127.0.0.1", 0, lambda: True)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=HUNG) as slow:
            slow.settimeout(0.05)
            end = time.monotonic() + HUNG
            while time.monotonic() < end:
                try:
                    slow.sendall(b"G")
                    if not slow.recv(1):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            assert time.monotonic() < end
    finally:
        server.stop()


# torch's store

SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from phalanx.store.tcpstore.server import TorchStoreServer
with TorchStoreServer("127.0.0.1", 0) as server:
    print(server.port, flush=True)
    sys.stdin.readline()
    print(len([open("/dev/null") for _ in range(40)]), "files", flush=True)
    sys.stdin.readline()
"""


def ping(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=HUNG) as sock:
        sock.sendall(HELLO + encode((protocol.PING, [7])))
        assert sock.recv(4, socket.MSG_WAITALL) == struct.pack("=I", 7)


def test_idle_connections_leave_torchs_store_descriptors() -> None:
    served = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert served.stdin is not None
    assert served.stdout is not None
    address = ("127.0.0.1", int(served.stdout.readline()))
    try:
        with socket.create_connection(address, timeout=HUNG) as member:
            member.sendall(HELLO + encode((protocol.PING, [1])))
            assert member.recv(4, socket.MSG_WAITALL) == struct.pack("=I", 1)
            with crowd(address, 400):
                ping(address)
                member.sendall(encode((protocol.PING, [2])))
                assert member.recv(4, socket.MSG_WAITALL) == struct.pack("=I", 2)
                served.stdin.write("\n")
                served.stdin.flush()
                assert served.stdout.readline() == "40 files\n"
    finally:
        served.communicate("\n\n", HUNG)
    assert served.returncode == 0


RING = """
import os, sys, time
import torch.distributed as dist
print("ready", os.environ["RANK"], os.getpid(), os.environ["MASTER_PORT"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
dist.init_process_group("gloo")
dist.barrier()
print("met", os.environ["RANK"], flush=True)
"""


@pytest.mark.long
def test_a_job_survives_a_crowd_at_its_master_port(tmp_path: Path, many_files: None) -> None:
    pytest.importorskip("torch")
    go = tmp_path / "go"
    words = ["bash", "-c", 'ulimit -n 1024; exec "$0" "$@"']
    port = free_static_port()
    with Running(
        ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port),
         "--nnodes", "1", "--rdzv-backend", "static", "--node-rank", "0",
         script(tmp_path, RING), str(go)],
        before=words,
        env=plain_environment(),
    ) as job:  # fmt: skip
        job.workers(2)
        with crowd(("127.0.0.1", port), 1100):
            go.touch()
            ended = job.end()
    assert ended.code == 0, ended
    assert "met 0" in ended.out
    assert "met 1" in ended.out


def free_static_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_requests_that_never_become_complete_take_no_memory_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_selector, "MAX_HALF_SENT", 1 << 20)
    said: list[str] = []
    whole = encode((protocol.SET, [b"/k", bytes(400_000)]))
    with TorchStoreServer("127.0.0.1", 0, log=said.append) as server:
        with ExitStack() as crowd_of:
            for _ in range(8):
                half = crowd_of.enter_context(socket.create_connection(server.address, timeout=HUNG))
                half.sendall(HELLO + whole[:-1])
            wait_until(lambda: said and len(server._loop._connections) < 4, "the end of the largest")
            assert "too many large requests" in said[0]
            ping(server.address)
            server.set("mine", bytes(600_000))
        wait_until(lambda: not server._loop._connections, "the end of all connections")
        assert server._loop._half_sent == 0


def test_strangers_cannot_store_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MAX_STORED", 1 << 20)
    said: list[str] = []
    with TorchStoreServer("127.0.0.1", 0, log=said.append) as server:
        server.set("mine", b"1")
        with socket.create_connection(server.address, timeout=HUNG) as greedy:
            greedy.sendall(HELLO)
            try:
                for number in range(100):
                    greedy.sendall(encode((protocol.SET, [b"/%d" % number, bytes(100_000)])))
                while greedy.recv(4096):
                    pass
            except OSError:
                pass
        wait_until(lambda: said, "a line about it")
        assert "the store is full" in said[0]
        assert server.get("mine") == b"1"
        assert server.num_keys() < 12
        # Room comes back with deletions, and replacing needs none.
        for _ in range(50):
            server.set("/0", bytes(1000))
        for number in range(12):
            server.delete_key(f"{number}")
        server.set("again", bytes(500_000))
