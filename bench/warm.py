"""Warm starts where they could be slower than cold ones: first launches, early kills, first lines, `--help`.

Every row has `--warm off` beside torchrun, and most targets are relative to it: a warm start is never slower.
"""

from __future__ import annotations

import os
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


def flags(side: str) -> tuple[str, ...]:
    """The options of a side."""
    return ("--warm", "off") if side == OFF else ()


def _env(side: str, cache: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": cache, **(_OWN_STORE if side == THEIRS else {})}


def relative(row: Row, samples: dict[str, Samples], figure: str) -> Row:
    """Make the target relative to --warm off."""
    values = samples[OFF].of(figure)
    row.target = Target(_ALLOWED * statistics.median(values), "value") if values else None
    return row


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
if os.environ.get("BENCH_WAIT"):
    time.sleep(3600)
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


def _installed(key: str) -> Iterator[tuple[str, str, str] | Row]:
    """Each program: its name, script and packages; a row without figures where its package is missing."""
    for what, imports in PROGRAMS.items():
        module = (imports.split() or ["", "sys"])[1].partition(".")[0]
        if find_spec(module) is None:
            yield Row(key, f"{what}: not installed", "s", None)
            continue
        with _program(imports) as (script, folder):
            yield what, script, folder


def launches(quick: bool) -> list[Row]:
    """The first four launches of a script in a fresh home: until all of its workers have imported."""
    rows = []
    for program in _installed("launches"):
        if isinstance(program, Row):
            rows.append(program)
            continue
        what, *at = program
        found = interleave(
            lambda side, at=at: _four(side, *at),  # type: ignore[misc]
            1 if quick else 5,
            names=(*sides(), OFF),
            warm=False,
        )
        for number in range(4):
            figure = f"launch {number + 1}"
            row = compare("launches", f"{figure} → {what} imported, N=2", "s", None, found, figure)
            rows.append(relative(row, found, figure))
    return rows


def _four(side: str, script: str, folder: str) -> Figures:
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        env = {**_env(side, cache), "PYTHONPATH": folder}
        for number in range(4):
            with Launch(side, script, nproc=2, flags=flags(side), env=env) as launch:
                imported = launch.expect("imported")
                figures[f"launch {number + 1}"] = max(one.at for one in imported.values()) - launch.begin
                launch.ended()
    return figures


def kills(quick: bool) -> list[Row]:
    """SIGKILL shortly after the first start with an empty cache → all workers have imported again."""
    rows = []
    for program in _installed("early-kill"):
        if isinstance(program, Row):
            rows.append(program)
            continue
        what, *at = program
        for after in _KILLS:
            samples = interleave(
                lambda side, at=at, after=after: _killed(side, *at, after),  # type: ignore[misc]
                1 if quick else 5,
                names=(*sides(), OFF),
                warm=False,
            )
            text = f"SIGKILL {after:g} s after {what} is imported, empty cache → again, N=2"
            row = compare("early-kill", text, "s", None, samples, "again")
            rows.append(relative(row, samples, "again"))
    return rows


def _killed(side: str, script: str, folder: str, after: float) -> Figures:
    with tempfile.TemporaryDirectory() as cache:
        env = {**_env(side, cache), "PYTHONPATH": folder, "BENCH_WAIT": "yes"}
        with Launch(side, script, nproc=2, restarts=1, flags=flags(side), env=env) as launch:
            first = launch.expect("imported")
            time.sleep(after)
            at = time.monotonic()
            os.kill(first[1].pid, 9)
            again = launch.expect("imported", attempt=1)
            return {"again": max(event.at for event in again.values()) - at}


def first_lines(quick: bool) -> list[Row]:
    """A script that shows something before its heavy imports, in a fresh home."""

    def line(side: str) -> Figures:
        with (
            tempfile.TemporaryDirectory() as cache,
            Launch(side, "heavy.py", nproc=1, flags=flags(side), env=_env(side, cache)) as launch,
        ):
            return {"line": launch.expect("up")[0].at - launch.begin}

    def usage(side: str) -> Figures:
        with tempfile.TemporaryDirectory() as cache:
            env = _env(side, cache)
            with Launch(side, "heavy.py", "--help", nproc=1, flags=flags(side), env=env) as launch:
                return {"help": launch.ended() - launch.begin}

    rounds, names = 2 if quick else 9, (*sides(), OFF)
    lines, helps = (interleave(once, rounds, names=names) for once in (line, usage))
    what = "launch → first line, before heavy imports, N=1"
    row = compare("help", "`script --help` before heavy imports → launcher's exit", "s", None, helps, "help")
    return [
        compare("first-line", what, "s", Target(1 / 8), lines, "line"),
        relative(row, helps, "help"),
    ]
