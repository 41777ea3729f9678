"""torch.distributed.elastic.agent.server.api's names."""

from phalanx.agent.agent import DEFAULT_ROLE as DEFAULT_ROLE
from phalanx.agent.agent import ElasticAgent, SimpleElasticAgent
from phalanx.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec
from phalanx.core.group_events import WorkerState

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
