"""torch.distributed.elastic.timer.api's names."""

from phalanx.supervision.timers.requests import RequestQueue, TimerClient, TimerRequest, configure, expires
from phalanx.supervision.timers.server import TimerServer

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
