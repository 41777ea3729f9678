"""Launching and ending: what a user waits for before the first line of code and after the last.

One run of the bare worker gives two figures: launch → first line, and last worker's exit → launcher's exit.
The floor is the script started N times without a launcher. Also the console's delay, and orphan processes.
"""

from __future__ import annotations

import os
import select
import statistics
import time
from tempfile import TemporaryDirectory

from bench.measure import (
    LIMIT,
    FailedRun,
    Figures,
    Launch,
    Row,
    Target,
    compare,
    interleave,
    settle,
    sides,
)
from bench.warm import OFF, flags, relative


def bare(quick: bool) -> list[Row]:
    """Launch → first line of user code, and last exit → launcher's exit."""
    rows = []
    for nproc, target in ((1, 1 / 15), (8, 1 / 8)):
        samples = interleave(
            lambda side, nproc=nproc: _bare(side, nproc),  # type: ignore[misc]
            3 if quick else 15,
            names=(*sides(), "floor"),
        )
        what = f"launch → first line of user code, bare, N={nproc}"
        rows.append(compare("launch", what, "s", Target(target), samples, "first"))
        del samples["floor"]
        what = f"last worker's exit → launcher's exit, N={nproc}"
        rows.append(compare("exit", what, "s", Target(1 / 15), samples, "end"))
    return rows


def _bare(side: str, nproc: int) -> Figures:
    with Launch(side, "bare.py", "wait", nproc=nproc) as launch:
        up = launch.expect("up")
        figures = {"first": max(e.at for e in up.values()) - launch.begin}
        if side == "floor":
            return figures
        settle()
        for event in up.values():
            os.kill(event.pid, 10)  # SIGUSR1: stamp, and exit with 0
        end = launch.ended()
        figures["end"] = end - max(e.at for e in launch.expect("exit").values())
    return figures


def torch(quick: bool) -> list[Row]:
    """The first launch ever of a script → first gloo all_reduce."""
    rows = []
    for nproc, rounds in ((2, 1 if quick else 7), (8, 1 if quick else 5)):
        names = (*sides(), OFF) if nproc == 2 else sides()
        samples = interleave(lambda side, nproc=nproc: reduce_once(side, nproc), rounds, names=names)  # type: ignore[misc]
        what = f"launch → first gloo all_reduce, torch, N={nproc}, fresh home"
        row = compare("launch-torch", what, "s", Target(1 / 4), samples, "first")
        rows.append(relative(row, samples, "first") if OFF in names else row)
    return rows


def reduce_once(side: str, nproc: int) -> Figures:
    """One launch of the torch worker, by a launcher that knows nothing of it."""
    with (
        TemporaryDirectory() as home,
        Launch(side, "reduce.py", nproc=nproc, flags=flags(side), env={"XDG_CACHE_HOME": home}) as launch,
    ):
        reduced = launch.expect("reduced")
        launch.ended()
        return {"first": max(e.at for e in reduced.values()) - launch.begin}


def line(quick: bool) -> list[Row]:
    """A line printed → the line on the console, with --tee."""
    rows, count = [], 10 if quick else 40
    for how, env in (("not flushed", {}), ("PYTHONUNBUFFERED=1", {"PYTHONUNBUFFERED": "1"})):
        samples = interleave(lambda side, env=env: _line(side, count, env), 1 if quick else 3, warm=False)  # type: ignore[misc]
        what = f"line printed ({how}) → on the console, tee into a pipe"
        rows.append(compare("line", what, "s", Target(0.010, "value"), samples, "median"))
    return rows


def _line(side: str, count: int, env: dict[str, str]) -> Figures:
    """The median over all lines of two workers; buffered lines appear when the worker exits."""
    console, write_end = os.pipe()
    late: list[float] = []
    rest = b""
    end = time.monotonic() + LIMIT
    try:
        with Launch(
            side, "bare.py", "print", str(count), nproc=2, flags=["--tee=3"], env=env, console=write_end
        ) as launch:
            os.close(write_end)
            write_end = -1
            while select.select([console], [], [], max(0.0, end - time.monotonic()))[0]:
                got, now = os.read(console, 65536), time.monotonic()
                if not got:
                    break
                *lines, rest = (rest + got).split(b"\n")
                late += [now - float(line.split()[-1]) for line in lines if b"stamp" in line]
            if len(late) != 2 * count:
                raise FailedRun(f"{len(late)} of {2 * count} lines reached the console: {launch.tail()}")
            return {"median": statistics.median(late)}
    finally:
        os.close(console)
        if write_end >= 0:
            os.close(write_end)


def orphans(quick: bool) -> list[Row]:
    """Processes left a second after SIGKILL of the launcher, and after the failure of one worker."""
    killed = interleave(_agent_killed, 1 if quick else 5, warm=False)
    failed = interleave(_worker_failed, 1 if quick else 5, warm=False)
    none = Target(0, "value")
    return [
        compare("orphans", "workers alive 1 s after SIGKILL of the agent, N=4", "", none, killed, "workers"),
        compare("orphans", "their children alive then", "", none, killed, "children"),
        compare(
            "orphans", "child of the failed worker alive after the job's end", "", none, failed, "children"
        ),
    ]


def _agent_killed(side: str) -> Figures:
    with Launch(side, "bare.py", "child", nproc=4) as launch:
        up = launch.expect("up")
        settle()
        os.kill(launch.pid, 9)
        time.sleep(1.0)  # the documented bound
        alive = set(launch.processes())
        children = _children(launch)
        return {
            "workers": float(len(alive & {e.pid for e in up.values()})),
            "children": float(len(alive & children)),
        }


def _worker_failed(side: str) -> Figures:
    with Launch(side, "bare.py", "child", nproc=4) as launch:
        up = launch.expect("up")
        settle()
        os.kill(up[0].pid, 12)  # SIGUSR2: exit with 1
        launch.ended()
        return {"children": float(len(set(launch.processes()) & _children(launch, of=up[0].pid)))}


def _children(launch: Launch, of: int | None = None) -> set[int]:
    """The children that the workers (or one of them) have reported."""
    events = [e for e in launch.events if e.what.startswith("child-") and of in (None, e.pid)]
    return {int(e.what.removeprefix("child-")) for e in events}
