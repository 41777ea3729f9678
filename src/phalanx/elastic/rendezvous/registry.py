"""torch.distributed.elastic.rendezvous.registry's names."""

from phalanx.cluster.registry import get_rendezvous_handler
from phalanx.elastic.lazy_modules import found_in

__all__ = ["get_rendezvous_handler"]

__getattr__ = found_in(__name__)
