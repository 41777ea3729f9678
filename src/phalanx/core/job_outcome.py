"""How a job ended on one node: its outcome, exit code and line. They are decided here and nowhere else.

| what ended it | outcome | exit code |
|---|---|---|
| a signal | STOPPED | 128+n |
| the same failure twice | FAILED | 93 |
| workers, a hang, another node | FAILED | of the nodes' common report, else of the workers, or the loop |
| wrong usage | FAILED | 2 |
| no meeting, an unfit node, a start that failed, another error of ours | FAILED | `exit_codes.of_error` |
| any other exception | FAILED | 1 |
| this node left, or the job was over when it came | LEFT | 0 |
| nothing: all workers succeeded | SUCCEEDED | 0 |
"""

from __future__ import annotations

from phalanx.core import exit_codes
from phalanx.core.record import Record
from phalanx.errors import PhalanxError, SignalException, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.group.events import Finish


class JobOutcome(Record):
    """The end of a job, in a word, a number and a text."""

    word: str
    code: int
    why: str


def of_error(error: BaseException, preempt_signal: int = 0, took: str = "") -> JobOutcome:
    """Of a run that an exception ended; `took`: how long it ran, in words."""
    if isinstance(error, SignalException):
        verb = "preempted" if error.sigval == preempt_signal else "stopped"
        line = f"{verb} by {error.sigval.name}{took}"
        return JobOutcome("STOPPED", exit_codes.SIGNALED + error.sigval, line)
    if isinstance(error, UsageError) or not is_foreign(error):
        return JobOutcome("FAILED", exit_codes.of_error(error), str(error))
    return JobOutcome("FAILED", exit_codes.FAILURE, f"{type(error).__name__}: {error}")


def is_foreign(error: BaseException) -> bool:
    """Whether it is wrong usage, or no error of ours: the caller of the command shows it, not the report."""
    return not isinstance(error, PhalanxError) or isinstance(error, ValueError)


def of_run(
    finish: Finish | None, restarts: int, failure: tuple[str, int] | None = None, took: str = ""
) -> JobOutcome:
    """Of a run that came to its own end; `failure`: report and exit code, if it failed."""
    if failure is not None:
        return JobOutcome("FAILED", failure[1], failure[0])
    if finish is not None and finish.outcome in ("CLOSED", "LEFT"):  # the job goes on, or was over before
        return JobOutcome("LEFT", exit_codes.SUCCESS, f"{finish.message}{took}")
    after = f", {restarts} restart{'s' * (restarts != 1)}" if restarts else ""
    but = finish.message.removeprefix("all workers succeeded") if finish is not None else ""
    return JobOutcome("SUCCEEDED", exit_codes.SUCCESS, f"all workers succeeded{took}{after}{but}")


def failure_of(
    job: tuple[str, int] | None, workers: tuple[str, int] | None, hang: str, finish: Finish | None
) -> tuple[str, int]:
    """Report and exit code of a failure: the one of all nodes, that of the workers here, or of a hang."""
    if job is not None:
        return job
    code = exit_codes.FAILURE if finish is None else finish.code
    report, own = workers or (hang, code)
    return report, code if code == exit_codes.DO_NOT_RETRY else own
