"""The one table of how a job ends: outcome, exit code and line."""

from __future__ import annotations

import signal

import pytest

from phalanx.core.group.events import Finish, Outcome, WorkerState
from phalanx.core.job_outcome import JobOutcome, failure_of, is_foreign, of_error, of_run
from phalanx.errors import (
    NodeUnfit,
    PhalanxError,
    RendezvousTimeoutError,
    SignalException,
    StartError,
    UsageError,
)

TERM = SignalException("process 1 got SIGTERM", signal.SIGTERM)


def finish(outcome: Outcome, message: str = "", code: int = 1) -> Finish:
    return Finish(outcome, WorkerState.STOPPED, message, code=code)


@pytest.mark.parametrize(
    ("error", "preempt", "outcome", "foreign"),
    [
        (TERM, 0, JobOutcome("STOPPED", 143, "stopped by SIGTERM after 3 s"), False),
        (TERM, signal.SIGTERM, JobOutcome("STOPPED", 143, "preempted by SIGTERM after 3 s"), False),
        (UsageError("--nnodes x"), 0, JobOutcome("FAILED", 2, "--nnodes x"), True),
        (RendezvousTimeoutError("alone"), 0, JobOutcome("FAILED", 94, "alone"), False),
        (StartError("no such file"), 0, JobOutcome("FAILED", 95, "no such file"), False),
        (NodeUnfit("h is unfit", None), 0, JobOutcome("FAILED", 95, "h is unfit"), False),
        (PhalanxError("else"), 0, JobOutcome("FAILED", 1, "else"), False),
        (KeyError("x"), 0, JobOutcome("FAILED", 1, "KeyError: 'x'"), True),
        (KeyboardInterrupt(), 0, JobOutcome("FAILED", 1, "KeyboardInterrupt: "), True),
    ],
)
def test_a_run_that_an_exception_ends(
    error: BaseException, preempt: int, outcome: JobOutcome, foreign: bool
) -> None:
    assert of_error(error, preempt, " after 3 s") == outcome
    assert is_foreign(error) is foreign


@pytest.mark.parametrize(
    ("end", "restarts", "failure", "outcome"),
    [
        (Outcome.SUCCEEDED, 0, None, JobOutcome("SUCCEEDED", 0, "all workers succeeded in 3 s")),
        (Outcome.SUCCEEDED, 1, None, JobOutcome("SUCCEEDED", 0, "all workers succeeded in 3 s, 1 restart")),
        (Outcome.SUCCEEDED, 2, None, JobOutcome("SUCCEEDED", 0, "all workers succeeded in 3 s, 2 restarts")),
        (Outcome.LEFT, 0, None, JobOutcome("LEFT", 0, "why in 3 s")),
        (Outcome.CLOSED, 0, None, JobOutcome("LEFT", 0, "why in 3 s")),
        (Outcome.FAILED, 3, ("the report", 7), JobOutcome("FAILED", 7, "the report")),
    ],
)
def test_a_run_that_comes_to_its_own_end(
    end: Outcome, restarts: int, failure: tuple[str, int] | None, outcome: JobOutcome
) -> None:
    message = "all workers succeeded" if end is Outcome.SUCCEEDED else "why"
    assert of_run(finish(end, message), restarts, failure, " in 3 s") == outcome


def test_what_the_exit_barrier_missed_is_in_the_line() -> None:
    end = finish(Outcome.SUCCEEDED, "all workers succeeded; the exit barrier ended without word from b")
    line = "all workers succeeded; the exit barrier ended without word from b"
    assert of_run(end, 0).why == line


def test_the_report_of_all_nodes_comes_first() -> None:
    lost, own, hang = ("the job's", 9), ("own", 3), finish(Outcome.FAILED, "hang", 96)
    assert failure_of(lost, own, "", hang) == lost
    assert failure_of(None, own, "", hang) == own
    assert failure_of(None, None, "stacks", hang) == ("stacks", 96)
    assert failure_of(None, None, "", None) == ("", 1)
    again = finish(Outcome.FAILED, "the same failure", 93)
    assert failure_of(None, own, "", again) == ("own", 93)
    assert failure_of(lost, own, "", again) == lost
