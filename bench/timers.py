"""Timers side by side with torch's: same worker, same machine, taking turns in one run.

A worker is a forked process; the server runs in this one. Both kinds are measured: over a multiprocessing
queue and over a named pipe.

- pairs: acquire+release pairs a second, end to end: from the worker's first acquire until the server has
  read them all, which it shows by killing the worker for a last timer that was overdue when it was sent.
  torch's server gets a short interval for this, so that its sleep is not what is measured.
- late: milliseconds from a timer's expiry until the worker is signalled (its death takes the kernel another
  few, which depend on its memory alone); torch's with an interval of 0.1 s and with its default (60 s
  queue, 10 s pipe), ours always with the default.

A figure is the median over rounds, a ratio the median of the ratios of neighbouring rounds.

`python bench/timers.py [--quick]` prints the result as JSON.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
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


def _pairs_work(client: Any, count: int, pipe: Connection) -> None:
    _send(lambda: client.acquire("warm", time.time() + 60))
    _send(lambda: client.release("warm"))
    refused = 0
    begin = time.time()
    for _ in range(count):
        refused += _send(lambda: client.acquire("scope", time.time() + 60))
        refused += _send(lambda: client.release("scope"))
    pipe.send((begin, refused))
    _send(lambda: client.acquire("end", time.time()))


def _late_work(client: Any, after: float, pipe: Connection) -> None:
    expiry = time.time() + after
    client.acquire("scope", expiry)
    pipe.send(expiry)


def _worker(make: Callable[[], Any], work: Callable[..., None], value: Any, pipe: Connection) -> None:
    pipe.send(os.getpid())
    pipe.recv()
    work(make(), value, pipe)
    signal.pause()


def _note_signals(folder: str) -> None:
    """Writes down when this process first signals another one."""

    def noting(send: Callable[..., None]) -> Callable[..., None]:
        def noted(target: int, sig: int, *rest: Any) -> None:
            now = time.time()
            send(target, sig, *rest)
            if sig and not os.path.exists(note):
                with open(note, "w") as file:
                    file.write(repr(now))

        return noted

    note = os.path.join(folder, "signalled")
    os.kill = noting(os.kill)
    signal.pidfd_send_signal = noting(signal.pidfd_send_signal)


def _host(side: str, kind: str, interval: float | None, folder: str, *job: Any) -> None:
    """Server and worker of one sample."""
    logging.disable(logging.CRITICAL)
    _note_signals(folder)
    make = _start(side, kind, interval, folder)
    worker = _FORK.Process(target=_worker, args=(make, *job))
    worker.start()
    worker.join()
    # Without stop(): torch's may take its whole interval.
    os._exit(0)


def _sample(side: str, kind: str, interval: float | None, work: Callable[..., None], value: Any) -> Any:
    """One sample: what the worker told, when it was signalled and when it died.

    The server has a process of its own, and the death is seen from here: torch's pipe server kills its own
    process right after the worker.
    """
    _parts("phalanx"), _parts("torch")  # loaded once, here, and not by every sample
    ours, theirs = _FORK.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench_timers_") as folder:
        host = _FORK.Process(target=_host, args=(side, kind, interval, folder, work, value, theirs))
        host.start()
        theirs.close()
        pidfd = os.pidfd_open(ours.recv())
        try:
            ours.send("go")
            told = ours.recv()
            if not wait([pidfd], 120):
                raise RuntimeError(f"{side} {kind}: the worker was not killed within 120 s")
            died = time.time()
            host.join(0.2)
            with open(os.path.join(folder, "signalled")) as file:
                return told, float(file.read()), died
        finally:
            os.close(pidfd)
            ours.close()
            host.join(5)
            host.kill()
            host.join()


def _pairs(kind: str, count: dict[str, int], rounds: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    refused = dict.fromkeys(SIDES, 0)
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            interval = 0.01 if side == "torch" else None
            (begin, refusals), _, died = _sample(side, kind, interval, _pairs_work, count[side])
            if number:  # the first round warms up
                rates[side].append(count[side] / (died - begin))
                refused[side] += refusals
    return {**_compare(rates, 0), "refused": refused}


def _late(kind: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            # Not in step with torch's interval: its lateness is then anything up to it.
            after = 0.2 + random.uniform(0, 0.1)
            expiry, killed, _ = _sample(side, kind, 0.1 if side == "torch" else None, _late_work, after)
            if number:
                times[side].append((killed - expiry) * 1000)
    return {**_compare(times, 2), "phalanx_worst": round(max(times["phalanx"]), 2)}


def _default(kind: str) -> float:
    """torch's lateness with its default interval; one sample, for it takes up to a minute."""
    expiry, killed, _ = _sample("torch", kind, None, _late_work, 0.2)
    return round((killed - expiry) * 1000, 1)


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
