"""Step rates: measured once per window, compared among the ranks of this node or of all nodes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.supervision.hang_consensus import HangConsensus
    from phalanx.agent.supervision.incident_log import IncidentLog
    from phalanx.core.diagnosis.progress import View
    from phalanx.core.diagnosis.stragglers import SlowHistory, StepCounts


class StepRates:
    """Those of one start; imports nothing until a rank reports steps."""

    def __init__(self, incidents: IncidentLog) -> None:
        self._incidents = incidents
        self._counts: StepCounts | None = None
        self._history: SlowHistory | None = None
        self.current: dict[int, float] = {}  # steps per second in the last window, by global rank

    def look(self, view: View, now: float, consensus: HangConsensus | None) -> float:
        """Compare the rates if a window has ended; returns when the next one ends."""
        from phalanx.core.diagnosis import stragglers

        before = self._counts or stragglers.StepCounts()
        if now < before.at + stragglers.WINDOW:
            return before.at + stragglers.WINDOW
        self._counts, self.current = stragglers.measure(before, view, now)
        if self.current and consensus is not None:
            consensus.publish_rates(self.current, now - before.at)
        elif self.current:
            history = self._history or stragglers.SlowHistory()
            self._history, found = stragglers.compare(history, self.current, now - before.at, {})
            for straggler in found:
                self._incidents.add_straggler(vars(straggler))
        return now + stragglers.WINDOW
