"""The walks of docs/design.md name functions that exist, where they are defined, and count themselves."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import phalanx

DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
SECTION = DESIGN.split("\n## Walks\n")[1].split("\n## ")[0]
WALKS = dict(walk.split("\n", 1) for walk in SECTION.split("\n### ")[1:])
MOST_HOPS = 20


def resolve(name: str) -> tuple[ModuleType, Any]:
    """The module of a dotted name below `phalanx`, as far as there are any, and what it names there."""
    found: Any = phalanx
    module, path = phalanx, "phalanx"
    for part in name.split("."):
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            module = found
    return module, found


def test_all_are_there() -> None:
    assert list(WALKS) == [
        "argv → user code",
        "kill → restarted",
        "Node lost → workers run",
        "Output line → console",
        "Heartbeat → hang report",
        "SIGTERM → exit",
        "keep → kept",
        "Reenter",
        "Node joins",
        "Subclass of SimpleElasticAgent",
    ]


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_short_and_names_what_exists(walk: str) -> None:
    text = WALKS[walk]
    hops = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert hops == [*range(1, len(hops) + 1)]
    assert 0 < len(hops) <= MOST_HOPS
    files = set()
    for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", text):
        if not name.endswith(".txt"):
            module, found = resolve(name)
            assert getattr(found, "__module__", module.__name__) == module.__name__, f"{name} is elsewhere"
            files.add(module.__file__)
    assert text.startswith(f"\n{len(hops)} hops in {len(files)} files.\n")
