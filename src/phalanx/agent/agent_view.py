"""What others read of an agent: its state, its parts, its names. Nothing here changes anything."""

from __future__ import annotations

from phalanx.core.group import group as core
from phalanx.core.group.group import Phase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.job_history import JobHistory
    from phalanx.agent.logs.run_logs import RunLogs
    from phalanx.agent.loop import OwnerLoop
    from phalanx.agent.protocols import Nodes, NodeWorkers
    from phalanx.agent.run_record import RunRecord
    from phalanx.agent.spec import WorkerGroup
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.cluster.handler import RendezvousHandler


class AgentView:
    """The view of one agent."""

    _loop: OwnerLoop
    _record: RunRecord
    _rdzv_handler: RendezvousHandler
    _worker_group: WorkerGroup
    run_logs: RunLogs

    @property
    def state(self) -> core.GroupState:
        """The group's state, as the core has it."""
        return self._loop.state

    @property
    def attempt(self) -> int:
        """Restarts used by the job so far."""
        return self.state.attempt

    @property
    def host(self) -> str:
        """This node, as people know it."""
        return self._loop.workers.host

    @property
    def run_id(self) -> str:
        """The job's."""
        return self._rdzv_handler.get_run_id()

    @property
    def alone(self) -> bool:
        """Whether the job can have no other node."""
        return self._rdzv_handler.immediate

    @property
    def workers(self) -> NodeWorkers:
        return self._loop.workers

    @property
    def nodes(self) -> Nodes:
        return self._loop.nodes

    @property
    def record(self) -> RunRecord:
        """What has happened, and what is known of it."""
        return self._record

    @property
    def history(self) -> JobHistory:
        """The incidents of this agent, and its goodput ledger."""
        return self._record.history

    @property
    def context(self) -> PContext | None:
        """The workers of the last start."""
        return self._loop.workers.context

    @property
    def run_dir(self) -> str | None:
        """The directory of this run's logs, once workers have started."""
        return self.run_logs.directory(self.context)

    @property
    def waiting_for(self) -> str:
        """What the agent waits for, in words; empty while that is as it should be."""
        phase = self.state.phase
        return (self.nodes.waiting if phase is Phase.JOINING else "") or core.WORDS[phase].waiting

    def get_worker_group(self) -> WorkerGroup:
        """The group as it is now; not to be changed by the caller."""
        return self._worker_group
