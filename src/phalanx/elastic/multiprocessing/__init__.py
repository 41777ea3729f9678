"""torch.distributed.elastic.multiprocessing's names."""

from phalanx.errors import SignalException
from phalanx.processes.context import PContext
from phalanx.processes.failure import ProcessFailure
from phalanx.processes.logs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.processes.result import RunProcsResult
from phalanx.processes.start import MultiprocessContext, SubprocessContext, start_processes
from phalanx.torch_paths import below

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
