"""torch.distributed.elastic.utils.distributed's names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.utils.functions import create_c10d_store, get_socket_with_port
from phalanx.job.address import free_port as get_free_port

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

__getattr__ = found_in(__name__)
