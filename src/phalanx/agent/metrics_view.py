"""This node as a sample for `/metrics`, read when a request asks for it."""

from __future__ import annotations

import os
import time

from phalanx.agent.node_view import NodeView
from phalanx.observe.incident_counters import IncidentCounters
from phalanx.web.metrics import MetricsPage, MetricsSample, RankSample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.agent import Agent
    from phalanx.observe.stream import Stream


class MetricsView:
    """Counts the incidents of an agent from the start on, and takes samples of it."""

    def __init__(self, agent: Agent, stream: Stream) -> None:
        self._agent = agent
        self._since = time.time()
        self._view = NodeView(agent, self._since)
        self._counters = IncidentCounters()
        stream.subscribers.append(self._counters)

    def page(self) -> MetricsPage:
        """What answers requests."""
        return MetricsPage(self.sample, self._agent.post)

    def sample(self) -> MetricsSample:
        """The agent now; in the owner's thread."""
        agent, group = self._agent, self._agent.get_worker_group()
        agent.history.settle()
        totals, current = agent.history.totals(), agent.state.round
        return MetricsSample(
            agent.run_id,
            agent.record.job_name,
            group.spec.role,
            agent.host,
            self._since,
            totals.ratio if totals.measure == "goodput" else None,
            dict(totals.seconds),
            dict(self._counters.restarts),
            {phase: counts.copy() for phase, counts in self._counters.recovery.items()},
            self._workers(),
            0 if current is None else current.number,
            0 if current is None else len(current.members),
            len(agent.helpers.parked),
            self._log_bytes(),
            self._store_operations(),
        )

    def _workers(self) -> list[RankSample]:
        boards, now, wall = self._agent.supervision.snapshots(), time.monotonic(), time.time()
        found = []
        for one in self._view.workers({}):
            board = boards[one.local_rank] if one.local_rank < len(boards) else None
            beats = one.running and board is not None and board.count > 0
            last = wall - (now - board.beat_at) if beats and board is not None else None
            found.append(RankSample(one.rank, one.state, board.count if board else 0, last))
        return found

    def _log_bytes(self) -> dict[str, int]:
        context = self._agent.context
        if context is None:
            return {}
        found = {}
        for name, files in (("stdout", context.stdouts), ("stderr", context.stderrs)):
            paths = [path for path in files.values() if path and path != os.devnull]
            if paths:
                found[name] = sum(_size(path) for path in paths)
        return found

    def _store_operations(self) -> dict[str, int]:
        sent = self._agent.nodes.place().get("operations")
        found = {} if sent is None else {"nodes": int(sent)}
        store = self._agent.workers.store
        if store is not None:
            found["workers"] = store.operations
        return found


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
