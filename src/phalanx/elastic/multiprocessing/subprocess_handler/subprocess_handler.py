"""torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler's names."""

from phalanx.processes.single import SubprocessHandler

__all__ = ["SubprocessHandler"]
