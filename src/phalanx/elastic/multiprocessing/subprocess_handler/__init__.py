"""torch.distributed.elastic.multiprocessing.subprocess_handler's names."""

from phalanx.agent.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler
from phalanx.elastic.lazy_modules import below

__all__ = ["SubprocessHandler", "get_subprocess_handler"]

__getattr__ = below(__name__, "handlers", "subprocess_handler")
