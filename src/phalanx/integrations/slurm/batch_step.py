"""The batch step of a submitted job: runs srun, passes Slurm's notice on, requeues the job if that may help.

All signals are blocked and taken one by one, so that none is lost between two lines, and so that the commands
which requeue the job outlive the SIGTERM that Slurm sends for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from phalanx.core.exit_codes import SIGNALED
from phalanx.environment import OUTCOMES, variables
from phalanx.integrations.outcomes import read_outcomes
from phalanx.integrations.slurm.batch_script import NOTICE_SIGNAL
from phalanx.integrations.slurm.host_list import format_host_list, parse_host_list
from phalanx.integrations.slurm.job_record import JobRecord, job_key, records_directory
from phalanx.integrations.slurm.requeue import judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.integrations.outcomes import AgentOutcome

_NOTICE = signal.Signals[f"SIG{NOTICE_SIGNAL}"]
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TAKEN = {signal.SIGCHLD, _NOTICE, *_STOPS}
_PATIENCE = 60.0  # for a command of Slurm
_LOOK = 5.0  # seconds between two looks at the outcomes, which may be on a network file system


class StepEnd:
    """How srun ended, and whether the job was asked to end meanwhile."""

    def __init__(self, code: int, cancelled: bool) -> None:
        self.code = code
        self.cancelled = cancelled


def run_batch(words: Sequence[str], most: int, wait: float, say: Callable[[str], None]) -> int:
    """Run the step to its end, judge it, and requeue the job if need be; the exit code.

    `wait`: seconds from the first agent that ended the job to the end of srun, which else waits forever for
    the tasks of a node that was lost and came back."""
    environ = variables()
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would leave no status
    attempt = int(environ.get("SLURM_RESTART_COUNT") or 0)
    record = JobRecord(records_directory(environ), job_key(environ))
    outcomes = ""
    try:
        outcomes = record.outcomes(attempt)
    except OSError as error:
        say(f"{record.path} cannot be written ({error.strerror}): only srun's code tells how it ended")
    began = time.time()
    end = run_step(words, {**environ, OUTCOMES: outcomes}, outcomes, wait, say)
    verdict = judge(
        read_outcomes(outcomes) if outcomes else [],
        end.code,
        preempt_signal=_NOTICE,
        cancelled=end.cancelled,
        attempt=attempt,
        most=most,
        nodes=_nodes(environ),
    )
    job = environ["SLURM_JOB_ID"]
    excluded = _asked_to_exclude(job) if verdict.exclude else []
    if verdict.again:
        problem = _command("scontrol", "requeue", job)
        if problem:
            verdict = verdict.replace(again=False, reason=f"{verdict.reason}, which failed: {problem}")
    say(("" if verdict.again or verdict.code == 0 else "not requeued: ") + verdict.reason)
    if outcomes:
        ended = {"began": began, "ended": time.time(), "code": verdict.code, "again": verdict.again}
        try:
            record.add_attempt(
                {"attempt": attempt, **ended, "reason": verdict.reason, "exclude": list(verdict.exclude)}
            )
        except OSError:
            pass  # status knows less
    if verdict.again and verdict.exclude:
        # Last: only a job that is in the queue can be changed, and Slurm may take until the end of this step,
        # to which it now gives some seconds (KillWait).
        hosts = format_host_list([*excluded, *verdict.exclude])
        problem = _command("scontrol", "update", f"JobId={job}", f"ExcNodeList={hosts}")
        if problem:
            say(f"the next attempt may get {' '.join(verdict.exclude)} again: {problem}")
    return verdict.code


def _nodes(environ: Mapping[str, str]) -> list[str]:
    try:
        return parse_host_list(environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return []


def run_step(
    words: Sequence[str], environ: Mapping[str, str], outcomes: str, wait: float, say: Callable[[str], None]
) -> StepEnd:
    """Start srun, pass signals on, and wait for its end, or for the job's."""
    child = subprocess.Popen(words, env=dict(environ), preexec_fn=_unblock)
    cancelled = False
    over_at: float | None = None
    while True:
        info = signal.sigtimedwait(_TAKEN, _LOOK)
        if over_at is None and outcomes and any(_ends_job(one) for one in read_outcomes(outcomes)):
            over_at = time.monotonic() + wait
        if over_at is not None and time.monotonic() >= over_at:
            say(f"srun still waits {wait:g} s after the end of the job, perhaps for a lost node; stopped")
            child.kill()  # Slurm ends the step with it
            over_at = float("inf")
        if info is None:
            continue
        got = signal.Signals(info.si_signo)
        if got == signal.SIGCHLD:
            code = child.poll()
            if code is not None:
                return StepEnd(128 - code if code < 0 else code, cancelled)
            continue
        if got == _NOTICE:
            say("notice from Slurm: the job is preempted, workers save their state")
        else:
            cancelled = True
        child.send_signal(got)


def _ends_job(one: AgentOutcome) -> bool:
    return one.outcome in ("SUCCEEDED", "FAILED") or one.code == SIGNALED + _NOTICE


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)


def _asked_to_exclude(job: str) -> list[str]:
    done = subprocess.run(
        ["scontrol", "show", "job", "-o", job], capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    found = [word.partition("=")[2] for word in done.stdout.split() if word.startswith("ExcNodeList=")]
    try:
        return parse_host_list(found[0]) if found and found[0] != "(null)" else []
    except ValueError:
        return []


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{os.path.basename(words[0])}: {error}"
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
