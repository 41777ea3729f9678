"""Who is who: ranks of workers and the order of nodes, computed the same way on every node.

Invariants: global ranks are 0..world_size-1 without a gap, ordered by node rank and then by local
rank; role ranks are 0..role_world_size-1 within each role, in the same order; the order of nodes
depends only on what is passed in, never on the order in which the nodes arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class NodeSlots(NamedTuple):
    """What a node contributes to a round."""

    rank: int
    role: str
    local_world_size: int


class WorkerRanks(NamedTuple):
    """Every rank of one worker."""

    local_rank: int
    global_rank: int
    role_rank: int
    world_size: int
    role_world_size: int


class Candidate(NamedTuple):
    """A node that wants a rank: `given` by a person, `scheduled` by a scheduler, else by host name."""

    name: str
    host: str = ""
    given: int | None = None
    scheduled: int | None = None


def _checked(nodes: Iterable[NodeSlots]) -> list[NodeSlots]:
    """The nodes by rank, or ValueError naming what is wrong with them."""
    ordered = sorted(nodes)
    if [node.rank for node in ordered] != list(range(len(ordered))):
        found = [node.rank for node in ordered]
        raise ValueError(f"node ranks {found}: every rank from 0 to {len(ordered) - 1} must be there once")
    for node in ordered:
        if node.local_world_size < 1:
            raise ValueError(
                f"node {node.rank} ({node.role!r}) brings {node.local_world_size} workers: it needs 1 or more"
            )
    return ordered


def assign(nodes: Iterable[NodeSlots]) -> list[list[WorkerRanks]]:
    """The ranks of all workers, one list per node, by node rank."""
    ordered = _checked(nodes)
    world = sum(node.local_world_size for node in ordered)
    roles: dict[str, int] = {}
    for node in ordered:
        roles[node.role] = roles.get(node.role, 0) + node.local_world_size
    first, given = 0, dict.fromkeys(roles, 0)
    result = []
    for _, role, size in ordered:
        base = given[role]
        result.append([WorkerRanks(i, first + i, base + i, world, roles[role]) for i in range(size)])
        first += size
        given[role] = base + size
    return result


def assign_to(nodes: Iterable[NodeSlots], rank: int) -> list[WorkerRanks]:
    """The ranks of the workers of one node: O(nodes) however many workers the others have."""
    ordered = _checked(nodes)
    if not 0 <= rank < len(ordered):
        raise ValueError(f"node rank {rank}: this round has the ranks 0 to {len(ordered) - 1}")
    me = ordered[rank]
    first = sum(node.local_world_size for node in ordered[:rank])
    base = sum(node.local_world_size for node in ordered[:rank] if node.role == me.role)
    world = sum(node.local_world_size for node in ordered)
    mine = sum(node.local_world_size for node in ordered if node.role == me.role)
    return [WorkerRanks(i, first + i, base + i, world, mine) for i in range(me.local_world_size)]


def assign_identical(rank: int, nodes: int, local_world_size: int) -> list[WorkerRanks]:
    """The ranks of one node's workers when all nodes are alike: known without asking the others."""
    if not 0 <= rank < nodes:
        raise ValueError(f"node rank {rank}: this round has the ranks 0 to {nodes - 1}")
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size}: a node needs at least 1 worker")
    first, world = rank * local_world_size, nodes * local_world_size
    return [WorkerRanks(i, first + i, first + i, world, world) for i in range(local_world_size)]


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts `node2` before `node10`; names that differ at all never compare equal."""
    parts: list[tuple[int, int, str]] = []
    text, digits = "", ""
    for char in name:
        # Only ASCII digits: int() also takes other scripts' digits, which no scheduler counts with.
        if "0" <= char <= "9":
            if text:
                parts.append((1, 0, text))
                text = ""
            digits += char
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        text += char
    if text:
        parts.append((1, 0, text))
    if digits:
        parts.append((0, int(digits), ""))
    # `n1` and `n01` read the same as numbers; the spelling decides, so that the order stays total.
    return (*parts, (2, 0, name))


def order_nodes(present: Sequence[Candidate], previous: Mapping[str, int] | None = None) -> list[str]:
    """Names of the nodes by rank: index 0 of the answer is node rank 0.

    A given rank wins; then a node keeps the rank it had; whoever is left takes the free ranks in the
    order of former rank, scheduler index, natural host order, name. Ranks past the end (nodes are
    missing, or the round shrank) only sort. Keeping the ranks of most nodes was chosen over keeping
    their relative order: losing node 1 of 1000 must not move 998 others.
    """
    before = previous or {}
    size = len(present)
    names = {node.name for node in present}
    if len(names) != size:
        twice = sorted(n for n in names if sum(node.name == n for node in present) > 1)
        raise ValueError(f"nodes {twice} are listed twice: every node needs a name of its own")
    slots: dict[int, Candidate] = {}
    claimed: dict[int, str] = {}
    for node in sorted(present):
        if node.given is None:
            continue
        if node.given < 0:
            raise ValueError(f"node {node.name!r} was given rank {node.given}: ranks start at 0")
        if node.given in claimed:
            raise ValueError(
                f"nodes {claimed[node.given]!r} and {node.name!r} were both given rank {node.given}: "
                "give each node its own"
            )
        claimed[node.given] = node.name
        if node.given < size:
            slots[node.given] = node
    placed = {node.name for node in slots.values()}
    for node in sorted(present):
        rank = before.get(node.name, size)
        if node.given is None and 0 <= rank < size and rank not in slots:
            slots[rank] = node
            placed.add(node.name)
    rest = sorted((node for node in present if node.name not in placed), key=lambda n: _rest_key(n, before))
    free = (rank for rank in range(size) if rank not in slots)
    slots.update(zip(free, rest, strict=True))
    return [slots[rank].name for rank in range(size)]


def _rest_key(
    node: Candidate, before: Mapping[str, int]
) -> tuple[tuple[int, int], tuple[tuple[int, int, str], ...], str]:
    """How nodes without a rank of their own queue up for the free ones."""
    if node.given is not None:
        order = (0, node.given)
    elif node.name in before:
        order = (1, before[node.name])
    elif node.scheduled is not None:
        order = (2, node.scheduled)
    else:
        order = (3, 0)
    return order, natural_key(node.host or node.name), node.name


def master(order: Sequence[str]) -> str:
    """The node whose address the workers use: node rank 0."""
    if not order:
        raise ValueError("a round without nodes has no master")
    return order[0]
