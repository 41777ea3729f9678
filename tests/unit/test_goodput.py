"""The goodput ledger: every rank-second in exactly one category, and the right one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phalanx.core.group import group
from phalanx.core.group.events import (
    AllSucceeded,
    BarrierDone,
    Event,
    GroupRound,
    Hang,
    RoundReady,
    Signal,
    Start,
    Started,
    Stopped,
    WorkerFailed,
)
from phalanx.core.group.restarts import RestartPolicy
from phalanx.core.ledger.goodput import (
    CATEGORIES,
    GoodputLedger,
    GoodputTotals,
    RankProgress,
    StartBounds,
    goodput_line,
    losses,
    read_totals,
    seconds,
    split,
    typical_step,
)
from phalanx.core.ledger.incidents import GroupStep, Incident, IncidentBook, observe

STEADY = RankProgress(101.0, 0.0, 104.0, 1, 120.0, 9, 9)
"""A first line at 101, steps of 2 s from 102 on, the ninth at 120."""


def parts(rank: RankProgress, **bounds: Any) -> dict[str, float]:
    found = split(rank, StartBounds(**{"begin": 100.0, "started_at": 100.5, "end": 121.0, **bounds}))
    assert sum(found.values()) == pytest.approx(bounds.get("end", 121.0) - 100.0)
    return {name: round(value, 6) for name, value in found.items() if value > 1e-9}


SAVED = STEADY.replace(saved=3.0, saved_by_first=0.5, saved_since_beat=0.5)
CASES = [
    ("runs", STEADY, {}, {"starting": 2.0, "productive": 19.0}),
    ("succeeds", STEADY, {"how": "success"}, {"starting": 2.0, "productive": 19.0}),
    ("ready() tells", STEADY.replace(ready_at=103.5), {}, {"starting": 3.5, "productive": 17.5}),
    ("fails", STEADY, {"how": "failure", "left": 120.5}, {"starting": 2, "productive": 18, "recovering": 1}),
    (
        "hangs",
        STEADY,
        {"how": "hang", "left": 150.0, "end": 151.0},
        {"starting": 2, "productive": 18, "hung": 30, "recovering": 1},
    ),
    (
        "is stopped",
        STEADY,
        {"how": "stop", "left": 120.5},
        {"starting": 2, "productive": 18.5, "recovering": 0.5},
    ),
    ("saves", SAVED, {}, {"starting": 2.25, "checkpointing": 2.5, "productive": 16.25}),
    (
        "saves, then fails",
        SAVED,
        {"how": "failure"},
        {"starting": 2.25, "checkpointing": 2.5, "productive": 15.75, "recovering": 0.5},
    ),
    (
        "saves now",
        STEADY.replace(saving_since=120.2),
        {},
        {"starting": 2.0, "productive": 18.2, "checkpointing": 0.8},
    ),
    (
        "dies while it saves",
        STEADY.replace(saving_since=120.2),
        {"how": "failure"},
        {"starting": 2.0, "productive": 18.0, "recovering": 1.0},
    ),
    (
        "repeats four steps",
        STEADY.replace(passed_at=110.0, passed_step=4),
        {"mark": 4},
        {"starting": 2.0, "recomputed": 8.0, "productive": 11.0},
    ),
    ("repeats, not sampled", STEADY, {"mark": 4}, {"starting": 2.0, "recomputed": 8.0, "productive": 11.0}),
    (
        "skips over the mark",
        STEADY.replace(passed_at=112.0, passed_step=5),
        {"mark": 4},
        {"starting": 2.0, "recomputed": 8.0, "productive": 11.0},
    ),
    ("repeats all", STEADY, {"mark": 40}, {"starting": 2.0, "recomputed": 19.0}),
    ("goes on where it was", STEADY, {"mark": 0}, {"starting": 2.0, "productive": 19.0}),
    (
        "no steps",
        STEADY.replace(first_step=None, step=None),
        {"mark": 4},
        {"starting": 2, "productive": 19},
    ),
    (
        "has finished",
        STEADY.replace(ended_at=120.5),
        {},
        {"starting": 2.0, "productive": 18.5, "slowest": 0.5},
    ),
    (
        "one heartbeat, an earlier start knows a step",
        RankProgress(101.0, 0.0, 110.0, 1, 110.0, 1, 1),
        {"typical": 2.0},
        {"starting": 8.0, "productive": 13.0},
    ),
    ("no heartbeat", RankProgress(101.0), {}, {"starting": 1.0, "unmarked": 20.0}),
    (
        "no heartbeat, saves",
        RankProgress(101.0, saved=5.0),
        {},
        {"starting": 1, "unmarked": 15, "checkpointing": 5},
    ),
    ("no first line yet", RankProgress(), {"started_at": 121.0}, {"starting": 21.0}),
    ("a program that is not Python", RankProgress(), {}, {"starting": 0.5, "unmarked": 20.5}),
    (
        "no heartbeat, fails",
        RankProgress(101.0),
        {"how": "failure", "left": 120.0},
        {"starting": 1.0, "unmarked": 19.0, "recovering": 1.0},
    ),
    (
        "no heartbeat, hangs",
        RankProgress(101.0),
        {"how": "hang", "left": 120.0, "quiet_since": 111.0},
        {"starting": 1.0, "unmarked": 10.0, "hung": 9.0, "recovering": 1.0},
    ),
    ("clocks apart", STEADY.replace(first_at=99.0, beat_at=130.0), {}, {"productive": 19.5, "starting": 1.5}),
]


@pytest.mark.parametrize(("name", "rank", "bounds", "expected"), CASES, ids=[case[0] for case in CASES])
def test_one_rank_in_one_start(
    name: str, rank: RankProgress, bounds: dict[str, Any], expected: dict[str, float]
) -> None:
    if name == "clocks apart":
        assert set(parts(rank, **bounds)) <= {"productive", "starting"}
    else:
        assert parts(rank, **bounds) == pytest.approx(expected)


def test_whatever_a_board_holds_the_parts_add_up_and_none_is_negative() -> None:
    source = random.Random(5)
    for _ in range(3000):
        times = [source.choice([0.0, source.uniform(90, 130)]) for _ in range(6)]
        steps = [source.choice([None, source.randrange(-5, 60)]) for _ in range(4)]
        saved = [source.choice([0.0, source.uniform(0, 20)]) for _ in range(4)]
        rank = RankProgress(
            times[0], times[1], times[2], steps[0], times[3], steps[1], source.randrange(3),
            times[4], steps[2], *saved, times[5], source.choice([0.0, source.uniform(90, 130)]),
        )  # fmt: skip
        how = source.choice(["", "success", "failure", "hang", "stop"])
        found = parts(
            rank, how=how, left=source.uniform(90, 130), mark=steps[3], typical=source.uniform(0, 9)
        )
        assert all(value >= 0 for value in found.values())


BASE = 1000.0  # 0.0 means that something has not happened


class Job:
    """A group with its incidents and its ledger; steps of 1 s, a checkpoint at every tenth."""

    def __init__(self, ranks: int = 2, began: float = 0.0) -> None:
        self.state, self.book, self.ranks = group.GroupState(), IncidentBook(), ranks
        self.ledger = GoodputLedger(ranks, BASE + began)
        self.boards = [RankProgress()] * ranks
        self.policy = group.GroupPolicy(RestartPolicy(max_restarts=99, backoff_max=0.0))
        self.number = 0

    def __call__(self, now: float, event: Event) -> None:
        now += BASE
        made = group.step(self.state, event, now, self.policy)
        self.state = made.state
        self.book = observe(
            self.book, GroupStep(event, self.state, bool(made.commands), made.reason, now, now, beats=1)
        )
        incident = self.book.current.incident.number if self.book.current is not None else 0
        self.ledger.step(event, self.state.phase, now, incident, lambda: self.boards)

    def up(self, now: float, takes: float = 1.0) -> None:
        """A round at once, workers after `takes`."""
        if self.state.phase is group.Phase.NEW:
            self(now, Start())
        self.number += 1
        self(now, RoundReady(GroupRound(self.number)))
        self.boards = [RankProgress()] * self.ranks
        self(now + takes, Started())

    def steps(self, begin: float, first: int, last: int) -> float:
        """Steps of 1 s from `begin` on; the time of the last one."""
        begin += BASE
        mark, end = self.ledger.marks[0], begin + last - first + 1
        board = RankProgress(begin - 0.5, 0.0, begin + 1, first, end, last, last - first + 1)
        if mark is not None and first <= mark <= last:
            board = board.replace(passed_at=begin + mark - first + 1, passed_step=mark)
        self.boards = [board] * self.ranks
        return end - BASE

    def sum(self, now: float) -> GoodputTotals:
        return self.ledger.totals(BASE + now, lambda: self.boards)

    def totals(self, now: float) -> dict[str, float]:
        found = self.sum(now)
        assert found.total == pytest.approx(now * self.ranks)
        return {name: round(value, 6) for name, value in found.seconds.items() if value > 1e-9}


def test_a_job_with_a_kill_and_a_success() -> None:
    job = Job()
    job.up(3.0)
    assert job.totals(4.0) == {"nodes": 6.0, "starting": 2.0}
    now = job.steps(5.0, 1, 15)
    assert job.totals(20.5) == {"nodes": 6.0, "starting": 4.0, "productive": 31.0}
    job(20.6, WorkerFailed("killed"))
    job(21.0, Stopped())
    job.up(21.5)
    now = job.steps(24.0, 11, 20)
    assert now == 34.0
    job(35.0, AllSucceeded())
    expected = {"nodes": 6.0, "starting": 4.0, "productive": 42.0, "recovering": 8.0, "recomputed": 10.0}
    assert job.totals(35.0) == expected
    assert job.totals(37.0) == {**expected, "slowest": 4.0}
    job(37.0, BarrierDone())
    assert job.sum(99.0).total == 74.0, "the job is over"
    found = job.sum(99.0)
    assert found.lost == {1: {"recovering": 8.0, "recomputed": 10.0, "hung": 0.0}}
    line = goodput_line(found, job.book.incidents())
    assert line == (
        "goodput 56.8 %: 9.0 s lost to a restart, 2.0 s to starting, 3.0 s to waiting for nodes, "
        "2.0 s to waiting for the slowest"
    )


def test_a_second_kill_while_steps_are_repeated() -> None:
    job = Job(1)
    job.up(0.0, 0.0)
    job.steps(0.5, 1, 20)
    job(20.5, WorkerFailed("first"))
    job(20.5, Stopped())
    job.up(20.5, 0.0)
    job.steps(21.0, 11, 15)
    job(26.0, WorkerFailed("second"))
    job(26.0, Stopped())
    job.up(26.0, 0.0)
    assert job.ledger.marks == [20]
    job.steps(26.5, 11, 25)
    assert job.totals(41.5) == {"starting": 0.5, "recovering": 1.0, "productive": 25.0, "recomputed": 15.0}


def test_a_hang_is_booked_from_the_last_heartbeat_to_its_detection() -> None:
    job = Job(1)
    job.up(0.0, 0.0)
    job.steps(0.5, 1, 10)
    job(40.5, Hang("no heartbeat"))
    job(42.5, Stopped())
    job.up(42.5, 0.5)
    job.steps(44.0, 11, 12)
    assert job.totals(46.0) == {"starting": 0.5, "productive": 12.0, "hung": 30.0, "recovering": 3.5}
    line = goodput_line(job.sum(46.0), job.book.incidents())
    assert line == "goodput 26.1 %: 34 s lost to a hang, 0.5 s to starting"


def test_workers_that_die_before_their_first_step_count_as_recovering_only_if_there_are_steps() -> None:
    for beats in (False, True):
        job = Job(1)
        job.up(0.0, 0.0)
        job.boards = [RankProgress(BASE + 1.0)]
        job(5.0, WorkerFailed("early"))
        job(5.0, Stopped())
        job.up(5.0, 0.0)
        job.boards = [RankProgress(BASE + 6.0)]
        expected = {"starting": 1.0, "running": 4.0 + 4.0, "recovering": 1.0}
        if beats:
            job.steps(8.0, 1, 2)
            expected = {"starting": 5.0, "recovering": 3.0, "productive": 2.0}
        assert job.totals(10.0) == expected


def test_a_long_wait_for_a_round_is_a_wait_for_nodes() -> None:
    job = Job(1)
    job.up(0.0, 0.0)
    job.boards = [RankProgress(BASE)]
    job(10.0, WorkerFailed("x"))
    job(11.0, Stopped())
    job.up(71.0, 0.0)
    assert job.totals(71.0) == {"running": 10.0, "recovering": 6.0, "nodes": 55.0}


def test_the_first_wait_for_a_round_is_a_wait_for_nodes() -> None:
    job = Job(1)
    job(0.0, Start())
    job(4.0, RoundReady(GroupRound(1)))
    assert job.totals(4.0) == {"nodes": 4.0}


def test_a_spare_begins_with_its_first_round() -> None:
    job = Job(1)
    job(0.0, Start())
    job.number = 4
    job(50.0, RoundReady(GroupRound(5)))
    job(50.0, Started())
    job.boards = [RankProgress(BASE + 50.0)]
    assert job.sum(60.0).seconds["running"] == 10.0


def test_a_silent_rank_is_booked_like_one_that_sends_heartbeats() -> None:
    job = Job(2)
    job.up(0.0, 0.0)
    job.steps(2.0, 1, 8)
    job.boards = [RankProgress(BASE + 1.5), job.boards[1]]
    assert job.totals(10.0) == {"starting": 4.0, "productive": 16.0}


def test_a_signal_loses_only_the_stop() -> None:
    job = Job(1)
    job.up(0.0, 0.0)
    job.steps(0.0, 1, 8)
    job(8.5, Signal(15))
    job(9.5, Stopped())
    assert job.totals(9.5) == {"productive": 8.5, "recovering": 1.0}
    line = goodput_line(job.sum(9.5), job.book.incidents())
    assert line == "goodput 89.5 %: 1.0 s lost to the end of the job"


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_lose_no_second_and_the_ratio_is_the_truth(seed: int) -> None:
    """Kills at random times, a checkpoint at every tenth step: the productive time is one second a step."""
    source = random.Random(seed)
    job, now, done = Job(4), 0.0, 0
    for _ in range(60):
        job.up(now, source.uniform(0, 0.5))
        begin = now + source.uniform(0.6, 3.0)
        first = done // 10 * 10 + 1
        last = first + source.randrange(1, 40)
        end = job.steps(begin, first, last)
        done = max(done, last)
        now = end + source.uniform(0.0, 0.9)
        job(now, WorkerFailed("killed"))
        now += source.uniform(0, 0.2)
        job(now, Stopped())
    job.up(now, 0.1)
    found = job.sum(now + 0.1)
    assert found.total == pytest.approx((now + 0.1) * 4)
    assert found.seconds["productive"] == pytest.approx(done * 4)


def test_memory_does_not_grow_with_incidents() -> None:
    job, now = Job(1), 0.0
    for _ in range(500):
        job.up(now, 0.0)
        job.boards = [RankProgress(BASE + now + 0.1)]
        job(now + 1.0, WorkerFailed("x"))
        job(now + 1.5, Stopped())
        now += 1.5
    assert len(job.sum(now).lost) <= 201
    assert job.sum(now).total == pytest.approx(now)


def test_nodes_add_up() -> None:
    one = GoodputTotals(2, dict.fromkeys(CATEGORIES, 1.0), {1: {"recovering": 1.0}})
    both = one + one
    assert (both.ranks, both.total, both.ratio) == (4, 18.0, pytest.approx(2 / 9))


def test_without_heartbeats_it_is_uptime_and_not_goodput() -> None:
    """31 s of imports are no progress; a node that does send heartbeats makes it the job's goodput."""
    job = Job(1)
    job.up(0.0, 0.5)
    job.boards = [RankProgress(BASE + 0.5)]
    found = job.sum(31.0)
    assert {name: spent for name, spent in found.seconds.items() if spent} == {
        "starting": 0.5,
        "running": 30.5,
    }
    assert goodput_line(found, []) == "uptime 98.4 %: 0.5 s lost to starting"
    assert (found.as_dict().get("goodput"), found.as_dict()["uptime"]) == (None, 0.983871)
    marked = Job(1)
    marked.up(0.0, 0.5)
    marked.steps(1.0, 1, 30)
    both = found + marked.sum(31.0)
    assert both.measure == "goodput"
    assert "uptime" not in both.as_dict()
    assert read_totals(both.as_dict()) == both.replace(lost={})


