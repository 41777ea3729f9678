"""SIGKILL or SIGSTOP of a torch worker → first all_reduce again at full size, where the others re-enter.

A job of ours is hit several times, each time when all of its standbys wait; torchrun once per launch.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence

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
    interleave,
    settle,
    with_unit,
)
from bench.restart import wait_for_standby

_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun's shared store often does not come back
_HEARTBEAT = 1.0  # seconds until a stopped worker is found
PHASES = ("recalled", "unwound", "called", "joined")  # of bench/workers/reentered.py


def run(quick: bool) -> list[Row]:
    """For two and eight workers: a kill of the last rank, of rank 0, and a stop; for two hosts, a kill."""
    rows = []
    for nproc, rounds in ((2, 1 if quick else 5), (8, 1 if quick else 3)):
        for rank in (nproc - 1, 0):
            samples = interleave(
                lambda side, nproc=nproc, rank=rank: _lost(side, nproc, rank),  # type: ignore[misc]
                rounds,
                names=(THEIRS, OURS),
                warm=not quick,
            )
            what = f"SIGKILL of rank {rank} → first all_reduce again, torch, N={nproc}, worker.reenter"
            target = Target(0.15, "value")
            rows.append(compare("reenter", what, "s", target, samples, "again", phases(samples[OURS])))
    samples = interleave(
        lambda side: _lost(side, 8, 5, signal.SIGSTOP), 1 if quick else 3, names=(OURS,), warm=not quick
    )
    what = "SIGSTOP of rank 5, recall → first all_reduce again, torch, N=8, worker.reenter"
    notes = [
        f"--heartbeat-timeout {_HEARTBEAT:g}: {with_unit(value, 's')} from the signal to the recall"
        for value in [_median(samples[OURS], "recalled")]
        if value is not None
    ]
    rows.append(compare("reenter", what, "s", Target(0.1, "value"), samples, "since_recall", notes))
    return [*rows, *_two_hosts(quick)]


def _two_hosts(quick: bool) -> list[Row]:
    """Four workers on each of two hosts, which are network namespaces; none where these cannot be made."""
    try:
        from tests.support.netns import Network, possible
    except ImportError:  # the tests' own packages
        return []
    if not possible():
        return []
    rows = []
    with Network("a", "b") as network:
        hosts = [(host.inside, host.address) for host in network.hosts.values()]
        for rank in (7, 0):
            samples = interleave(
                lambda side, rank=rank: _lost(side, 8, rank, hosts=hosts),  # type: ignore[misc]
                1 if quick else 3,
                names=(THEIRS, OURS),
                warm=not quick,
            )
            what = f"SIGKILL of rank {rank} → first all_reduce again, torch, 2 hosts of 4, worker.reenter"
            target = Target(0.15, "value")
            rows.append(compare("reenter", what, "s", target, samples, "again", phases(samples[OURS])))
    return rows


def _lost(
    side: str,
    nproc: int,
    rank: int,
    sig: int = signal.SIGKILL,
    hosts: Sequence[tuple[Sequence[str], str]] = (),
) -> Figures:
    flags: tuple[str, ...] = () if side == THEIRS else ("--warm", "standby", "--backoff", "0")
    if sig == signal.SIGSTOP:
        flags += ("--heartbeat-timeout", str(_HEARTBEAT))
    env = {**(_OWN_STORE if side == THEIRS else {})}
    if hosts:
        env |= {"GLOO_SOCKET_IFNAME": "eth0", "PHALANX_TOKEN": "bench"}
    times = 1 if side == THEIRS else 5
    with Launch(
        side,
        "reentered.py",
        nproc=nproc,
        restarts=2 * times,
        flags=flags,
        env=env,
        hosts=hosts,
    ) as launch:
        return several(launch, times, side == OURS, lambda pid: os.kill(pid, sig), rank)


def several(launch: Launch, times: int, reenters: bool, hit: Callable[[int], object], rank: int) -> Figures:
    """The medians of as many faults, one after the other; figures in seconds since the fault."""
    found: list[Figures] = []
    before = launch.expect("reduced")
    while len(found) < times:
        if reenters:
            wait_for_standby(launch)
        settle()
        lost = time.monotonic()
        hit(before[rank].pid)
        after = launch.expect("reduced", attempt=before[rank].attempt + 1, limit=60)
        kept = sum(after[other].pid == before[other].pid for other in before)
        if reenters and kept != launch.nproc - 1:
            raise FailedRun(f"{kept} of {launch.nproc} workers kept their process")
        raised = [event.at for event in launch.events if event.what == "raised" and event.at > lost]
        lost = max(raised, default=lost)
        figures = {"again": max(event.at for event in after.values()) - lost}
        for phase in PHASES if reenters else ():
            stamps = [event.at for event in launch.events if event.what == phase and event.at > lost]
            figures[phase] = max(stamps) - lost
            if phase == "recalled":
                figures["since_recall"] = figures["again"] - (min(stamps) - lost)
        found.append(figures)
        before = after
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def phases(samples: Samples) -> list[str]:
    """A note: when the last rank had come through each of the phases."""
    medians = [(phase, _median(samples, phase)) for phase in PHASES]
    told = [f"{phase} {with_unit(value, 's')}" for phase, value in medians if value is not None]
    return [f"last rank {', '.join(told)}"] if told else []


def _median(samples: Samples, figure: str) -> float | None:
    values = samples.of(figure)
    return statistics.median(values) if values else None
