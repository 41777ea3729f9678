"""The torch store against the real client of torch: every method, many clients, and process groups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HUNG, needs_ipv6

dist = pytest.importorskip("torch.distributed")

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=100)

# In a process of its own: some of torch's client calls hold the interpreter's lock while they wait.
SERVER = """
import sys
from phalanx.store.tcpstore.server import TorchStoreServer

with TorchStoreServer(sys.argv[1]) as server:
    print(server.port, flush=True)
    for line in sys.stdin:
        server.reset()
        print("reset", flush=True)
"""

WORKER = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.ones(4) * (rank + 1)
dist.all_reduce(total)
assert total.tolist() == [world * (world + 1) / 2] * 4, total
dist.barrier()
pair = dist.new_group([0, 1])
if rank < 2:
    value = torch.tensor([rank])
    dist.all_reduce(value, group=pair)
    assert value.item() == 1, value
gathered = [None] * world
dist.all_gather_object(gathered, {"rank": rank})
assert [item["rank"] for item in gathered] == list(range(world)), gathered
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
"""


class Server:
    """The store in its own process."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def reset(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "reset\n"

    def client(self, timeout: timedelta = LONG, **options: Any) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, None, False, timeout, **options)

    def close(self) -> None:
        self.process.communicate(timeout=HUNG)
        assert self.process.returncode == 0


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(shared: Server) -> Server:
    shared.reset()
    return shared


def check_basic_methods(store: Any) -> None:
    """The methods that every client of torch has."""
    store.set("k", "v")
    assert store.get("k") == b"v"
    store.set("k", b"\0\xff")
    assert store.get("k") == b"\0\xff"
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    assert store.check(["k", "n"])
    assert not store.check(["k", "none"])
    store.wait(["k", "n"])
    store.wait(["k"], SHORT)
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "wrong", "second") == b"first"
    assert store.compare_set("c", "first", "second") == b"second"
    assert store.compare_set("absent", "expected", "new") == b"expected"
    assert store.num_keys() == 3
    assert store.delete_key("c")
    assert not store.delete_key("c")


@pytest.mark.parametrize("prefix", ["", "a/b"])
def test_the_plain_client(server: Server, prefix: str) -> None:
    store = server.client(use_libuv=False)
    check_basic_methods(dist.PrefixStore(prefix, store) if prefix else store)


@pytest.mark.parametrize("prefix", ["", "a/b"])
def test_every_method(server: Server, prefix: str) -> None:
    store = server.client()
    if prefix:
        store = dist.PrefixStore(prefix, store)
    check_basic_methods(store)
    store.multi_set(["m1", "m2"], ["1", "2"])
    assert store.multi_get(["m1", "m2", "k"]) == [b"1", b"2", b"\0\xff"]
    store.append("m1", "0")
    store.append("m1", "0")
    assert store.add("m1", 1) == 101
    store.queue_push("q", "first")
    store.queue_push("q", "second")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert store.queue_pop("q") == b"first"
    assert store.queue_pop("q", False) == b"second"
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    assert sorted(store.list_keys()) == ["k", "m1", "m2", "n"]
    store.barrier("b", 1)
    assert store.has_extended_api()
    other = store.clone()
    other.set("from the clone", "")
    assert store.get("from the clone") == b""


def test_timeouts_leave_the_client_usable(server: Server) -> None:
    store, other = server.client(SHORT), server.client()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.get("late")
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.wait(["late", "later"], SHORT)
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.queue_pop("queue")
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.barrier("barrier", 2, SHORT)
    other.multi_set(["late", "later"], ["1", "2"])
    other.queue_push("queue", "3")
    assert store.get("late") == b"1"
    store.wait(["late", "later"], SHORT)
    assert store.queue_pop("queue") == b"3"
    # The arrivals that were given up do not count: one more is not enough for two, two are.
    with pytest.raises(dist.DistStoreError, match="timeout"):
        other.barrier("barrier", 2, SHORT)
    thread = threading.Thread(target=other.barrier, args=("barrier", 2, LONG))
    thread.start()
    store.barrier("barrier", 2, LONG)
    thread.join()


@pytest.mark.parametrize("size", [0, 1, 65_527, 65_536, 1_000_003, 8 << 20])
def test_values_of_any_size(server: Server, size: int) -> None:
    store, other = server.client(), server.client()
    value = os.urandom(size)
    store.set("k", value)
    assert other.get("k") == value
    assert other.compare_set("k", "x", "y") == value
    store.multi_set(["a", "b"], [value, value])
    assert other.multi_get(["b", "a", "k"]) == [value] * 3


def test_a_value_beyond_the_limit_costs_only_its_sender(server: Server) -> None:
    bad, good = server.client(), server.client()

    def set_and_ask() -> None:
        # The sending itself may already fail, or else the next answer is missing.
        bad.set("k", b"x" * ((8 << 20) + 1))
        bad.num_keys()

    with pytest.raises((dist.DistNetworkError, dist.DistStoreError)):
        set_and_ask()
    assert good.num_keys() == 0


def test_sixty_four_clients(server: Server) -> None:
    clients = 64
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            store = server.client()
            store.barrier("start", clients)
            store.set(f"rank/{rank}", str(rank))
            for _ in range(10):
                store.add("counter", 1)
            everyone = store.multi_get([f"rank/{other}" for other in range(clients)])
            assert everyone == [str(other).encode() for other in range(clients)]
            if rank:
                assert store.queue_pop("work") in {str(other).encode() for other in range(1, clients)}
            else:
                for other in range(1, clients):
                    store.queue_push("work", str(other))
            store.barrier("end", clients)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    store = server.client()
    assert store.add("counter", 0) == clients * 10
    assert store.queue_len("work") == 0


def test_reset_ends_the_old_round(server: Server) -> None:
    old = server.client()
    old.set("k", "old")
    assert old.get("k") == b"old"
    server.reset()
    new = server.client()
    assert new.num_keys() == 0
    with pytest.raises(dist.DistNetworkError):
        old.get("k")
    assert new.num_keys() == 0


@needs_ipv6
def test_listening_on_every_address() -> None:
    server = Server("::")
    try:
        for host in ("127.0.0.1", "localhost"):
            store = dist.TCPStore(host, server.port, None, False, LONG)
            store.set(host, host)
            assert store.get(host) == host.encode()
    finally:
        server.close()


def test_process_groups_come_up_round_after_round(server: Server, tmp_path: Path) -> None:
    script, world = tmp_path / "worker.py", 4
    script.write_text(WORKER)
    for attempt in range(2):
        # Not even the restart count keeps the rounds apart: torch 2.13 names its keys the same in each round,
        # so that without a reset the workers would find the addresses of the attempt before.
        server.reset()
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "WORLD_SIZE": str(world),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        workers = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [worker.communicate(timeout=2 * HUNG)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        assert [worker.returncode for worker in workers] == [0] * world, "\n".join(outputs)
        assert all("done" in output for output in outputs)
