"""torch.distributed.elastic.utils's names."""

from phalanx.torch_names import get_env_variable_or_raise, get_socket_with_port, macros

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros"]
