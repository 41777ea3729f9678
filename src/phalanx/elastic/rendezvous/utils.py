"""torch.distributed.elastic.rendezvous.utils's names."""

from phalanx.elastic.internals import (  # noqa: F401
    matches_machine_hostname as _matches_machine_hostname,
)
from phalanx.elastic.internals import (  # noqa: F401
    parse_rendezvous_config as _parse_rendezvous_config,
)
from phalanx.job.address import parse_rendezvous_endpoint

__all__ = ["parse_rendezvous_endpoint"]
