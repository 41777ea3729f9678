"""Observes an import in two processes, one after the other, with the same conditions for both.

The variables, the seed of hashes and the addresses are the same; so what differs afterwards was drawn from
the system or the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HUNG = 600.0  # seconds
_HERE = Path(__file__).parent


def observe(
    python: str, modules: list[str], compiled: Path | None = None, path: Path | None = None
) -> list[dict[str, Any]]:
    """What observe.py writes, of two processes; RuntimeError if there is no answer.

    `compiled`: where Python keeps what it compiles, if not beside the modules. `path`: a directory with more
    modules.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="warm-packages") as name:
        folder = Path(name)
        shim = _compiled_shim(folder)
        home = folder / "home"
        before = "-"
        for number in (1, 2):
            shutil.rmtree(home, ignore_errors=True)  # the first one may have filled a cache there
            home.mkdir()
            out = folder / f"{number}.json"
            log = folder / "getenv"
            log.unlink(missing_ok=True)
            env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "PYTHONHASHSEED": "0"}
            env |= {"LD_PRELOAD": str(shim), "PROOF_GETENV": str(log)} if shim else {}
            env |= {"PYTHONPYCACHEPREFIX": str(compiled)} if compiled else {}
            env |= {"PYTHONPATH": str(path)} if path else {}
            command = [*_without_random_addresses(), python, str(_HERE / "observe.py"), str(out), before]
            done = subprocess.run(
                [*command, *modules], cwd=home, env=env, capture_output=True, text=True, timeout=HUNG
            )
            if not out.exists():
                raise RuntimeError(f"ends the process ({done.returncode}): {done.stderr[-150:]}")
            found.append(json.loads(out.read_text()))
            before = str(out)
    return found


def _compiled_shim(folder: Path) -> Path | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None  # what C code reads is not seen then
    shim = folder / "getenv.so"
    source = str(_HERE / "getenv_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), source], check=True)
    return shim


def _without_random_addresses() -> list[str]:
    """Sets of functions are in the same order in both processes then."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return []
    words = [setarch, os.uname().machine, "-R"]
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []
