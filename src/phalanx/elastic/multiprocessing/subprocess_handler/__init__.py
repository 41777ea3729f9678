"""torch.distributed.elastic.multiprocessing.subprocess_handler's names."""

from phalanx.agent.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler
from phalanx.elastic.lazy_modules import found_in

__all__ = ["SubprocessHandler", "get_subprocess_handler"]

__getattr__ = found_in(__name__, "handlers", "subprocess_handler")
