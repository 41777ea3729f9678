"""torch.distributed.elastic.multiprocessing's names."""

from phalanx.errors import SignalException
from phalanx.lazy_modules import below
from phalanx.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.workers.failure import ProcessFailure
from phalanx.workers.result import RunProcsResult
from phalanx.workers.worker_group import PContext
from phalanx.workers.worker_kinds import MultiprocessContext, SubprocessContext, start_processes

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
    "start_processes",
    "to_map",
]

__getattr__ = below(__name__, "api", "errors", "redirects", "subprocess_handler", "tail_log")
