"""Timers side by side with torch's: same worker, same machine, taking turns in one run.

A worker is a forked process; the server runs in this one. Both kinds are measured: over a multiprocessing
queue and over a named pipe.

- pairs: acquire+release pairs a second, end to end: from the worker's first acquire until the server has
  read them all, which it shows by killing the worker for a last timer that was overdue when it was sent.
  torch's server gets a short interval for this, so that its sleep is not what is measured.
- late: milliseconds from a timer's expiry until the worker is dead; torch's with an interval of 0.1 s and
  with its default (60 s queue, 10 s pipe), ours always with the default.

A figure is the median over rounds, a ratio the median of the ratios of neighbouring rounds.

`python bench/timers.py [--quick]` prints the result as JSON.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

SIDES = ("phalanx", "torch")
KINDS = ("queue", "pipe")
_FORK = multiprocessing.get_context("fork")


def _parts(side: str) -> Any:
    if side == "torch":
        from torch.distributed.elastic import timer
    else:
        from phalanx.elastic import timer
    return timer


def _start(side: str, kind: str, interval: float | None, folder: str) -> Callable[[], Any]:
    """Starts a server in this process; what makes a client for it."""
    timer = _parts(side)
    given = {} if interval is None else {"max_interval": interval}
    if kind == "queue":
        queue = _FORK.Queue()
        timer.LocalTimerServer(queue, **given).start()
        return lambda: timer.LocalTimerClient(queue)
    path = os.path.join(folder, "pipe")
    timer.FileTimerServer(path, "bench", **given).start()
    return lambda: timer.FileTimerClient(path)


def _send(act: Callable[[], None]) -> int:
    """Does it until the pipe takes it; how often it was refused (torch's client does not wait)."""
    refused = 0
    while True:
        try:
            act()
            return refused
        except BlockingIOError:
            refused += 1
            time.sleep(0.0001)


def _pairs_worker(make: Callable[[], Any], count: int, pipe: Connection) -> None:
    client = make()
    _send(lambda: client.acquire("warm", time.time() + 60))
    _send(lambda: client.release("warm"))
    refused = 0
    begin = time.time()
    for _ in range(count):
        refused += _send(lambda: client.acquire("scope", time.time() + 60))
        refused += _send(lambda: client.release("scope"))
    pipe.send((begin, refused))
    _send(lambda: client.acquire("end", time.time()))
    signal.pause()


def _late_worker(make: Callable[[], Any], after: float, pipe: Connection) -> None:
    client = make()
    expiry = time.time() + after
    client.acquire("scope", expiry)
    pipe.send(expiry)
    signal.pause()


def _host(
    side: str, kind: str, interval: float | None, work: Callable[..., None], value: Any, pipe: Connection
) -> None:
    """Server and worker of one sample; reports what the worker told and when it died."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="bench_timers_") as folder:
        make = _start(side, kind, interval, folder)
        ours, theirs = _FORK.Pipe(duplex=False)
        worker = _FORK.Process(target=work, args=(make, value, theirs))
        worker.start()
        # Not the sentinel: that is a pipe, which the kernel closes before the process has ended.
        pidfd = os.pidfd_open(worker.pid or 0)
        told = ours.recv()
        wait([pidfd])
        pipe.send((told, time.time()))
    # Without stop(): torch's may take its whole interval, and has been seen to kill its own process instead.
    os._exit(0)


def _sample(side: str, kind: str, interval: float | None, work: Callable[..., None], value: Any) -> Any:
    """One sample, in a process of its own."""
    _parts("phalanx"), _parts("torch")  # loaded once, here, and not by every sample
    ours, theirs = _FORK.Pipe(duplex=False)
    host = _FORK.Process(target=_host, args=(side, kind, interval, work, value, theirs))
    host.start()
    theirs.close()
    try:
        if not ours.poll(120):
            raise RuntimeError(f"{side} {kind}: the worker was not killed within 120 s")
        return ours.recv()
    except EOFError:
        host.join()
        raise RuntimeError(f"{side} {kind}: the server's process ended with {host.exitcode}") from None
    finally:
        ours.close()
        if host.exitcode is None:
            host.join(5)
        host.kill()
        host.join()


def _pairs(kind: str, count: dict[str, int], rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    refused = dict.fromkeys(SIDES, 0)
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            interval = 0.01 if side == "torch" else None
            (begin, refusals), died = _sample(side, kind, interval, _pairs_worker, count[side])
            if number:  # the first round warms up
                rates[side].append(count[side] / (died - begin))
                refused[side] += refusals
    return {**_compare(rates, 0), "refused": refused}


def _late(kind: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            expiry, died = _sample(side, kind, 0.1 if side == "torch" else None, _late_worker, 0.2)
            if number:
                times[side].append((died - expiry) * 1000)
    return {**_compare(times, 2), "phalanx_worst": round(max(times["phalanx"]), 2)}


def _default(kind: str) -> float:
    """torch's lateness with its default interval; one sample, for it takes up to a minute."""
    expiry, died = _sample("torch", kind, None, _late_worker, 0.2)
    return round((died - expiry) * 1000, 1)


def _compare(samples: dict[str, list[float]], digits: int) -> dict[str, Any]:
    medians = {side: round(statistics.median(values), digits) for side, values in samples.items()}
    ratios = [ours / theirs for ours, theirs in zip(samples["phalanx"], samples["torch"], strict=True)]
    return {**medians, "ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def run(quick: bool) -> dict[str, Any]:
    """All figures; `ratio` is ours over torch's (pairs: more is better; late: less is better)."""
    rounds = 3 if quick else 9
    few, many = (1_000, 20_000) if quick else (4_000, 100_000)
    counts = {"queue": {"torch": 4 * few, "phalanx": many}, "pipe": {"torch": few, "phalanx": many}}
    return {
        "cores": os.cpu_count(),
        "pairs_per_s": {kind: _pairs(kind, counts[kind], rounds) for kind in KINDS},
        "late_ms": {kind: _late(kind, rounds) for kind in KINDS},
        "torch_late_ms_default_interval": {kind: _default(kind) for kind in (KINDS[1:] if quick else KINDS)},
        "targets": {"pairs_per_s.*.ratio": ">= 5", "late_ms.*.phalanx": "<= 5"},
    }


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv[1:]), indent=2))
