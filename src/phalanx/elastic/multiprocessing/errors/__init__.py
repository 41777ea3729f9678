"""`torch.distributed.elastic.multiprocessing.errors`, at the same names."""

from phalanx.errors import ChildFailedError
from phalanx.processes.failure import ProcessFailure
from phalanx.processes.record import ErrorHandler, get_error_handler, record
from phalanx.torch_paths import below

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

__getattr__ = below(__name__, "error_handler", "handlers")
