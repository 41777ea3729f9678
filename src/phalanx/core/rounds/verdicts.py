"""The end of a round, or of the job, as this node's group takes it: events of `core.group.events`.

A failure that has ended the job beats everything else: its group ends with it, on every node alike, whatever
restarts are left. A round that ended with one restart more failed on some node; any other end used none.
"""

from __future__ import annotations

from phalanx.core.group.events import BarrierDone, PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant_events import End
from phalanx.core.rounds.records import CLOSED, FORMING, Round


def round_over(held: Round, now: Round, leaving: str, drained: bool) -> RoundOver | PeerFailed | RoundFailed:
    """What follows for a group that holds a round when `now` is the job's; `leaving`: why this node goes."""
    reason = leaving or now.reason
    if drained:
        return RoundFailed("graceful", reason)
    if now.phase == FORMING and now.preempted:
        return RoundOver(held.number, reason, preempted=True)
    ended = job_failure(held.number, now, now.outcome)
    if ended is not None:
        return ended
    if now.phase == CLOSED:
        return RoundFailed("closed", reason, job_failed=False)
    if now.restarts <= held.restarts:
        return RoundOver(held.number, reason)
    _, name, detail = now.cause
    failure = NodeFailure.read(detail)
    return PeerFailed(
        name,
        held.number,
        now.restarts,
        failure.summary,
        delay=failure.delay,
        fresh=failure.anew,
        ranks=failure.ranks,
        step=failure.step,
        signature=failure.signature,
    )


def job_failure(number: int, now: Round, outcome: str) -> PeerFailed | None:
    """The failure of a node that has ended the job, for a group that holds round `number`."""
    _, name, detail = now.cause
    failure = NodeFailure.read(detail)
    if outcome != "failed" and not failure.final:
        return None
    return PeerFailed(name, number, now.restarts, failure.summary, final=True)


def job_over(end: End, told: str) -> PeerFailed | RoundFailed | BarrierDone:
    """What the end of the job means for the group; `told`: the end in words, with what to check."""
    if end.round is not None and end.outcome in ("failed", "closed"):
        failed = job_failure(max(end.held, 0), end.round, end.outcome)
        if failed is not None:
            return failed
    if end.finished and end.outcome in ("succeeded", "left"):
        # `left`: the other nodes took longer than the barrier, and know how it ended there.
        missing = () if end.outcome == "succeeded" else (f"the other nodes ({end.reason})",)
        return BarrierDone(not missing, missing, end.held)
    if end.outcome in ("succeeded", "closed"):
        return RoundFailed("closed", told, job_failed=False)
    if end.outcome == "left":
        return RoundFailed("graceful", end.reason)
    return RoundFailed("timeout" if end.outcome == "timeout" else "error", told)
