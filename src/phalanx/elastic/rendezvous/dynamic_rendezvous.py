"""torch.distributed.elastic.rendezvous.dynamic_rendezvous's names; most of them say why they are not here."""

from phalanx.membership.unsupported import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
)
from phalanx.membership.unsupported import create_dynamic_handler as create_handler

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]
