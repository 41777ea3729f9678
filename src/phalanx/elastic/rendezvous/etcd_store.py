"""torch.distributed.elastic.rendezvous.etcd_store's names; they say why they are not here."""

from phalanx.membership.unsupported import EtcdStore

__all__ = ["EtcdStore"]
