"""torch.distributed.elastic.utils's names."""

from phalanx.elastic.lazy_modules import below
from phalanx.elastic.utils.api import *  # noqa: F403 - the names in its __all__

__getattr__ = below(__name__, "api", "data", "distributed", "log_level", "logging", "process_state", "store")
