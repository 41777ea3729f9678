"""The static rendezvous: the number of nodes and their ranks are given, and all meet at one address.

It is the elastic rendezvous with fixed settings: exactly nnodes nodes, each with its given rank, node 0 hosts
the store (`master_port`), no last call. `core.rounds.rounds` describes what a fixed job does when a node is
lost.

When node 0 is lost, its store is lost too: the other nodes stop their workers, wait a minute for node 0 to
return, and form the next round at its new store; the counts of rounds and restarts go on.

A static job authenticates its agents exactly when a token is given (PHALANX_TOKEN, PHALANX_TOKEN_FILE,
--token-file), so that a torchrun command line works unchanged on hosts without a common token.
"""

from __future__ import annotations

from phalanx.cluster.elastic import ElasticRendezvous
from phalanx.cluster.handler import RendezvousParameters
from phalanx.cluster.settings import DEFAULT_TIMEOUT, Settings
from phalanx.job.environment import STATIC_PORT, shares_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class StaticRendezvous(ElasticRendezvous):
    """Rounds of a fixed set of nodes; torch's StaticTCPRendezvous, and `config` as --rdzv-conf."""

    def __init__(
        self,
        master_addr: str,
        master_port: int,
        rank: int,
        world_size: int,
        run_id: str,
        timeout: float = DEFAULT_TIMEOUT,
        local_addr: str | None = None,
        **config: Any,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"node rank {rank} of {world_size}: ranks go from 0 to one less than the number of nodes"
            )
        if not 0 <= master_port <= 65535 or (master_port == 0 and world_size > 1):
            raise ValueError(
                f"master port {master_port}: nodes can only meet at a port that all of them know"
            )
        host = f"[{master_addr}]" if ":" in master_addr else master_addr
        config |= {"rank": rank, "timeout": timeout}
        params = RendezvousParameters(
            "static", f"{host}:{master_port}", run_id, world_size, world_size, local_addr, **config
        )
        super().__init__(Settings(params))
        self.master_addr, self.master_port = master_addr, master_port
        self.rank, self.world_size = rank, world_size
        self.timeout = self._settings.options.join_timeout

    @property
    def use_agent_store(self) -> bool:
        return shares_store()

    def set_closed(self) -> None:
        """End the job for all nodes; a node that has not joined has no part in it."""
        if self.membership is not None:
            super().set_closed()


def create_rdzv_handler(params: RendezvousParameters) -> StaticRendezvous:
    """The handler for these parameters."""
    from phalanx.job.address import parse_rendezvous_endpoint

    rank = params.get_as_int("rank")
    if rank is None:
        raise ValueError(
            "static rendezvous: the rank of this node is missing; give --node-rank (rank=… here)"
        )
    if params.min_nodes != params.max_nodes:
        raise ValueError(
            f"static rendezvous with {params.min_nodes}:{params.max_nodes} nodes: the number must be fixed; "
            "use the phalanx backend for a range"
        )
    host, port = parse_rendezvous_endpoint(params.endpoint, STATIC_PORT)
    config = {**params.config, "rank": rank}
    return StaticRendezvous(
        host, port, world_size=params.max_nodes, run_id=params.run_id, local_addr=params.local_addr, **config
    )
