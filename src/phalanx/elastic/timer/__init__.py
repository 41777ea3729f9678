"""torch.distributed.elastic.timer's names: timers that stop a worker which does not leave a scope in time."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.timer.api import TimerClient as TimerClient
from phalanx.elastic.timer.api import TimerRequest as TimerRequest
from phalanx.elastic.timer.api import TimerServer as TimerServer
from phalanx.elastic.timer.api import configure as configure
from phalanx.elastic.timer.api import expires as expires
from phalanx.elastic.timer.file_based_local_timer import *  # noqa: F403 - the names in its __all__
from phalanx.elastic.timer.local_timer import LocalTimerClient as LocalTimerClient
from phalanx.elastic.timer.local_timer import LocalTimerServer as LocalTimerServer

__getattr__ = found_in(__name__, "debug_info_logging")
