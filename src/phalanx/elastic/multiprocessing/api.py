"""torch.distributed.elastic.multiprocessing.api's names."""

from phalanx.errors import SignalException
from phalanx.logs.redirects import get_std_cm
from phalanx.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.logs.tail_log import TailLog
from phalanx.workers.failure import ProcessFailure
from phalanx.workers.record import record
from phalanx.workers.result import RunProcsResult
from phalanx.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler
from phalanx.workers.worker_group import PContext
from phalanx.workers.worker_kinds import MultiprocessContext, SubprocessContext

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
