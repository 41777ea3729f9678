"""The verdict on a node: a table of findings."""

from __future__ import annotations

import random

import pytest

from phalanx.core.diagnosis.fitness import (
    EXIT_CODES,
    FIT,
    UNFIT,
    UNKNOWN,
    WARN,
    CheckFinding,
    NodeVerdict,
    join_verdicts,
    judge_clocks,
    judge_network,
    judge_node,
    rate_of_latency,
    suspects,
)
from phalanx.core.diagnosis.pairing import NodeGroup, confirming_round, first_round, overall, second_round

FINE = CheckFinding("memory", "plenty")
DOUBTFUL = CheckFinding("clock", "not synchronised", WARN)
BROKEN = CheckFinding("GPU 3", "lost", UNFIT)
SILENT = CheckFinding("disk", "no answer", UNKNOWN)
HIDDEN = CheckFinding("kernel log", "not readable", UNKNOWN, needed=False)


@pytest.mark.parametrize(
    ("findings", "fitness", "reason"),
    [
        ([], FIT, ""),
        ([FINE, HIDDEN], FIT, ""),
        ([FINE, DOUBTFUL, HIDDEN], WARN, "clock: not synchronised"),
        ([DOUBTFUL, SILENT], UNKNOWN, "disk: no answer"),
        ([SILENT, BROKEN, DOUBTFUL], UNFIT, "GPU 3: lost"),
        ([DOUBTFUL] * 5, WARN, "; ".join(["clock: not synchronised"] * 3) + "; and 2 more"),
    ],
)
def test_the_worst_finding_decides(findings: list[CheckFinding], fitness: str, reason: str) -> None:
    assert judge_node("a", findings) == NodeVerdict("a", fitness, reason)


def test_exit_codes() -> None:
    assert EXIT_CODES == {FIT: 0, WARN: 0, UNFIT: 95, UNKNOWN: 1}


def test_several_verdicts_are_one() -> None:
    slow, lost = NodeVerdict("a", UNFIT, "slow"), NodeVerdict("a", UNFIT, "lost")
    assert join_verdicts([NodeVerdict("a", FIT), NodeVerdict("a", WARN, "hot")]).reason == "hot"
    assert join_verdicts([slow, NodeVerdict("a", WARN, "hot"), lost]) == NodeVerdict("a", UNFIT, "slow; lost")


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        ({}, {}),
        ({0: (0.0, 0.0), 1: (-0.1, 0.1), 2: (0.0, 0.5)}, {}),
        ({0: (0.0, 0.0), 1: (-0.1, 0.1), 2: (4.9, 5.1)}, {2: "5.0 s ahead of"}),
        ({0: (0.0, 0.0), 1: (-7.2, -7.0), 2: (-7.1, -7.0)}, {0: "7.0 s ahead of"}),
        ({0: (0.0, 0.0), 1: (-0.1, 0.1), 2: (-5.1, -4.9)}, {2: "5.0 s behind"}),
        # Read late, on a busy machine: it may as well be right.
        ({0: (0.0, 0.0), 1: (-30.0, 0.1), 2: (0.0, 0.1)}, {}),
        ({0: (0.0, 0.0), 1: (5.0, 5.0)}, {1: "5.0 s ahead of"}),
    ],
)
def test_a_clock_is_compared_with_the_middle_one(
    ahead: dict[int, tuple[float, float]], said: dict[int, str]
) -> None:
    found = judge_clocks("abc", ahead)
    assert {node: one.fitness for node, one in enumerate(found)} == {
        node: WARN if node in said else FIT for node in range(3)
    }
    for node, words in said.items():
        assert found[node].reason == f"clock: {words} the others: set up NTP or chrony"


# ---- between nodes ---------------------------------------------------------------------------------


class Fabric:
    """Nodes with a bandwidth (bytes per second; 0: unreachable) and a latency (seconds), and noise."""

    noise = 0.7  # the least part of its bandwidth that a pair reaches by chance

    def __init__(self, count: int, seed: int = 0, **odd: tuple[float, float]) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self._odd = {int(name[1:]): how for name, how in odd.items()}
        self._chance = random.Random(seed)

    def measure(self, groups: tuple[NodeGroup, ...]) -> dict[NodeGroup, dict[str, float]]:
        found: dict[NodeGroup, dict[str, float]] = {}
        for group in groups:
            rates, latencies = zip(*(self._odd.get(node, (1e9, 50e-6)) for node in group), strict=True)
            noise = self._chance.uniform
            found[group] = {
                "bandwidth": min(rates) * noise(self.noise, 1.0),
                "latency": rate_of_latency(max(latencies) * noise(1.0, 3.0)),
            }
            if not min(rates):
                found[group] = {}
        return found

    def judge(self) -> dict[str, str]:
        first = self.measure(first_round(range(len(self.names))))
        second = self.measure(second_round(overall(first)))
        slow = suspects(self.names, first, second)
        third = self.measure(confirming_round(slow, overall(first), overall(second)))
        return {one.node: one.fitness for one in judge_network(self.names, first, second, third)}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ((0.1e9, 50e-6), UNFIT),  # a tenth of the bandwidth
        ((1e9, 20e-3), UNFIT),  # far away
        ((0.0, 50e-6), UNFIT),  # cannot be reached
        ((0.4e9, 50e-6), WARN),
        ((1e9, 100e-6), FIT),
    ],
)
def test_one_node_is_named_and_its_partners_are_not(how: tuple[float, float], expected: str) -> None:
    for seed in range(50):
        for count in (3, 4, 5, 8):
            bad = seed % count
            verdicts = Fabric(count, seed, **{f"n{bad}": how}).judge()
            assert verdicts.pop(f"n{bad}") == expected, (count, bad, seed)
            assert set(verdicts.values()) == {FIT}, (count, bad, seed)


def test_the_bad_one_of_32_is_named_by_any_of_its_rates() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        bad = chance.randrange(32)
        how = chance.choice([(0.15e9, 50e-6), (1e9, 10e-3), (0.0, 0.0)])
        verdicts = Fabric(32, seed, **{f"n{bad}": how}).judge()
        assert [name for name, fitness in verdicts.items() if fitness != FIT] == [f"n{bad}"], seed


def test_on_busy_machines_few_are_blamed_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fabric, "noise", 0.1)
    seeds = range(100)
    blamed = [name for seed in seeds for name, fitness in Fabric(8, seed).judge().items() if fitness == UNFIT]
    assert len(blamed) <= 4 * len(seeds) * 8 // 100  # of nodes that reach 10 to 100 % of their bandwidth


def test_two_nodes_and_a_network_that_lets_nothing_through() -> None:
    assert Fabric(2).judge() == {"n0": FIT, "n1": FIT}
    assert set(Fabric(2, n1=(0.0, 0.0)).judge().values()) == {UNKNOWN}
    assert set(Fabric(4, n0=(0.0, 0.0), n1=(0.0, 0.0), n2=(0.0, 0.0)).judge().values()) == {UNKNOWN}


def test_the_reason_has_figures() -> None:
    first = {(0, 1): {"bandwidth": 2.5e6}, (2, 3): {"bandwidth": 50e6}}
    second = {(0, 3): {"bandwidth": 2.4e6}, (1, 2): {"bandwidth": 51e6}}
    bad = judge_network(["a", "b", "c", "d"], first, second)[0]
    assert bad.reason == (
        "bandwidth: slow with both partners: 2.5 MB/s with b, 2.4 MB/s with d (usual: 51 MB/s)"
    )
