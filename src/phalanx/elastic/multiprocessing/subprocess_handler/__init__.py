"""torch.distributed.elastic.multiprocessing.subprocess_handler's names."""

from phalanx.lazy_modules import below
from phalanx.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]

__getattr__ = below(__name__, "handlers", "subprocess_handler")
