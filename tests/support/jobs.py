"""Jobs for the tests that run real frameworks: `phalanx run` in a process of its own, its output in files."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HUNG, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAMEWORKS = "PHALANX_TEST_PYTHON"  # an interpreter that has the frameworks, where ours has not


@functools.cache
def _has(python: str, module: str) -> bool:
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look]).returncode == 0


def python_with(*modules: str) -> str:
    """An interpreter that has these modules and this package; else the test is skipped, or fails in CI."""
    for python in (sys.executable, os.environ.get(FRAMEWORKS, "")):
        if python and all(_has(python, module) for module in (*modules, "phalanx")):
            return python
    why = f"no interpreter here has {' and '.join(modules)}; name one that has in {FRAMEWORKS}"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class Job:
    """One `phalanx run`."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        python: str = sys.executable,
        before: tuple[str, ...] = (),
        **env: str,
    ) -> None:
        """`before`: words in front of the command, for one that is to run on another host."""
        folder.mkdir(parents=True, exist_ok=True)
        self.out_file, self.err_file = folder / "out", folder / "err"
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_", "OMP_"))}
        environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": "", **env}
        with open(self.out_file, "wb") as out, open(self.err_file, "wb") as err:
            command = [*before, python, "-m", "phalanx", "run", *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, env=environ)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def wait(self, timeout: float = HUNG) -> int:
        """Its exit code."""
        return self.process.wait(timeout)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Look until it is true, or the job has ended."""
        wait_until(lambda: condition() or self.process.poll() is not None, what, HUNG)
        if not condition():
            raise AssertionError(
                f"the job ended ({self.process.returncode}) before {what}\n{self.out}\n{self.err}"
            )

    def succeeds(self, timeout: float = HUNG) -> str:
        """Wait for the end, which must be a good one; what it printed."""
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}\n{self.out}\n{self.err}"
        return self.out


def job(folder: Path, *words: str, python: str = sys.executable, **env: str) -> str:
    """Run a job to its good end; what it printed."""
    with Job(folder, *words, python=python, **env) as running:
        return running.succeeds()


def script(folder: Path, source: str, name: str = "script.py") -> str:
    """A script in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(source)
    return str(path)
