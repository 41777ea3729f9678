"""Does a script that imports a package see the same at every launch? The differential test of the preload.

For each package: a start with `--warm off`, a first launch, a second one, and a restart within it. The script
imports the package and prints everything that it can observe (SNAPSHOT). The four have to agree, apart from
what differs between any two processes, as another start with `--warm off` shows; that has to differ between
the second launch and its restart, too.

The package is there before the first line in the first launch as well as in the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
HUNG = 600.0  # seconds
# The last value of a loop over a set of functions, which has another order in every process, and the name of
# a semaphore that is gone.
OF_NO_MEANING = {
    "scipy.sparse._data.name",
    "torch._dynamo.variables.torch_function.banned_attrs",
    "joblib._multiprocessing_helpers.name",
}

SNAPSHOT = (Path(__file__).parent / "package_snapshot.py").read_text()


class PackageResult:
    """What was found about one package."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.missing = ""
        self.early = (False, False)  # in the first launch, and in the second
        self.differences: list[str] = []

    def verdict(self) -> str:
        """ "same", or why the launches do not prove it."""
        if self.missing:
            return f"cannot be imported in a launch: {self.missing}"
        if self.differences:
            return f"a launch differs: {'; '.join(self.differences)}"
        return "same" if self.early == (True, True) else "was not preloaded when it was launched"


def four_starts(
    python: str, name: str, modules: list[str], search: Sequence[Path] = (SOURCE,)
) -> PackageResult:
    """Launch a script that imports these modules of a package in four ways, and compare.

    `search`: the source of the launcher, and more directories with modules.
    """
    result = PackageResult(name)
    with tempfile.TemporaryDirectory(prefix="warm-packages") as folder:
        script = Path(folder, "script.py")
        script.write_text(
            SNAPSHOT.replace("import MODULE", f"import {', '.join(modules)}").replace("MODULE", modules[0])
        )
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
        env |= {
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "XDG_CACHE_HOME": f"{folder}/cache",
            "PYTHONHASHSEED": "0",
        }
        env |= {"TMPDIR": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

        def launch(kind: str, *words: str, **more: str) -> dict[str, Any]:
            out = f"{folder}/{kind}"
            command = [python, "-m", "phalanx", "run", "--nproc-per-node", "1", "-q", *words, str(script)]
            done = subprocess.run(
                command, env={**env, **more, "SNAPSHOT_TO": out}, capture_output=True, text=True, timeout=HUNG
            )
            last = f"{out}1" if more else f"{out}0"
            if not os.path.exists(last):
                raise RuntimeError(f"{kind}: exit code {done.returncode}: {done.stderr[-300:]}")
            return dict(json.loads(Path(last).read_text()))

        cold = launch("cold", "--warm", "off")
        if cold["state"]["failed"]:
            result.missing = cold["state"]["failed"][:150]
            return result
        other = launch("other", "--warm", "off")
        first = launch("first")
        again = launch("second", "--max-restarts", "1", SNAPSHOT_AGAIN="1")
        second = dict(json.loads(Path(folder, "second0").read_text()))
        result.early = first["early"], second["early"]
        result.differences = compare(cold, other, {"launch 1": first, "launch 2": second, "restart": again})
    return result


def compare(cold: dict[str, Any], other: dict[str, Any], launches: dict[str, dict[str, Any]]) -> list[str]:
    """What is not the same, in words. `cold` and `other`: two starts without a preload."""
    _, second, again = launches.values()
    differences = []
    for kind, snapshot in launches.items():
        for what, value in cold["state"].items():
            if snapshot["state"].get(what) != value and what != "environment":
                differences.append(f"{kind}: {what}: {_first_difference(value, snapshot['state'].get(what))}")
        theirs, ours, others = (_variables(one) for one in (snapshot, cold, other))
        random = {name for name in ours if others.get(name) != ours[name]}
        if {**ours, **dict.fromkeys(random)} != {**theirs, **dict.fromkeys(random)}:
            differences.append(f"{kind}: environment: {_first_difference(ours, theirs)}")
        differences += [
            f"{kind}: {name} = {snapshot['values'].get(name)} instead of {value}"
            for name, value in cold["values"].items()
            if other["values"].get(name) == value != snapshot["values"].get(name)
            and name not in OF_NO_MEANING
        ]
    shots = [cold, *launches.values()]
    differences += [
        f"random, but shared: {name}"
        for name, value in cold["values"].items()
        if other["values"].get(name) != value
        and second["values"].get(name) == again["values"].get(name)
        and name not in OF_NO_MEANING
        and not _is_time_or_address(value)
    ]
    for name in cold["drawn"]:
        if len({shot["drawn"].get(name) for shot in shots}) != len(shots):
            differences.append(f"the same random numbers: {name}")
    return differences


def _variables(snapshot: dict[str, Any]) -> dict[str, str]:
    environment = snapshot["state"]["environment"]
    return {name: value for name, value in environment.items() if not name.startswith("SNAPSHOT")}


def _is_time_or_address(text: str) -> bool:
    """In whole seconds: a restart takes less."""
    if " at 0x" in text:
        return True
    return text.isdigit() and (abs(int(text) - time.time()) < 3600 or 1 << 32 <= int(text) < 1 << 47)


def _first_difference(one: Any, two: Any) -> str:
    if isinstance(one, list) and isinstance(two, list):
        lost = [str(x) for x in one if x not in two][:3]
        new = [str(x) for x in two if x not in one][:3]
        return f"without {lost}, with {new}" if lost or new else "another order"
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in {**one, **two} if one.get(key) != two.get(key)][:3]
        return ", ".join(f"{key}: {one.get(key)} → {two.get(key)}" for key in keys)
    return f"{one} → {two}"
