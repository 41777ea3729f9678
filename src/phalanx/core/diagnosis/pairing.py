"""Which node is slow, from two rounds of measurements between pairs.

A slow pair does not say which of its two nodes is slow. So every node is measured twice, with another
partner: the second time, the members of the slowest pairs meet those of the fastest. A node is *unfit* if it
was slow both times, and *fit* if it was fast once: then it was its partner. Two rounds are enough for any
number of nodes, as long as the slow ones are fewer than the others.

Two rounds on a busy machine may be slow by chance. So a suspect gets a third chance, with a node that is
fit, while the others are idle; if it is fast then, it is fit.

With an odd number, one node takes part in two pairs of a round, one after the other. Of three nodes, one is
in both pairs of the first round; so what is usual is taken from both rounds together.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NodeGroup = tuple[int, ...]
_SOME = 8  # nodes to choose a partner from; a node has met at most two
SLOW = 0.6
"""Of the upper quartile: below it, a pair is slow."""


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


def confirming_round(
    suspects: Sequence[int], *rounds: Mapping[NodeGroup, float | None]
) -> tuple[NodeGroup, ...]:
    """Each suspect meets a node that is none, if possible a new one; without a partner left it meets none."""
    met = {frozenset(group) for results in rounds for group in results}
    best: dict[int, float] = {}
    for results in rounds:
        for group, rate in results.items():
            for node in group:
                best[node] = max(rate or 0.0, best.get(node, 0.0))
    free = sorted((node for node in best if node not in suspects), key=lambda node: (-best[node], node))
    found: list[NodeGroup] = []
    for node in suspects:
        partners = [other for other in free if frozenset((node, other)) not in met] or free
        if partners:
            found.append((node, partners[0]))
            free.remove(partners[0])
    return tuple(found)


def overall(results: Mapping[NodeGroup, Mapping[str, float]]) -> dict[NodeGroup, float | None]:
    """One rate for each pair from several: the worst of them, each as a part of the best that any pair had.

    None: a pair lacks a rate that another one has."""
    best: dict[str, float] = {}
    for rates in results.values():
        for name, rate in rates.items():
            best[name] = max(rate, best.get(name, 0.0))
    return {
        group: min((rates[name] / (top or 1.0) for name, top in best.items()), default=None)
        if rates.keys() == best.keys()
        else None
        for group, rates in results.items()
    }


def judge_pairs(
    *rounds: Mapping[NodeGroup, float | None],
    slow: float = SLOW,
    show: Callable[[float], str] = lambda rate: f"{rate:.3g}",
    name: Callable[[int], str] = str,
) -> tuple[PairVerdict, ...]:
    """The verdict on every node; results are rates (more is better). `show` and `name`: for the reasons."""
    # The upper quartile: a bad node of five is in half of all pairs.
    rates = sorted(rate for results in rounds for rate in results.values() if rate is not None)
    usual = rates[3 * len(rates) // 4] if rates else 0.0
    met: dict[int, list[tuple[str, bool]]] = {}  # node -> its measurements in words, and whether slow
    for results in rounds:
        for group, rate in results.items():
            for node in group:
                partners = " and ".join(name(other) for other in group if other != node)
                words = f"{'no result' if rate is None else show(rate)} with {partners}"
                met.setdefault(node, []).append((words, rate is None or rate < slow * usual))
    if not usual:
        return tuple(PairVerdict(node, "unknown", "no pair has a result") for node in sorted(met))
    others = f" (usual: {show(usual)})"
    return tuple(_judge_node(node, met[node], others) for node in sorted(met))


def _judge_node(node: int, met: list[tuple[str, bool]], others: str) -> PairVerdict:
    rates = ", ".join(words for words, _ in met)
    if not all(slow for _, slow in met):
        return PairVerdict(node, "fit", rates)
    if len(met) < 2:
        return PairVerdict(node, "unknown", f"slow, but measured only once: {rates}{others}")
    every = "both" if len(met) == 2 else "all"
    return PairVerdict(node, "unfit", f"slow with {every} partners: {rates}{others}")
