"""torch.distributed.elastic.rendezvous.etcd_store's names; they say why they are not here."""

from phalanx.elastic.rendezvous.etcd_v2 import EtcdStore

__all__ = ["EtcdStore"]
