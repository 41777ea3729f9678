"""SIGKILL or SIGSTOP of a torch worker → first all_reduce again at full size, where the others re-enter."""

from __future__ import annotations

import os
import signal
import time

from bench.measure import OURS, THEIRS, FailedRun, Figures, Launch, Row, Target, compare, interleave, settle
from bench.restart import wait_for_standby

_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun's shared store often does not come back
_HEARTBEAT = 1.0  # seconds until a stopped worker is found


def run(quick: bool) -> list[Row]:
    """For two and eight workers: a kill of the last rank, of rank 0, and a stop."""
    rows = []
    for nproc, rounds in ((2, 1 if quick else 7), (8, 1 if quick else 5)):
        for rank in (nproc - 1, 0):
            samples = interleave(
                lambda side, nproc=nproc, rank=rank: _lost(side, nproc, rank),  # type: ignore[misc]
                rounds,
                names=(THEIRS, OURS),
            )
            what = f"SIGKILL of rank {rank} → first all_reduce again, torch, N={nproc}, worker.reenter"
            rows.append(compare("reenter", what, "s", Target(0.15, "value"), samples, "again"))
    samples = interleave(lambda side: _lost(side, 8, 5, signal.SIGSTOP), 1 if quick else 5, names=(OURS,))
    what = "SIGSTOP of rank 5 → first all_reduce again after it is noticed, torch, N=8, worker.reenter"
    # 0.6 s: the stacks of all ranks are collected first, and a stopped one does not answer.
    rows.append(compare("reenter", what, "s", Target(0.75, "value"), samples, "again"))
    return rows


def _lost(side: str, nproc: int, rank: int, sig: int = signal.SIGKILL) -> Figures:
    flags: tuple[str, ...] = () if side == THEIRS else ("--warm", "standby")
    stopped = sig == signal.SIGSTOP
    if stopped:
        flags += ("--heartbeat-timeout", str(_HEARTBEAT))
    env = _OWN_STORE if side == THEIRS else {}
    with Launch(side, "reentered.py", nproc=nproc, restarts=3, flags=flags, env=env) as launch:
        up = launch.expect("reduced")
        if side == OURS:
            wait_for_standby(launch)
        settle()
        lost = time.monotonic()
        os.kill(up[rank].pid, sig)
        again = launch.expect("reduced", attempt=1, limit=30)
        kept = sum(again[other].pid == up[other].pid for other in up)
        if side == OURS and kept != nproc - 1:
            raise FailedRun(f"{kept} of {nproc} workers kept their process")
        took = max(event.at for event in again.values()) - lost
        return {"again": took - _HEARTBEAT * stopped}
