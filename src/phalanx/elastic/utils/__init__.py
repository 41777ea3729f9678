"""torch.distributed.elastic.utils's names."""

from phalanx.integrations.torch_functions import get_env_variable_or_raise, get_socket_with_port, macros
from phalanx.lazy_modules import below

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]

__getattr__ = below(__name__, "api", "data", "distributed", "log_level", "logging", "process_state", "store")
