"""Ranks of workers and the natural order of node names; every node computes the same result.

Invariants: global ranks are 0..world_size-1 without a gap, ordered by node rank and then by local rank; role
ranks are 0..role_world_size-1 within each role, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.core.record import Record


class WorkerRanks(Record):
    """Every rank of one worker."""

    local_rank: int
    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


class Offsets(Record):
    """Where the ranks of one node's workers begin, and the sizes they are counted in."""

    first: int
    world_size: int
    role_first: int
    role_world_size: int

    def workers(self, local_world_size: int) -> list[WorkerRanks]:
        """The ranks of the node's workers."""
        return [
            WorkerRanks(i, self.first + i, self.role_first + i, self.world_size, self.role_world_size)
            for i in range(local_world_size)
        ]


def offsets(nodes: Iterable[tuple[str, int]]) -> list[Offsets]:
    """The offsets of every node from its (role, worker count), by node rank; O(nodes)."""
    listed = list(nodes)
    world = sum(size for _, size in listed)
    roles: dict[str, int] = {}
    for role, size in listed:
        roles[role] = roles.get(role, 0) + size
    first, given = 0, dict.fromkeys(roles, 0)
    result = []
    for role, size in listed:
        result.append(Offsets(first, world, given[role], roles[role]))
        first += size
        given[role] += size
    return result


def assign_identical(rank: int, nodes: int, local_world_size: int) -> list[WorkerRanks]:
    """The ranks of one node's workers when all nodes are alike: no exchange is needed."""
    if not 0 <= rank < nodes:
        raise ValueError(f"node rank {rank}: this round has the ranks 0 to {nodes - 1}")
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}: a node needs at least 1 worker")
    first, world = rank * local_world_size, nodes * local_world_size
    return Offsets(first, world, first, world).workers(local_world_size)


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """A sort key that puts `node2` before `node10`; different names never compare equal."""
    from itertools import groupby

    # Only ASCII digits: int() accepts the digits of other scripts too, which no scheduler counts with.
    runs = ((number, "".join(chars)) for number, chars in groupby(name, lambda c: c in "0123456789"))
    parts = ((0, int(text), "") if number else (1, 0, text) for number, text in runs)
    return tuple(parts), name
