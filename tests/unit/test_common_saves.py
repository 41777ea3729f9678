"""The save that all ranks and all copies have: a ring of nodes in which everything may be late.

The model below has what the real files have: three slots for a rank, two for its copy, the rule by which a
save takes a slot, and connections that keep the order and nothing else.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from phalanx.core.common_saves import (
    CONFIRM,
    HOLD,
    PROPOSE,
    Ballot,
    CommonSaves,
    Moment,
    RankSaves,
    first_since,
)

ROUND = 1


class Slots:
    """Saves of one rank, newest first, and the pins."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.saves: list[Moment] = []
        self.pins: tuple[Moment | None, Moment | None] = (
            None,
            None,
        )  # the common one; the first since this one

    def save(self, moment: Moment) -> None:
        if moment in self.saves:
            return
        if len(self.saves) == self.count:
            pinned = self.pins[0], first_since(self.saves, self.pins[1])
            loose = [one for one in self.saves if one not in pinned]
            self.saves.remove((loose or self.saves[:1])[-1])
        self.saves.insert(0, moment)


class Node:
    """A rank, the copy of the rank before it, and the connection to the next one."""

    def __init__(self, number: int) -> None:
        self.own, self.copy = Slots(3), Slots(2)
        self.common = CommonSaves(number == 0, ROUND)
        self.arriving: deque[Moment | Ballot] = deque()
        self.copied: set[Moment] = set()
        self.step = 0

    def pass_ballots(self, following: Node) -> None:
        known = [RankSaves(tuple(self.own.saves), frozenset(self.copied))]
        turn = self.common.turn("model", known)
        if turn is not None:
            self.own.pins = turn.common or self.own.pins[0], turn.hold
            self.common.done(turn, known)
            if turn.send is not None:
                following.arriving.append(turn.send)

    def copy_one(self, following: Node) -> None:
        moment = self.common.to_copy("model", self.own.saves) if self.own.saves else None
        if moment is not None and moment not in self.copied:
            following.arriving.append(moment)
            self.copied = {*sorted(self.copied)[-3:], moment}

    def receive(self) -> None:
        if not self.arriving:
            return
        found = self.arriving.popleft()
        if not isinstance(found, Ballot):
            self.copy.save(found)
            return
        self.copy.pins = (
            found.common or self.copy.pins[0],
            found.candidate if found.phase == CONFIRM else None,
        )
        if found.phase == CONFIRM and found.candidate not in self.copy.saves:
            found = found.replace(candidate=None)
        self.common.arrive(found)


def common(nodes: list[Node], lost: int) -> set[Moment]:
    """What is everywhere when a node is lost: the copy of its rank, and the others' own saves."""
    places = [node.own.saves for number, node in enumerate(nodes) if number != lost]
    return set(nodes[(lost + 1) % len(nodes)].copy.saves).intersection(*places)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 200))]
)
def test_whichever_node_is_lost_at_any_moment_there_is_a_common_save(seed: int) -> None:
    luck = random.Random(seed)
    nodes = [Node(number) for number in range(luck.choice((2, 3, 5)))]
    # What is slow differs: the copies, the workers, one node.
    weights = [luck.choice((1, 3, 10)) for _ in range(4)]
    slow = luck.choice((None, *range(len(nodes))))
    found: set[Moment] = set()  # common ones
    for turn in range(100_000):
        number = luck.randrange(len(nodes))
        node, following = nodes[number], nodes[(number + 1) % len(nodes)]
        act = luck.choices(("save", "ballots", "copy", "receive"), weights)[0]
        if act == "save":
            if node.step <= min(other.step for other in nodes):  # ranks wait for each other in every step
                node.own.save((node.step, ROUND))
                node.step += 1
        elif number != slow or luck.random() < 0.1:
            if act == "ballots":
                node.pass_ballots(following)
            elif act == "copy" and len(following.arriving) < 3:  # what fits into a connection
                node.copy_one(following)
            elif act == "receive" and node.arriving:
                node.receive()
        if act not in ("save", "receive"):
            continue  # no slot has changed
        found |= {slots.pins[0] for node in nodes for slots in (node.own, node.copy) if slots.pins[0]}
        if found:
            for lost in range(len(nodes)):
                assert common(nodes, lost), (seed, turn, lost, [(n.own.saves, n.copy.saves) for n in nodes])
        if len(found) == 5:
            break
    else:
        raise AssertionError(f"the common save does not follow: {found}")


def passed(node: CommonSaves, *ranks: RankSaves) -> Ballot | None:
    turn = node.turn("model", ranks)
    if turn is None:
        return None
    node.done(turn, ranks)
    return turn.send


def test_a_ballot_goes_around_three_times() -> None:
    first, second = CommonSaves(True, ROUND), CommonSaves(False, ROUND)
    saves, ahead = RankSaves(((4, 1), (3, 1))), RankSaves(((5, 1), (4, 1)))
    assert passed(second, saves) is None
    proposed = passed(first, saves)
    assert proposed == Ballot("model", 0, PROPOSE, None, (4, 1))
    assert passed(first, saves) is None  # under way
    second.arrive(proposed)
    raised = passed(second, ahead, saves)
    second.arrive(proposed)
    assert passed(second, ahead, saves) is None, "repeated on another connection"
    assert raised == proposed.replace(candidate=(5, 1))
    first.arrive(raised)
    held = passed(first, saves)
    assert held == raised.replace(phase=HOLD)
    second.arrive(held)
    assert passed(second, ahead, saves) == held
    assert second.to_copy("model", [(6, 1), (5, 1), (4, 1)]) == (5, 1)
    first.arrive(held)
    assert passed(first, saves) is None  # not saved yet
    assert passed(first, ahead) is None  # not copied yet
    confirmed = passed(first, ahead.replace(copied=frozenset({(5, 1)})))
    assert confirmed == held.replace(phase=CONFIRM)
    first.arrive(confirmed)
    assert passed(first, ahead) == Ballot("model", 1, PROPOSE, (5, 1), (5, 1))


@pytest.mark.parametrize(
    ("candidate", "moments"),
    [((5, 1), ((7, 1), (6, 1), (3, 1))), ((9, 0), ((8, 0), (7, 0)))],
    ids=["passed", "of an earlier round"],
)
def test_a_rank_that_will_not_have_the_candidate_withdraws_it(
    candidate: Moment, moments: tuple[Moment, ...]
) -> None:
    node = CommonSaves(False, ROUND)
    node.arrive(Ballot("model", 0, CONFIRM, (3, 1), candidate))
    assert passed(node, RankSaves(moments)) == Ballot("model", 0, CONFIRM, (3, 1), None)
    assert node.to_copy("model", moments) == moments[0]
