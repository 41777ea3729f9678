"""The rules for hangs and for the ranks that differ, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.diagnosis.progress import (
    Beat,
    Evidence,
    View,
    WatchPolicy,
    alike,
    blame,
    is_finite,
    judge,
    next_look,
    why_not_hung,
)

ALL = WatchPolicy(5.0, 7.0, 10.0, 3.0)
LOSS = WatchPolicy(expect=r"loss {1}: (\S+)", expect_every=30.0, expect_finite=True)


def beats(*ages: float, now: float = 100.0) -> tuple[Beat, ...]:
    """One rank for each age of its last heartbeat."""
    return tuple(Beat(rank, now - age, 40 + rank, 1) for rank, age in enumerate(ages))


HANG = WatchPolicy(hang_timeout=5.0)


def inside(numbers_at: float, ran_at: float, waits: bool = True) -> tuple[Beat, ...]:
    """Rank 0 is inside a collective, rank 1 is not."""
    return Beat(0, waits=waits, numbers_at=numbers_at), Beat(1, numbers_at=numbers_at, ran_at=ran_at)


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (View(0.0, inside(95.0, 0.0)), ""),  # it is one
        (View(0.0, inside(96.0, 0.0)), ""),  # the time is not over
        (
            View(0.0, inside(60.0, 99.0)),
            "no collective has progressed for 40 s: rank 0 waits in one, and rank 1 is running outside of it"
            "; not a hang",
        ),
        (
            View(0.0, inside(60.0, 0.0, waits=False)),
            "no collective has progressed for 40 s, and no rank waits in one; not a hang",
        ),
    ],
)
def test_why_it_is_not_a_hang(view: View, text: str) -> None:
    assert why_not_hung(view, 100.0, HANG) == text
    assert not text or judge(view, 100.0, HANG) is None


@pytest.mark.parametrize(
    ("view", "policy", "rule", "reason"),
    [
        (View(0.0, beats(1, 2)), ALL, None, ""),
        (View(0.0, beats(1, 5)), ALL, "heartbeat", "no heartbeat from rank 1 for 5.0 s (last at step 41)"),
        # The others reach the timeout a moment later: they hang together.
        (
            View(0.0, beats(4.9, 5, 4.8)),
            ALL,
            "heartbeat",
            "no heartbeat from ranks 0-2 for 5.0 s (last at steps 40 to 42)",
        ),
        (View(0.0, beats(50)), WatchPolicy(), None, ""),
        # Without a first heartbeat, the startup timeout applies.
        (View(95.0, (Beat(0),)), ALL, None, ""),
        (View(0.0, (Beat(0),)), WatchPolicy(heartbeat_timeout=5.0), None, ""),
        (
            View(90.0, (Beat(0), Beat(1, ready_at=95.0))),
            ALL,
            "startup",
            "rank 0 not ready 10 s after the start",
        ),
        (View(90.0, (Beat(0, ready_at=91.0), Beat(1, 99.0, 0, 1))), ALL, None, ""),
        (
            View(0.0, (Beat(0, deadline=99.5), Beat(1, deadline=101.0))),
            WatchPolicy(),
            "expires",
            "rank 0 did not leave expires() in time (0.5 s late)",
        ),
        (
            View(0.0, beats(1), finished=(1, 2), first_exit=96.0),
            ALL,
            "partial exit",
            "rank 0 still runs 4.0 s after ranks 1, 2 have finished",
        ),
        (View(0.0, beats(1), finished=(1,), first_exit=98.0), ALL, None, ""),
        (View(0.0, beats(1, 1), output_at=93.0), ALL, "silence", "no output from ranks 0, 1 for 7.0 s"),
        (View(0.0, beats(1, 1), output_at=94.0), ALL, None, ""),
        (View(0.0, beats(1, 1), output_at=None), ALL, None, ""),
        (View(0.0, (), finished=(0,), first_exit=1.0, output_at=0.0), ALL, None, ""),
        (View(0.0, beats(1, 1), matched_at=71.0), LOSS, None, ""),
        (View(0.0, beats(1, 1)), LOSS, None, ""),  # not expected yet
        (View(0.0, beats(1, 1), matched_at=0.0), WatchPolicy(expect="x", expect_finite=True), None, ""),
        (
            View(0.0, beats(1, 1), matched_at=70.0),
            LOSS,
            "expect",
            "no line of ranks 0, 1 matched 'loss {1}: (\\\\S+)' for 30.0 s",
        ),
        (
            View(0.0, beats(1, 1), matched_at=99.0, bad_value=(1, "loss: {nan}")),
            LOSS,
            "value",
            "rank 1 printed a value that is not finite: loss: {nan}",
        ),
        (View(0.0, beats(1), bad_value=(0, "nan")), WatchPolicy(expect="x", expect_every=9.0), None, ""),
        # Collectives: rank 0 waits in one since 95.
        (
            View(0.0, inside(95.0, 0.0)),
            HANG,
            "collectives",
            "no collective of ranks 0, 1 has progressed for 5.0 s",
        ),
        (View(0.0, inside(95.1, 0.0)), HANG, None, ""),
        (View(0.0, inside(80.0, 99.0)), HANG, None, ""),  # rank 1 runs
        (View(0.0, inside(80.0, 0.0, waits=False)), HANG, None, ""),
        (View(0.0, inside(80.0, 0.0), progress_elsewhere=96.0), HANG, None, ""),
        (View(0.0, inside(0.0, 0.0)), HANG, None, ""),  # not sampled yet
    ],
)
def test_judge(view: View, policy: WatchPolicy, rule: str | None, reason: str) -> None:
    verdict = judge(view, 100.0, policy)
    assert (None if verdict is None else verdict.rule) == rule
    assert verdict is None or verdict.reason == reason


times = st.floats(0.0, 100.0)
maybe = st.none() | st.floats(0.1, 50.0)
some_beats = st.builds(
    Beat,
    st.integers(0, 3),
    times,
    st.integers(0, 9),
    st.integers(0, 2),
    times,
    times,
    waits=st.booleans(),
    numbers_at=times,
)
views = st.builds(
    View,
    times,
    st.lists(some_beats, max_size=4, unique_by=lambda beat: beat.rank).map(tuple),
    st.just((9,)),
    times,
    st.none() | times,
    st.none() | times,
)


@given(
    views,
    st.builds(
        WatchPolicy, maybe, maybe, maybe, maybe, expect=st.just("x"), expect_every=maybe, hang_timeout=maybe
    ),
)
def test_nothing_hangs_before_the_next_look_and_a_rank_does_then(view: View, policy: WatchPolicy) -> None:
    due = next_look(view, policy)
    if due is None or not view.alive:
        assert judge(view, 1e6, policy) is None or view.alive
        return
    assert judge(view, due - 1e-6, policy) is None or due <= 1e-6
    assert judge(view, due + 1e-6, policy) is not None


@pytest.mark.parametrize(
    ("text", "finite"),
    [
        ("0.3", True),
        ("1e-7,", True),
        ("-12)", True),
        ("", True),
        ("n/a", True),
        ("information", True),
        ("inference", True),
        ("nan", False),
        ("NaN", False),
        ("-inf", False),
        ("1e999", False),
        ("nan,", False),
        ("tensor(nan,", False),
        ("tensor([0.1, inf])", False),
        ("Infinity", False),
    ],
)
def test_what_counts_as_finite(text: str, finite: bool) -> None:
    assert is_finite(text) is finite


IN_TRAIN, IN_REDUCE = (
    ("train.py:9 in load",),
    ("x/torch/distributed/c10d.py:1 in all_reduce", "train.py:12 in step"),
)


def seen(*stacks: tuple[str, ...], stopped: int = -1) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, stack, rank == stopped, stack is IN_REDUCE) for rank, stack in enumerate(stacks)
    )


@pytest.mark.parametrize(
    ("evidence", "ages", "ranks", "reason"),
    [
        (seen(IN_REDUCE, IN_TRAIN, IN_REDUCE), (9, 9, 9), (1,), "the others wait for it"),
        (seen(IN_REDUCE, IN_TRAIN), (9, 9), (1,), "the others wait for it"),
        (seen(IN_TRAIN, IN_TRAIN, IN_REDUCE), (9, 9, 9), (0, 1), "the others wait for them"),
        (seen(IN_REDUCE, (), IN_REDUCE, stopped=1), (9, 9, 9), (1,), "stopped by a signal"),
        (seen(("a",), ("b",), ("a",)), (9, 9, 9), (0,), "behind the others"),
        (seen(IN_TRAIN, IN_TRAIN), (0, 9), (1,), ""),  # the other one is not even quiet
    ],
)
def test_blame(
    evidence: tuple[Evidence, ...], ages: tuple[float, ...], ranks: tuple[int, ...], reason: str
) -> None:
    view = View(0.0, beats(*ages))
    verdict = judge(view, 100.0, WatchPolicy(heartbeat_timeout=5.0))
    assert verdict is not None
    found = blame(view, verdict, evidence)
    assert (found.ranks, found.reason) == (ranks, reason)


def test_an_odd_stack_differs_where_steps_are_not_counted() -> None:
    view = View(0.0, tuple(Beat(rank) for rank in range(4)))
    verdict = judge(view, 100.0, WatchPolicy(startup_timeout=5.0))
    assert verdict is not None
    odd = blame(view, verdict, seen(("a",), ("a",), ("b",), ("a",)))
    assert odd.ranks == (2,)
    assert odd.reason == "its stack differs from the others'"
    assert blame(view, verdict, seen(("a",), ("a",), ("a",), ("a",))).ranks == (0, 1, 2, 3)


def test_identical_stacks_are_grouped_with_the_odd_ones_first() -> None:
    assert alike(seen(("a",), ("b",), ("a",), ("c",), ("b",), ("a",))) == ((3,), (1, 4), (0, 2, 5))
    assert alike(()) == ()


@pytest.mark.parametrize("final", [True, False])
def test_a_final_hang_ends_the_job_whatever_restarts_are_left(final: bool) -> None:
    from phalanx.core import exit_codes
    from phalanx.core.group import events as group_events
    from phalanx.core.group import group

    policy, state = group.GroupPolicy(), group.GroupState()
    for event in (
        group_events.Start(),
        group_events.RoundReady(group_events.GroupRound(1)),
        group_events.Started((1,)),
    ):
        state = group.step(state, event, 0.0, policy).state
    made = group.step(state, group_events.Hang("rank 1 hangs", final), 9.0, policy)
    state, commands, reason = made.state, made.commands, made.reason
    assert state.phase is (group.Phase.ENDING if final else group.Phase.REFORMING)
    assert reason == ("rank 1 hangs" if final else "rank 1 hangs; restart 1 of 3")
    (report,) = [command for command in commands if isinstance(command, group_events.ReportFailure)]
    assert report.final is final
    if final:
        commands = group.step(state, group_events.Stopped(), 10.0, policy).commands
        assert commands[-1] == group_events.Finish(
            group_events.Outcome.FAILED, group_events.WorkerState.FAILED, "rank 1 hangs", code=exit_codes.HANG
        )
