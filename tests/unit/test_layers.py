"""Imports go one way: from a room to those below it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import phalanx
from tests.support.state_diagram import of_the_group, of_the_participant

ROOT = Path(phalanx.__file__).parent
DOCS = ROOT.parents[1] / "docs"

# Rooms and root modules, from the bottom up: each may import what comes before it, lazy imports included.
FOUNDATION = ("errors", "rawsignal", "kernel", "log", "python_command", "trusted_files", "plugins", "devices")
ROOMS = (
    "core", "job", "store", "helpers", "worker", "observe", "cluster", "web", "agent", "elastic", "platforms",
    "check", "cli",
)  # fmt: skip
SURFACE = ("swap", "swapped", "argparse_util", "launcher", "launch", "run", "__init__", "__main__")
ORDER = (*FOUNDATION, *ROOMS, *SURFACE)

# What the code of a process may import: rooms and root modules, and packages that the user has installed.
# A helper is forked to become a worker, so whatever it loads is in the user's process.
PROCESSES = {
    "helpers": ({"core", "helpers", "kernel", "python_command", "rawsignal", "trusted_files"}, set()),
    "worker": (
        {"worker", "helpers", "core", "store.tcpstore", "errors", "kernel", "log", "rawsignal"},
        {"cloudpickle", "jax", "numpy", "setproctitle", "torch"},
    ),
}
FORBIDDEN_IN_CORE = {
    "asyncio", "logging", "multiprocessing", "os", "random", "select", "selectors", "socket", "subprocess",
    "sys", "threading", "time",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Everything that a module imports, wherever in it, but for what only the type checker sees."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in block.body
        for node in ast.walk(inner)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Dict):  # a table of names that are loaded on first use
            found |= {text for value in node.values for text in texts(value) if text.startswith("phalanx.")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "__import__"):
            found |= {text for value in node.args for text in texts(value)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_load":  # of worker/bootstrap.py
            found |= {f"phalanx.{text}" for value in node.args for text in texts(value)}
    return found


def texts(node: ast.expr) -> set[str]:
    """A text, or those in a tuple."""
    values = node.elts if isinstance(node, ast.Tuple) else [node]
    return {
        value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def module_of(name: str) -> str:
    """The module of an imported name, below `phalanx`: "" for the package itself and for others."""
    parts = name.split(".")
    if parts.pop(0) != "phalanx":
        return ""
    while parts and not (ROOT.joinpath(*parts).with_suffix(".py").exists() or ROOT.joinpath(*parts).is_dir()):
        parts.pop()
    return ".".join(parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts == ("__init__",) else (part for part in parts if part != "__init__"))


def room(module: str) -> str:
    return module.partition(".")[0]


def package(module: str) -> str:
    """The directory of a module; a module at the root stands for itself."""
    return module if ROOT.joinpath(*module.split(".")).is_dir() else module.rpartition(".")[0] or module


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_core_is_pure() -> None:
    for path in modules("core"):
        for name in imports(path):
            top = name.partition(".")[0]
            assert top not in FORBIDDEN_IN_CORE, f"{path.name} imports {name}"
            if top == "phalanx" and name != "phalanx":
                assert room(module_of(name)) in ("core", "errors"), f"{path.name} imports {name}"


def test_every_room_has_its_place() -> None:
    assert {room(module_name(path)) for path in ROOT.rglob("*.py")} == set(ORDER)


def test_imports_go_down() -> None:
    """A room imports only rooms below it, so that the graph of rooms has no cycle."""
    place = {name: number for number, name in enumerate(ORDER)}
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        importer = module_name(path)
        for target in filter(None, map(module_of, imports(path))):
            if place[room(target)] > place[room(importer)]:
                found.add((importer, target))
    assert found == set(), "a room imports one above it"


def test_packages_have_no_cycle() -> None:
    """Neither have the directories inside a room: each can be read after those that it uses."""
    graph: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if path.name == "__init__.py":
            continue  # the names of what is below, for users; it is imported by none of ours for them
        importer = package(module_name(path))
        targets = {package(target) for target in map(module_of, imports(path)) if target}
        graph.setdefault(importer, set()).update(targets - {importer})
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_only_its_own(process: str) -> None:
    ours, others = PROCESSES[process]
    for path in modules(process):
        found = imports(path) - {"phalanx"}
        targets = set(filter(None, map(module_of, found)))
        assert {target for target in targets if not {room(target), package(target)} & ours} == set(), (
            path.name
        )
        tops = {name.partition(".")[0] for name in found} - {"phalanx"}
        assert tops - sys.stdlib_module_names - others == set(), path.name


@pytest.mark.parametrize("drawing", [of_the_group, of_the_participant])
def test_the_state_diagram_in_the_docs_is_the_table(drawing: Callable[[], str]) -> None:
    assert drawing() in (DOCS / "design.md").read_text()


def test_class_names_are_unique() -> None:
    """A name in a traceback or a search finds one class."""
    found: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
