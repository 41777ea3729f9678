"""torch.distributed.elastic.rendezvous.registry's names."""

from phalanx.cluster.registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
