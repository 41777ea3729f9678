"""`start_processes`: many small functions, one large value, and how soon `wait()` returns after an exit.

Each sample is a process of its own (workers/functions.py), so that no library is warm or shares a parent with
another. `wait()` is called without arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid

from bench.measure import (
    LIMIT,
    TAG,
    WORKERS,
    FailedRun,
    Figures,
    Row,
    Target,
    compare,
    environment,
    interleave,
    kill_group,
    kill_tagged,
    python,
)


def functions(quick: bool) -> list[Row]:
    """Start of 8 trivial functions → all results."""
    samples = interleave(lambda side: _measure(side, "trivial"), 1 if quick else 5, warm=not quick)
    what = "start_processes, 8 trivial functions, spawn → all results"
    return [compare("functions", what, "s", Target(1 / 5), samples, "seconds")]


def waits(quick: bool) -> list[Row]:
    """The decisive exit → wait() returns."""
    rows = []
    for case, what in (
        ("success", "last worker exits with 0 → wait() returns"),
        ("failure", "one of 2 exits with 3 → wait() returns, the other stopped"),
    ):
        samples = interleave(lambda side, case=case: _measure(side, case), 2 if quick else 15, warm=not quick)  # type: ignore[misc]
        rows.append(compare("wait", what, "s", Target(0.005, "value"), samples, "seconds"))
    return rows


def value(quick: bool) -> list[Row]:
    """A return value of 100 MB."""
    samples = interleave(lambda side: _measure(side, "big"), 2 if quick else 7, warm=not quick)
    return [compare("value", "return value of 100 MB", "MB/s", Target(3, least=True), samples, "rate")]


def _measure(side: str, what: str) -> Figures:
    tag = uuid.uuid4().hex
    process = subprocess.Popen(
        [python(side), os.path.join(WORKERS, "functions.py"), side, what],
        env=environment(side, **{TAG: tag}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise FailedRun(f"{what}: no result within {LIMIT:.0f} s") from None
    finally:
        kill_group(process)
        kill_tagged(tag)
    if process.returncode:
        raise FailedRun(f"{what}: {' / '.join(err.strip().splitlines()[-2:])[-300:]}")
    figures: Figures = json.loads(out.splitlines()[-1])
    return figures
