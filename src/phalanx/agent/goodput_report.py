"""This node's goodput ledger, for that of the whole job: told now and then, and at the end.

A part of the owner's loop: where nothing happens, one wake-up a minute, and fewer as the job grows older.
"""

from __future__ import annotations

import time

from phalanx.agent.job_history import JobHistory
from phalanx.agent.protocols import Nodes
from phalanx.cluster.job_goodput import NodeGoodput
from phalanx.core.group.group import Phase

_SETTLED = 2.5  # seconds after a start: what a start costs is known by then


class GoodputReport:
    """Of one agent, in a job of several nodes."""

    def __init__(self, history: JobHistory, nodes: Nodes) -> None:
        self._history, self._nodes = history, nodes
        nodes.on_end = self._at_end
        self._due: float | None = None  # None: the workers do not run

    def _at_end(self) -> NodeGoodput | None:
        history = self._history
        history.close_ledger()
        if not history.is_known:
            return None
        from phalanx.cluster.job_goodput import NodeGoodput
        from phalanx.core.ledger.goodput import goodput_line

        incidents = history.incidents()
        return NodeGoodput(history.totals(), lambda totals: goodput_line(totals, incidents))

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        return []

    def deadline(self, phase: Phase) -> float | None:
        if phase != "RUNNING":
            self._due = None
        elif self._due is None:
            self._due = time.monotonic() + _SETTLED
        return self._due

    def look(self, phase: Phase, now: float) -> None:
        if phase == "RUNNING" and self._due is not None and now >= self._due:
            from phalanx.cluster.job_goodput import next_report

            self._due = next_report(self._history.began, now)
            self._nodes.keep_goodput(self._history.totals())
