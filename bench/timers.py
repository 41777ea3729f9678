"""Timers: throughput and lateness, over a multiprocessing queue and over a named pipe.

A worker is a forked process; the server runs in its parent.

- pairs: acquire+release pairs a second, end to end: from the worker's first acquire until the server has
  read them all, which it shows by killing the worker for a last timer that was overdue when it was sent.
  torch's server gets a short interval for this, so that its sleep is not what is measured.
- late: seconds from a timer's expiry until the worker is signalled (its death takes the kernel a few
  milliseconds more, depending on its memory); torch with an interval of 0.1 s, and once with its default
  (60 s for the queue, 10 s for the pipe), phalanx always with the default.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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
    with_unit,
)

_FORK = multiprocessing.get_context("fork")


def run(quick: bool) -> list[Row]:
    """Pairs a second, and lateness."""
    rows = []
    few, many = (1_000, 20_000) if quick else (4_000, 100_000)
    rounds = 3 if quick else 9
    with samplers("bench.timers") as sample:
        for kind, torchs in (("queue", 4 * few), ("pipe", few)):
            samples = interleave(
                lambda side, kind=kind, torchs=torchs: sample(  # type: ignore[misc]
                    side, "pairs", kind, 0.01 if side == THEIRS else None, torchs if side == THEIRS else many
                ),
                rounds,
            )
            what = f"timers, {kind}: acquire+release pairs, end to end"
            rows.append(compare("timers", what, "/s", Target(5, least=True), samples, "rate"))
        for kind in ("queue", "pipe"):
            samples = interleave(
                lambda side, kind=kind: sample(  # type: ignore[misc]
                    # The time is unrelated to torch's interval: its lateness is then anything up to it.
                    side,
                    "late",
                    kind,
                    0.1 if side == THEIRS else None,
                    0.2 + random.uniform(0, 0.1),
                ),
                rounds,
            )
            notes = []
            if kind == "pipe" or not quick:  # the queue's takes a minute
                late = sample(THEIRS, "late", kind, None, 0.2)["late"]
                notes = [f"{THEIRS} with its default interval: {with_unit(late, 's')}"]
            what = f"timers, {kind}: expiry → worker signalled"
            rows.append(compare("timers", what, "s", Target(0.005, "value"), samples, "late", notes))
    return rows


def _take(side: str, what: str, kind: str, interval: float | None, value: Any) -> Figures:
    if what == "pairs":
        begin, _, died = _sample(side, kind, interval, _pairs_work, value)
        return {"rate": value / (died - begin)}
    expiry, signalled, _ = _sample(side, kind, interval, _late_work, value)
    return {"late": signalled - expiry}


def _library(side: str) -> Any:
    if side == THEIRS:
        from torch.distributed.elastic import timer
    else:
        from phalanx.elastic import timer
    return timer


def _start(side: str, kind: str, interval: float | None, folder: str) -> Callable[[], Any]:
    """Start a server in this process; returns what makes a client for it."""
    timer = _library(side)
    given = {} if interval is None else {"max_interval": interval}
    if kind == "queue":
        queue = _FORK.Queue()
        timer.LocalTimerServer(queue, **given).start()
        return lambda: timer.LocalTimerClient(queue)
    path = os.path.join(folder, "pipe")
    timer.FileTimerServer(path, "bench", **given).start()
    return lambda: timer.FileTimerClient(path)


def _send(act: Callable[[], None]) -> None:
    """Retry while the pipe is full: torch's client does not wait."""
    while True:
        try:
            return act()
        except BlockingIOError:
            time.sleep(0.0001)


def _pairs_work(client: Any, count: int, pipe: Connection) -> None:
    _send(lambda: client.acquire("warm", time.time() + 60))
    _send(lambda: client.release("warm"))
    begin = time.time()
    for _ in range(count):
        _send(lambda: client.acquire("scope", time.time() + 60))
        _send(lambda: client.release("scope"))
    pipe.send(begin)
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
    """Write down when this process first signals another one."""

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
    """One sample: what the worker sent, when it was signalled and when it died.

    The server has a process of its own: torch's pipe server kills its own process right after the worker.
    """
    _library(side)  # once, and not in every fork
    ours, theirs = _FORK.Pipe()
    with tempfile.TemporaryDirectory(prefix="bench_timers_") as folder:
        host = _FORK.Process(target=_host, args=(side, kind, interval, folder, work, value, theirs))
        host.start()
        theirs.close()
        pidfd = os.pidfd_open(ours.recv())
        try:
            ours.send("go")
            sent = ours.recv()
            if not wait([pidfd], 120):
                raise RuntimeError(f"{side} {kind}: the worker was not killed within 120 s")
            died = time.time()
            host.join(0.2)
            with open(os.path.join(folder, "signalled")) as file:
                return sent, float(file.read()), died
        finally:
            os.close(pidfd)
            ours.close()
            host.join(5)
            host.kill()
            host.join()


if __name__ == "__main__":
    serve_samples(_take)
