"""`torch.distributed.elastic.multiprocessing.errors`, at the same names."""

from phalanx.errors import ChildFailedError
from phalanx.lazy_modules import below
from phalanx.workers.failure import ProcessFailure
from phalanx.workers.record import ErrorHandler, get_error_handler, record

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

__getattr__ = below(__name__, "error_handler", "handlers")
