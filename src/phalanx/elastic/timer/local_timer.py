"""torch.distributed.elastic.timer.local_timer's names."""

from phalanx.agent.supervision.timers.queue_timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
)

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
