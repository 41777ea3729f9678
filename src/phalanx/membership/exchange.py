"""What nodes tell each other through the round's store: their role and size, and that they are finished."""

from __future__ import annotations

from phalanx.core.ranks import NodeSlots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.spec import WorkerSpec


def node_infos(store: Any, rank: int, world_size: int, spec: WorkerSpec, number: int) -> list[NodeSlots]:
    """Everybody's role and worker count, by node rank."""
    import json

    prefix = f"phalanx/nodes/{number}/"
    mine = json.dumps([spec.role, spec.local_world_size])
    store.set(f"{prefix}{rank}", mine.encode())
    keys = [f"{prefix}{node}" for node in range(world_size)]
    values = store.multi_get(keys) if hasattr(store, "multi_get") else [store.get(key) for key in keys]
    infos = []
    for node, value in enumerate(values):
        role, size = json.loads(bytes(value))
        infos.append(NodeSlots(node, str(role), int(size)))
    return infos


def exit_barrier(store: Any, rank: int, world_size: int, number: int, timeout: float) -> None:
    """Wait until every node has finished; names the missing ones when they do not come."""
    from phalanx.store.store_barrier import barrier

    barrier(store, world_size, f"phalanx/exit/{number}", timeout, rank=rank)