def test_the_line_names_what_was_lost_and_leaves_small_things_out() -> None:
    spent = {**dict.fromkeys(CATEGORIES, 0.0), "productive": 1946.0, "recovering": 42.0, "recomputed": 40.0}
    lost = {number: {"recovering": 14.0, "recomputed": 40.0 / 3, "hung": 0.0} for number in (1, 2, 3)}
    totals = GoodputTotals(2, {**spent, "hung": 12.0}, {**lost, 4: {"hung": 12.0}})
    told = [Incident(1, "a"), Incident(2, "b"), Incident(3, "c"), Incident(4, "d", "hang")]
    assert goodput_line(totals, told) == "goodput 95.4 %: 41 s lost to 3 restarts, 6.0 s to a hang"
    assert goodput_line(
        totals.replace(seconds={**spent, "recovering": 0.0, "recomputed": 0.0}, lost={}), []
    ) == ("goodput 100.0 %")
    assert [row[0] for row in losses(totals, told)][:2] == ["restart", "hang"]


def test_typical_steps_and_seconds_in_words() -> None:
    assert typical_step(STEADY) == 2.0
    assert typical_step(STEADY.replace(step=None)) == 2.0
    assert typical_step(RankProgress()) == 0.0
    words = [seconds(value) for value in (0.01, 0.31, 9.94, 41.2, 125, 7325)]
    assert words == ["0 s", "0.3 s", "9.9 s", "41 s", "2 min 5 s", "2 h 2 min"]
