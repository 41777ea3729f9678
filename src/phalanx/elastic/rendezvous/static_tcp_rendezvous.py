"""torch.distributed.elastic.rendezvous.static_tcp_rendezvous's names."""

from phalanx.cluster.static import StaticRendezvous as StaticTCPRendezvous
from phalanx.cluster.static import create_rdzv_handler

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]
