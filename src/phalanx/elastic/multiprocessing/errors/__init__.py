"""`torch.distributed.elastic.multiprocessing.errors`, at the same names."""

from typing import Any

from phalanx.agent.workers.failure import ProcessFailure
from phalanx.elastic.lazy_modules import found_in
from phalanx.errors import ChildFailedError
from phalanx.worker.recorder import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

JSON = dict[str, Any]
GlobalRank = int

__getattr__ = found_in(__name__, "error_handler", "handlers")
