"""The restart policy: the budget, the window, codes not worth a retry, the same failure again, back-off."""

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


SAME = "KeyError at train.py:7, in step"
SAME_FAILURE = [
    # the first failure; the second; restarted?
    ("the same, soon, no steps", {}, {}, False),
    ("another failure", {}, {"signature": "ValueError at train.py:7, in step"}, True),
    ("nothing is known of them", {"signature": ""}, {"signature": ""}, True),
    ("the second lived long: it may have progressed", {}, {"at": 100.0, "lived": 61.0}, True),
    ("the first lived long", {"lived": 61.0}, {}, True),
    ("a round that ended otherwise may have progressed", {}, {"at": 100.0}, True),
    ("the same step, hours apart", {"step": 9, "lived": 9e3}, {"step": 9, "at": 9e3, "lived": 8e3}, False),
    ("a step further", {"step": 9}, {"step": 10}, True),
    ("the first step", {}, {"step": 0}, True),
    ("soon, at an earlier step", {"step": 9}, {"step": 3}, False),
    ("at an earlier step, after a while: not deterministic", {"step": 9}, {"step": 3, "at": 100.0}, True),
    ("soon, before any step", {"step": 9}, {}, False),
    ("before any step, after hours of steps", {"step": 9, "lived": 9e3}, {}, True),
]


@pytest.mark.parametrize(("why", "first", "second", "restart"), SAME_FAILURE, ids=lambda v: str(v))
def test_the_same_failure_again_is_final_without_progress(
    why: str, first: dict[str, Any], second: dict[str, Any], restart: bool
) -> None:
    failures = [
        Failure(0.0, "e", 1, 0.5, signature=SAME).replace(**first),
        Failure(2.0, "e", 1, 0.5, signature=SAME).replace(**second),
    ]
    verdicts = run(RestartPolicy(same_failure=True), failures)
    assert verdicts[0].restart
    assert (verdicts[1].restart, verdicts[1].code) == (restart, 0 if restart else 93), why
    assert all(verdict.restart for verdict in run(RestartPolicy(), failures)), "not without the rule"
    if not restart:
        assert verdicts[1].reason == (
            f"not restarted: the same failure twice in a row without progress ({SAME}); "
            "--restart-always restarts it all the same"
        )


def test_another_failure_in_between_makes_it_another_story() -> None:
    policy = RestartPolicy(9, same_failure=True)
    names = (SAME, "", SAME, "SIGSEGV", SAME)
    assert all(v.restart for v in run(policy, [Failure(0.1 * i, signature=n) for i, n in enumerate(names)]))


def test_the_end_of_the_budget_keeps_the_code_of_the_worker() -> None:
    failures = [failure.replace(signature=SAME) for failure in crashes(2)]
    last = run(RestartPolicy(1, same_failure=True), failures)[-1]
    assert (last.reason, last.code) == ("not restarted: 1 of 1 restarts are used", 0)


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
    budget: int, window: float | None, spans: list[tuple[float, float]], same: bool
) -> None:
    """In the whole job, or within any window; and the delay is always within its bounds."""
    policy = RestartPolicy(budget, window=window, same_failure=same, free=1)
    now, failures = 0.0, []
    for index, (gap, lived) in enumerate(spans):
        now += gap
        failures.append(Failure(now, "e", 1, lived, signature=f"e{index // 2 % 3}"))
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
