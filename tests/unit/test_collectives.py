"""The verdict over recorded collectives: a table of cases, and what holds for any records."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.diagnosis.collectives import Explanation, GroupTrace, Operation, RankTrace, explain

Ops = tuple[Operation, ...]


def ops(*names: str, wait: bool = False, first: int = 1, age: float | None = None) -> Ops:
    """Operations in order; with `wait`, the last one has not been left."""
    last = first + len(names) - 1
    return tuple(
        Operation(number, name, done=not (wait and number == last), age=age)
        for number, name in enumerate(names, first)
    )


def group(operations: Ops, members: tuple[int, ...], name: str = "0", label: str = "") -> GroupTrace:
    entered = max((one.number for one in operations if one.peer is None), default=0)
    return GroupTrace(name, label, members, operations, entered)


def world(*ranks: Ops | None, label: str = "") -> dict[int, RankTrace]:
    """One group of all; None: a rank that did not answer."""
    members = tuple(range(len(ranks)))
    return {
        rank: RankTrace(rank, (group(found, members, label=label),))
        for rank, found in enumerate(ranks)
        if found is not None
    }


AR = "all_reduce"
IN = ops(AR, AR, wait=True)  # waits in the second
OUT = ops(AR)  # has left the first
DONE = ops(AR, AR)


def typed(kind: str, *shapes: tuple[int, ...], name: str = AR) -> Ops:
    return (Operation(2, name, inputs=shapes, types=(kind,)),)


CASES = [
    # traces, stopped, exited -> kind, ranks, text
    pytest.param(
        world(IN, IN, OUT, IN), (), (), "missing", (2,),
        "rank 2 never entered all_reduce #2 of the default group (last was all_reduce #1); "
        "the other 3 wait in it",
        id="missing",
    ),
    pytest.param(
        world(IN, OUT, label="tp"), (), (), "missing", (1,),
        "rank 1 never entered all_reduce #2 of group tp (last was all_reduce #1); rank 0 waits in it",
        id="missing-of-two",
    ),
    pytest.param(
        world(IN, (), IN), (), (), "missing", (1,),
        "rank 1 never entered all_reduce #2 of the default group; the other 2 wait in it",
        id="missing-without-any-operation",
    ),
    pytest.param(
        world(IN, OUT, OUT, OUT), (), (), "ahead", (0,),
        "rank 0 is ahead: in all_reduce #2 of the default group, which the other 3 have not entered "
        "(their last was all_reduce #1)",
        id="ahead",
    ),
    pytest.param(
        world(IN, IN, None, IN), (2,), (), "stopped", (2,),
        "rank 2 is stopped by a signal; the other 3 wait in all_reduce #2 of the default group",
        id="stopped",
    ),
    pytest.param(
        world(IN, IN, None, IN), (), (2,), "dead", (2,),
        "rank 2 has exited; the other 3 wait in all_reduce #2 of the default group",
        id="dead",
    ),
    pytest.param(
        world(IN, None, None), (), (1, 2), "ahead", (0,),
        "rank 0 waits in all_reduce #2 of the default group; ranks 1, 2 have exited",
        id="all-others-have-exited",
    ),
    pytest.param(
        world(IN, IN, None, IN), (), (), "silent", (2,),
        "rank 2 does not answer; the other 3 wait in all_reduce #2 of the default group",
        id="silent",
    ),
    pytest.param(
        world(IN, OUT, None, IN), (), (), "missing", (1,),
        "rank 1 never entered all_reduce #2 of the default group (last was all_reduce #1); "
        "ranks 0, 3 wait in it",
        id="missing-with-a-silent-one",
    ),
    pytest.param(
        world(IN, IN, IN), (), (), "network", (0, 1, 2),
        "all 3 ranks are in all_reduce #2 of the default group: look at the network between them",
        id="network",
    ),
    pytest.param(
        world(ops("broadcast"), ops("broadcast", wait=True)), (), (), "network", (1,),
        "rank 1 is still in broadcast #1 of the default group, which rank 0 has left: "
        "look at the network between them",
        id="left-by-some",
    ),
    pytest.param(
        world(IN, IN, ops(AR, "broadcast", wait=True)), (), (), "mismatch", (2,),
        "rank 2 calls broadcast as #2 of the default group, the other 2 call all_reduce",
        id="another-operation",
    ),
    pytest.param(
        world(IN, ops(AR, "broadcast", wait=True)), (), (), "mismatch", (0, 1),
        "the ranks disagree on #2 of the default group: rank 0 calls all_reduce, rank 1 calls broadcast",
        id="another-operation-of-two",
    ),
    pytest.param(
        world(typed("Float", (4,)), typed("Double", (4,)), typed("Float", (4,))), (), (), "mismatch", (1,),
        "rank 1 calls all_reduce with double as #2 of the default group, the other 2 with float",
        id="another-type",
    ),
    pytest.param(
        world(typed("Float", (4, 2)), typed("Float", (8,)), typed("Float", (9,))), (), (), "mismatch", (2,),
        "rank 2 calls all_reduce with 9 elements as #2 of the default group, the other 2 with 8 elements",
        id="another-size",
    ),
    pytest.param(
        world(typed("Float", (4,), name="all_to_all"), typed("Float", (9,), name="all_to_all")), (), (),
        "network", (0, 1),
        "all 2 ranks are in all_to_all #2 of the default group: look at the network between them",
        id="sizes-that-may-differ",
    ),
    pytest.param(
        # A mismatch is certain, whatever else is missing.
        world(IN, IN, ops(AR, "broadcast", wait=True), OUT), (), (), "mismatch", (2,),
        "rank 2 calls broadcast as #2 of the default group, the other 2 call all_reduce",
        id="mismatch-before-missing",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("traces", "stopped", "exited", "kind", "ranks", "text"), CASES)
def test_verdict(
    traces: dict[int, RankTrace],
    stopped: tuple[int, ...],
    exited: tuple[int, ...],
    kind: str,
    ranks: tuple[int, ...],
    text: str,
) -> None:
    found = explain(traces, stopped=stopped, exited=exited)
    assert found is not None
    assert (found.kind, found.ranks, found.text) == (kind, ranks, text)


def test_no_rank_waits_in_a_collective() -> None:
    assert explain(world(DONE, DONE)) is None
    assert explain(world(DONE, None), exited=(1,)) is None
    assert explain({}) is None


def test_the_cause_is_found_through_another_group() -> None:
    """Rank 3 lacks in both pairs' group; rank 2 lacks in the world's only because it waits for rank 3."""
    everyone, pair = (0, 1, 2, 3), (2, 3)
    traces = {rank: RankTrace(rank, (group(IN, everyone),)) for rank in (0, 1)}
    traces[2] = RankTrace(2, (group(OUT, everyone), group(IN, pair, "1", "tp")))
    traces[3] = RankTrace(3, (group(OUT, everyone), group(OUT, pair, "1", "tp")))
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("missing", (3,))
    assert found.signature.startswith("hang, missing: all_reduce #"), found
    assert len(found.others) == 1
    only = {rank: trace for rank, trace in traces.items() if rank != 3}
    found = explain(only)
    assert found is not None
    assert (found.kind, found.ranks) == ("silent", (3,))
    assert found.signature == "", "a machine may be at fault"


def test_ranks_that_wait_for_each_other_in_different_groups() -> None:
    everyone = (0, 1, 2)
    traces = {
        rank: RankTrace(rank, (group(OUT, everyone), group(IN, everyone, "1", "tp"))) for rank in (0, 1)
    }
    traces[2] = RankTrace(2, (group(IN, everyone), group(OUT, everyone, "1", "tp")))
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", (2,))
    assert found.text == (
        "the ranks are in different groups: ranks 0, 1 in all_reduce #2 of group tp, "
        "rank 2 in all_reduce #2 of the default group"
    )


def test_a_rank_that_is_alone_in_its_group_waits_for_its_device() -> None:
    """As with NCCL behind a kernel that does not end: the others wait for it in the default group."""
    traces = {
        0: RankTrace(0, (group(ops(AR, AR, wait=True), (0, 1)),)),
        1: RankTrace(1, (group(ops(AR), (0, 1)), group(ops(AR, AR, wait=True), (1,), "2", "own"))),
    }
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("device", (1,))
    assert found.text == (
        "rank 1 is in all_reduce #2 of group own, as its only member: its device has not finished what comes "
        "before it; rank 0 waits in all_reduce #2 of the default group"
    )
    alone = explain({0: RankTrace(0, (group(ops(AR, wait=True), (0,)),))})
    assert alone is not None
    assert (alone.kind, alone.ranks) == ("device", (0,))


def test_a_group_that_is_complete_and_stuck_holds_up_those_that_wait_for_its_members() -> None:
    pair = group(ops(AR, AR, wait=True), (2, 3), "2", "tp")
    traces = {
        0: RankTrace(0, (group(ops(AR, wait=True), (0, 1, 2, 3)),)),
        1: RankTrace(1, (group(ops(AR, wait=True), (0, 1, 2, 3)),)),
        2: RankTrace(2, (group((), (0, 1, 2, 3)), pair)),
        3: RankTrace(3, (group((), (0, 1, 2, 3)), pair)),
    }
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("network", (2, 3))
    assert found.text == (
        "all 2 ranks are in all_reduce #2 of group tp: look at the network between them; "
        "ranks 0, 1 wait in all_reduce #1 of the default group"
    )


def late(count: int, by: float, now: float) -> dict[int, RankTrace]:
    """Rank 1 comes `by` later than the others to `count` operations, one a second, and not to the next."""
    others = [Operation(n, AR, n <= count, age=now + count + 1.0 - n) for n in range(1, count + 2)]
    mine = [one.replace(age=one.age - by) for one in others[:-1] if one.age]
    return world(tuple(others), tuple(mine), tuple(others))


def read_late(by: float, lateness: float) -> dict[int, RankTrace]:
    """Eight operations in quick succession, from the fourth on `lateness` apart, to which rank 1 comes last;
    the records of the others are read `by` later."""
    entries = [0.01 * n if n < 4 else 0.04 + lateness * (n - 4) for n in range(9)]
    others = [Operation(n, AR, n < 8, age=5.0 + by - entries[n]) for n in range(1, 9)]
    mine = [Operation(n, AR, True, age=5.0 - entries[n] - lateness * (n >= 4)) for n in range(1, 8)]
    return world(tuple(others), tuple(mine), tuple(others))


def slow_lately(before: int, since: int) -> dict[int, RankTrace]:
    """Rank 1 comes first to `before` operations and last to the `since` that follow; the next is to come."""
    last = before + since + 1
    others = [Operation(number, AR, True, age=last - number + 0.5) for number in range(1, last)]
    mine = [one.replace(age=one.age + (0.1 if one.number <= before else -0.49)) for one in others if one.age]
    return world((*others, Operation(last, AR, age=0.4)), mine, (*others, Operation(last, AR, age=0.4)))


@pytest.mark.parametrize(
    ("traces", "kind"),
    [
        pytest.param(slow_lately(0, 5), "slow", id="always-last"),
        pytest.param(slow_lately(7, 4), "slow", id="last-since-a-moment-ago"),
        pytest.param(slow_lately(7, 2), "missing", id="last-twice"),
        pytest.param(late(10, 0.49, 0.4), "slow", id="as-usual"),
        pytest.param(late(10, 0.49, 5.0), "missing", id="later-than-usual"),
        pytest.param(late(10, 0.01, 0.03), "missing", id="never-late-before"),
        pytest.param(late(2, 0.49, 0.4), "missing", id="too-few-to-tell"),
        pytest.param(late(10, -0.49, 0.4), "missing", id="the-others-came-last"),
        pytest.param(read_late(0.46, 0.01), "missing", id="read-late-by-another-node"),
        pytest.param(read_late(-0.46, 0.01), "missing", id="read-early-by-another-node"),
        pytest.param(read_late(0.46, 0.98), "slow", id="slow-and-read-late"),
        pytest.param(read_late(-0.46, 0.98), "slow", id="slow-and-read-early"),
    ],
)
def test_a_slow_rank_is_told_from_a_missing_one(traces: dict[int, RankTrace], kind: str) -> None:
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == (kind, (1,))
    if kind == "slow":
        comes_last = r"it comes to all_reduce #\d+ of the default group last, as to [45] of the last 5"
        assert re.fullmatch(
            f"rank 1 is slow: {comes_last}, by 0.(49|9[789]) s; the other 2 wait in it", found.text
        )


def test_a_recv_without_a_send() -> None:
    pending = (Operation(1, "recv", peer=1),)
    members = (0, 1)
    traces = {0: RankTrace(0, (group(pending, members),)), 1: RankTrace(1, (group((), members),))}
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("missing", (1,))
    assert (
        found.text == "rank 0 waits in recv #1 of the default group from rank 1, which is in no send or recv"
    )
    del traces[1]
    for given_, kind in (({"stopped": (1,)}, "stopped"), ({"exited": (1,)}, "dead"), ({}, "silent")):
        found = explain(traces, **given_)
        assert found is not None
        assert found.kind == kind


# ---- what holds for any records ----------------------------------------------------------------------

operations = st.builds(
    Operation,
    number=st.integers(-3, 8),
    name=st.sampled_from(["all_reduce", "broadcast", "all_gather", "", "barrier"]),
    done=st.booleans(),
    inputs=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=2).map(tuple),
    types=st.lists(st.sampled_from(["Float", "Int"]), max_size=2).map(tuple),
    age=st.none() | st.floats(0, 10),
    peer=st.none() | st.integers(0, 5),
)
groups = st.builds(
    GroupTrace,
    name=st.sampled_from(["0", "1"]),
    label=st.sampled_from(["", "tp"]),
    members=st.sampled_from([(0, 1, 2, 3), (0, 1), (1, 2, 3), (0,), ()]),
    operations=st.lists(operations, max_size=5).map(tuple),
    entered=st.integers(-1, 9),
)
records = st.dictionaries(
    st.integers(0, 4),
    st.lists(groups, max_size=3).map(tuple),
    max_size=5,
).map(lambda found: {rank: RankTrace(rank, one) for rank, one in found.items()})


@settings(max_examples=60, deadline=None)
@given(records, st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)))
def test_any_records_have_a_verdict_or_none(
    traces: dict[int, RankTrace], stopped: set[int], exited: set[int]
) -> None:
    found = explain(traces, stopped=stopped, exited=exited)
    if found is not None:
        assert isinstance(found, Explanation)
        assert found.ranks
        assert found.text


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 64), st.data())
def test_the_one_missing_rank_is_always_named(count: int, data: st.DataObject) -> None:
    """Any number of operations, any one rank that stops before one: never another rank is blamed."""
    guilty = data.draw(st.integers(0, count - 1))
    done = data.draw(st.integers(0, 5))
    waiting = ops(*[AR] * (done + 1), wait=True)
    traces = world(*[ops(*[AR] * done) if rank == guilty else waiting for rank in range(count)])
    found = explain(traces)
    assert found is not None
    assert (found.kind, found.ranks) == ("missing", (guilty,))
