"""The end of an attempt: judge it, requeue the job if that may help, and keep a record of it.

That is the batch step's task. Its host may be lost while the job goes on (`--no-kill`), and then nobody gives
the other nodes back. So the batch step listens on a port, and an agent whose job is over connects to it. If
that fails, and Slurm has lost the host as well, the agent ends the job in its place. It asks Slurm because
its own network may be what has failed: then the batch step is alive, and decides.
"""

from __future__ import annotations

import signal
import socket
import time

from phalanx.core.exit_codes import UNFIT_NODE
from phalanx.job.environment import BATCH_STEP
from phalanx.job.slurm_host_list import format_host_list, parse_host_list
from phalanx.platforms.outcomes import read_outcomes
from phalanx.platforms.slurm.controller import find_lost, leave_request, request, show_job
from phalanx.platforms.slurm.job_record import JobRecord, job_key, records_directory
from phalanx.platforms.slurm.requeue import AttemptEnd, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.platforms.outcomes import AgentOutcome
    from phalanx.platforms.slurm.requeue import RequeueVerdict, SlurmJob

_BACKLOG = 4096  # agents that end at the same time
_CONNECT = 5.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # before Slurm kills a step
_PAUSE = 5.0  # Slurm takes up to SlurmdTimeout to find out that a host is lost


class SlurmAttempt:
    """One attempt of a job of Slurm, as its environment describes it."""

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._say = say
        self.job = environ["SLURM_JOB_ID"]
        self.number = int(environ.get("SLURM_RESTART_COUNT") or 0)
        self.record = JobRecord(records_directory(environ), job_key(environ))
        try:
            self._nodes = parse_host_list(environ.get("SLURM_JOB_NODELIST", ""))
        except ValueError:
            self._nodes = []

    def holds(self, now: SlurmJob) -> bool:
        """Whether the nodes are still those of this attempt."""
        return now.runs and now.restarts <= self.number

    def end(self, outcomes: str, attempt: AttemptEnd) -> RequeueVerdict:
        """Judge the attempt by the outcomes in a directory, requeue the job if need be, and keep a record."""
        now = show_job(self.job)
        lost = find_lost(self._nodes) if now.restarts > self.number else ()
        attempt = attempt.replace(number=self.number, nodes=tuple(self._nodes), lost=lost)
        verdict = judge(read_outcomes(outcomes) if outcomes else [], attempt, now)
        if verdict.again:
            problem = request("scontrol", "requeue", self.job)
            if problem:
                verdict = verdict.replace(again=False, reason=f"{verdict.reason}, which failed: {problem}")
        self._say(("" if verdict.again or verdict.code == 0 else "not requeued: ") + verdict.reason)
        if outcomes:
            try:
                self.record.add_attempt({"attempt": self.number, "ended": time.time(), **verdict.as_dict()})
            except OSError:
                pass  # status knows less
        if verdict.again and verdict.exclude:
            # Last: only a job that is in the queue can be changed. After the loss of a node, that is some
            # seconds after the end of this step, for which Slurm holds the request: the step must end now.
            hosts = format_host_list([*now.excluded, *verdict.exclude])
            refused = leave_request("scontrol", "update", f"JobId={self.job}", f"ExcNodeList={hosts}")
            if refused:
                self._say(f"the next attempt may get {' '.join(verdict.exclude)} again: {refused}")
        return verdict


class BatchListener:
    """The port of the batch step: whoever can connect to it knows that the batch step is alive."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def drain(self) -> None:
        """Take in the connections that were made, so that there is room for more."""
        try:
            while True:
                self._socket.accept()[0].close()
        except OSError:
            pass  # there is none


def batch_place(environ: Mapping[str, str], port: int, most: int) -> dict[str, str]:
    """The variable that agents find the batch step by; `most`: how often it may requeue the job."""
    return {BATCH_STEP: f"{environ.get('SLURMD_NODENAME', '')} {port} {most}"}


def stand_in(
    directory: str, outcome: AgentOutcome, environ: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """At the end of an agent: end the job, if the host of its batch step is lost."""
    place = environ.get(BATCH_STEP, "").split(" ")
    if len(place) != 3 or outcome.outcome == "LEFT" or outcome.code == UNFIT_NODE or outcome.refused:
        return  # not a submitted job; or the other nodes go on
    host, port, most = place
    here = SlurmAttempt(environ, say)
    told = False
    while not _answers(host, int(port)):
        now = show_job(here.job)
        if not here.holds(now):
            return  # Slurm, or another agent, has ended it
        if now.state and host in find_lost([host]):
            say(f"the host of the batch step, {host}, is lost; this node ends the job")
            # The requeue ends this node's step, too: not before what was decided is written down.
            before = [signal.signal(number, signal.SIG_IGN) for number in _ENDING]
            try:
                verdict = here.end(directory, AttemptEnd(outcome.code, most=int(most)))
                if not verdict.again and here.holds(show_job(here.job)):
                    request("scancel", "--state=RUNNING", here.job)
            finally:
                for number, handler in zip(_ENDING, before, strict=True):
                    signal.signal(number, handler)
            return
        if not told:
            told = True
            say(f"the batch step on {host} does not answer; waiting for it, or until Slurm has lost {host}")
        time.sleep(_PAUSE)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT).close()
    except OSError:
        return False
    return True
