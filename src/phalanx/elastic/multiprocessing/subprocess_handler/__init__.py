"""torch.distributed.elastic.multiprocessing.subprocess_handler's names."""

from phalanx.processes.single import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
