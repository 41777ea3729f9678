"""Stragglers: ranks, or hosts, whose step rate stays well below the others' over several windows.

`measure` computes the step rates of this node's ranks since the last window, from the times of the heartbeats
by the clock of the host that sent them. `compare` takes the rates of the whole world, one window after the
other, and returns the stragglers to report; each rank is reported once. `slow_hosts` follows which hosts
are slow as a whole, for `--straggler-policy replace`: the leader replaces one where there is a fit spare
(`core.rounds.rounds`), as long as it stays slow.

In a job whose ranks wait for each other in every step all rates are equal: only ranks that fall behind on
their own (their own data, replica or pipeline) are found here.
"""

from __future__ import annotations

from phalanx.core.diagnosis.failures import ranks_text
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.core.diagnosis.progress import View

WINDOW = 10.0
"""Seconds between two comparisons of the step rates."""
_WINDOWS = 3
"""A rank must be slow in this many windows in a row: a checkpoint or a slow file does not count."""
_SLOW = 0.8  # of the median rate
_MIN_STEPS = 3
"""With fewer steps per window, rates are not compared."""


class StepCounts(Record):
    """The step counts of this node's ranks at the end of a window: (rank, steps, when)."""

    at: float = 0.0
    seen: tuple[tuple[int, int, float], ...] = ()


class SlowHistory(Record):
    """The number of windows in a row in which each rank of the world was slow, and the ranks reported."""

    slow: tuple[tuple[int, int], ...] = ()
    reported: frozenset[int] = frozenset()


class Straggler(Record):
    """Ranks that are persistently slower than the others; `host` if they are all ranks of one host."""

    ranks: tuple[int, ...]
    rate: float
    median: float
    reason: str
    host: str = ""


def measure(last: StepCounts, view: View, now: float) -> tuple[StepCounts, dict[int, float]]:
    """Steps per second of each rank since the last window; empty after the first call."""
    seen = tuple(
        (beat.rank, beat.count if beat.step is None else beat.step, beat.beat_at)
        for beat in view.alive
        if beat.count
    )
    before = {rank: (steps, at) for rank, steps, at in last.seen}
    rates = {}
    for rank, steps, at in seen:
        if rank not in before or now <= last.at:
            continue
        former, since = before[rank]
        rates[rank] = (steps - former) / (at - since) if at > since and steps > former else 0.0
    return StepCounts(now, seen), rates


def compare(
    history: SlowHistory, rates: Mapping[int, float], span: float, hosts: Mapping[int, str]
) -> tuple[SlowHistory, tuple[Straggler, ...]]:
    """Add the world's rates of one window of `span` seconds; returns the stragglers to report now."""
    before = dict(history.slow)
    median = sorted(rates.values())[len(rates) // 2] if len(rates) > 1 else 0.0
    comparable = median * span >= _MIN_STEPS
    # The windows of different nodes do not begin together: a rank without a new rate keeps its count.
    slow = {rank: times for rank, times in before.items() if rank not in rates}
    for rank, rate in sorted(rates.items()):
        if comparable and rate < _SLOW * median:
            slow[rank] = before.get(rank, 0) + 1
    due = {rank for rank in rates if slow.get(rank, 0) >= _WINDOWS}
    found: list[Straggler] = []
    for rank in sorted(due - history.reported):
        ranks = _slow_host(rank, slow, rates, hosts)
        if any(rank in one.ranks for one in found) or not due.issuperset(ranks):
            continue  # reported with its host, or the rest of its host is about to become due
        host = hosts[rank] if len(ranks) > 1 else ""
        rate = sum(rates[r] for r in ranks) / len(ranks)
        who = f"{host} ({ranks_text(ranks)})" if host else f"rank {rank}{_at(rank, hosts)}"
        reason = f"{who} is slow: {rate:.3g} steps/s, median {median:.3g}"
        found.append(Straggler(ranks, rate, median, reason, host))
    reported = history.reported.union(*(one.ranks for one in found))
    return SlowHistory(tuple(slow.items()), reported), tuple(found)


def slow_hosts(
    known: Mapping[str, str], history: SlowHistory, rates: Mapping[int, float], hosts: Mapping[int, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The hosts whose ranks are all slow after a window, with the reason, and what is new; empty: no longer.

    `known`: those before; `history`: after the window's `compare`."""
    counts = dict(history.slow)
    found = {}
    for host in sorted(set(hosts.values())):
        ranks = [rank for rank in hosts if hosts[rank] == host]
        if len(ranks) == len(hosts) or any(counts.get(rank, 0) < _WINDOWS for rank in ranks):
            continue
        measured = [rates[rank] for rank in ranks if rank in rates]
        # A host that is known keeps its reason: the figures of every window would be a write each.
        found[host] = known.get(host, "")
        if not found[host] and measured:
            rate, median = sum(measured) / len(measured), sorted(rates.values())[len(rates) // 2]
            found[host] = f"slow: {rate:.3g} steps/s, median {median:.3g}"
    found = {host: why for host, why in found.items() if why}
    changes = {host: why for host, why in found.items() if host not in known}
    return found, changes | {host: "" for host in known if host not in found}


def _slow_host(
    rank: int, slow: Mapping[int, int], rates: Mapping[int, float], hosts: Mapping[int, str]
) -> tuple[int, ...]:
    """All ranks of the rank's host if all of them are slow and there are other hosts; else the rank."""
    here = tuple(r for r in sorted(rates) if r in hosts and hosts[r] == hosts.get(rank))
    return here if len(here) < len(rates) and all(r in slow for r in here) and here else (rank,)


def _at(rank: int, hosts: Mapping[int, str]) -> str:
    """The rank's host, if there are several hosts."""
    return f" ({hosts[rank]})" if rank in hosts and len(set(hosts.values())) > 1 else ""
