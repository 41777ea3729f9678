"""Memory (PSS) of 8 torch workers: forked from a zygote that has imported torch, and started from scratch.

python bench/warm_memory.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORKERS = 8
SCRIPT = """
import os, signal, sys, torch
torch.ones(4).sum()
path = os.path.join(sys.argv[1], os.environ["RANK"])
with open(path + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".new", path)
signal.pause()
"""


def pss(pids: list[int]) -> float:
    """Megabytes; a shared page counts once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def measure(mode: str, script: Path) -> tuple[float, float]:
    """(workers, agent and helpers)."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["run", "-q", "--warm", mode, "--nproc-per-node", str(WORKERS), str(script), folder]
        job = subprocess.Popen([sys.executable, "-m", "phalanx", *options])
        try:
            found: list[Path] = []
            while len(found) < WORKERS:
                time.sleep(0.1)
                found = [path for path in Path(folder).iterdir() if path.suffix != ".new"]
            time.sleep(1.0)  # the last one has just started
            workers = [int(path.read_text()) for path in found]
            children = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
            return pss(workers), pss([job.pid, *(pid for pid in children if pid not in workers)])
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        script = Path(folder) / "worker.py"
        script.write_text(SCRIPT)
        for mode in ("off", "auto"):
            workers, rest = measure(mode, script)
            print(f"--warm {mode}: {WORKERS} torch workers {workers:.0f} MB, agent and helpers {rest:.0f} MB")


if __name__ == "__main__":
    main()
