"""torch.distributed.elastic.timer.file_based_local_timer's names."""

from phalanx.supervision.timers.fifo import FileTimerClient
from phalanx.supervision.timers.file_server import FileTimerServer
from phalanx.supervision.timers.requests import FileTimerRequest

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
