"""Which Python environment a person means, and the line about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.job.config import parse
from phalanx.job.program import other_environment

BESIDE = ".venv beside the script"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With environments: `broken` has no interpreter, `ours` is that of the tests."""
    for name in ("other", "second"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "broken").mkdir()
    (tmp_path / "ours").symlink_to(sys.prefix)
    (tmp_path / "project").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("active", "conda", "beside", "found"),
    [
        ("", "", "", None),
        ("other", "", "", "VIRTUAL_ENV"),
        ("", "other", "", "CONDA_PREFIX"),
        ("", "", "other", BESIDE),
        ("other", "second", "", "VIRTUAL_ENV"),
        ("ours", "", "other", None),  # active, and phalanx was run from it
        ("other", "", "ours", None),  # .venv/bin/phalanx
        ("other", "ours", "", None),
        ("broken", "", "", None),
        ("gone", "", "second", BESIDE),
    ],
)
def test_the_environment_that_is_meant(
    active: str, conda: str, beside: str, found: str | None, folder: Path
) -> None:
    environ = {"VIRTUAL_ENV": active and str(folder / active), "CONDA_PREFIX": conda and str(folder / conda)}
    if beside:
        (folder / "project" / ".venv").symlink_to(folder / beside)
    other = other_environment(environ, str(folder / "project"))
    assert found == (None if other is None else other[0])
    assert other is None or os.access(other[1], os.X_OK)


def test_the_base_environment_of_conda_is_active_everywhere(folder: Path) -> None:
    environ = {"CONDA_PREFIX": str(folder / "other"), "CONDA_DEFAULT_ENV": "base"}
    assert other_environment(environ, str(folder)) is None
    assert other_environment({**environ, "CONDA_DEFAULT_ENV": "train"}, str(folder)) is not None


def test_one_line_names_the_other_environment(folder: Path) -> None:
    script = folder / "project" / "train.py"
    script.touch()
    environ = {"VIRTUAL_ENV": str(folder / "other")}
    (line,) = parse([str(script)], environ).warnings
    assert f"not the Python of VIRTUAL_ENV ({folder}/other/bin/python)" in line
    chosen = {**environ, "PYTHON_EXEC": sys.executable}
    assert parse([str(script)], chosen).warnings == ()
    assert parse(["--no-python", "true"], {**environ, "PATH": os.defpath}).warnings == ()
