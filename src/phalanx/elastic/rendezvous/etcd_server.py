"""torch.distributed.elastic.rendezvous.etcd_server's names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.store.etcd.local_server import EtcdServer

__all__ = ["EtcdServer"]

__getattr__ = found_in(__name__)
