"""The place of a node's workers in a round: their ranks."""

from __future__ import annotations

from phalanx.agent.spec import Worker
from phalanx.job import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.protocols import Nodes
    from phalanx.agent.spec import WorkerGroup, WorkerSpec
    from phalanx.cluster.handler import RendezvousInfo


def place_group(group: WorkerGroup, info: RendezvousInfo, nodes: Nodes) -> None:
    """Give the group its place in the round, and each worker its ranks."""
    group.store, group.group_rank, group.group_world_size = info.store, info.rank, info.world_size
    group.workers = assign_ranks(nodes, info.store, info.rank, info.world_size, group.spec)


def assign_ranks(
    nodes: Nodes, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
) -> list[Worker]:
    """Ranks from role and worker count of every node, which the nodes exchange while they join."""
    from phalanx.core.group.ranks import assign_identical

    places = nodes.worker_ranks
    if places is None and group_world_size > 1 and not environment.workers_are_identical():
        from phalanx.cluster.exchange import exchange_ranks

        places = exchange_ranks(store, group_rank, group_world_size, spec)
    if places is None:
        places = assign_identical(group_rank, group_world_size, spec.local_world_size)
    return [Worker(p.local_rank, p.global_rank, p.role_rank, p.world_size, p.role_world_size) for p in places]
