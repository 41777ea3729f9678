"""What nodes exchange through a round's store where the handler does not: roles, sizes, their end."""

from __future__ import annotations

from phalanx.core.ranks import NodeSlots, assign_to

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.spec import WorkerSpec
    from phalanx.core.ranks import WorkerRanks


def exchange_ranks(
    store: Any, rank: int, world_size: int, spec: WorkerSpec, number: int
) -> list[WorkerRanks]:
    """The ranks of this node's workers, from the role and worker count of every node."""
    import json

    prefix = f"phalanx/nodes/{number}/"
    mine = json.dumps([spec.role, spec.local_world_size])
    store.set(f"{prefix}{rank}", mine.encode())
    keys = [f"{prefix}{node}" for node in range(world_size)]
    values = store.multi_get(keys) if hasattr(store, "multi_get") else [store.get(key) for key in keys]
    nodes = []
    for node, value in enumerate(values):
        role, size = json.loads(value if isinstance(value, str) else bytes(value))
        nodes.append(NodeSlots(node, str(role), int(size)))
    return assign_to(nodes, rank)


def exit_barrier(store: Any, rank: int, world_size: int, number: int, timeout: float) -> None:
    """Wait until every node has finished; a time-out names the missing ones."""
    from phalanx.store.store_barrier import barrier

    barrier(store, world_size, f"phalanx/exit/{number}", timeout, rank=rank)
