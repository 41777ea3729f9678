"""torch.distributed.elastic.multiprocessing.api's names."""

from phalanx.errors import SignalException
from phalanx.processes.context import PContext
from phalanx.processes.failure import ProcessFailure
from phalanx.processes.logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.processes.record import record
from phalanx.processes.redirects import get_std_cm
from phalanx.processes.result import RunProcsResult
from phalanx.processes.single import SubprocessHandler, get_subprocess_handler
from phalanx.processes.start import MultiprocessContext, SubprocessContext
from phalanx.processes.tail_log import TailLog

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
