"""The verdict on a node: a table of findings."""

from __future__ import annotations

import pytest

from phalanx.core.fitness import (
    EXIT_CODES,
    FIT,
    UNFIT,
    UNKNOWN,
    WARN,
    CheckFinding,
    NodeVerdict,
    join_verdicts,
    judge_node,
    offence_of,
)
from phalanx.core.quarantine import Offence

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
    assert EXIT_CODES == {FIT: 0, WARN: 10, UNFIT: 20, UNKNOWN: 30}


def test_several_verdicts_are_one() -> None:
    slow, lost = NodeVerdict("a", UNFIT, "slow"), NodeVerdict("a", UNFIT, "lost")
    assert join_verdicts([NodeVerdict("a", FIT), NodeVerdict("a", WARN, "hot")]).reason == "hot"
    assert join_verdicts([slow, NodeVerdict("a", WARN, "hot"), lost]) == NodeVerdict("a", UNFIT, "slow; lost")


def test_only_an_unfit_node_is_kept_out() -> None:
    assert offence_of(judge_node("a", [SILENT])) is None
    assert offence_of(judge_node("a", [BROKEN])) == Offence("a", "check", "unfit: GPU 3: lost")
