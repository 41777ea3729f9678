"""Which node is slow, from two rounds of measurements between pairs.

A slow pair does not say which of its two nodes is slow. So every node is measured twice, with another
partner: the second time, the members of the slowest pairs meet those of the fastest. A node is *unfit* if it
was slow both times, and *fit* if it was fast once: then it was its partner. Two rounds are enough for any
number of nodes, as long as the slow ones are fewer than the others.

With an odd number, one node takes part in two pairs of a round, one after the other.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NodeGroup = tuple[int, ...]
_SOME = 8  # nodes to choose a partner from; a node has met at most two
SLOW = 0.6
"""Of the upper quartile of a round: below it, a pair is slow."""


class PairVerdict(Record):
    """What two rounds say of one node: fit, unfit or unknown."""

    node: int
    fitness: str
    reason: str


def first_round(nodes: Sequence[int]) -> tuple[NodeGroup, ...]:
    """Neighbours meet."""
    ordered = sorted(nodes)
    if len(ordered) < 2:
        return ()
    groups = list(zip(ordered[::2], ordered[1::2], strict=False))
    if len(ordered) % 2:
        groups.append((ordered[0], ordered[-1]))
    return tuple(groups)


def second_round(first: Mapping[NodeGroup, float | None]) -> tuple[NodeGroup, ...]:
    """The slowest nodes meet the fastest, and never the same again; None: a pair could not measure."""
    met: dict[int, set[int]] = {}
    for group in first:
        for node in group:
            met.setdefault(node, set()).update(group)
    groups = sorted(first, key=lambda group: (first[group] is not None, first[group] or 0.0, group))
    slowest = list(dict.fromkeys(node for group in groups for node in group))
    fastest = slowest[::-1]
    found: list[NodeGroup] = []
    paired: set[int] = set()
    start = 0  # the first of the fastest that may be free
    for node in slowest:
        if node in paired:
            continue
        while start < len(fastest) and fastest[start] in paired:
            start += 1
        unmet = [other for other in fastest[start : start + _SOME] if other not in met[node]]
        free = [other for other in unmet if other not in paired]
        # The last one may be left with nodes that it has met: then one that has its pair meets it, too.
        partners = free or [other for other in fastest[:_SOME] if other not in met[node]]
        if partners:
            found.append((node, partners[0]))
            paired |= {node, partners[0]}
    return tuple(found)


def judge_pairs(
    first: Mapping[NodeGroup, float | None], second: Mapping[NodeGroup, float | None]
) -> tuple[PairVerdict, ...]:
    """The verdict on every node; results are rates (more is better)."""
    met: dict[int, list[tuple[str, bool]]] = {}  # node -> its measurements in words, and whether slow
    for results in (first, second):
        slow = _slow_groups(results)
        for group, rate in results.items():
            for node in group:
                partners = " and ".join(str(other) for other in group if other != node)
                met.setdefault(node, []).append((f"{_rate(rate)} with {partners}", group in slow))
    return tuple(_judge_node(node, met[node]) for node in sorted(met))


def _judge_node(node: int, met: list[tuple[str, bool]]) -> PairVerdict:
    rates = ", ".join(words for words, _ in met)
    if not all(slow for _, slow in met):
        return PairVerdict(node, "fit", rates)
    if len(met) < 2:
        return PairVerdict(node, "unknown", f"slow, but measured only once: {rates}")
    return PairVerdict(node, "unfit", f"slow with both partners: {rates}")


def _rate(rate: float | None) -> str:
    return "no result" if rate is None else f"{rate:.3g}"


def _slow_groups(results: Mapping[NodeGroup, float | None]) -> set[NodeGroup]:
    rates = sorted(rate for rate in results.values() if rate is not None)
    usual = rates[3 * len(rates) // 4] if rates else 0.0  # a bad node of five is in two of three pairs
    return {group for group, rate in results.items() if rate is None or rate < SLOW * usual}
