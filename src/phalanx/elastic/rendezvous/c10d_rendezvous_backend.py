"""torch.distributed.elastic.rendezvous.c10d_rendezvous_backend's names; they say why they are not here."""

from phalanx.integrations.torch_internals import create_tcp_store as _create_tcp_store  # noqa: F401
from phalanx.membership.unsupported import C10dRendezvousBackend
from phalanx.membership.unsupported import create_c10d_backend as create_backend

__all__ = ["C10dRendezvousBackend", "create_backend"]
