"""Stragglers: ranks, or hosts, whose step rate stays well below the others' over several windows.

`measure` gives the rates of this node's ranks since the last look; they come from the times of the heartbeats
themselves, by the clock of the host on which they were sent. `compare` looks at the rates of the whole world,
one window after the other, and says who is to be named now. Who is named is left alone.

In a job whose ranks wait for each other in every step all rates are the same, and nobody stands out: what is
found here are ranks that fall behind by themselves (their own data, their own replica, their own pipeline).
"""

from __future__ import annotations

from phalanx.core.failures import ranks_text
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.core.progress import View

WINDOW = 10.0
"""Seconds between two looks at the step rates."""
_WINDOWS = 3
"""How many in a row a rank must be slow: a checkpoint or a slow file is no straggler."""
_SLOW = 0.8
"""Of the usual rate."""
_FEW = 3
"""Steps in a window below which a rate says nothing."""


class Pace(Record):
    """The step counts of this node's ranks at the last look: (rank, steps, when)."""

    at: float = 0.0
    seen: tuple[tuple[int, int, float], ...] = ()


class Standing(Record):
    """How often in a row each rank of the world was slow, and who has been named."""

    slow: tuple[tuple[int, int], ...] = ()
    named: frozenset[int] = frozenset()


class Straggler(Record):
    """Ranks that are persistently slower than the others; `host` when it is all ranks of one."""

    ranks: tuple[int, ...]
    rate: float
    others: float
    reason: str
    host: str = ""


def measure(pace: Pace, view: View, now: float) -> tuple[Pace, dict[int, float]]:
    """Steps per second of each rank since the last look; none after the first."""
    seen = tuple(
        (beat.rank, beat.count if beat.step is None else beat.step, beat.beat_at)
        for beat in view.alive
        if beat.count
    )
    before = {rank: (steps, at) for rank, steps, at in pace.seen}
    rates = {}
    for rank, steps, at in seen:
        if rank not in before or now <= pace.at:
            continue
        former, since = before[rank]
        rates[rank] = (steps - former) / (at - since) if at > since and steps > former else 0.0
    return Pace(now, seen), rates


def compare(
    standing: Standing, rates: Mapping[int, float], span: float, hosts: Mapping[int, str]
) -> tuple[Standing, tuple[Straggler, ...]]:
    """Take in the world's rates of one window of `span` seconds; who is to be named now."""
    before = dict(standing.slow)
    usual = sorted(rates.values())[len(rates) // 2] if len(rates) > 1 else 0.0
    telling = usual * span >= _FEW
    # Windows of different nodes do not begin together: a rank without news stays where it was.
    slow = {rank: times for rank, times in before.items() if rank not in rates}
    for rank, rate in sorted(rates.items()):
        if telling and rate < _SLOW * usual:
            slow[rank] = before.get(rank, 0) + 1
    due = {rank for rank in rates if slow.get(rank, 0) >= _WINDOWS}
    found: list[Straggler] = []
    for rank in sorted(due - standing.named):
        ranks = _slow_host(rank, slow, rates, hosts)
        if any(rank in one.ranks for one in found) or not due.issuperset(ranks):
            continue  # named with its host; or the rest of its host is about to be due as well
        host = hosts[rank] if len(ranks) > 1 else ""
        rate = sum(rates[r] for r in ranks) / len(ranks)
        who = f"{host} ({ranks_text(ranks)})" if host else f"rank {rank}{_at(rank, hosts)}"
        reason = f"{who} is slow: {rate:.3g} steps/s where the others make {usual:.3g}"
        found.append(Straggler(ranks, rate, usual, reason, host))
    named = standing.named.union(*(one.ranks for one in found))
    return Standing(tuple(slow.items()), named), tuple(found)


def _slow_host(
    rank: int, slow: Mapping[int, int], rates: Mapping[int, float], hosts: Mapping[int, str]
) -> tuple[int, ...]:
    """All ranks of the rank's host, when all of them are slow and there are other hosts; else the rank."""
    here = tuple(r for r in sorted(rates) if r in hosts and hosts[r] == hosts.get(rank))
    return here if len(here) < len(rates) and all(r in slow for r in here) and here else (rank,)


def _at(rank: int, hosts: Mapping[int, str]) -> str:
    """Where a rank is, if there is more than one place."""
    return f" ({hosts[rank]})" if rank in hosts and len(set(hosts.values())) > 1 else ""
