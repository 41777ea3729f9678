"""Whether a job of Slurm that has ended runs again: pure, from the ends of its agents and Slurm's view of it.

srun returns the highest code of its tasks: after a lost node that is the code of the agent that was killed,
although the job went on with a spare and succeeded. So the agents leave their outcomes in files, and srun's
code counts only where there are none.

In a submitted job SIGTERM is a notice: Slurm sends it to all processes of a job that it preempts or that is
cancelled, and the batch step sends it before the time limit. Slurm's record of the job says which:

| the job is | PreemptTime | requeues counted by Slurm | what follows |
|---|---|---|---|
| running | none | as before | the exit code decides; SIGTERM's only if the batch step passed a notice on |
| running | set | as before | preempted, with GraceTime left: requeued, unless the code is 0 or 93 |
| ending | any | one more | Slurm has requeued it: preempted, or a node of it was lost |
| ending | set | as before | preempted, and Slurm ends it (PreemptMode=CANCEL) |
| ending | none | as before | cancelled |
"""

from __future__ import annotations

import signal

from phalanx.core.exit_codes import DO_NOT_RETRY, SIGNALED, SUCCESS, UNFIT_NODE, Retry, retry
from phalanx.core.record import Record
from phalanx.job.slurm_host_list import parse_host_list
from phalanx.platforms.outcomes import job_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.platforms.outcomes import AgentOutcome

PREEMPT_SIGNAL = signal.SIGTERM


class SlurmJob(Record):
    """A job as `scontrol show job` has it; the defaults are those of a job that Slurm does not show."""

    state: str = ""
    preempted: bool = False
    restarts: int = 0
    batch_host: str = ""
    excluded: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the job still has its nodes, and Slurm does not take them away."""
        return self.state in ("", "RUNNING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED")


def read_job(text: str) -> SlurmJob:
    """A job from the output of `scontrol show job -o`."""
    fields = dict(word.partition("=")[::2] for word in text.split())
    restarts, excluded = fields.get("Restarts", ""), fields.get("ExcNodeList", "(null)")
    try:
        hosts = parse_host_list(excluded) if excluded != "(null)" else []
    except ValueError:
        hosts = []
    return SlurmJob(
        fields.get("JobState", ""),
        fields.get("PreemptTime", "None") != "None",
        int(restarts) if restarts.isdecimal() else 0,
        fields.get("BatchHost", ""),
        tuple(hosts),
    )


def lost_nodes(text: str) -> tuple[str, ...]:
    """The nodes that are down, or do not respond, in the output of `scontrol show node -o`."""
    found = []
    for line in text.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        state = fields.get("State", "")
        if "*" in state or "DOWN" in state.split("+") or "NOT_RESPONDING" in state:
            found.append(fields.get("NodeName", ""))
    return tuple(found)


class AttemptEnd(Record):
    """An attempt that is over. `number`: how often the job was requeued before; `most`: how often it may be.

    `noticed`: the batch step has announced the time limit; `stopped`: it was asked to end itself. `nodes`:
    those of the allocation; `lost`: those of them that Slurm has lost."""

    of_srun: int
    number: int = 0
    most: int = 0
    noticed: bool = False
    stopped: bool = False
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class RequeueVerdict(Record):
    """The job's own exit code, whether it goes back into the queue, why, and which nodes it avoids then."""

    code: int
    again: bool
    reason: str
    exclude: tuple[str, ...] = ()


def judge(outcomes: Sequence[AgentOutcome], attempt: AttemptEnd, job: SlurmJob) -> RequeueVerdict:
    """The verdict on an attempt. The next one avoids the nodes that are unfit, or quarantined."""
    code = job_code(outcomes, attempt.of_srun, PREEMPT_SIGNAL)
    advice = _advice(code, attempt, job)
    if not advice.again:
        return RequeueVerdict(code, False, advice.reason)
    if attempt.number >= attempt.most:
        times = "once" if attempt.number == 1 else f"{attempt.number} times"
        used = f"it was requeued {times} (--requeues {attempt.most})" if attempt.number else "--requeues 0"
        return RequeueVerdict(code, False, f"{advice.reason}; {used}")
    avoided = [one.node for one in outcomes if one.code == UNFIT_NODE and one.node]
    avoided += [node for one in outcomes for host in one.quarantined if (node := _node(host, attempt.nodes))]
    reason = f"{advice.reason}; requeue {attempt.number + 1} of {attempt.most}"
    return RequeueVerdict(code, True, reason, tuple(dict.fromkeys(avoided)))


def _advice(code: int, attempt: AttemptEnd, job: SlurmJob) -> Retry:
    if code == SUCCESS:
        return retry(code)
    if job.restarts > attempt.number:
        lost = f"lost {' '.join(attempt.lost)}" if attempt.lost else "preempted, or requeued by an operator"
        return Retry(False, f"{lost}; Slurm has put the job back into the queue")
    if not job.runs:
        return Retry(False, "preempted, and Slurm ends the job" if job.preempted else "the job was cancelled")
    if job.preempted:
        return retry(code) if code == DO_NOT_RETRY else Retry(True, f"preempted (exit code {code})")
    if attempt.stopped:
        return Retry(False, "the job was cancelled")
    if code == SIGNALED + PREEMPT_SIGNAL and not attempt.noticed:
        return Retry(False, f"stopped by {PREEMPT_SIGNAL.name}, and not preempted")
    return retry(code, (PREEMPT_SIGNAL,))


def _node(host: str, nodes: Sequence[str]) -> str:
    """The node of Slurm that a job's name for a host means; empty: none. `n1.0` is the first task of n1."""
    return next((name for name in (host, host.rpartition(".")[0]) if name in nodes), "")
