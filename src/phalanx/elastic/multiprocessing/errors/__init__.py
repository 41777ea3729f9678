"""`torch.distributed.elastic.multiprocessing.errors`, at the same names."""

from phalanx.errors import ChildFailedError
from phalanx.processes.failure import ProcessFailure
from phalanx.processes.record import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]
