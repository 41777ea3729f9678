"""What nodes exchange through a round's store where the handler does not: roles, sizes, their end."""

from __future__ import annotations

from phalanx.core.group.ranks import Offsets, offsets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.spec import WorkerSpec
    from phalanx.core.group.ranks import WorkerRanks

# torch's keys: a handler that brings its own store may answer them itself.
_NODES, _ASSIGNED = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


def exchange_ranks(store: Any, rank: int, world_size: int, spec: WorkerSpec) -> list[WorkerRanks]:
    """The ranks of this node's workers, from the role and worker count of every node.

    As torch does it: every node writes its own, node 0 reads all and writes each node's place, and each node
    reads its own place.
    """
    import json

    mine = {"role": spec.role, "rank": rank, "local_world_size": spec.local_world_size}
    store.set(f"{_NODES}{rank}", json.dumps(mine).encode())
    if rank == 0:
        nodes = [json.loads(_text(value)) for value in _get(store, _NODES, world_size)]
        places = offsets((str(node["role"]), int(node["local_world_size"])) for node in nodes)
        _set(store, _ASSIGNED, [json.dumps(list(place.as_dict().values())) for place in places])
    place = Offsets(*json.loads(_text(store.get(f"{_ASSIGNED}{rank}"))))
    return place.workers(spec.local_world_size)


def _text(value: Any) -> str | bytes:
    return value if isinstance(value, str) else bytes(value)


def _get(store: Any, prefix: str, count: int) -> list[Any]:
    keys = [f"{prefix}{node}" for node in range(count)]
    if hasattr(store, "multi_get"):
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def _set(store: Any, prefix: str, values: list[str]) -> None:
    keys = [f"{prefix}{node}" for node in range(len(values))]
    if hasattr(store, "multi_set"):
        store.multi_set(keys, values)
        return
    for key, value in zip(keys, values, strict=True):
        store.set(key, value.encode())


def exit_barrier(store: Any, rank: int, world_size: int, number: int, timeout: float) -> None:
    """Wait until every node has finished; a time-out names the missing ones."""
    from phalanx.store.tcpstore.barrier import barrier

    barrier(store, world_size, f"phalanx/exit/{number}", timeout, rank=rank)
