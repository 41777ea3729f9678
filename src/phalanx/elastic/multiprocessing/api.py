"""torch.distributed.elastic.multiprocessing.api's names."""

from phalanx.agent.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.agent.workers.failure import ProcessFailure
from phalanx.agent.workers.result import RunProcsResult
from phalanx.agent.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler
from phalanx.agent.workers.worker_kinds import MultiprocessContext, SubprocessContext
from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.multiprocessing.context import PolledContext as PContext
from phalanx.elastic.multiprocessing.redirects import get_std_cm
from phalanx.elastic.multiprocessing.tail_log import TailLog
from phalanx.errors import SignalException
from phalanx.worker.recorder import record

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "SubprocessHandler",
    "TailLog",
    "get_std_cm",
    "get_subprocess_handler",
    "record",
    "to_map",
]

__getattr__ = found_in(__name__)
