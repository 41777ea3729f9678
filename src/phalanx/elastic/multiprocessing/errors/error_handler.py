"""`torch.distributed.elastic.multiprocessing.errors.error_handler`, at the same names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.worker.recorder import ErrorHandler

__all__ = ["ErrorHandler"]

__getattr__ = found_in(__name__)
