"""What `phalanx` returns to whatever started it: one table for people, schedulers and scripts.

The code of a worker that failed is passed on unchanged, so the codes of our own must not be ones that
programs use: not 1 and 2, not sysexits.h's (64 to 78), not Python's 120, not those of shells, `timeout` and
containers (124 to 127), not 128+n for signals, not 255. 93 says that trying again cannot help: a worker
chooses it, or the restart policy for the same failure again. The three after it are infrastructure, where
another attempt may help.
"""

from __future__ import annotations

from phalanx.core.record import Record
from phalanx.errors import (
    NodeUnfit,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    StartError,
    UsageError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SUCCESS = 0
FAILURE = 1
USAGE = 2
DO_NOT_RETRY = 93
NO_MEETING = 94
UNFIT_NODE = 95
HANG = 96
SIGNALED = 128

INFRASTRUCTURE = {
    NO_MEETING: "too few nodes met in time or are left, or they have no store",
    UNFIT_NODE: "a node is unfit",
    HANG: "the job hung",
}
"""Why another attempt may help, perhaps on other machines."""

DONE, FINAL, HERE, ELSEWHERE = "done", "do not retry", "retry here", "retry elsewhere"
PREEMPTED, STOPPED = "preempted: retry", "stopped by a person: do not retry"
TABLE: tuple[tuple[str, str, str], ...] = (
    ("0", "success; of `run`: all workers succeeded", DONE),
    ("the code of a worker", "of `run`: the exit code of the worker that failed first", FINAL),
    (
        str(DO_NOT_RETRY),
        "of `run`: the same failure ended two attempts in a row without progress, or a worker exited with "
        "it, which says 'do not retry': no restart, and the job should not be submitted again",
        FINAL,
    ),
    ("128+n", "of `run`: the worker that failed first was killed by signal n", FINAL),
    ("128+n", "of `run`: signal n, the one in `--preempt-signal`, ended the job", PREEMPTED),
    ("128+n", "signal n stopped the launcher or the command: 130 for Ctrl-C, 143 for SIGTERM", STOPPED),
    (
        str(NO_MEETING),
        "of `run`: the nodes did not meet within `join_timeout`, or too few are left, or the store that they "
        "share was lost, could not be reached, or refused this node (another token, a wrong password)",
        HERE,
    ),
    (
        str(UNFIT_NODE),
        "of `run`: this node is unfit, because its `--check` or `--check-command` failed or it could not "
        "start its workers; of `check`: a machine is unfit",
        ELSEWHERE,
    ),
    (str(HANG), "of `run`: a hang ended the job (`--on-hang fail`, or no restart was left)", HERE),
    (
        "1",
        "of `run`: a failure without an exit code of a worker, other than these; of the others: no such job "
        "or log, a node did not answer, the checks could not tell",
        FINAL,
    ),
    ("2", "wrong usage; nothing was started", FINAL),
)
"""Of all commands: code, meaning, and what a scheduler should do; docs/api.md has the same rows."""


class Retry(Record):
    """Whether a job is worth another attempt, and why."""

    again: bool
    reason: str


def of_error(error: BaseException) -> int:
    """The exit code for an exception that ended the launcher."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, RendezvousTimeoutError | RendezvousConnectionError):
        return NO_MEETING
    if isinstance(error, NodeUnfit | StartError):
        return UNFIT_NODE
    return FAILURE


def retry(code: int, preempted_by: Iterable[int] = ()) -> Retry:
    """For a scheduler: whether a job that ended with this code should run again.

    `preempted_by`: the signals that announce a preemption. Any other code is the program's own, and the
    restarts of `--max-restarts` were its chances.
    """
    if code == SUCCESS:
        return Retry(False, "all workers succeeded")
    if code == DO_NOT_RETRY:
        return Retry(False, f"exit code {code} says 'do not retry'")
    if code in INFRASTRUCTURE:
        return Retry(True, f"{INFRASTRUCTURE[code]} (exit code {code})")
    if code - SIGNALED in preempted_by:
        return Retry(True, f"preempted (exit code {code})")
    return Retry(False, f"exit code {code} is the program's own")
