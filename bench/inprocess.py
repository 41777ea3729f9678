"""A fault → the next all_reduce of all ranks: worker.reenter beside the wrapper of nvidia-resiliency-ext.

The wrapper keeps the process of a rank that raises, and has no process for one that was killed: it goes on
with fewer ranks. It is measured with its default intervals, and with 0.1 s for all of them. Its own abort,
made for NCCL, does not free ranks that wait in gloo (none came back within a minute): a hook does that here.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

from bench.measure import OURS, Figures, Launch, Row, Target, compare, interleave, settle
from bench.reenter import phases, several

WRAPPER, FASTER = "in-process wrapper", "in-process wrapper, intervals of 0.1 s"
_TIMES = 3  # faults in one launch


def missing() -> str:
    """Why there is nothing to compare with."""
    found = importlib.util.find_spec("nvidia_resiliency_ext")
    return "" if found is not None else "needs nvidia-resiliency-ext (pip install nvidia-resiliency-ext)"


def run(quick: bool) -> list[Row]:
    """For four and eight workers: an exception in the last rank, and SIGKILL of it."""
    rows = []
    for nproc in (4, 8):
        for fault in ("exception", "SIGKILL"):
            samples = interleave(
                lambda side, nproc=nproc, fault=fault: _sample(side, nproc, fault),  # type: ignore[misc]
                1 if quick else 3,
                names=(OURS, WRAPPER, FASTER),
                warm=False,
            )
            size = nproc - 1 if fault == "SIGKILL" else nproc
            what = f"{fault} in rank {nproc - 1} → next all_reduce, torch, N={nproc}"
            notes = [
                *phases(samples[OURS]),
                f"worker.reenter goes on with {nproc} ranks, the wrapper with {size}",
            ]
            target = Target(0.15, "value") if fault == "SIGKILL" else None  # an exit takes longer
            rows.append(compare("inprocess", what, "s", target, samples, "again", notes))
    return rows


def _sample(side: str, nproc: int, fault: str) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        told = os.path.join(folder, "raise")

        def hit(pid: int) -> None:
            if fault == "SIGKILL":
                os.kill(pid, signal.SIGKILL)
            else:
                open(f"{told}.{nproc - 1}", "w").close()

        if side == OURS:
            flags = ("--warm", "standby", "--backoff", "0")
            more = {"BENCH_RAISE": told}
            with Launch(OURS, "reentered.py", nproc=nproc, restarts=2 * _TIMES, flags=flags, env=more) as job:
                return several(job, _TIMES, True, hit, nproc - 1)
        return _wrapped(nproc, fault, {"BENCH_RAISE": told, "BENCH_INTERVAL": "0.1" * (side == FASTER)}, hit)


def _wrapped(nproc: int, fault: str, env: dict[str, str], hit: Callable[[int], None]) -> Figures:
    """Without a launcher: the wrapper is not meant for one that restarts workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nproc), **env}
    with Launch("floor", "inprocess.py", nproc=nproc, env=env) as job:
        before, took = job.expect("reduced"), []
        for number in range(_TIMES if fault == "exception" else 1):
            settle()
            lost = time.monotonic()
            hit(before[nproc - 1].pid)
            count = nproc - (fault == "SIGKILL")
            before = job.expect("reduced", attempt=number + 1, count=count)
            raised = [event.at for event in job.events if event.what == "raised" and event.at > lost]
            took.append(max(event.at for event in before.values()) - max(raised, default=lost))
        return {"again": statistics.median(took)}
