"""torch.distributed.elastic.multiprocessing's names."""

from phalanx.errors import SignalException
from phalanx.processes.context import PContext
from phalanx.processes.failure import ProcessFailure
from phalanx.processes.logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.processes.result import RunProcsResult
from phalanx.processes.start import MultiprocessContext, SubprocessContext, start_processes

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
