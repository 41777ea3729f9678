"""Stragglers over several windows, on one host or over the world."""

from __future__ import annotations

import pytest

from phalanx.core.diagnosis.progress import Beat, View
from phalanx.core.diagnosis.stragglers import WINDOW, SlowHistory, StepCounts, compare, measure, slow_hosts


def windows(*rates: tuple[float, ...]) -> list[list[tuple[int, ...]]]:
    """The ranks reported in each window; `rates` are steps per second of each rank."""
    counts, history, named = StepCounts(), SlowHistory(), []
    steps = [0.0] * len(rates[0])
    now = 100.0
    for window in ((0.0,) * len(rates[0]), *rates):
        steps = [done + rate * WINDOW for done, rate in zip(steps, window, strict=True)]
        view = View(0.0, tuple(Beat(rank, now, int(done), 1) for rank, done in enumerate(steps)))
        counts, measured = measure(counts, view, now)
        history, found = compare(history, measured, WINDOW, {})
        named.append([one.ranks for one in found])
        now += WINDOW
    return named[1:]


SLOW, EVEN = (10.0, 5.0, 10.0), (10.0, 10.0, 9.0)


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ((SLOW,) * 6, [[], [], [(1,)], [], [], []]),  # once
        ((SLOW, SLOW, EVEN, SLOW, SLOW, EVEN), [[]] * 6),  # not persistently
        ((EVEN,) * 6, [[]] * 6),
        (((10.0, 5.0),) * 3, [[], [], [(1,)]]),
        (((10.0,),) * 3, [[]] * 3),  # nothing to compare with
        (((0.01, 0.0),) * 4, [[]] * 4),  # too few steps
    ],
)
def test_stragglers(rates: tuple[tuple[float, ...], ...], named: list[list[tuple[int, ...]]]) -> None:
    assert windows(*rates) == named


def test_rates_are_by_the_times_of_the_beats() -> None:
    """The heartbeats seen in two windows ten seconds apart may be eight seconds apart."""
    counts, _ = measure(StepCounts(), View(0.0, (Beat(0, 101.0, 50, 1), Beat(1, 0.0))), 102.0)
    counts, rates = measure(counts, View(0.0, (Beat(0, 109.0, 90, 1), Beat(1, 111.0, 7, 1))), 112.0)
    assert rates == {0: 5.0}  # rank 1 had sent no heartbeat
    assert measure(counts, View(0.0, (Beat(0, 109.0, 90, 1), Beat(1, 121.0, 17, 1))), 122.0)[1] == {
        0: 0.0,
        1: 1.0,
    }


A, B = {0: "node-a", 1: "node-a"}, {2: "node-b", 3: "node-b"}


def named(rates: dict[int, float], hosts: dict[int, str], turns: int = 3) -> list[str]:
    history, reasons = SlowHistory(), []
    for _ in range(turns):
        history, found = compare(history, rates, WINDOW, hosts)
        reasons += [one.reason for one in found]
    return reasons


def test_a_straggler_is_reported_with_both_rates_and_its_host_if_there_are_several() -> None:
    rates = {0: 10.0, 1: 5.0, 2: 10.0, 3: 10.0}
    assert named(rates, {}) == ["rank 1 is slow: 5 steps/s, median 10"]
    assert named(rates, A | B) == ["rank 1 (node-a) is slow: 5 steps/s, median 10"]
    assert named(rates, dict.fromkeys(rates, "node-a")) == named(rates, {})


def test_a_host_whose_ranks_are_all_slow_is_reported_as_one() -> None:
    rates = {0: 10.0, 1: 10.0, 2: 4.0, 3: 6.0}
    assert named(rates, A | B, 6) == ["node-b (ranks 2, 3) is slow: 5 steps/s, median 10"]


def test_a_rank_without_a_new_rate_keeps_its_count() -> None:
    """The windows of nodes do not begin together; a missing rate does not count as fast."""
    history = SlowHistory()
    found = ()
    for turn in range(5):
        rates = {0: 10.0, 1: 10.0} if turn in (1, 3) else {0: 10.0, 1: 10.0, 2: 5.0, 3: 10.0}
        history, found = compare(history, rates, WINDOW, A | B)
    assert [one.ranks for one in found] == [(2,)]


ONE_SLOW, ALL_SLOW, NONE_SLOW = (
    {0: 9.0, 1: 9.0, 2: 9.0, 3: 3.0},
    {0: 9.0, 1: 9.0, 2: 2.0, 3: 3.0},
    dict.fromkeys(range(4), 9.0),
)
WHY = "slow: 2.5 steps/s, median 9"


@pytest.mark.parametrize(
    ("rates", "changes"),
    [
        ([ALL_SLOW] * 5, [{}, {}, {"node-b": WHY}, {}, {}]),  # once, after three windows
        ([ONE_SLOW] * 5, [{}] * 5),  # a rank, not its host
        ([ALL_SLOW, ALL_SLOW, NONE_SLOW, ALL_SLOW, ALL_SLOW], [{}] * 5),  # not persistently
        (
            [ALL_SLOW] * 3 + [NONE_SLOW] + [ALL_SLOW] * 3,
            [{}, {}, {"node-b": WHY}, {"node-b": ""}, {}, {}, {"node-b": WHY}],
        ),
        ([ALL_SLOW] * 3 + [ONE_SLOW], [{}, {}, {"node-b": WHY}, {"node-b": ""}]),
        (
            [ALL_SLOW] * 3 + [{0: 9.0, 1: 9.0}] * 2,
            [{}, {}, {"node-b": WHY}, {}, {}],
        ),  # its windows come later
        ([{0: 9.0, 1: 3.0}] * 4, [{}] * 4),  # one host: nothing to compare it with
    ],
)
def test_hosts_to_replace(rates: list[dict[int, float]], changes: list[dict[str, str]]) -> None:
    history, known, told = SlowHistory(), {}, []
    for window in rates:
        hosts = A if len(rates[0]) == 2 else A | B
        history, _ = compare(history, window, WINDOW, hosts)
        known, new = slow_hosts(known, history, window, hosts)
        told.append(new)
    assert told == changes
