"""Counts incidents for `/metrics`: recoveries by cause and kind, and how long each stage of them took.

Sizes do not grow with the number of incidents.
"""

from __future__ import annotations

from phalanx.core.ledger.incidents import DURATIONS, END
from phalanx.observe.stream import IncidentChanged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.observe.stream import Happened

BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Seconds: a standby takes over in hundredths, a cold start of a large model takes minutes."""
PHASES = (*DURATIONS, "total")


class DurationCounts:
    """A histogram; `counts` has one more than `BOUNDS`, for what is longer."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[sum(1 for bound in BOUNDS if seconds > bound)] += 1
        self.sum += seconds

    def copy(self) -> DurationCounts:
        """The same at this moment."""
        other = DurationCounts()
        other.counts, other.sum = list(self.counts), self.sum
        return other

    def cumulative(self) -> list[tuple[str, float]]:
        """How many were at most that long, as Prometheus counts."""
        found, total = [], 0
        for bound, count in zip((*BOUNDS, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return found


class IncidentCounters:
    """The counts of one agent."""

    def __init__(self) -> None:
        self.restarts: dict[tuple[str, str], int] = {}
        """By cause (`Incident.trigger`) and kind (`Incident.recovery`)."""
        self.recovery: dict[str, DurationCounts] = {phase: DurationCounts() for phase in PHASES}

    def take(self, happened: Happened) -> None:
        if not isinstance(happened, IncidentChanged):
            return
        incident = happened.incident
        if not incident.over:
            if incident.recovery != END:
                key = incident.trigger, incident.recovery
                self.restarts[key] = self.restarts.get(key, 0) + 1
            return
        for phase in PHASES:
            seconds = getattr(incident, phase)
            if seconds is not None:
                self.recovery[phase].add(seconds)
