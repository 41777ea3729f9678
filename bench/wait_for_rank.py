"""SIGKILL of a torch worker → first all_reduce again, where the script waits for its rank."""

from __future__ import annotations

import os
import time

from bench.measure import OURS, THEIRS, Figures, Launch, Row, Target, compare, interleave, settle
from bench.restart import wait_for_standby

_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun's shared store often does not come back


def run(quick: bool) -> list[Row]:
    """For two and eight workers."""
    rows = []
    for nproc, rounds in ((2, 1 if quick else 7), (8, 1 if quick else 5)):
        samples = interleave(
            lambda side, nproc=nproc: _killed(side, nproc),  # type: ignore[misc]
            rounds,
            names=(THEIRS, OURS),
        )
        what = f"SIGKILL → first all_reduce again, torch, N={nproc}, wait_for_rank()"
        rows.append(compare("wait-for-rank", what, "s", Target(1 / 15), samples, "again"))
    return rows


def _killed(side: str, nproc: int) -> Figures:
    flags = () if side == THEIRS else ("--warm", "standby")
    env = _OWN_STORE if side == THEIRS else {}
    with Launch(side, "built.py", "wait", nproc=nproc, restarts=3, flags=flags, env=env) as launch:
        up = launch.expect("reduced")
        if side == OURS:
            wait_for_standby(launch)
        settle()
        killed = time.monotonic()
        os.kill(up[nproc - 1].pid, 9)
        again = launch.expect("reduced", attempt=1, limit=30)
        return {"again": max(event.at for event in again.values()) - killed}
