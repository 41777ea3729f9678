"""Imports go one way: core knows nobody, the shell knows core, the surface knows both."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx
from phalanx.core import group

ROOT = Path(phalanx.__file__).parent
DOCS = ROOT.parents[1] / "docs"
SURFACE = ("cli", "launch", "launcher", "elastic", "run", "worker", "__main__")
SHELL = (
    "agent", "check", "logs", "membership", "observe", "state", "store", "supervision", "warm", "web",
    "workers", "zygote",
)  # fmt: skip
PURE = {"record", "errors"}
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


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_core_is_pure() -> None:
    for path in modules("core"):
        for name in imports(path):
            top = name.partition(".")[0]
            assert top not in FORBIDDEN_IN_CORE, f"{path.name} imports {name}"
            if top == "phalanx" and name != "phalanx":
                assert name.split(".")[1] in ("core", "errors"), f"{path.name} imports {name}"


def test_the_shell_does_not_know_the_surface() -> None:
    for folder in SHELL:
        for path in modules(folder):
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == "phalanx" and len(parts) > 1:
                    assert parts[1] not in SURFACE, f"{folder}/{path.name} imports {name}"


def test_torchs_paths_hold_no_logic() -> None:
    for path in modules("elastic"):
        for node in ast.parse(path.read_text()).body:
            allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
            lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            assert isinstance(node, allowed) or lazy or types, f"{path}: line {node.lineno}"


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
