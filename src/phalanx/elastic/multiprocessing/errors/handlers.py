"""`torch.distributed.elastic.multiprocessing.errors.handlers`, at the same names."""

from phalanx.worker.recorder import ErrorHandler, get_error_handler

__all__ = ["ErrorHandler", "get_error_handler"]
