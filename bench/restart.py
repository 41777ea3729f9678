"""After SIGKILL of a worker: how soon its siblings are signalled, and how soon all workers run again.

torchrun is measured without its shared store: with its default settings a job of torch workers often does not
restart at all; how often it does is a row of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence

from bench.launch import reduce_once
from bench.measure import (
    OURS,
    THEIRS,
    FailedRun,
    Figures,
    Launch,
    Row,
    Samples,
    Target,
    compare,
    environment,
    has_torch,
    interleave,
    program,
    settle,
    sides,
)

_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_STANDBY = ("--warm", "standby")
_STANDBY_LIMIT = 60.0  # seconds; learning and preloading a worker's imports happens in the background


def bare(quick: bool) -> list[Row]:
    """SIGKILL → siblings signalled, and → all bare workers run user code again."""
    rows = []
    for nproc in (2, 8):
        samples = interleave(
            lambda side, nproc=nproc: _killed_bare(side, nproc),  # type: ignore[misc]
            3 if quick else 15,
        )
        what = f"SIGKILL of one worker → all siblings signalled, N={nproc}"
        rows.append(compare("detect", what, "s", Target(0.005, "value"), samples, "signalled"))
        if nproc == 8:
            what = "SIGKILL → all bare workers run user code again, N=8"
            rows.append(compare("restart", what, "s", Target(1 / 6), samples, "again"))
    return rows


def standby(quick: bool) -> list[Row]:
    """The same with a standby process for every worker, once that exists."""
    what = "SIGKILL → all bare workers run user code again, N=8, standby"
    samples = interleave(lambda side: _killed_bare(side, 8, standby=True), 2 if quick else 9)
    rows = [compare("standby", what, "s", Target(1 / 15), samples, "again")]
    if has_torch():
        for nproc, rounds in ((2, 1 if quick else 5), (8, 1 if quick else 3)):
            samples = interleave(
                lambda side, nproc=nproc: _killed_torch(  # type: ignore[misc]
                    side, nproc, _OWN_STORE if side == THEIRS else {}, standby=True
                ),
                rounds,
            )
            what = f"SIGKILL → first all_reduce again, torch, N={nproc}, standby"
            rows.append(compare("standby", what, "s", Target(1 / 15), samples, "again"))
    return rows


def _flags(side: str, standby: bool) -> tuple[str, ...]:
    return _STANDBY if standby and side != THEIRS else ()


def wait_for_standby(launch: Launch) -> None:
    """Wait until `phalanx status` shows a standby process for every worker."""
    command = [*program(launch.side)[:-1], "status", "--json"]

    def waiting(place: Sequence[str]) -> int:
        words = [*place, *command]
        done = subprocess.run(words, env=environment(launch.side), capture_output=True, check=False)
        jobs = json.loads(done.stdout or b"[]")
        return sum(job["standbys"]["count"] for job in jobs if job["pid"] in launch.pids)

    end = time.monotonic() + _STANDBY_LIMIT
    while True:
        if sum(map(waiting, launch.places)) == launch.nproc:
            return
        if time.monotonic() > end:
            raise FailedRun(f"not all {launch.nproc} standby processes within {_STANDBY_LIMIT:.0f} s")
        time.sleep(0.1)


def _killed_bare(side: str, nproc: int, standby: bool = False) -> Figures:
    with Launch(side, "bare.py", "wait", nproc=nproc, restarts=3, flags=_flags(side, standby)) as launch:
        up = launch.expect("up")
        if standby and side != THEIRS:
            wait_for_standby(launch)
        settle()
        at = time.monotonic()
        os.kill(up[nproc - 1].pid, 9)
        again = launch.expect("up", attempt=1)
        signalled = launch.expect("term", count=nproc - 1)
        return {
            "signalled": max(e.at for e in signalled.values()) - at,
            "again": max(e.at for e in again.values()) - at,
        }


def torch(quick: bool) -> list[Row]:
    """SIGKILL → the first all_reduce of the restarted torch workers."""
    rows = []
    for side in sides():
        try:
            reduce_once(side, 2)  # byte code and page cache
        except FailedRun:
            pass  # the rows show it
    for nproc, target, rounds in ((2, 1 / 8, 1 if quick else 7), (8, 1 / 10, 1 if quick else 5)):
        samples = interleave(
            lambda side, nproc=nproc: _killed_torch(side, nproc, _OWN_STORE if side == THEIRS else {}),  # type: ignore[misc]
            rounds,
            warm=False,
        )
        what = f"SIGKILL → first all_reduce again, torch, N={nproc}"
        rows.append(compare("restart-torch", what, "s", Target(target), samples, "again"))
        if nproc == 2 or not quick:
            rows.append(_restarted(nproc, 1 if quick else 6, samples[OURS]))
    return rows


def _restarted(nproc: int, rounds: int, ours: Samples) -> Row:
    """The percentage of jobs that restarted with default settings."""
    default = interleave(lambda side: _killed_torch(side, nproc, {}), rounds, names=[THEIRS], warm=False)
    row = Row(
        "restart-torch",
        f"jobs that restarted, default settings, torch, N={nproc}",
        "%",
        Target(100, "value", True),
    )
    shares = {}
    for name, taken in ((THEIRS, default[THEIRS]), (OURS, ours)):
        total = len(taken.figures) + len(taken.failures)
        shares[name] = 100 * len(taken.figures) / total
        row.notes.append(f"{name}: {len(taken.figures)} of {total}")
        row.notes += [f"{name}: {why}" for why in taken.failures[:1]]
    row.theirs, row.ours = shares[THEIRS], shares[OURS]
    return row


def _killed_torch(side: str, nproc: int, env: dict[str, str], standby: bool = False) -> Figures:
    flags = _flags(side, standby)
    with Launch(side, "reduce.py", "wait", nproc=nproc, restarts=3, env=env, flags=flags) as launch:
        reduced = launch.expect("reduced")
        if standby and side != THEIRS:
            wait_for_standby(launch)
        settle()
        at = time.monotonic()
        os.kill(reduced[nproc - 1].pid, 9)
        again = launch.expect("reduced", attempt=1, limit=30)
        return {"again": max(e.at for e in again.values()) - at}
