"""torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler's names."""

from phalanx.agent.workers.subprocess_handle import SubprocessHandler
from phalanx.elastic.lazy_modules import found_in

__all__ = ["SubprocessHandler"]

__getattr__ = found_in(__name__)
