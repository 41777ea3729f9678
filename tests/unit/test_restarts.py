"""The restart policy: the budget, the window, codes not worth a retry, fail fast, back-off."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.group.restarts import Decision, Failure, History, RestartPolicy, check, decide, record


def run(policy: RestartPolicy, failures: list[Failure]) -> list[Decision]:
    """The verdicts on these failures, up to and with the first final one."""
    history, verdicts = History(), []
    for failure in failures:
        verdict = decide(history, failure, failure.at, policy)
        verdicts.append(verdict)
        if not verdict.restart:
            break
        history = record(history, failure, policy)
    return verdicts


def crashes(count: int, lived: float = 0.1, every: float = 1.0) -> list[Failure]:
    return [Failure(at=every * i, error="boom", exit_code=1, lived=lived) for i in range(count)]


def test_a_script_that_crashes_at_once_gets_all_its_restarts() -> None:
    verdicts = run(RestartPolicy(max_restarts=3), crashes(9))
    assert [v.restart for v in verdicts] == [True, True, True, False]
    assert [v.remaining for v in verdicts] == [2, 1, 0, 0]
    assert verdicts[0].reason == "restart 1 of 3"
    assert verdicts[-1].reason == "not restarted: 3 of 3 restarts are used"


def test_no_restarts() -> None:
    (verdict,) = run(RestartPolicy(max_restarts=0), crashes(2))
    assert not verdict.restart
    assert "max_restarts is 0" in verdict.reason


@pytest.mark.parametrize(("code", "restart"), [(3, False), (-9, False), (1, True), (None, True)])
def test_exit_codes_not_worth_a_restart(code: int | None, restart: bool) -> None:
    policy = RestartPolicy(no_restart_on=frozenset({3, -9}))
    verdict = decide(History(), Failure(0.0, "x", code), 0.0, policy)
    assert verdict.restart is restart
    if not restart:
        assert f"exit code {code}" in verdict.reason
        assert verdict.remaining == 3


def test_a_guess_does_not_hold_for_what_may_pass() -> None:
    policy = RestartPolicy(hopeless=frozenset({2, "ImportError"}))

    def restarts(**more: Any) -> bool:
        return decide(History(), Failure(0.0, "x", 2, **more), 0.0, policy).restart

    assert not restarts()
    assert not restarts(kinds=("UsageError", "ClickException"))
    assert restarts(kinds=("FileNotFoundError", "OSError"))
    assert restarts(step=1)
    assert restarts(lived=100.0)


def test_only_failures_within_the_window_count() -> None:
    policy = RestartPolicy(max_restarts=2, window=100.0)
    assert all(v.restart for v in run(policy, crashes(50, lived=60, every=60)))
    assert [v.restart for v in run(policy, crashes(50, lived=20, every=40))] == [True, True, False]


def test_without_a_window_the_jobs_count_rules_also_on_a_node_that_came_late() -> None:
    verdict = decide(History(attempt=2), Failure(0.0), 0.0, RestartPolicy(max_restarts=3))
    assert (verdict.restart, verdict.remaining, verdict.reason) == (True, 0, "restart 3 of 3")
    assert not decide(History(attempt=3), Failure(0.0), 0.0, RestartPolicy(max_restarts=3)).restart


FAIL_FAST = [
    # readiness, first, second, restarted?
    ("off: plain jobs keep their restarts", False, ("e", False), ("e", False), True),
    ("same error, never ready", True, ("e", False), ("e", False), False),
    ("another error", True, ("e", False), ("f", False), True),
    ("ready the second time", True, ("e", False), ("e", True), True),
    ("ready the first time", True, ("e", True), ("e", False), True),
    ("no word, died young: not ready", True, ("e", None), ("e", None), False),
]


@pytest.mark.parametrize(("why", "readiness", "first", "second", "restart"), FAIL_FAST, ids=lambda v: str(v))
def test_fail_fast(
    why: str, readiness: bool, first: tuple[str, bool], second: tuple[str, bool], restart: bool
) -> None:
    policy = RestartPolicy(readiness=readiness)
    failures = [Failure(float(i), error, 1, 0.5, ready) for i, (error, ready) in enumerate((first, second))]
    verdicts = run(policy, failures)
    assert verdicts[0].restart
    assert verdicts[1].restart is restart, why


def test_no_word_but_a_long_life_counts_as_ready() -> None:
    policy = RestartPolicy(readiness=True, ready_after=5.0)
    assert all(v.restart for v in run(policy, [Failure(0.0, "e", 1, 6.0), Failure(9.0, "e", 1, 6.0)]))


def test_back_off_grows_in_a_crash_loop_and_resets_after_a_healthy_time() -> None:
    policy = RestartPolicy(100, free=2, backoff_first=1.0, backoff_max=5.0, healthy_after=10.0)
    loop = crashes(6)
    delays = [v.delay for v in run(policy, [*loop, Failure(60.0, lived=10.0), *crashes(3)])]
    assert delays == [0, 0, 1, 2, 4, 5, 0, 0, 0, 1]


def live(policy: RestartPolicy, passes_after: float, lived: float = 0.1) -> float | None:
    """When a worker first runs after the cause of its failures has passed; None: it never does."""
    now, history = 0.0, History()
    while now < passes_after:
        now += lived
        failure = Failure(now, "e", 1, lived)
        verdict = decide(history, failure, now, policy)
        if not verdict.restart:
            return None
        history = record(history, failure, policy)
        now += verdict.delay
    return now


@pytest.mark.parametrize("lived", [0.01, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("budget", [2, 3, 5, 20])
def test_a_cause_that_passes_after_six_seconds_does_not_end_a_job(budget: int, lived: float) -> None:
    reached = live(RestartPolicy(budget, patience=8.0), 6.0, lived)
    assert reached is not None
    assert reached < 16.0, "the wait must not be much longer than the cause"


def test_the_delays_of_a_long_crash_loop() -> None:
    delays = [v.delay for v in run(RestartPolicy(100), crashes(9))]
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    late = run(RestartPolicy(3, patience=8.0), crashes(3))
    assert [v.delay for v in late] == [0, 0.5, 6.0], "the last waits until 8 s after the first failure"
    assert [v.delay for v in run(RestartPolicy(3, restart_delay=2.0, patience=8.0), crashes(3))] == [2, 2, 6]
    assert [v.delay for v in run(RestartPolicy(3, backoff_first=0.0, patience=8.0), crashes(3))] == [0, 0, 0]


def test_a_worker_that_is_killed_comes_back_at_once() -> None:
    kills = [failure.replace(exit_code=137) for failure in crashes(8)]
    assert [v.delay for v in run(RestartPolicy(100), kills)] == [0, 0, 0, 0, 0, 0.5, 1, 2]
    assert [v.delay for v in run(RestartPolicy(3, patience=8.0), kills[:3])] == [0, 0, 0]


def test_a_fixed_delay_says_so() -> None:
    (verdict,) = run(RestartPolicy(3, restart_delay=2.5), crashes(1))
    assert verdict.reason == "restart 1 of 3, in 2.5 s"


def test_back_off_says_so_and_can_be_switched_off() -> None:
    verdicts = run(RestartPolicy(2000, backoff_max=0.0), crashes(1500))
    assert len(verdicts) == 1500
    assert {v.delay for v in verdicts} == {0.0}
    late = run(RestartPolicy(10, free=0), crashes(1))[0]
    assert late.reason == (
        "restart 1 of 10, in 0.5 s because the workers keep failing soon after their start"
    )


@given(
    st.integers(0, 8),
    st.sampled_from([None, 1.0, 50.0, 1e6]),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.9, 1.0, 30.0, 49.0, 50.0, 99.0]), st.floats(0, 100)), max_size=40
    ),
    st.booleans(),
)
def test_never_more_restarts_than_the_budget(
    budget: int, window: float | None, spans: list[tuple[float, float]], readiness: bool
) -> None:
    """In the whole job, or within any window; and the delay is always within its bounds."""
    policy = RestartPolicy(budget, window=window, readiness=readiness, free=1)
    now, failures = 0.0, []
    for index, (gap, lived) in enumerate(spans):
        now += gap
        failures.append(Failure(now, f"e{index % 3}", 1, lived))
    verdicts = run(policy, failures)
    times = [f.at for f, v in zip(failures, verdicts, strict=False) if v.restart]
    for begin in times:
        span = float("inf") if window is None else window
        assert sum(begin <= t < begin + span for t in times) <= budget
    longest = max(policy.backoff_max, policy.patience)
    assert all(0 <= v.delay <= longest and v.remaining >= 0 and v.reason for v in verdicts)


def test_attempt_follows_the_job() -> None:
    policy = RestartPolicy()
    assert record(History(1), Failure(0.0), policy).attempt == 2
    assert record(History(1), Failure(0.0), policy, attempt=4).attempt == 4
    assert record(History(5), Failure(0.0), policy, attempt=4).attempt == 5


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (RestartPolicy(-1), "max_restarts=-1"),
        (RestartPolicy(window=0.0), "window=0.0"),
        (RestartPolicy(restart_delay=-1.0), "restart_delay=-1.0"),
        (RestartPolicy(backoff_factor=0.5), "0.5"),
    ],
)
def test_bad_policies_are_refused_with_the_value(policy: RestartPolicy, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(policy)
    assert check(RestartPolicy()) == RestartPolicy()
