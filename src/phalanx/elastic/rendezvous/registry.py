"""torch.distributed.elastic.rendezvous.registry's names."""

from phalanx.membership.registry import get_rendezvous_handler

__all__ = ["get_rendezvous_handler"]
