"""torch.distributed.elastic.utils.store's names."""

from phalanx.store.tcpstore.barrier import barrier, get_all, store_timeout, synchronize

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]
