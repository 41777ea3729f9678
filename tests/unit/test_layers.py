"""Imports go one way: from a room to those below it."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx
from phalanx.core.group import group

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

# Imports upwards that are still to go: this list may only shrink.
UPWARDS = {
    ("agent.job", "elastic.agent.server.local_elastic_agent"),
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
    return found


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
    assert found - UPWARDS == set(), "a room imports one above it"
    assert UPWARDS - found == set(), "gone: take it off the list"


def test_the_state_diagram_in_the_docs_is_the_table() -> None:
    assert group.diagram() in (DOCS / "design.md").read_text()


def test_class_names_are_unique() -> None:
    """A name in a traceback or a search finds one class."""
    found: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
