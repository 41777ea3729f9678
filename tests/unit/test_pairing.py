"""Two rounds of pairs: the bad node is named, its partners are not."""

from __future__ import annotations

import random

import pytest

from phalanx.core.diagnosis.pairing import (
    NodeGroup,
    confirming_round,
    first_round,
    judge_pairs,
    overall,
    second_round,
)


def measured(
    groups: tuple[NodeGroup, ...], speed: dict[int, float], seed: random.Random
) -> dict[NodeGroup, float | None]:
    """As fast as the slowest of each group, and noise; speed 0: it does not answer."""
    found: dict[NodeGroup, float | None] = {}
    for group in groups:
        slowest = min(speed.get(node, 1.0) for node in group)
        found[group] = 100.0 * slowest * seed.uniform(0.85, 1.0) if slowest else None
    return found


def unfit(count: int, speed: dict[int, float], seed: int = 0) -> tuple[set[int], set[int]]:
    """The nodes that are found unfit, and those of which nothing is known."""
    chance = random.Random(seed)
    first = measured(first_round(range(count)), speed, chance)
    second = measured(second_round(first), speed, chance)
    verdicts = judge_pairs(first, second)
    assert [verdict.node for verdict in verdicts] == list(range(count if count > 1 else 0))
    return (
        {verdict.node for verdict in verdicts if verdict.fitness == "unfit"},
        {verdict.node for verdict in verdicts if verdict.fitness == "unknown"},
    )


def test_one_bad_node_of_32_is_named_for_1000_seeds() -> None:
    for seed in range(1000):
        chance = random.Random(seed)
        bad, speed = chance.randrange(32), chance.choice([0.0, 0.1, 0.3, 0.5])
        assert unfit(32, {bad: speed}, seed) == ({bad}, set()), (seed, bad, speed)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8, 9, 31, 32, 33])
def test_any_number_of_nodes_and_any_bad_one(count: int) -> None:
    for bad in range(count):
        for speed in (0.0, 0.4):
            assert unfit(count, {bad: speed}) == ({bad}, set()), bad


def test_several_bad_nodes() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        bad = set(chance.sample(range(32), 6))
        assert unfit(32, dict.fromkeys(bad, 0.2), seed) == (bad, set()), seed


def test_none_is_bad() -> None:
    assert unfit(31, {}) == (set(), set())


def test_two_nodes_cannot_be_told_apart() -> None:
    assert first_round([5]) == ()
    first = {(0, 1): None}
    assert second_round(first) == ()
    assert [one.fitness for one in judge_pairs(first, {})] == ["unknown", "unknown"]


def test_no_result_at_all_blames_none() -> None:
    first: dict[NodeGroup, float | None] = dict.fromkeys(first_round(range(4)))
    second: dict[NodeGroup, float | None] = dict.fromkeys(second_round(first))
    verdicts = judge_pairs(first, second)
    assert {(one.fitness, one.reason) for one in verdicts} == {("unknown", "no pair has a result")}


def test_suspects_meet_nodes_that_are_none() -> None:
    first = {(0, 1): 10.0, (2, 3): 90.0, (4, 5): 100.0}
    second = {(0, 5): 10.0, (1, 4): 95.0, (2, 3): 50.0}
    assert confirming_round((0,), first, second) == ((0, 4),)  # the fastest that it has not met
    assert confirming_round((), first, second) == ()
    assert confirming_round((0, 2, 3), first, second) == ((0, 4), (2, 5), (3, 1))
    assert confirming_round((0, 1, 2, 4, 5), first, second) == ((0, 3),)  # no partner left for the others
    of_three = {(0, 1): 1.0, (0, 2): 1.0}, {(1, 2): 9.0}
    assert confirming_round((0,), *of_three) == ((0, 1),)  # it has met all


def test_several_rates_are_one() -> None:
    fast, slow = {"bandwidth": 100.0, "latency": 4.0}, {"bandwidth": 90.0, "latency": 1.0}
    assert overall({(0, 1): fast, (2, 3): slow, (4, 5): {"latency": 4.0}, (6, 7): {}}) == {
        (0, 1): 1.0, (2, 3): 0.25, (4, 5): None, (6, 7): None,
    }  # fmt: skip
    assert overall({(0, 1): {}, (2, 3): {}}) == {(0, 1): None, (2, 3): None}


def test_every_node_meets_two_different_ones() -> None:
    for count in range(4, 60):
        chance = random.Random(count)
        first = measured(first_round(range(count)), {}, chance)
        second = second_round(first)
        assert {node for group in second for node in group} == set(range(count))
        assert (count + 1) // 2 <= len(second) <= (count + 1) // 2 + 1
        assert not {frozenset(group) for group in first} & {frozenset(group) for group in second}


def test_ten_thousand_nodes() -> None:
    bad = {17, 4711, 9999}
    found, unknown = unfit(10_000, dict.fromkeys(bad, 0.3))
    assert (found, unknown) == (bad, set())
