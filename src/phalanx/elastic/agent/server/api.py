"""torch.distributed.elastic.agent.server.api's names."""

from phalanx.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec
from phalanx.agent.torch_agent import DEFAULT_ROLE as DEFAULT_ROLE
from phalanx.agent.torch_agent import ElasticAgent, SimpleElasticAgent
from phalanx.core.group.events import WorkerState
from phalanx.elastic.internals import RoleInstanceInfo as _RoleInstanceInfo  # noqa: F401
from phalanx.elastic.internals import fq_hostname as _get_fq_hostname  # noqa: F401

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
