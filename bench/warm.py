"""Warm starts where they could be slower than cold ones: first launches, early kills, first lines, `--help`.

Every row has `--warm off` beside torchrun, and most targets are relative to it: a warm start is never slower.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bench.measure import (
    THEIRS,
    Figures,
    Launch,
    Row,
    Samples,
    Target,
    compare,
    interleave,
    sides,
)

OFF = "off"  # this checkout, with --warm off
_KILLS = (0.2, 1.0, 3.0, 8.0)  # seconds after the first all_reduce
_ALLOWED = 1.05  # of --warm off
_THREADS = (
    "import threading\n"
    "sum(number * number for number in range(200_000))\n"  # some work, as in a real package
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _flags(side: str) -> tuple[str, ...]:
    return ("--warm", "off") if side == OFF else ()


def _env(side: str, cache: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": cache, **(_OWN_STORE if side == THEIRS else {})}


def _relative(row: Row, samples: dict[str, Samples], figure: str, limit: float = _ALLOWED) -> Row:
    """Make the target relative to --warm off."""
    values = samples[OFF].of(figure)
    row.target = Target(limit * statistics.median(values), "value") if values else None
    return row


# -- restarts -----------------------------------------------------------------------------------------------


def kills(quick: bool) -> list[Row]:
    """SIGKILL shortly after the first start with an empty cache → the first all_reduce again."""
    rows = []
    for after in _KILLS:
        samples = interleave(
            lambda side, after=after: _killed(side, after),  # type: ignore[misc]
            1 if quick else 5,
            names=(*sides(), OFF),
            warm=False,
        )
        what = f"SIGKILL {after:g} s after the first all_reduce, empty cache → again, N=2"
        rows.append(_relative(compare("early-kill", what, "s", None, samples, "again"), samples, "again"))
    return rows


def _killed(side: str, after: float) -> Figures:
    with tempfile.TemporaryDirectory() as cache:
        flags, env = _flags(side), _env(side, cache)
        with Launch(side, "reduce.py", "wait", nproc=2, restarts=1, flags=flags, env=env) as launch:
            first = launch.expect("reduced")
            time.sleep(after)
            at = time.monotonic()
            os.kill(first[1].pid, 9)
            again = launch.expect("reduced", attempt=1)
            return {"again": max(event.at for event in again.values()) - at}


# -- launches -----------------------------------------------------------------------------------------------


PROGRAMS = {  # what a script imports at its top
    "nothing": "",
    "numpy": "import numpy\n",
    "torch": "import torch\n",
    "torch, and ten packages that leave threads": "import torch\nimport bench_threads\n",
    "transformers.Trainer": "from transformers import Trainer\n",
    "lightning": "import lightning\n",
    "datasets": "import datasets\n",
}
STAMP = """
import os, time
at = time.monotonic()
line = f"imported {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {at!r}\\n"
os.write(os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY), line.encode())
"""


@contextmanager
def _program(imports: str) -> Iterator[tuple[str, str]]:
    """A script with these imports, and a directory of installed packages that leave a thread each."""
    with tempfile.TemporaryDirectory() as base:
        folder = os.path.join(base, "site-packages")
        os.mkdir(folder)
        for number in range(10):
            Path(folder, f"bench_threads{number}.py").write_text(_THREADS)
        every = "".join(f"import bench_threads{number}\n" for number in range(10))
        Path(folder, "bench_threads.py").write_text(every)
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
        script = os.path.join(base, "train.py")
        Path(script).write_text(imports + STAMP)
        yield script, folder


def launches(quick: bool) -> list[Row]:
    """The first four launches of a script in a fresh home: until all of its workers have imported."""
    rows = []
    for what, imports in PROGRAMS.items():
        module = (imports.split() or ["", "sys"])[1].partition(".")[0]
        if find_spec(module) is None:
            continue
        with _program(imports) as (script, folder):
            found = interleave(
                lambda side, at=(script, folder): _four(side, *at),  # type: ignore[misc]
                1 if quick else 5,
                names=(*sides(), OFF),
                warm=False,
            )
        for number in range(4):
            figure = f"launch {number + 1}"
            row = compare("launches", f"{figure} → {what} imported, N=2", "s", None, found, figure)
            rows.append(_relative(row, found, figure, 1.05))
    return rows


def _four(side: str, script: str, folder: str) -> Figures:
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        env = {**_env(side, cache), "PYTHONPATH": folder}
        for number in range(4):
            with Launch(side, script, nproc=2, flags=_flags(side), env=env) as launch:
                imported = launch.expect("imported")
                figures[f"launch {number + 1}"] = max(one.at for one in imported.values()) - launch.begin
                launch.ended()
    return figures


def _learned(side: str, script: str, *args: str, cache: str) -> None:
    """One launch, to its end."""
    with Launch(side, script, *args, nproc=1, flags=_flags(side), env=_env(side, cache)) as launch:
        launch.expect("imported")
        launch.ended()


def first_lines(quick: bool) -> list[Row]:
    """A script that shows something before its heavy imports, with a learned list."""
    caches = {side: tempfile.mkdtemp() for side in (*sides(), OFF)}
    try:
        for side, cache in caches.items():
            _learned(side, "heavy.py", cache=cache)

        def line(side: str) -> Figures:
            env, flags = _env(side, caches[side]), _flags(side)
            with Launch(side, "heavy.py", nproc=1, flags=flags, env=env) as launch:
                return {"line": launch.expect("up")[0].at - launch.begin}

        def usage(side: str) -> Figures:
            env, flags = _env(side, caches[side]), _flags(side)
            with Launch(side, "heavy.py", "--help", nproc=1, flags=flags, env=env) as launch:
                return {"help": launch.ended() - launch.begin}

        rounds = 2 if quick else 9
        lines = interleave(line, rounds, names=tuple(caches))
        helps = interleave(usage, rounds, names=tuple(caches))
    finally:
        for cache in caches.values():
            shutil.rmtree(cache, ignore_errors=True)
    row = compare(
        "help", "`script --help`, heavy imports learned → launcher's exit", "s", None, helps, "help"
    )
    return [
        compare(
            "first-line", "launch → first line, heavy imports learned, N=1", "s", Target(1 / 8), lines, "line"
        ),
        _relative(row, helps, "help"),
    ]
