"""torch's small functions for stores (`utils.store`, `utils.distributed`), alone and against torch's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic.rendezvous import RendezvousStoreInfo
from phalanx.elastic.utils.distributed import create_c10d_store
from phalanx.elastic.utils.store import barrier, get_all, synchronize
from phalanx.errors import StoreConnectionError, StoreTimeoutError
from tests.conftest import HUNG
from tests.support.netns import free_port


class Shelf:
    """A store as people write one in Python: torch's methods, no multi_get, values as they were given."""

    def __init__(self, text: bool) -> None:
        self._text, self._values = text, dict[str, Any]()
        self._changed = threading.Condition()
        self.timeout = timedelta(seconds=HUNG)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> Any:
        self.wait([key])
        value = self._values[key]
        if self._text:
            return value.decode() if isinstance(value, bytes) else value
        return value.encode() if isinstance(value, str) else value

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + amount)
            return int(self._values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: self.check(keys), (timeout or self.timeout).total_seconds()
            ):
                raise LookupError("not there")


def together(call: Callable[[int], Any], count: int = 2) -> list[Any]:
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: answers.update({rank: call(rank)})) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    return [answers[rank] for rank in range(count)]


@pytest.mark.parametrize("text", [False, True])
def test_any_object_with_torchs_methods_will_do(text: bool) -> None:
    store = Shelf(text)
    for value in (b"v", "v"):
        prefix = f"{type(value).__name__}/"
        said = together(lambda rank: synchronize(store, value, rank, 2, prefix, HUNG))  # noqa: B023
        assert said == [[b"v", b"v"]] * 2
    store.set("z0", "a"), store.set("z1", b"b")
    assert together(lambda rank: get_all(store, rank, "z", 2)) == [[b"a", b"b"]] * 2
    assert together(lambda rank: barrier(store, 2, "b", HUNG, rank=rank)) == [None, None]
    built = together(lambda rank: RendezvousStoreInfo.build(rank, store, "here", 5))
    assert built == [RendezvousStoreInfo("here", 5)] * 2
    with pytest.raises(StoreTimeoutError, match="only 1 of 2 came"):
        barrier(store, 2, "alone", 0.1)
    with pytest.raises(StoreTimeoutError, match="rank host1 of 2 did not come"):
        barrier(store, 2, "named", 0.1, rank=0, rank_tracing_decoder=lambda rank: f"host{rank}")
    assert store.timeout == timedelta(seconds=HUNG)


def test_a_server_that_chooses_its_port_and_several_clients() -> None:
    with create_c10d_store(True, "localhost", 0, 3, wait_for_workers=False) as server:
        clients = [
            create_c10d_store(False, "localhost", server.port, 3, wait_for_workers=False) for _ in "ab"
        ]
        clients[0].set("key", "value")
        assert clients[1].get("key") == server.get("key") == b"value"
        assert server.libuvBackend
        for client in clients:
            client.close()


def test_a_port_in_use_is_tried_again_until_it_is_free() -> None:
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    with pytest.raises(StoreConnectionError, match="already in use"):
        create_c10d_store(True, "localhost", port, retries=2)
    timer = threading.Timer(0.2, held.close)
    timer.start()
    create_c10d_store(True, "localhost", port, retries=50).close()
    timer.join()


def test_time_outs_are_those_that_were_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        busy = silent.getsockname()[1]
        queued = [socket.create_connection(("127.0.0.1", busy))]  # the queue of the listener is full
        began = time.monotonic()
        for port in (busy, free_port()):
            with pytest.raises(StoreConnectionError, match=r"within 0\.5 s"):
                create_c10d_store(False, "127.0.0.1", port, timeout=0.5)
        with pytest.raises(StoreTimeoutError, match=r"only 1 of 2 came within 0\.5 s"):
            create_c10d_store(True, "localhost", 0, 2, timeout=0.5)
        assert time.monotonic() - began < HUNG / 2
        queued[0].close()
    for arguments in ((False, "localhost"), (True, "localhost", -1, 2)):
        with pytest.raises(ValueError, match="server_port is missing"):
            create_c10d_store(*arguments)  # type: ignore[arg-type]


def test_a_free_port_is_free_on_both_families() -> None:
    """In a network of its own that has two ports, one of which is taken on IPv6 only."""
    words = ["unshare", "--net", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    program = f"""
        import socket
        open({str(ports)!r}, "w").write("40000 40001")
        from phalanx.elastic.utils.distributed import get_free_port
        for taken in 40000, 40001:
            with socket.socket(socket.AF_INET6) as held:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                held.bind(("::", taken))
                print(*{{get_free_port() for _ in range(64)}})
    """
    if (
        not os.path.exists("/proc/net/if_inet6")
        or subprocess.run([*words, "test", "-w", str(ports)]).returncode
    ):
        assert not os.environ.get("CI"), "a network with both families must be allowed in CI"
        pytest.skip("networks of one's own, or IPv6, are not to be had here")
    command = [*words, sys.executable, "-c", textwrap.dedent(program)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)
    assert made.stdout == "40001\n40000\n", made.stderr


def test_a_barriers_error_has_torchs_name_without_torch() -> None:
    program = """
        import sys
        from phalanx.elastic.utils import distributed, store
        with distributed.create_c10d_store(True, "localhost") as served:
            try:
                store.barrier(served, 2, "b", 0.1)
            except store.DistStoreError as error:
                print(type(error).__name__, "torch" in sys.modules)
    """
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert made.stdout == "StoreTimeoutError False\n", made.stderr[-3000:]


def test_torch_on_the_other_side_and_in_except_clauses() -> None:
    pytest.importorskip("torch")
    program = """
        import os, threading
        import torch.distributed as dist
        from torch.distributed.elastic.utils.distributed import create_c10d_store as theirs, get_free_port
        from phalanx.elastic.utils.distributed import create_c10d_store as ours
        from phalanx.elastic.utils import store
        from phalanx.elastic.utils.store import barrier

        for serves, asks in ((theirs, ours), (ours, theirs)):
            port, stores = get_free_port(), {}
            def make(create, is_server):
                stores[is_server] = create(is_server, "localhost", port, 2, timeout=60)
            threads = [threading.Thread(target=make, args=a) for a in ((serves, True), (asks, False))]
            [thread.start() for thread in threads], [thread.join() for thread in threads]
            stores[True].set("key", "value")
            print(stores[False].get("key"))
        for call, error in (
            (lambda: barrier(dist.HashStore(), 2, "b", 0.1), dist.DistStoreError),
            (lambda: barrier(dist.HashStore(), 2, "b", 0.1), store.DistStoreError),
            (lambda: ours(True, "localhost", 0, 2, timeout=0.1), dist.DistStoreError),
            (lambda: ours(False, "localhost", get_free_port(), timeout=0.1), dist.DistNetworkError),
            (lambda: stores[True].wait(["never"], 0.1), dist.DistStoreError),
        ):
            try:
                call()
            except error as caught:
                print(type(caught).__name__)
        os._exit(0) if print("end", flush=True) is None else None
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100
    )
    assert made.stdout.split() == [
        *["b'value'"] * 2,
        *["StoreTimeoutError"] * 3,
        *("StoreConnectionError", "StoreTimeoutError", "end"),
    ], made.stderr[-3000:]
