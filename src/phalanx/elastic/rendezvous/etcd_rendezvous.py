"""torch.distributed.elastic.rendezvous.etcd_rendezvous's names; most of them say why they are not here."""

from phalanx.cluster.registry import create_etcd_v2_handler as create_rdzv_handler
from phalanx.elastic.rendezvous.etcd_v2 import (
    EtcdRendezvous,
    EtcdRendezvousHandler,
    EtcdRendezvousRetryableFailure,
    EtcdRendezvousRetryImmediately,
)

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]
