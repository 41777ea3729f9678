"""torch.distributed.elastic.rendezvous.static_tcp_rendezvous's names."""

from phalanx.cluster.static import StaticRendezvous as StaticTCPRendezvous
from phalanx.cluster.static import create_rdzv_handler
from phalanx.elastic.lazy_modules import found_in

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

__getattr__ = found_in(__name__)
