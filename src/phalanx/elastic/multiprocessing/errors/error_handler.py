"""`torch.distributed.elastic.multiprocessing.errors.error_handler`, at the same names."""

from phalanx.worker.recorder import ErrorHandler

__all__ = ["ErrorHandler"]
