"""The exit codes of a job: the table, what is worth another attempt, and one code of many agents."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from phalanx.core import exit_codes as codes
from phalanx.core.restarts import Failure, History, RestartPolicy, decide
from phalanx.errors import (
    NodeUnfit,
    PhalanxError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    StartError,
    UsageError,
)
from phalanx.integrations.outcomes import AgentOutcome, job_code, read_outcomes, write_outcome
from phalanx.integrations.slurm.requeue import RequeueVerdict, judge

USED_BY_OTHERS = {0, 1, 2, 120, 255, *range(64, 79), *range(124, 193)}
PREEMPTED = 128 + signal.SIGUSR2


def test_the_codes_collide_with_nothing_usual() -> None:
    own = [codes.DO_NOT_RETRY, codes.NO_MEETING, codes.UNFIT_NODE, codes.HANG]
    assert len(set(own)) == len(own)
    assert not set(own) & USED_BY_OTHERS


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), codes.USAGE),
        (RendezvousTimeoutError("x"), codes.NO_MEETING),
        (RendezvousConnectionError("x"), codes.NO_MEETING),
        (RendezvousClosedError("x"), codes.FAILURE),
        (NodeUnfit("x"), codes.UNFIT_NODE),
        (StartError("x"), codes.UNFIT_NODE),
        (PhalanxError("x"), codes.FAILURE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_codes_of_errors(error: Exception, code: int) -> None:
    assert codes.of_error(error) == code


def test_another_token_would_be_refused_again() -> None:
    error = RendezvousConnectionError("x")
    error.lasting = True
    assert codes.of_error(error) == codes.FAILURE


@pytest.mark.parametrize(
    ("code", "again"),
    [(0, False), (1, False), (2, False), (7, False), (93, False), (94, True), (95, True), (96, True),
     (137, False), (143, False), (PREEMPTED, True)],
)  # fmt: skip
def test_what_is_worth_another_attempt(code: int, again: bool) -> None:
    assert codes.retry(code, (signal.SIGUSR2,)).again is again


def test_a_worker_says_that_a_retry_cannot_help() -> None:
    policy = RestartPolicy(max_restarts=3, no_restart_on=frozenset())
    verdict = decide(History(), Failure(0.0, "x", 93, lived=500.0, step=9), 0.0, policy)
    assert (verdict.restart, verdict.reason) == (False, "not restarted: exit code 93 says 'do not retry'")


GOOD = AgentOutcome("a", "SUCCEEDED", 0)


def bad(code: int, node: str = "b", outcome: str = "FAILED") -> AgentOutcome:
    return AgentOutcome(node, outcome, code)


@pytest.mark.parametrize(
    ("outcomes", "otherwise", "code"),
    [
        ([], 0, 0),
        ([], 137, 137),  # no outcome is known: what srun says
        ([GOOD, GOOD], 137, 0),  # a node was lost, and the job went on without it
        ([GOOD, bad(143, outcome="SIGNALED")], 143, 0),
        ([bad(0, outcome="LEFT"), bad(3)], 3, 3),  # one node was drained before the job failed
        ([bad(0, outcome="LEFT")], 0, 1),
        ([bad(3), bad(94)], 94, 3),
        ([bad(93), bad(3)], 93, 93),
        ([bad(95), bad(94)], 95, 94),
        ([bad(PREEMPTED), bad(94)], PREEMPTED, PREEMPTED),
        ([bad(137), bad(137)], 137, 137),
    ],
)
def test_one_code_of_many_agents(outcomes: list[AgentOutcome], otherwise: int, code: int) -> None:
    assert job_code(outcomes, otherwise, signal.SIGUSR2) == code


def test_verdicts() -> None:
    def of(*outcomes: AgentOutcome, **more: int) -> RequeueVerdict:
        settings = {"attempt": 0, "most": 2, **more}
        return judge(outcomes, 1, preempt_signal=signal.SIGUSR2, **settings)  # type: ignore[arg-type]

    assert of(GOOD) == RequeueVerdict(0, False, "all workers succeeded")
    assert of(bad(PREEMPTED)).reason == f"preempted (exit code {PREEMPTED}); requeue 1 of 2"
    assert of(bad(PREEMPTED), attempt=1).again
    last = of(bad(PREEMPTED), attempt=2)
    assert not last.again
    assert last.reason.endswith("; it was requeued 2 times (--requeues 2)")
    assert not of(bad(PREEMPTED), cancelled=1).again
    assert not of(bad(93)).again
    unfit = of(bad(95, "n3"), bad(94, "n4"), bad(95, "n3"))
    assert (unfit.again, unfit.exclude) == (True, ("n3",))
    kept_out = ("n1", "n2.0", "n7", "other.host")  # n2.0: where a node has several agents; n7 is not ours
    out = AgentOutcome("n4", "FAILED", 94, quarantined=kept_out)
    again = judge([bad(95, "n3"), out, out], 1, preempt_signal=0, most=1, nodes=["n1", "n2", "n3", "n4"])
    assert (again.again, again.exclude) == (True, ("n3", "n1", "n2"))


def test_outcomes_in_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    left = AgentOutcome("n1", "FAILED", 94, "lost", ("n2", "n3"))
    write_outcome(str(tmp_path), left, "n1.7")
    (tmp_path / "n2.json").write_text('{"node":"n2","outcome":"LEFT","code":0,"quarantined":[7,"n4"]}')
    (tmp_path / "n3.json").write_text('{"node":"n3","outcome":"LEFT","code":0,"quarantined":7}')
    assert read_outcomes(str(tmp_path)) == [
        left,
        AgentOutcome("n2", "LEFT", 0, "", ("n4",)),
        AgentOutcome("n3", "LEFT", 0),
    ]
