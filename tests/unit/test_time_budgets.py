"""The order of time budgets, as docs/design.md has it, is that of the code."""

from __future__ import annotations

import importlib
import operator
import re
from pathlib import Path
from types import ModuleType

import pytest

import phalanx
from phalanx.core.rounds.leader_view import Options
from phalanx.job import time_budgets
from phalanx.job.options import BY_DEST

ROOT = Path(phalanx.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
SIDE = r"`([^`]+)` \(([\d.]+)\)"
ROWS = re.findall(rf"^\| {SIDE} \| ([<≤=]) \| {SIDE} \| \S.* \|$", PAGE, re.MULTILINE)
ORDER = {"<": operator.lt, "≤": operator.le, "=": operator.eq}
OWN = {name for name in vars(time_budgets) if name.isupper()}
NAME = re.compile(r"((?:[a-z_]+\.)*)(_?[A-Z][A-Z_]+)")


def module_of(path: str) -> ModuleType:
    """The one module whose path ends with these names; the table of budgets without any."""
    if not path:
        return time_budgets
    parts = tuple(path.strip(".").split("."))
    found = [
        names
        for file in ROOT.rglob("*.py")
        if (names := file.relative_to(ROOT).with_suffix("").parts)[-len(parts) :] == parts
    ]
    assert len(found) == 1, f"{path}: {found}"
    return importlib.import_module(".".join(("phalanx", *found[0])))


def seconds(text: str) -> float:
    """The value of an expression with names of budgets."""
    return float(eval(NAME.sub(lambda name: repr(getattr(module_of(name[1]), name[2])), text), {"max": max}))


@pytest.mark.parametrize(("left", "left_is", "sign", "right", "right_is"), ROWS)
def test_the_order(left: str, left_is: str, sign: str, right: str, right_is: str) -> None:
    assert (f"{seconds(left):g}", f"{seconds(right):g}") == (left_is, right_is), (
        "docs/design.md is out of date"
    )
    assert ORDER[sign](seconds(left), seconds(right))


def test_every_row_is_read() -> None:
    table = PAGE.split("\n## Time budgets\n")[1].split("\n## ")[0]
    assert len(ROWS) == table.count("\n| `")


def test_every_budget_of_the_table_has_an_order() -> None:
    """Without one, it belongs into the module that uses it."""
    named = {
        name for row in ROWS for side in (row[0], row[3]) for path, name in NAME.findall(side) if not path
    }
    assert named == OWN


def test_defaults_of_the_core_and_of_the_options_are_the_same() -> None:
    """Neither can import the table."""
    options = Options()
    found = options.ttl, options.linger, options.store_grace
    assert found == (time_budgets.LEASE, time_budgets.LINGER, time_budgets.STORE_GRACE)
    assert BY_DEST["store_grace"].default == time_budgets.STORE_GRACE
