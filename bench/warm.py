"""Warm starts where they could be slower than cold ones: early kills, second launches, first lines, `--help`.

Every row has `--warm off` beside torchrun, and most targets are relative to it: a warm start is never slower.
Lists that are learned come from one launch that stays until its helpers in the background have tried them.
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
from pathlib import Path

from bench.measure import (
    LIMIT,
    OURS,
    THEIRS,
    WORKERS,
    FailedRun,
    Figures,
    Launch,
    Row,
    Samples,
    Target,
    compare,
    environment,
    interleave,
    phalanx_sides,
    sides,
)

OFF = "off"  # this checkout, with --warm off
_KILLS = (0.2, 1.0, 3.0, 8.0)  # seconds after the first all_reduce
_ALLOWED = 1.1  # of --warm off
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


@contextmanager
def _packages() -> Iterator[str]:
    """A directory of installed packages that leave a thread each."""
    with tempfile.TemporaryDirectory() as base:
        folder = os.path.join(base, "site-packages")
        os.mkdir(folder)
        for number in range(10):
            Path(folder, f"bench_threads{number}.py").write_text(_THREADS)
        subprocess.run([sys.executable, "-m", "compileall", "-q", folder], check=True)
        yield folder


def _learned(side: str, script: str, *args: str, cache: str, env: dict[str, str]) -> None:
    """One launch that stays until the list of the script was tried."""
    flags = _flags(side)
    with Launch(side, script, *args, nproc=1, flags=flags, env={**_env(side, cache), **env}) as launch:
        launch.expect("imported")
        if side in phalanx_sides():
            end = time.monotonic() + LIMIT
            while not _is_vetted(cache):
                if time.monotonic() > end:
                    raise FailedRun("the list was not tried in time")
                time.sleep(0.1)  # a file in another process's hands: there is no event for it


def _is_vetted(cache: str) -> bool:
    for path in Path(cache, "phalanx", "modules").glob("*"):
        text = path.read_text(errors="replace")
        return "\n#0.000\n" not in text  # what is imported later is tried later
    return False


def threads(quick: bool) -> list[Row]:
    """Second launch of a script with packages that leave threads."""
    caches = {side: tempfile.mkdtemp() for side in (*sides(), OFF)}
    try:
        with _packages() as folder:
            env = {"PYTHONPATH": folder}
            for side, cache in caches.items():
                _learned(side, "threads.py", "stay", cache=cache, env=env)

            def once(side: str) -> Figures:
                flags, variables = _flags(side), {**_env(side, caches[side]), **env}
                with Launch(side, "threads.py", nproc=2, flags=flags, env=variables) as launch:
                    imported = launch.expect("imported")
                    return {"imported": max(event.at for event in imported.values()) - launch.begin}

            samples = interleave(once, 1 if quick else 7, names=tuple(caches), warm=False)
    finally:
        for cache in caches.values():
            shutil.rmtree(cache, ignore_errors=True)
    what = "second launch → torch and 10 packages that leave threads imported, N=2"
    row = compare("second-launch", what, "s", None, samples, "imported")
    return [_relative(row, samples, "imported")]


def ready(quick: bool) -> list[Row]:
    """Helper readiness with torch and ten packages that leave threads, against one cold import."""
    with _packages() as folder:
        names = [f"bench_threads{number}" for number in range(10)]
        env = {**environment(OURS), "PYTHONPATH": f"{folder}:{os.path.dirname(os.path.dirname(WORKERS))}/src"}
        code = f"import {', '.join(['torch', *names])}, sys; print(*sys.modules)"
        command = [sys.executable, "-c", code]
        listed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

        def once(side: str) -> Figures:
            if side == "import":
                begin = time.monotonic()
                subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
                return {"ready": time.monotonic() - begin}
            script = os.path.join(WORKERS, "readiness.py")
            run = [sys.executable, script, *listed]
            done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
            seconds, found = done.stdout.split()
            if int(found) < 10:
                raise FailedRun(f"{found} of 10 packages were found unsuitable")
            return {"ready": float(seconds)}

        samples = interleave(once, 2 if quick else 9, names=("import", OURS))
    what = "helpers ready: torch and 10 packages that leave threads, never tried"
    row = compare("helper-ready", what, "s", None, samples, "ready")
    values = samples["import"].of("ready")
    row.target = Target(1.5 * statistics.median(values), "value") if values else None
    return [row]


def first_lines(quick: bool) -> list[Row]:
    """A script that shows something before its heavy imports, with a learned list."""
    caches = {side: tempfile.mkdtemp() for side in (*sides(), OFF)}
    try:
        for side, cache in caches.items():
            _learned(side, "heavy.py", "--stay", cache=cache, env={})

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
