"""The public names: what `phalanx` exports, what its import costs, and that docs/api.md describes them."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx import errors, worker
from tests.conftest import HUNG

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
ERRORS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.PhalanxError)
}
SURFACE = {"LaunchConfig", "__version__", "elastic_launch", "run", "worker", *ERRORS}
MODULES_IN_THE_REFERENCE = (
    "phalanx.run",
    "phalanx.elastic.agent.server",
    "phalanx.elastic.events",
    "phalanx.elastic.metrics",
    "phalanx.elastic.multiprocessing",
    "phalanx.elastic.multiprocessing.errors",
    "phalanx.elastic.rendezvous",
    "phalanx.elastic.timer",
    "phalanx.elastic.utils",
    "phalanx.launcher",
)
NOT_DESCRIBED = {
    # Constants that torch's module exports beside its classes.
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_TIMER_FILE",
    # A type alias.
    "RendezvousHandlerCreator",
}
BLOCK = re.compile(r"(<!-- run -->\n)?```python\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(found[2], id=f"line {API.count(chr(10), 0, found.start(2)) + 1}")
    for found in BLOCK.finditer(API)
]
RUNNABLE = [
    example for example, found in zip(EXAMPLES, BLOCK.finditer(API), strict=True) if found[1] is not None
]


def test_the_package_shows_its_public_surface_and_nothing_else() -> None:
    assert set(phalanx.__all__) == SURFACE
    assert set(dir(phalanx)) == SURFACE


def test_every_exported_name_resolves_and_is_documented() -> None:
    for name in phalanx.__all__:
        value = getattr(phalanx, name)
        assert name == "__version__" or inspect.getdoc(value), name


@pytest.mark.parametrize("name", ["start_processes", "Std", "DefaultLogsSpecs", "record", "errors"])
def test_names_that_are_not_advertised_still_resolve(name: str) -> None:
    assert getattr(phalanx, name) is not None
    assert name not in dir(phalanx)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'launcher_of_rockets'"):
        phalanx.launcher_of_rockets  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.untraced
def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import phalanx; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG, check=True
    )
    assert set(done.stdout.split()) <= {"__future__", "phalanx"}


def test_help_describes_the_surface() -> None:
    text = pydoc.plain(pydoc.render_doc(phalanx))
    for name in SURFACE - {"__version__"}:
        assert name in text, name
    for internal in ("start_processes", "_PROVIDERS", "TYPE_CHECKING"):
        assert internal not in text, internal


def public_names(module: str) -> list[str]:
    found = importlib.import_module(module)
    names: list[str] = getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")])
    described = [name for name in names if name not in NOT_DESCRIBED]
    return [name for name in described if name != "found_in" and not inspect.ismodule(getattr(found, name))]


def mentioned(name: str) -> bool:
    return re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", API) is not None


def test_the_reference_mentions_the_public_surface() -> None:
    expected = {*phalanx.__all__, *worker.__all__, *ERRORS}
    assert {name for name in expected if not mentioned(name)} == set()


@pytest.mark.parametrize("module", MODULES_IN_THE_REFERENCE)
def test_the_reference_mentions_every_name_of(module: str) -> None:
    assert f"`{module}`" in API
    assert [name for name in public_names(module) if not mentioned(name)] == []


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_compile(code: str) -> None:
    compile(code, "docs/api.md", "exec")


@pytest.mark.parametrize("code", RUNNABLE)
def test_examples_print_what_they_claim(code: str, tmp_path: Path) -> None:
    """Each runs as a file of its own, as somebody who copies it would run it."""
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr
    claimed = re.findall(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert done.stdout.splitlines() == claimed
