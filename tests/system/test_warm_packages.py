"""Real packages: a script that imports one of them sees the same at every launch.

A sample of what is installed here belongs to every run. With -m long all of them, in the environment whose
Python PHALANX_PACKAGES_PYTHON names, or in one that is made in ~/.cache/phalanx-tests (some gigabytes).
tests/support/warm_packages.py does the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.warm_packages import PACKAGES, examine

# The names of distributions, where they are not those of the list.
DISTRIBUTIONS = {
    "torch-distributed": "torch",
    "torch-dynamo": "torch",
    "transformers-trainer": "transformers",
    "opencv": "opencv-python-headless",
}
# Two with C code and random generators, and one that reads many variables. Each is launched three times and
# imported in two more processes, which takes some seconds.
SAMPLE = ("numpy", "torch", "huggingface_hub")


def check(python: str, name: str) -> None:
    result = examine(python, name, PACKAGES[name])
    if result.missing:
        pytest.skip(f"{name} cannot be imported: {result.missing}")
    assert result.differences == []


@pytest.mark.untraced
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_script_sees_the_same_at_every_launch(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    check(sys.executable, name)


@pytest.fixture(scope="module")
def packages_python() -> str:
    """The Python of an environment with all packages that can be had."""
    given = os.environ.get("PHALANX_PACKAGES_PYTHON")
    if given:
        return given
    home = Path.home() / ".cache" / "phalanx-tests" / f"packages-{sys.version_info[0]}.{sys.version_info[1]}"
    python = home / "bin" / "python"
    done = home / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        wanted = ["cloudpickle", "msgspec", "setproctitle", "shtab", "torch"]
        wanted += [DISTRIBUTIONS.get(name, name) for name in PACKAGES]
        install = [str(python), "-m", "pip", "install", "-q", "--prefer-binary"]
        missing = [one for one in dict.fromkeys(wanted) if subprocess.run([*install, one]).returncode]
        if "msgspec" in missing:
            pytest.skip("packages cannot be installed here: no connection to a package index")
        done.write_text("\n".join(missing))
    return str(python)


@pytest.mark.long
@pytest.mark.untraced
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PACKAGES)
def test_scripts_of_all_packages_see_the_same_at_every_launch(name: str, packages_python: str) -> None:
    check(packages_python, name)
