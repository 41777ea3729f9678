"""torch.distributed.elastic.rendezvous.etcd_server's names."""

from phalanx.store.etcd.local_server import EtcdServer

__all__ = ["EtcdServer"]
