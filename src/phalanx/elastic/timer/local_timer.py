"""torch.distributed.elastic.timer.local_timer's names."""

from phalanx.supervision.timers.queue import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]
