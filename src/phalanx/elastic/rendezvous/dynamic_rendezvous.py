"""torch.distributed.elastic.rendezvous.dynamic_rendezvous's names."""

from phalanx.membership.dynamic import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    create_handler,
)
from phalanx.membership.rendezvous_backend import RendezvousBackend, Token

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
