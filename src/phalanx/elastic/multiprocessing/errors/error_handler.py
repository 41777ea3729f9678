"""`torch.distributed.elastic.multiprocessing.errors.error_handler`, at the same names."""

from phalanx.workers.record import ErrorHandler

__all__ = ["ErrorHandler"]
