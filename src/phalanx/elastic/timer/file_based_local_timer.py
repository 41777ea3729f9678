"""torch.distributed.elastic.timer.file_based_local_timer's names."""

from phalanx.supervision.timers.api import FileTimerRequest
from phalanx.supervision.timers.file_timer import FileTimerClient, FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
