"""torch.distributed.elastic.rendezvous.etcd_rendezvous's names; they say why they are not here."""

from phalanx.membership.unsupported import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)
from phalanx.membership.unsupported import create_etcd_v2_handler as create_rdzv_handler

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]
