"""The six walks of docs/design.md name functions that exist, and none is longer than twenty hops."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import phalanx

DESIGN = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
SECTION = DESIGN.split("\n## Six walks\n")[1].split("\n## ")[0]
WALKS = dict(walk.split("\n", 1) for walk in SECTION.split("\n### ")[1:])
MOST_HOPS = 20


def resolve(name: str) -> Any:
    """The object of a dotted name below `phalanx`: modules as far as there are any, then attributes."""
    found: Any = phalanx
    path = "phalanx"
    for part in name.split("."):
        path = f"{path}.{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def test_there_are_six() -> None:
    assert len(WALKS) == 6


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_short_and_names_what_exists(walk: str) -> None:
    text = WALKS[walk]
    hops = re.findall(r"^\d+\. ", text, re.MULTILINE)
    assert 0 < len(hops) <= MOST_HOPS
    for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", text):
        if not name.endswith(".txt"):
            resolve(name)
