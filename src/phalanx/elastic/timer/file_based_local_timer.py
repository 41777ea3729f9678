"""torch.distributed.elastic.timer.file_based_local_timer's names."""

from phalanx.agent.supervision.timers.api import FileTimerRequest
from phalanx.agent.supervision.timers.file_timer import FileTimerClient, FileTimerServer
from phalanx.agent.supervision.timers.file_timer import (
    log_debug_info_for_expired_timers as log_debug_info_for_expired_timers,
)

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]
