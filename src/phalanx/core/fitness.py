"""Whether a node is fit for a job, from what its checks have found.

    unfit > could not tell > warn > fit

The worst finding decides. A finding that could not be made counts only if the check is `needed`: that the
kernel log cannot be read in a container says nothing about the machine, that a GPU did not answer does.
"""

from __future__ import annotations

from phalanx.core.quarantine import Offence
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIT, WARN, UNFIT, UNKNOWN = "fit", "warn", "unfit", "could not tell"
EXIT_CODES = {FIT: 0, WARN: 10, UNFIT: 20, UNKNOWN: 30}
"""Of `phalanx check`."""
_WORST_LAST = (FIT, WARN, UNKNOWN, UNFIT)
_MOST_REASONS = 3


class CheckFinding(Record):
    """What one check has found: the value, how fit that is, and what to do about it."""

    check: str
    value: str
    fitness: str = FIT
    advice: str = ""
    needed: bool = True
    """False: that it could not be found out does not count."""


class NodeVerdict(Record):
    """Whether a node is fit, and what decided it, in words (empty: nothing is wrong)."""

    node: str
    fitness: str
    reason: str = ""


def worst(fitness: Iterable[str]) -> str:
    """The one that decides; fit if there is none."""
    return max(fitness, key=_WORST_LAST.index, default=FIT)


def judge_node(node: str, findings: Sequence[CheckFinding]) -> NodeVerdict:
    """The verdict on a node from the findings on it."""
    counted = [one for one in findings if one.needed or one.fitness != UNKNOWN]
    fitness = worst(one.fitness for one in counted)
    if fitness == FIT:
        return NodeVerdict(node, FIT)
    deciding = [f"{one.check}: {one.value}" for one in counted if one.fitness == fitness]
    more = len(deciding) - _MOST_REASONS
    reason = "; ".join(deciding[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
    return NodeVerdict(node, fitness, reason)


def join_verdicts(verdicts: Sequence[NodeVerdict]) -> NodeVerdict:
    """Several verdicts on one node as one: the worst, with the reasons of all that are as bad."""
    fitness = worst(one.fitness for one in verdicts)
    reasons = [one.reason for one in verdicts if one.fitness == fitness and one.reason]
    return NodeVerdict(verdicts[0].node, fitness, "; ".join(dict.fromkeys(reasons)))


def offence_of(verdict: NodeVerdict) -> Offence | None:
    """What an unfit node is quarantined for; None: nothing that keeps a node out."""
    if verdict.fitness != UNFIT:
        return None
    return Offence(verdict.node, "check", f"unfit: {verdict.reason}")
