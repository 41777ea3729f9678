"""The step rates of every rank over time, from one look at the job to the next; bounded.

A rate is taken between two heartbeats, by the clock of the host that sent them, so that the time between two
looks does not matter. A rank without a new heartbeat keeps its rate for a while, then it counts as 0.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from statistics import median

POINTS = 120
"""Looks that are kept."""
RANKS = 16384
"""Ranks that are followed; of larger jobs, the first ones."""
SHOWN = 12
"""Ranks that are drawn one by one; of larger jobs, the slowest ones."""
SLOW = 0.8
"""Of the median rate: slower ranks are stragglers."""
_STALE = 3.0  # a rank keeps its rate for this many of its steps, and two seconds at least
_NONE = math.nan


class RateHistory:
    """The last looks, oldest first; nan where a rank has no rate."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=POINTS)
        self._rows: deque[array[float]] = deque(maxlen=POINTS)
        self._last: dict[int, tuple[int, float, float]] = {}  # rank -> step, when, rate

    def add(self, now: float, beats: Iterable[tuple[int, int | None, float]], world: int) -> None:
        """One look: (rank, step, when it was reached), None for a rank without steps."""
        row = array("f", [_NONE]) * max(0, min(world, RANKS))
        last: dict[int, tuple[int, float, float]] = {}
        for rank, step, when in beats:
            if step is None or not 0 <= rank < len(row):
                continue
            before = self._last.get(rank)
            rate = _NONE
            if before is not None and before[0] <= step:
                former, since, rate = before
                if step > former and when > since:
                    rate = (step - former) / (when - since)
                elif rate == rate and now - since > max(2.0, _STALE / rate if rate > 0 else 0.0):
                    rate = 0.0
                if step == former:
                    when = since
            last[rank] = step, when, rate
            row[rank] = rate
        self._last = last
        self.times.append(now)
        self._rows.append(row)

    def current(self) -> list[float | None]:
        """The latest rate of every rank."""
        return [_number(rate) for rate in self._rows[-1]] if self._rows else []

    def typical(self) -> float | None:
        """The median of the latest rates."""
        known = [rate for rate in self.current() if rate is not None]
        return median(known) if known else None

    def slow(self) -> list[int]:
        """The ranks that are well below the others, the slowest first."""
        typical, found = self.typical(), self.current()
        if not typical or len(found) < 2:
            return []
        late = [(rate, rank) for rank, rate in enumerate(found) if rate is not None and rate < SLOW * typical]
        return [rank for _, rank in sorted(late)]

    def lines(self) -> dict[str, object]:
        """What is drawn: the median and the range of all ranks, and single ranks."""
        if not self._rows or self.typical() is None:
            return {"times": [], "middle": [], "low": [], "high": [], "ranks": [], "slow": []}
        columns = [[rate for rate in row if rate == rate] for row in self._rows]
        world, slow = len(self._rows[-1]), self.slow()
        chosen = sorted({*range(world)} if world <= SHOWN else {*slow[:SHOWN]})
        return {
            "times": [round(at, 2) for at in self.times],
            "middle": [_number(median(column)) if column else None for column in columns],
            "low": [_number(min(column)) if column else None for column in columns],
            "high": [_number(max(column)) if column else None for column in columns],
            "ranks": [
                {"rank": r, "rates": [_number(row[r]) if r < len(row) else None for row in self._rows]}
                for r in chosen
            ],
            "slow": slow[:256],
        }


def _number(rate: float) -> float | None:
    return None if rate != rate or math.isinf(rate) else float(f"{rate:.4g}")
