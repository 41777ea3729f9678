"""The torch store beside torch's own TCPStore server, with the same clients (torch's).

Every server runs in a process of its own; clients are one process each.

- throughput: requests a second of set, get, add and wait with 1 and 32 clients;
- barrier: 64 bare clients connect and pass one store barrier, from the moment they are released.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from bench.measure import (
    THEIRS,
    Figures,
    Row,
    Target,
    compare,
    interleave,
    samplers,
    serve_samples,
    sides,
)

OPERATIONS = ("set", "get", "add", "wait")
_TIMEOUT = timedelta(seconds=60)
_servers: list[Any] = []


def run(quick: bool) -> list[Row]:
    """Throughput and the barrier."""
    rounds = 5 if quick else 15
    with samplers("bench.torch_store") as sample:
        ports = {side: sample(side)["port"] for side in sides()}
        few, many = (2_000, 6_400) if quick else (10_000, 32_000)
        return [
            *_throughput(1, few, rounds, ports, None),
            *_throughput(32, many, rounds, ports, Target(1 / 2, least=True)),
            _barrier(64, rounds, ports),
        ]


def _serve(side: str) -> Figures:
    """Start a server that stays with the process."""
    if side == THEIRS:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
    else:
        from phalanx.elastic.utils.distributed import create_c10d_store

        store = create_c10d_store(True, "127.0.0.1", 0, wait_for_workers=False)
    _servers.append(store)
    return {"port": store.port}


def _operation(store: Any, name: str, rank: int) -> Callable[[], Any]:
    key, value = f"key/{rank}", b"v" * 64
    if name == "set":
        return lambda: store.set(key, value)
    if name == "add":
        return lambda: store.add("counter", 1)
    store.set(key, value)
    if name == "get":
        return lambda: store.get(key)
    return lambda: store.wait([key])


def _client(rank: int, ports: dict[str, int], pipe: Connection) -> None:
    """Do what the pipe requests on a connection to a server; answer with the times of begin and end."""
    from torch.distributed import TCPStore

    stores = {kind: TCPStore("127.0.0.1", port, None, False, _TIMEOUT) for kind, port in ports.items()}
    pipe.send("ready")
    while True:
        try:
            kind, name, count = pipe.recv()
        except EOFError:
            return
        act = _operation(stores[kind], name, rank)
        begin = time.monotonic()
        for _ in range(count):
            act()
        stores[kind].num_keys()  # set has no reply: waits until the server has seen them all
        pipe.send((begin, time.monotonic()))


def _barrier_client(port: int, world: int, key: str, pipe: Connection) -> None:
    from torch.distributed import TCPStore

    pipe.send("ready")
    pipe.recv()
    store = TCPStore("127.0.0.1", port, None, False, _TIMEOUT)
    store.barrier(key, world)
    pipe.send(time.monotonic())


@contextmanager
def _children(target: Callable[..., None], arguments: list[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Forked clients (torch is loaded once, here), each ready at its pipe."""
    import torch.distributed  # noqa: F401 - so that no client has to

    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    try:
        for args in arguments:
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_only, args=(target, [*pipes, ours], *args, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(30)


def _only(target: Callable[..., None], inherited: list[Connection], *args: Any) -> None:
    # Inherited ends would keep the pipes of siblings open.
    for pipe in inherited:
        pipe.close()
    target(*args)


def _throughput(
    clients: int, requests: int, rounds: int, ports: dict[str, int], target: Target | None
) -> Iterator[Row]:
    """Requests a second for each operation, all clients at once."""
    with _children(_client, [(rank, ports) for rank in range(clients)]) as pipes:
        for name in OPERATIONS:

            def once(side: str, name: str = name) -> Figures:
                for pipe in pipes:
                    pipe.send((side, name, requests // clients))
                times = [pipe.recv() for pipe in pipes]
                span = max(end for _, end in times) - min(begin for begin, _ in times)
                return {"rate": requests // clients * clients / span}

            what = f"torch store, {name}, {clients} client{'s' * (clients > 1)}"
            yield compare("store", what, "/s", target, interleave(once, rounds), "rate")


def _barrier(clients: int, rounds: int, ports: dict[str, int]) -> Row:
    """Seconds from the release of the clients until the last has passed the barrier."""
    numbers = itertools.count()

    def once(side: str) -> Figures:
        key = f"barrier/{next(numbers)}"
        with _children(_barrier_client, [(ports[side], clients, key)] * clients) as pipes:
            begin = time.monotonic()
            for pipe in pipes:
                pipe.send("go")
            return {"seconds": max(pipe.recv() for pipe in pipes) - begin}

    what = f"torch store, barrier of {clients} clients"
    return compare("store", what, "s", Target(1), interleave(once, rounds), "seconds")


if __name__ == "__main__":
    serve_samples(_serve)
