"""What an agent serves beside its workers: status socket, page, event file, metrics, ledger."""

from __future__ import annotations

import time

from phalanx.agent.loop import ProgressPart
from phalanx.agent.node_view import NodeView
from phalanx.agent.requests import RequestDesk
from phalanx.agent.status import StatusSocket
from phalanx.observe.event_file import EventFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.agent import Agent
    from phalanx.agent.protocols import LoopPart
    from phalanx.agent.spec import AgentOptions


class ServiceDesk:
    """The services of one agent; `parts` are those that its loop waits for."""

    def __init__(self, agent: Agent, options: AgentOptions) -> None:
        self.requests = RequestDesk(agent, NodeView(agent, time.time()), options.dashboard)
        self.status = StatusSocket(self.requests.handle)
        self.parts: list[LoopPart] = [self.status, self.requests]
        agent.nodes.on_request = self.requests.answer
        if options.progress is not None:
            self.parts.append(ProgressPart(options.progress, lambda: agent.waiting_for))
        if not agent.alone:
            from phalanx.agent.goodput_report import GoodputReport

            self.parts.append(GoodputReport(agent.history, agent.nodes))
        if options.dashboard is not None:
            options.dashboard.attach(
                lambda: self.status.name,
                lambda: agent.state.round is not None and agent.state.round.node_rank == 0,
                lambda: agent.run_id,
                agent.record.clear_progress,
            )
            self.parts.append(options.dashboard)
        stream = agent.record.stream
        stream.subscribers.append(EventFile(lambda: agent.run_dir, lambda: agent.host))
        if options.metrics:
            from phalanx.agent.metrics_view import MetricsView

            agent.supervision.services.pages["/metrics"] = MetricsView(agent, stream).page().answer

    def close(self) -> None:
        """Answer no more; idempotent."""
        self.status.close()
        self.requests.close()
