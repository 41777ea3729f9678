"""The save that all ranks and all copies have: a ring of nodes in which everything may be late.

The model below has what the real files have: three slots for a rank, two for its copy, the rule by which a
save takes a slot, and connections that keep the order and nothing else. Nodes are lost and replaced, also
before a round has a common save.
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
    known_common,
)

ROUND = 1
COPIES = 2  # slots of a copy


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
            if not loose and self.count == COPIES:
                return  # a copy that has no room is not taken
            self.saves.remove((loose or self.saves[:1])[-1])
        self.saves.insert(0, moment)


class Node:
    """A rank, the copy of the rank before it, and the connection to the next one."""

    def __init__(self, number: int) -> None:
        self.own, self.copy = Slots(3), Slots(COPIES)
        self.number = number
        self.copy_is_new = False
        self.begin(ROUND, set())

    def begin(self, round_: int, copied: set[Moment]) -> None:
        """A round, and what the next node has copies of."""
        self.common = CommonSaves(self.number == 0, round_)
        self.arriving: deque[Moment | Ballot] = deque()
        self.copied = copied
        self.step = 0

    @property
    def known(self) -> Moment | None:
        return known_common(*self.own.pins, self.own.saves)

    def pass_ballots(self, following: Node) -> None:
        known = [RankSaves(tuple(self.own.saves), frozenset(self.copied), self.known)]
        turn = self.common.turn("model", known)
        if turn is not None:
            self.own.pins = turn.pins(*self.own.pins, self.own.saves)
            self.common.done(turn, known)
            if turn.send is not None:
                following.arriving.append(turn.send)

    def copy_one(self, following: Node) -> None:
        moment = self.own.saves and self.common.to_copy("model", self.own.saves, self.known)
        if moment and moment not in self.copied:
            following.arriving.append(moment)
            self.copied = {*sorted(self.copied)[-3:], moment}

    def receive(self) -> None:
        if not self.arriving:
            return
        found = self.arriving.popleft()
        if not isinstance(found, Ballot):
            self.copy.save(found)
            return
        if found.settles:
            stays = found.stays(self.copy.pins[0], self.copy.saves)
            self.copy.pins = stays, found.candidate if found.phase == CONFIRM else None
        self.copy_is_new &= found.common is None
        if found.phase == CONFIRM and found.candidate not in self.copy.saves:
            found = found.replace(candidate=None)
        self.common.arrive(found)


def common(nodes: list[Node], lost: int) -> set[Moment]:
    """What is everywhere when a node is lost: the copy of its rank, and the others' own saves."""
    places = [node.own.saves for number, node in enumerate(nodes) if number != lost]
    return set(nodes[(lost + 1) % len(nodes)].copy.saves).intersection(*places)


def replace(nodes: list[Node], lost: int, round_: int) -> Moment:
    """Another node takes a lost one's place, with the copy; all resume from the newest common save."""
    following = nodes[(lost + 1) % len(nodes)]
    new = nodes[lost] = Node(lost)
    new.own.saves, new.own.pins = [*following.copy.saves], following.copy.pins
    new.copy_is_new = True
    others = [node.own.saves for node in nodes]
    resumed = next(one for one in others[0] if all(one in saves for saves in others))
    for number, node in enumerate(nodes):
        node.own.saves = node.own.saves[node.own.saves.index(resumed) :]
        node.begin(round_, {*nodes[(number + 1) % len(nodes)].copy.saves})
        node.step = resumed[0] + 1
    return resumed


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
    round_, often = ROUND, luck.choice((0.003, 0.01, 0.1))
    for turn in range(300_000):
        number = luck.randrange(len(nodes))
        node, following = nodes[number], nodes[(number + 1) % len(nodes)]
        act = luck.choices(("save", "ballots", "copy", "receive"), weights)[0]
        if act == "save":
            if node.step <= min(other.step for other in nodes):  # ranks wait for each other in every step
                node.own.save((node.step, round_))
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
        if not found:
            continue
        # A node that came in this round has its copies when the round has a common save.
        safe = [lost for lost in range(len(nodes)) if not nodes[(lost + 1) % len(nodes)].copy_is_new]
        for lost in safe:
            assert common(nodes, lost), (seed, turn, lost, [(n.own.saves, n.copy.saves) for n in nodes])
        if len({step for step, of in found if of == round_}) == 5 and round_ > 20:
            break
        if safe and luck.random() < often and round_ <= 20:
            round_ += 1
            replace(nodes, luck.choice(safe), round_)
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


def test_what_an_earlier_round_left_stays_until_all_nodes_have_said_what_it_is() -> None:
    first, second = CommonSaves(True, 2), CommonSaves(False, 2)
    # One node knows that (7, 1) is the common moment, the other one only that it may be.
    saves = ((9, 2), (7, 1), (5, 1))
    ahead, behind = RankSaves(saves[:2], known=(7, 1)), RankSaves(saves, known=(5, 1))
    proposed = passed(first, behind)
    assert proposed is not None
    second.arrive(proposed)
    turn = second.turn("model", [ahead])
    assert turn is not None
    assert turn.pins((7, 1), None, ahead.moments) == ((7, 1), None)
    assert turn.send == Ballot("model", 0, PROPOSE, None, (9, 2), (7, 1))
    second.done(turn, [ahead])
    for node, known in ((first, (5, 1)), (second, (7, 1))):
        assert node.to_copy("model", saves, known) is None, "it might replace the common one"
        assert node.to_copy("model", saves) == (9, 2), "nothing has been common yet"
    first.arrive(turn.send)
    turn = first.turn("model", [behind])
    assert turn is not None
    assert turn.send == Ballot("model", 0, HOLD, None, (9, 2), (7, 1))
    assert turn.pins((5, 1), (7, 1), saves) == ((7, 1), (9, 2))
    assert turn.pins((5, 1), None, ((9, 2), (5, 1))) == ((5, 1), (9, 2)), "has not got it"
    first.done(turn, [behind])
    assert first.to_copy("model", saves, (7, 1)) == (9, 2)


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
