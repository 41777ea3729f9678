"""torch.distributed.elastic.agent.server's names."""

from phalanx.agent.spec import Worker, WorkerGroup, WorkerSpec
from phalanx.agent.workers.result import RunResult
from phalanx.core.group.events import WorkerState
from phalanx.elastic.agent.server.api import ElasticAgent, SimpleElasticAgent
from phalanx.elastic.agent.server.local_elastic_agent import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
    LocalElasticAgent,
)
from phalanx.elastic.lazy_modules import found_in

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

__getattr__ = found_in(__name__, "api", "health_check_server")
