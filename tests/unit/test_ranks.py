"""Ranks of workers and the order of nodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.group.ranks import (
    NodeSlots,
    WorkerRanks,
    assign,
    assign_identical,
    assign_to,
    natural_key,
)


def test_heterogeneous_roles() -> None:
    nodes = [NodeSlots(2, "trainer", 1), NodeSlots(0, "trainer", 2), NodeSlots(1, "reader", 3)]
    assert assign(nodes) == [
        [WorkerRanks(0, 0, 0, 6, 3), WorkerRanks(1, 1, 1, 6, 3)],
        [WorkerRanks(0, 2, 0, 6, 3), WorkerRanks(1, 3, 1, 6, 3), WorkerRanks(2, 4, 2, 6, 3)],
        [WorkerRanks(0, 5, 2, 6, 3)],
    ]


node_lists = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=12).map(
    lambda items: [NodeSlots(rank, role, size) for rank, (role, size) in enumerate(items)]
)


@given(node_lists, st.randoms())
def test_ranks_are_unique_and_contiguous_whatever_the_order(
    nodes: list[NodeSlots], rng: random.Random
) -> None:
    shuffled = list(nodes)
    rng.shuffle(shuffled)
    result = assign(shuffled)
    flat = [worker for node in result for worker in node]
    assert [w.global_rank for w in flat] == list(range(len(flat)))
    assert {w.world_size for w in flat} == {len(flat)}
    for role in {node.role for node in nodes}:
        of_role = [w for n in nodes if n.role == role for w in result[n.rank]]
        assert [w.role_rank for w in of_role] == list(range(len(of_role)))
        assert {w.role_world_size for w in of_role} == {len(of_role)}
    for node in nodes:
        assert [w.local_rank for w in result[node.rank]] == list(range(node.local_world_size))
        assert assign_to(shuffled, node.rank) == result[node.rank]


@given(st.integers(1, 9), st.integers(1, 9))
def test_identical_nodes_need_no_exchange(nodes: int, size: int) -> None:
    exchanged = assign([NodeSlots(rank, "default", size) for rank in range(nodes)])
    assert [assign_identical(rank, nodes, size) for rank in range(nodes)] == exchanged


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([NodeSlots(0, "a", 1), NodeSlots(0, "a", 1)], r"node ranks \[0, 0\]"),
        ([NodeSlots(1, "a", 1)], r"node ranks \[1\]"),
        ([NodeSlots(0, "a", 0)], "brings 0 workers"),
    ],
)
def test_impossible_rounds_are_refused(nodes: list[NodeSlots], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        assign(nodes)


def test_ranks_outside_the_round_are_refused() -> None:
    with pytest.raises(ValueError, match="node rank 2"):
        assign_to([NodeSlots(0, "a", 1)], 2)
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
