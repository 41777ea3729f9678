"""Whether a job of Slurm that has ended runs again: pure, from the ends of its agents.

srun returns the highest code of its tasks: after a lost node that is the code of the agent that was killed,
although the job went on with a spare and succeeded. So the agents leave their outcomes in files, and srun's
code counts only where there are none.
"""

from __future__ import annotations

from phalanx.core.exit_codes import SUCCESS, UNFIT_NODE, retry
from phalanx.core.record import Record
from phalanx.integrations.outcomes import job_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.integrations.outcomes import AgentOutcome


class RequeueVerdict(Record):
    """The job's own exit code, whether it goes back into the queue, why, and which nodes it avoids then."""

    code: int
    again: bool
    reason: str
    exclude: tuple[str, ...] = ()


def judge(
    outcomes: Sequence[AgentOutcome],
    of_srun: int,
    *,
    preempt_signal: int,
    cancelled: bool = False,
    attempt: int = 0,
    most: int = 0,
    nodes: Sequence[str] = (),
) -> RequeueVerdict:
    """The verdict on an attempt; `attempt`: how often the job was requeued before, `most`: how often it may.

    `cancelled`: somebody, or Slurm itself, has ended the job; if it is to run again, Slurm sees to that.
    `nodes`: those of the allocation. The next attempt avoids the nodes that are unfit, or quarantined.
    """
    code = job_code(outcomes, of_srun, preempt_signal)
    if cancelled and code != SUCCESS:
        return RequeueVerdict(code, False, "the job was cancelled")
    advice = retry(code, (preempt_signal,) if preempt_signal else ())
    if not advice.again:
        return RequeueVerdict(code, False, advice.reason)
    if attempt >= most:
        times = "once" if attempt == 1 else f"{attempt} times"
        used = f"; it was requeued {times} (--requeues {most})" if attempt else "; --requeues 0"
        return RequeueVerdict(code, False, advice.reason + used)
    avoided = [one.node for one in outcomes if one.code == UNFIT_NODE and one.node]
    avoided += [node for one in outcomes for host in one.quarantined if (node := _node(host, nodes))]
    reason = f"{advice.reason}; requeue {attempt + 1} of {most}"
    return RequeueVerdict(code, True, reason, tuple(dict.fromkeys(avoided)))


def _node(host: str, nodes: Sequence[str]) -> str:
    """The node of Slurm that a job's name for a host means; empty: none. `n1.0` is the first task of n1."""
    return next((name for name in (host, host.rpartition(".")[0]) if name in nodes), "")
