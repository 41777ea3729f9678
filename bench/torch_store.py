"""The torch store side by side with torch's own TCPStore server: same client, same run, taking turns.

Both servers run in a process of their own; the clients are torch's, one process each. A figure is the median
over rounds; a ratio is the median of the ratios of neighbouring rounds, so that a drift of the machine falls
out.

- throughput: requests a second of set, get, add and wait with 1 and 32 clients;
- barrier: 64 bare clients connect and pass one store barrier, from the moment they are let go.

`python bench/torch_store.py [--quick]` prints the result as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

OPERATIONS = ("set", "get", "add", "wait")
SERVERS = ("phalanx", "torch")
_TIMEOUT = timedelta(seconds=60)


def _serve(kind: str, pipe: Connection) -> None:
    """One server, until the other end of the pipe is closed."""
    if kind == "torch":
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
        pipe.send(store.port)
        pipe.poll(None)
    else:
        from phalanx.store.torch.server import TorchStoreServer

        with TorchStoreServer() as server:
            pipe.send(server.port)
            pipe.poll(None)


@contextmanager
def _servers() -> Iterator[dict[str, int]]:
    """Both servers running; their ports."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes, ports = [], [], {}
    try:
        for kind in SERVERS:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(kind, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            ports[kind] = ours.recv()
        yield ports
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(30)


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
    """Does what the pipe says on a connection to either server; answers with when it began and ended."""
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
        stores[kind].num_keys()  # set has no reply: until the server has seen them all
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
    # The parent's ends came along with the fork; kept open, no sibling would ever see its pipe close.
    for pipe in inherited:
        pipe.close()
    target(*args)


def _throughput(clients: int, requests: int, rounds: int, ports: dict[str, int]) -> dict[str, Any]:
    """Requests a second for each operation and server, all clients at once."""
    result: dict[str, Any] = {}
    with _children(_client, [(rank, ports) for rank in range(clients)]) as pipes:
        for name in OPERATIONS:
            rates: dict[str, list[float]] = {kind: [] for kind in SERVERS}
            for number in range(rounds + 1):
                for kind in SERVERS if number % 2 else reversed(SERVERS):
                    for pipe in pipes:
                        pipe.send((kind, name, requests // clients))
                    times = [pipe.recv() for pipe in pipes]
                    span = max(end for _, end in times) - min(begin for begin, _ in times)
                    if number:  # the first round warms up
                        rates[kind].append(requests // clients * clients / span)
            result[name] = _compare(rates)
    return result


def _barrier(clients: int, rounds: int, ports: dict[str, int]) -> dict[str, Any]:
    """Seconds from letting the clients go until the last has passed the barrier."""
    seconds: dict[str, list[float]] = {kind: [] for kind in SERVERS}
    for number in range(rounds + 1):
        for kind in SERVERS if number % 2 else reversed(SERVERS):
            key = f"barrier/{clients}/{number}"
            with _children(_barrier_client, [(ports[kind], clients, key)] * clients) as pipes:
                begin = time.monotonic()
                for pipe in pipes:
                    pipe.send("go")
                end = max(pipe.recv() for pipe in pipes)
            if number:
                seconds[kind].append(end - begin)
    return _compare(seconds)


def _compare(samples: dict[str, list[float]]) -> dict[str, Any]:
    medians = {kind: statistics.median(values) for kind, values in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(samples["phalanx"], samples["torch"], strict=True)]
    return {**medians, "ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def _figures(quick: bool) -> dict[str, Any]:
    rounds = 5 if quick else 15
    with _servers() as ports:
        return {
            "cores": os.cpu_count(),
            "throughput_1": _throughput(1, 2_000 if quick else 10_000, rounds, ports),
            "throughput_32": _throughput(32, 6_400 if quick else 32_000, rounds, ports),
            "barrier_64": _barrier(64, rounds, ports),
            "targets": {"throughput_32.*.ratio": ">= 0.5", "barrier_64.ratio": "<= 1"},
        }


def _figures_with_names(quick: bool) -> dict[str, Any] | None:
    """The figures, taken where 127.0.0.1 has a name without a name server; None where that cannot be.

    torch's client and server look up the name of each peer. With 64 at once a weak name server drops some of
    the questions, and the figure would be its timeout (5 s for each side that asks), not the store's.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write(Path("/etc/hosts").read_text() + "\n127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n")
        hosts.flush()
        mode = ["--here", *(["--quick"] if quick else [])]
        inside = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts.name]
        command = ["unshare", "--mount", *inside, sys.executable, os.path.abspath(__file__), *mode]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run(quick: bool) -> dict[str, Any]:
    """All figures; `ratio` is ours over torch's (throughput: more is better; barrier: less is better)."""
    result = _figures_with_names(quick)
    if result is not None:
        return {**result, "names": "local"}
    return {**_figures(quick), "names": "as this machine has them: a slow name server shows in barrier_64"}


if __name__ == "__main__":
    chosen = _figures if "--here" in sys.argv[1:] else run
    print(json.dumps(chosen("--quick" in sys.argv[1:]), indent=2))
