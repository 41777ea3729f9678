"""torch.distributed.elastic.timer.debug_info_logging's names."""

from phalanx.agent.supervision.timers.pipe_watchdog import log_debug_info_for_expired_timers
from phalanx.elastic.lazy_modules import found_in

__all__ = ["log_debug_info_for_expired_timers"]

__getattr__ = found_in(__name__)
