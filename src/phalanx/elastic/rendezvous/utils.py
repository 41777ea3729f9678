"""torch.distributed.elastic.rendezvous.utils's names."""

from phalanx.membership.address import parse_rendezvous_endpoint

__all__ = ["parse_rendezvous_endpoint"]
