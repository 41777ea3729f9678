"""The second launch of a torch script with `--warm-for`: first line after `import torch`, first all_reduce.

A kept process is used only in the same environment, so all launches of a side share one, and workers print
their stamps (CLOCK_MONOTONIC) instead of sending them through a pipe of the launch.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time

from bench.measure import (
    LIMIT,
    OURS,
    THEIRS,
    FailedRun,
    Figures,
    Row,
    Target,
    compare,
    environment,
    interleave,
    kill_group,
    program,
    python,
)

WORKER = """\
import os, sys, time
import torch
os.write(1, f"\\nstamp first {time.monotonic()}\\n".encode())  # whole, whatever the others write
if sys.argv[1:] == ["reduce"]:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    os.write(1, f"\\nstamp reduced {time.monotonic()}\\n".encode())
    dist.destroy_process_group()
"""


def run(quick: bool) -> list[Row]:
    """Launch → first line with torch imported, N=1; launch → first all_reduce, N=8."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        script = os.path.join(folder, "keep.py")
        with open(script, "w") as file:
            file.write(WORKER)
        try:
            for what, nproc, limit, rounds in (
                ("first", 1, 0.15, 3 if quick else 15),
                ("reduced", 8, 0.35, 1 if quick else 9),
            ):
                words = ["reduce"] if what == "reduced" else []
                _prepare(script, folder, nproc, words)
                samples = interleave(
                    lambda side, n=nproc, w=words: _launch(side, script, folder, n, w),  # type: ignore[misc]
                    rounds,
                    names=(THEIRS, OURS),
                )
                event = "first line with torch imported" if what == "first" else "first gloo all_reduce"
                text = f"launch → {event}, N={nproc}, --warm-for"
                rows.append(compare("keep-warm", text, "s", Target(limit, "value"), samples, what))
        finally:
            _warm("--stop", script)
    return rows


def _prepare(script: str, folder: str, nproc: int, words: list[str]) -> None:
    """Launch once, and wait until the process that it leaves behind has imported what the script needs."""
    _warm("--stop", script)
    _launch(OURS, script, folder, nproc, words)
    end = time.monotonic() + LIMIT
    while "modules" not in _warm(script):
        if time.monotonic() > end:
            raise FailedRun("nothing was kept warm")
        time.sleep(0.1)


def _warm(*words: str) -> str:
    command = [program(OURS)[0], "warm", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _launch(side: str, script: str, folder: str, nproc: int, words: list[str]) -> Figures:
    """The latest stamp of each kind, after the launch."""
    environ = environment(side, XDG_CACHE_HOME=os.path.join(folder, "cache"))
    flags = [] if side == THEIRS else ["--warm-for", "2m"]
    command = [*program(side), *flags, "--standalone", f"--nproc-per-node={nproc}", script, *words]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        data = b""
        end = begin + LIMIT
        while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            got = os.read(process.stdout.fileno(), 65536)
            if not got:
                break
            data += got
        else:
            raise FailedRun(f"no end within {LIMIT:.0f} s")
        if process.wait(LIMIT) != 0:
            raise FailedRun(f"exit code {process.returncode}: {data.decode(errors='replace')[-300:]}")
    finally:
        kill_group(process)
        process.stdout.close()
    found: dict[str, list[float]] = {}
    for line in data.decode(errors="replace").splitlines():
        fields = line.partition("stamp ")[2].split()
        if len(fields) == 2:
            found.setdefault(fields[0], []).append(float(fields[1]) - begin)
    if any(len(stamps) != nproc for stamps in found.values()) or not found:
        raise FailedRun(f"not all of {nproc} workers have written their stamps with {python(side)}")
    return {what: max(stamps) for what, stamps in found.items()}
