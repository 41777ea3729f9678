"""A clean virtual environment for each package, in a folder that is kept between runs.

uv makes one in seconds, because it links files of its cache. Where it cannot be had, pip does the same.
All of them are made at the same place, so that what Python compiles for one of them is there for the next
(`compiled`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.warm_packages.packages import CONSTRAINTS, NEVER, installed_for

HUNG = 1800.0  # seconds
_OF_THE_AGENT = ["cloudpickle", "msgspec", "setproctitle", "shtab"]  # for the four starts


class Environments:
    """Makes and removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._uv = self._find_uv()
        self._constraints = folder / "constraints.txt"
        self._constraints.write_text("\n".join(CONSTRAINTS) + "\n")
        self._overrides = folder / "overrides.txt"
        self._overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in NEVER))

    def make(self, package: str) -> str:
        """The Python of a new environment with this package; RuntimeError if it cannot be installed."""
        home = self._folder / "venv"
        python = str(home / "bin" / "python")
        shutil.rmtree(home, ignore_errors=True)
        wanted = [*installed_for(package), *_OF_THE_AGENT]
        env = {**os.environ, "UV_CACHE_DIR": str(self._folder / "uv-cache"), "UV_LINK_MODE": "hardlink"}
        limits = ["--constraint", str(self._constraints)]
        if self._uv:
            limits += ["--override", str(self._overrides)]
            limits += [word for link in _find_links() for word in ("--find-links", link)]
            create = [self._uv, "venv", "-q", "-p", sys.executable, str(home)]
            install = [self._uv, "pip", "install", "-q", "-p", python, *limits, *wanted]
        else:
            create = [sys.executable, "-m", "venv", str(home)]
            install = [python, "-m", "pip", "install", "-q", "--prefer-binary", *limits, *wanted]
        for command in (create, install):
            done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG, env=env)
            if done.returncode:
                raise RuntimeError(f"cannot be installed: {_last_words(done.stderr)}")
        return python

    @property
    def compiled(self) -> Path:
        """For PYTHONPYCACHEPREFIX."""
        return self._folder / "compiled"

    def _find_uv(self) -> str:
        tool = self._folder / "tool"
        for path in (shutil.which("uv"), str(Path(sys.executable).with_name("uv")), str(tool / "bin" / "uv")):
            if path and os.access(path, os.X_OK):
                return path
        subprocess.run([sys.executable, "-m", "venv", str(tool)], check=True)
        done = subprocess.run([str(tool / "bin" / "python"), "-m", "pip", "install", "-q", "uv"])
        return "" if done.returncode else str(tool / "bin" / "uv")


def _find_links() -> list[str]:
    """Where pip is told to look for files; uv does not read pip's settings."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    lines = [line.partition("=")[2].strip("'\"") for line in text.splitlines() if ".find-links=" in line]
    return sorted({word for line in lines for word in line.replace("\\n", " ").split()})


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:])[:200]
