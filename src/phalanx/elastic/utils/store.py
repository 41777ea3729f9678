"""torch.distributed.elastic.utils.store's names."""

from phalanx.store.tcpstore.barrier import barrier, get_all, store_timeout, synchronize
from phalanx.store.tcpstore.torch_errors import dist_store_error

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]


def __getattr__(name: str) -> type[Exception]:
    if name == "DistStoreError":  # not before it is asked for: torch may be loaded after this module
        return dist_store_error()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
