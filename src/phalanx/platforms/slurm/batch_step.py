"""The batch step of a submitted job: runs srun, passes Slurm's notice on, requeues the job if that may help.

All signals are blocked and taken one by one, so that none is lost between two lines, and so that the commands
which requeue the job outlive the SIGTERM that Slurm sends for it.
"""

from __future__ import annotations

import signal
import subprocess
import time

from phalanx.core.exit_codes import NO_MEETING, SIGNALED
from phalanx.job.environment import OUTCOMES, variables
from phalanx.job.slurm_host_list import format_host_list
from phalanx.platforms.outcomes import read_outcomes
from phalanx.platforms.slurm.batch_script import NOTICE_SIGNAL
from phalanx.platforms.slurm.controller import request
from phalanx.platforms.slurm.job_end import BatchListener, SlurmAttempt, batch_place
from phalanx.platforms.slurm.requeue import PREEMPT_SIGNAL, AttemptEnd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.platforms.outcomes import AgentOutcome

_NOTICE = signal.Signals[f"SIG{NOTICE_SIGNAL}"]
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TAKEN = {signal.SIGCHLD, _NOTICE, *_STOPS}
_LOOK = 5.0  # seconds between two looks at the outcomes, which may be on a network file system


def run_batch(words: Sequence[str], most: int, missing: int, wait: float, say: Callable[[str], None]) -> int:
    """Run the step to its end, judge it, and requeue the job if need be; the exit code.

    `most`: requeues; `missing`: agents that the job can do without; `wait`: seconds from the first agent that
    ended the job to the end of srun, which else waits forever for the tasks of a node that was lost and came
    back."""
    environ = variables()
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would leave no status
    here = SlurmAttempt(environ, say)
    outcomes = ""
    try:
        outcomes = here.record.outcomes(here.number)
    except OSError as error:
        say(f"{here.record.path} cannot be written ({error.strerror}): only srun's code tells how it ended")
    listener = BatchListener()
    place = batch_place(environ, listener.port, most)
    step = _Step(here.job, environ.get("SLURMD_NODENAME", ""), outcomes, missing, wait, say)
    attempt = step.run(words, {**environ, **place, OUTCOMES: outcomes}, listener)
    return here.end(outcomes, attempt.replace(most=most)).code


class _Step:
    """srun, and what is known of its end."""

    def __init__(
        self, job: str, node: str, outcomes: str, missing: int, wait: float, say: Callable[[str], None]
    ) -> None:
        self._job, self._node, self._outcomes, self._say = job, node, outcomes, say
        self._missing, self._wait = missing, wait
        self._over_at: float | None = None
        self._unsent = False  # a notice that Slurm has not taken

    def run(self, words: Sequence[str], environ: Mapping[str, str], listener: BatchListener) -> AttemptEnd:
        """Start srun, pass the notice and signals on, and wait for its end, or for the job's."""
        child = subprocess.Popen(words, env=dict(environ), preexec_fn=_unblock)
        noticed = stopped = False
        while True:
            info = signal.sigtimedwait(_TAKEN, _LOOK)
            listener.drain()
            got = signal.Signals(info.si_signo) if info is not None else None
            if got == signal.SIGCHLD and (code := child.poll()) is not None:
                return AttemptEnd(SIGNALED - code if code < 0 else code, noticed=noticed, stopped=stopped)
            self._end_late(child)
            if got == _NOTICE:
                self._say("notice from Slurm: the job is preempted, workers save their state")
                noticed = self._unsent = True
            elif got is not None and got != signal.SIGCHLD:
                stopped = True
                child.send_signal(got)
            if self._unsent:
                # srun would not pass a SIGTERM on, but kill its tasks.
                problem = request("scancel", f"--signal={PREEMPT_SIGNAL.name[3:]}", self._job)
                self._unsent = bool(problem)
                if problem:
                    self._say(f"the notice has not reached the workers, trying again: {problem}")

    def _end_late(self, child: subprocess.Popen[bytes]) -> None:
        """End srun, if it waits for longer than it may after the end of the job."""
        if self._over_at is None and self._outcomes:
            known = read_outcomes(self._outcomes)
            refused = [one for one in known if one.refused]
            if len(refused) > self._missing:
                hosts = format_host_list([one.node for one in refused])
                self._say(f"too few agents are left: {hosts} refused the command line; stopped")
                child.terminate()  # no worker runs: srun kills its tasks
            if len(refused) > self._missing or any(map(self._ends_job, known)):
                self._over_at = time.monotonic() + self._wait
        if self._over_at is not None and time.monotonic() >= self._over_at:
            late = f"srun still waits {self._wait:g} s after the end of the job"
            self._say(f"{late}, perhaps for a lost node; stopped")
            child.kill()  # Slurm ends the step with it
            self._over_at = float("inf")

    def _ends_job(self, one: AgentOutcome) -> bool:
        """Whether the job is over with this agent: here is the store, without which no node goes on."""
        preempted, storeless = one.code == SIGNALED + PREEMPT_SIGNAL, one.code == NO_MEETING
        return one.ends_job or preempted or (storeless and one.node == self._node)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
