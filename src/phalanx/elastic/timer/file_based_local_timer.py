"""torch.distributed.elastic.timer.file_based_local_timer's names."""

from phalanx.timers.fifo import FileTimerClient
from phalanx.timers.file_server import FileTimerServer
from phalanx.timers.requests import FileTimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
