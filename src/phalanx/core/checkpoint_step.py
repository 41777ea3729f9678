"""At which step all ranks of a preempted job save, so that a collective save finds all of them.

The ranks run on while the step is agreed. Each reports the last step for which it has called
`should_checkpoint(step)`, and its pace. The step is ahead of all of them by more time than the result needs
to reach every worker. No rank waits; one that had passed the step when it learned of it saves at its next
call, and its node reports that.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SLACK = 1.0
"""Seconds for the result to reach all workers, besides twice the time that the reports took."""
LEAD = 2
"""Steps, however slow they are: a rank may be about to begin the next one."""


class RankPace(Record):
    """What one rank has asked for last."""

    step: int
    pace: float  # seconds per step; 0.0: not known yet


def checkpoint_step(asked: Iterable[RankPace], took: float) -> int:
    """The step; 0 (the first call) if no rank has asked yet. `took`: seconds since the first report."""
    known = list(asked)
    if not known:
        return 0
    pace = min((rank.pace for rank in known if rank.pace > 0), default=0.0)
    ahead = int((SLACK + 2 * took) / pace) if pace else 0
    return max(rank.step for rank in known) + LEAD + ahead
