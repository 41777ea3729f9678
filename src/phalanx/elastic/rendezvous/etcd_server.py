"""torch.distributed.elastic.rendezvous.etcd_server's names; they say why they are not here."""

from phalanx.membership.unsupported import EtcdServer

__all__ = ["EtcdServer"]
