"""torch.distributed.elastic.multiprocessing's names."""

from phalanx.agent.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from phalanx.agent.workers.failure import ProcessFailure
from phalanx.agent.workers.result import RunProcsResult
from phalanx.agent.workers.worker_kinds import MultiprocessContext, SubprocessContext, start_processes
from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.multiprocessing.context import PolledContext as PContext
from phalanx.errors import SignalException

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

__getattr__ = found_in(__name__, "api", "errors", "redirects", "subprocess_handler", "tail_log")
