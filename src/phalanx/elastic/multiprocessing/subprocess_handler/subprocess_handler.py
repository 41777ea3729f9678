"""torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler's names."""

from phalanx.agent.workers.subprocess_handle import SubprocessHandler

__all__ = ["SubprocessHandler"]
