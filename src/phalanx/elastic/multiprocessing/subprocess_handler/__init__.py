"""torch.distributed.elastic.multiprocessing.subprocess_handler's names."""

from phalanx.processes.single import SubprocessHandler, get_subprocess_handler
from phalanx.torch_paths import below

__all__ = ["SubprocessHandler", "get_subprocess_handler"]

__getattr__ = below(__name__, "handlers", "subprocess_handler")
