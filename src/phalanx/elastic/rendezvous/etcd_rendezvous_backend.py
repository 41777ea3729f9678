"""torch.distributed.elastic.rendezvous.etcd_rendezvous_backend's names; they say why they are not here."""

from phalanx.elastic.rendezvous.etcd_v2 import EtcdRendezvousBackend
from phalanx.elastic.rendezvous.etcd_v2 import create_etcd_backend as create_backend

__all__ = ["EtcdRendezvousBackend", "create_backend"]
