"""torch.distributed.elastic.multiprocessing.subprocess_handler.handlers's names."""

from phalanx.agent.workers.subprocess_handle import SubprocessHandler, get_subprocess_handler

__all__ = ["SubprocessHandler", "get_subprocess_handler"]
