"""The exit codes of a job: the table, what is worth another attempt, and one code of many agents."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from phalanx.core import exit_codes as codes
from phalanx.core.group.restarts import Failure, History, RestartPolicy, decide
from phalanx.errors import (
    NodeUnfit,
    PhalanxError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    StartError,
    UsageError,
)
from phalanx.platforms.outcomes import AgentOutcome, job_code, read_outcomes, write_outcome
from phalanx.platforms.slurm.requeue import AttemptEnd, SlurmJob, judge, lost_nodes, read_job

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


@pytest.mark.parametrize(
    ("code", "again"),
    [(0, False), (1, False), (2, False), (7, False), (93, False), (94, True), (95, True), (96, True),
     (137, False), (143, False), (PREEMPTED, True)],
)  # fmt: skip
def test_what_is_worth_another_attempt(code: int, again: bool) -> None:
    assert codes.retry(code, (signal.SIGUSR2,)).again is again


def test_the_table_advises_what_schedulers_here_do() -> None:
    advice = {int(code): advice for code, _, advice in codes.TABLE if code.isdigit()}
    assert set(advice) == {0, 1, 2, 93, 94, 95, 96}
    for code, advised in advice.items():
        assert codes.retry(code).again is advised.startswith("retry"), code


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


TERM = codes.SIGNALED + signal.SIGTERM
RUNS, ENDS = SlurmJob("RUNNING"), SlurmJob("COMPLETING")
PREEMPTS = SlurmJob("RUNNING", preempted=True)
AGAIN = SlurmJob("COMPLETING", restarts=1)

# How the attempt ended, what Slurm says about the job, whether we requeue it, and why.
VERDICTS = [
    ([GOOD], AttemptEnd(1), RUNS, False, "all workers succeeded"),
    ([GOOD], AttemptEnd(1, stopped=True), ENDS, False, "all workers succeeded"),
    ([bad(TERM)], AttemptEnd(1, noticed=True), RUNS, True, "preempted (exit code 143); requeue 1 of 2"),
    ([bad(TERM)], AttemptEnd(1), PREEMPTS, True, "preempted (exit code 143); requeue 1 of 2"),
    (
        [bad(1)],
        AttemptEnd(1),
        PREEMPTS,
        True,
        "preempted (exit code 1); requeue 1 of 2",
    ),  # a worker's handler
    ([], AttemptEnd(TERM), PREEMPTS, True, "preempted (exit code 143); requeue 1 of 2"),
    ([bad(93)], AttemptEnd(1), PREEMPTS, False, "exit code 93 says 'do not retry'"),
    ([bad(TERM)], AttemptEnd(1), RUNS, False, "stopped by SIGTERM, and not preempted"),  # scancel JOB.0
    ([bad(TERM)], AttemptEnd(1, stopped=True), ENDS, False, "the job was cancelled"),
    ([bad(TERM)], AttemptEnd(1, noticed=True), ENDS, False, "the job was cancelled"),
    ([bad(TERM)], AttemptEnd(1, stopped=True), SlurmJob(), False, "the job was cancelled"),  # Slurm is silent
    ([bad(94)], AttemptEnd(1), SlurmJob(), True, "(exit code 94); requeue 1 of 2"),
    (
        [bad(TERM)],
        AttemptEnd(1, stopped=True),
        AGAIN,
        False,
        "preempted, or requeued by an operator; Slurm has put the job back into the queue",
    ),
    (
        [bad(94)],
        AttemptEnd(1, stopped=True, lost=("n2",)),
        AGAIN,
        False,
        "lost n2; Slurm has put the job back into the queue",
    ),
    (
        [bad(TERM)],
        AttemptEnd(1, stopped=True),
        SlurmJob("COMPLETING", preempted=True),
        False,
        "preempted, and Slurm ends the job",
    ),
    (
        [bad(TERM)],
        AttemptEnd(1, number=1, noticed=True),
        AGAIN.replace(state="RUNNING"),
        True,
        "requeue 2 of 2",
    ),
    (
        [bad(TERM)],
        AttemptEnd(1, number=2, noticed=True),
        SlurmJob("RUNNING", restarts=2),
        False,
        "preempted (exit code 143); it was requeued 2 times (--requeues 2)",
    ),
    ([bad(3)], AttemptEnd(1), RUNS, False, "exit code 3 is the program's own"),
]


@pytest.mark.parametrize(("outcomes", "attempt", "job", "again", "why"), VERDICTS)
def test_verdicts(
    outcomes: list[AgentOutcome], attempt: AttemptEnd, job: SlurmJob, again: bool, why: str
) -> None:
    verdict = judge(outcomes, attempt.replace(most=2), job)
    assert verdict.again is again
    assert verdict.reason.endswith(why)


IN_QUEUE = "preempted, or requeued by an operator; Slurm has put the job back into the queue"
# PreemptMode and GraceTime of the job; the code that SIGTERM has led to; what Slurm shows of the job, which
# had been requeued once before; whether we requeue it, and why. The batch step gets SIGTERM, too.
PREEMPTIONS = [
    ("REQUEUE 15", TERM, "RUNNING", "2026-11-16T23:33:26", 1, True, "preempted (exit code 143)"),
    ("REQUEUE 15", 0, "RUNNING", "2026-11-16T23:33:26", 1, False, "all workers succeeded"),
    ("REQUEUE 15", 93, "RUNNING", "2026-11-16T23:33:26", 1, False, "exit code 93 says 'do not retry'"),
    ("REQUEUE 15", 94, "RUNNING", "2026-11-16T23:33:26", 1, True, "preempted (exit code 94)"),
    ("REQUEUE 15", TERM, "COMPLETING", "2026-11-16T23:33:26", 2, False, IN_QUEUE),  # it took too long
    ("REQUEUE 0", TERM, "COMPLETING", "2026-11-16T23:33:26", 2, False, IN_QUEUE),
    ("REQUEUE 0", TERM, "PENDING", "2026-11-16T23:33:26", 2, False, IN_QUEUE),
    ("CANCEL 15", TERM, "RUNNING", "2026-11-16T23:33:26", 1, True, "preempted (exit code 143)"),
    ("CANCEL 15", TERM, "COMPLETING", "2026-11-16T23:33:26", 1, False, "preempted, and Slurm ends the job"),
    ("CANCEL 0", TERM, "PREEMPTED", "2026-11-16T23:33:26", 1, False, "preempted, and Slurm ends the job"),
    ("scancel", TERM, "COMPLETING", "None", 1, False, "the job was cancelled"),
    ("scancel --batch", TERM, "RUNNING", "None", 1, False, "the job was cancelled"),
]


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("case", PREEMPTIONS, ids=[" ".join(map(str, case[:3])) for case in PREEMPTIONS])
def test_sigterm_in_a_submitted_job(case: tuple[str, int, str, str, int, bool, str], noticed: bool) -> None:
    """`noticed`: the time limit was near as well."""
    _, code, state, since, restarts, again, why = case
    job = read_job(f"JobId=7 JobState={state} Restarts={restarts} PreemptTime={since} BatchHost=n1")
    outcome = AgentOutcome("n1", "SUCCEEDED", 0) if not code else bad(code)
    attempt = AttemptEnd(15, number=1, most=2, noticed=noticed, stopped=True)
    verdict = judge([outcome], attempt, job)
    assert (verdict.code, verdict.again) == (code, again)
    assert verdict.reason == (f"{why}; requeue 2 of 2" if again else why)


def test_nodes_that_the_next_attempt_avoids() -> None:
    unfit = judge([bad(95, "n3"), bad(94, "n4"), bad(95, "n3")], AttemptEnd(1, most=2), RUNS)
    assert (unfit.again, unfit.exclude) == (True, ("n3",))
    kept_out = ("n1", "n2.0", "n7", "other.host")  # n2.0: where a node has several agents; n7 is not ours
    out = AgentOutcome("n4", "FAILED", 94, quarantined=kept_out)
    again = judge([bad(95, "n3"), out, out], AttemptEnd(1, most=1, nodes=("n1", "n2", "n3", "n4")), RUNS)
    assert (again.again, again.exclude) == (True, ("n3", "n1", "n2"))


def test_what_slurm_shows() -> None:
    line = "JobId=7 JobName=train JobState=RUNNING Reason=None Restarts=1"
    line += (
        " PreemptEligibleTime=2026-11-16T23:33:21 PreemptTime={} BatchHost=n1 ExcNodeList={} Features=(null)"
    )
    assert read_job(line.format("None", "(null)")) == SlurmJob("RUNNING", False, 1, "n1")
    preempted = read_job(line.format("2026-11-16T23:33:26", "n[3-4]"))
    assert preempted == SlurmJob("RUNNING", True, 1, "n1", ("n3", "n4"))
    assert read_job("slurm_load_jobs error: Unable to contact slurm controller") == SlurmJob()
    states = ["IDLE", "ALLOCATED*", "DOWN", "DOWN*+DRAIN", "IDLE+POWERED_DOWN", "MIXED+NOT_RESPONDING"]
    nodes = "\n".join(f"NodeName=n{n} Arch=x State={state} Reason=a b" for n, state in enumerate(states))
    assert lost_nodes(nodes) == ("n1", "n2", "n3", "n5")


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
