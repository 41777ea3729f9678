"""What docstrings refer to exists: dotted names in backticks, and files of Python code."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import phalanx

SOURCE = Path(phalanx.__file__).parent
ROOT = SOURCE.parents[1]
# Programs of users, in examples.
PROGRAMS = {"helpers.py", "script.py", "select.py", "train.py", "worker.py"}
# Of libraries and other programs, and names that no code here holds.
OTHERS = {
    "Pool", "dcp", "enum", "google", "jax", "memory", "mock", "mp", "multiprocessing", "phalanx", "torch",
    "torchrun", "train",
}  # fmt: skip
FILES = (".jsonl", ".json", ".toml", ".py", ".kill", ".events", ".oom_control")
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`")


class _Names:
    """The modules of the package by the last part of their name, and what the code of each mentions."""

    def __init__(self) -> None:
        self.modules: dict[str, list[str]] = defaultdict(list)
        self.of: dict[str, set[str]] = {}
        self.classes: dict[str, set[str]] = defaultdict(set)
        for path in sorted(SOURCE.rglob("*.py")):
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
            for number in range(name.count(".") + 1):
                package = name.rsplit(".", number)[0]
                if package not in self.modules[package.rpartition(".")[2]]:
                    self.modules[package.rpartition(".")[2]].append(package)
            tree = ast.parse(path.read_text())
            self.of[name] = mentioned(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] |= mentioned(node)

    def has(self, dotted: str, here: str) -> bool:
        first, *rest = dotted.split(".")
        if first in OTHERS or first in sys.stdlib_module_names:
            return True
        for depth in range(len(rest), -1, -1):
            path = ".".join([first, *rest[:depth]])
            for module in self.modules.get(path.rpartition(".")[2], ()):
                if f".{module}".endswith(f".{path}") and set(rest[depth:]) <= self.of.get(module, set()):
                    return True
        if first in self.classes:
            return set(rest) <= self.classes[first].union(*self.of.values() if not rest else ())
        # A variable of this module; its attributes are somebody's.
        return first in self.of[here] and all(
            any(part in names for names in self.of.values()) for part in rest
        )


def mentioned(tree: ast.AST) -> set[str]:
    """Every name in the code below a node."""
    found = set()
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


NAMES = _Names()
PYTHON = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]


@pytest.mark.parametrize("module", NAMES.of)
def test_what_docstrings_refer_to_exists(module: str) -> None:
    path = SOURCE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        for name in re.findall(r"[\w/]+\.py\b", text):
            known = name in PROGRAMS or any(f"/{file}".endswith(f"/{name}") for file in PYTHON)
            assert known, f"{name}: there is no such file"
        for name in DOTTED.findall(text):
            assert name.endswith(FILES) or NAMES.has(name, module), f"{name}: there is no such name"


@pytest.mark.parametrize("gone", ["child.prepare", "store.session", "round_records.HostRecord"])
def test_a_name_that_has_gone_is_found(gone: str) -> None:
    assert not NAMES.has(gone, "agent.workers.worker_group")
