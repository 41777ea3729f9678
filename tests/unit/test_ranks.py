"""Ranks of workers and the order of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.group.ranks import (
    WorkerRanks,
    assign_identical,
    natural_key,
    offsets,
)


def assign(nodes: list[tuple[str, int]]) -> list[list[WorkerRanks]]:
    """The ranks of all workers, by node; a node is its role and its number of workers."""
    return [place.workers(size) for place, (_, size) in zip(offsets(nodes), nodes, strict=True)]


def test_heterogeneous_roles() -> None:
    assert assign([("trainer", 2), ("reader", 3), ("trainer", 1)]) == [
        [WorkerRanks(0, 0, 0, 6, 3), WorkerRanks(1, 1, 1, 6, 3)],
        [WorkerRanks(0, 2, 0, 6, 3), WorkerRanks(1, 3, 1, 6, 3), WorkerRanks(2, 4, 2, 6, 3)],
        [WorkerRanks(0, 5, 2, 6, 3)],
    ]


node_lists = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=12)


@given(node_lists)
def test_ranks_are_unique_and_contiguous(nodes: list[tuple[str, int]]) -> None:
    result = assign(nodes)
    flat = [worker for node in result for worker in node]
    assert [w.global_rank for w in flat] == list(range(len(flat)))
    assert {w.world_size for w in flat} == {len(flat)}
    for role in {role for role, _ in nodes}:
        of_role = [w for (of, _), ranks in zip(nodes, result, strict=True) if of == role for w in ranks]
        assert [w.role_rank for w in of_role] == list(range(len(of_role)))
        assert {w.role_world_size for w in of_role} == {len(of_role)}
    for (_, size), ranks in zip(nodes, result, strict=True):
        assert [w.local_rank for w in ranks] == list(range(size))


@given(st.integers(1, 9), st.integers(1, 9))
def test_identical_nodes_need_no_exchange(nodes: int, size: int) -> None:
    exchanged = assign([("default", size)] * nodes)
    assert [assign_identical(rank, nodes, size) for rank in range(nodes)] == exchanged


def test_ranks_outside_the_round_are_refused() -> None:
    with pytest.raises(ValueError, match="node rank 3"):
        assign_identical(3, 3, 1)
    with pytest.raises(ValueError, match="local_world_size=0"):
        assign_identical(0, 3, 0)


def test_natural_order() -> None:
    names = ["node10", "node2", "node1", "node02", "rack2-n1", "rack10-n1", "rack2-n11", "10", "9", "", "a"]
    ordered = sorted(names, key=natural_key)
    assert ordered == [
        "",
        "9",
        "10",
        "a",
        "node1",
        "node02",
        "node2",
        "node10",
        "rack2-n1",
        "rack2-n11",
        "rack10-n1",
    ]
    assert sorted(set(names), key=natural_key) == ordered
