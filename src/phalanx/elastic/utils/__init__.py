"""torch.distributed.elastic.utils's names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.utils.api import *  # noqa: F403 - the names in its __all__

__getattr__ = found_in(
    __name__, "api", "data", "distributed", "log_level", "logging", "process_state", "store"
)
