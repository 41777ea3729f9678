"""Whether a node is fit for a job, from what its checks have found.

    unfit > could not tell > warn > fit

The worst finding decides. A finding that could not be made counts only if the check is `needed`: that the
kernel log cannot be read in a container says nothing about the machine, that a GPU did not answer does.
"""

from __future__ import annotations

from phalanx.core.diagnosis.pairing import SLOW, judge_pairs
from phalanx.core.exit_codes import FAILURE, SUCCESS, UNFIT_NODE
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from phalanx.core.diagnosis.pairing import NodeGroup

    PairRates = Mapping[NodeGroup, Mapping[str, float]]

FIT, WARN, UNFIT, UNKNOWN = "fit", "warn", "unfit", "could not tell"
EXIT_CODES = {FIT: SUCCESS, WARN: SUCCESS, UNFIT: UNFIT_NODE, UNKNOWN: FAILURE}
"""Of `phalanx check`."""
_WORST_LAST = (FIT, WARN, UNKNOWN, UNFIT)
_MOST_REASONS = 3
BAD = 0.3
"""Of the usual rate, with both partners: below it a node is unfit, below `pairing.SLOW` it is a warning."""
FAR_APART = 1.0
"""Seconds between clocks that make logs hard to compare."""
_NEGLIGIBLE = 500e-6  # seconds of latency that make no difference to a job
_PAIR_WORDS = {"unfit": UNFIT, "fit": FIT, "unknown": UNKNOWN}


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


def rate_of_latency(seconds: float) -> float:
    """A latency as a rate, in which differences of microseconds do not count."""
    return 1.0 / (seconds + _NEGLIGIBLE)


def judge_network(names: Sequence[str], *rounds: PairRates) -> tuple[NodeVerdict, ...]:
    """The verdict on every node from what pairs of them have measured, in two rounds or three.

    Rates by name: `bandwidth` and the backends' in bytes per second, `latency` as `rate_of_latency`. A pair
    that lacks a rate which others have could not measure it."""
    kinds = dict.fromkeys(kind for results in rounds for rates in results.values() for kind in rates)
    found: dict[int, list[NodeVerdict]] = {node: [NodeVerdict(name, FIT)] for node, name in enumerate(names)}
    for kind in kinds or {"bandwidth": None}:
        for node, one in _judge_kind(kind, names, rounds):
            found[node].append(one)
    return tuple(join_verdicts(verdicts) for verdicts in found.values())


def suspects(names: Sequence[str], *rounds: PairRates) -> tuple[int, ...]:
    """The nodes that deserve another measurement before they are called slow."""
    verdicts = judge_network(names, *rounds)
    return tuple(node for node, one in enumerate(verdicts) if one.fitness in (WARN, UNFIT))


def _judge_kind(
    kind: str, names: Sequence[str], rounds: Sequence[PairRates]
) -> Iterator[tuple[int, NodeVerdict]]:
    rates = [{group: one.get(kind) for group, one in results.items()} for results in rounds]

    def show(rate: float) -> str:
        return show_rate(kind, rate)

    for limit in (BAD, SLOW):
        for one in judge_pairs(*rates, slow=limit, show=show, name=names.__getitem__):
            fitness = WARN if one.fitness == "unfit" and limit == SLOW else _PAIR_WORDS[one.fitness]
            yield one.node, NodeVerdict(names[one.node], fitness, f"{kind}: {one.reason}" * (fitness != FIT))


def judge_clocks(names: Sequence[str], ahead: Mapping[int, tuple[float, float]]) -> tuple[NodeVerdict, ...]:
    """The verdict on every node's wall clock, against the middle one.

    `ahead`: by node, how far its clock can be ahead of one and the same clock, at least and at most. Nothing
    in Phalanx uses the wall clock of another node; people who compare logs do."""
    middle = sorted(ahead.values(), key=sum)[(len(ahead) - 1) // 2] if ahead else (0.0, 0.0)
    found = []
    for node, name in enumerate(names):
        least, most = ahead.get(node, middle)
        least, most = least - middle[1], most - middle[0]
        word = "ahead of" if least > FAR_APART else "behind" if most < -FAR_APART else ""
        about = f"clock: {abs(least + most) / 2:.1f} s {word} the others: set up NTP or chrony"
        found.append(NodeVerdict(name, WARN, about) if word else NodeVerdict(name, FIT))
    return tuple(found)


def plain_rate(kind: str, rate: float) -> float:
    """A rate as it was measured: seconds of latency, bytes per second."""
    return max(0.0, 1.0 / rate - _NEGLIGIBLE) if kind == "latency" else rate


def show_rate(kind: str, rate: float) -> str:
    if kind == "latency":
        return f"{plain_rate(kind, rate) * 1e3:.2f} ms"
    return f"{rate / 1e6:.0f} MB/s" if rate >= 10e6 else f"{rate / 1e6:.2g} MB/s"
