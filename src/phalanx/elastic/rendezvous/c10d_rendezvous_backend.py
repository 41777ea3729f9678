"""torch.distributed.elastic.rendezvous.c10d_rendezvous_backend's names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.rendezvous.rendezvous_backend import C10dRendezvousBackend
from phalanx.elastic.rendezvous.rendezvous_backend import create_c10d_backend as create_backend
from phalanx.elastic.rendezvous.rendezvous_backend import create_tcp_store as _create_tcp_store

__all__ = ["C10dRendezvousBackend", "_create_tcp_store", "create_backend"]

__getattr__ = found_in(__name__)
