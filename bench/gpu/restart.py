"""SIGKILL of a GPU worker → its first completed training step after the restart: torchrun, auto, standby.

    python bench/gpu/restart.py [--runs 5] [--out FILE]

One worker on one GPU; the ways alternate. Each run waits until training is under way and the helpers have had
their time (both launchers wait equally long), kills the worker, and reads the time of the restarted worker's
first complete step from the worker itself (CLOCK_MONOTONIC is one for all processes). Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTLE = 25.0  # seconds of training before the kill: the helpers look at the imports 2 and 10 s after a start
WAYS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "off": [sys.executable, "-m", "phalanx", "run", "--warm", "off"],
    "auto": [sys.executable, "-m", "phalanx", "run", "--warm", "auto"],
    "standby": [sys.executable, "-m", "phalanx", "run", "--warm", "standby", "--warmup", "warm_device:warm"],
}


def measure(way: str, settle: float) -> dict[str, float]:
    """Seconds from the launch and from the kill to the first complete step."""
    root = str(HERE.parents[1] / "src")
    with tempfile.TemporaryDirectory() as scratch:
        stop = os.path.join(scratch, "stop")
        env = {**os.environ, "STOP_FILE": stop, "PYTHONPATH": f"{root}:{HERE}"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        words = [*WAYS[way], "--nproc-per-node", "1", "--max-restarts", "1", str(HERE / "train_step.py")]
        begin = time.monotonic()
        job = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            assert job.stdout is not None
            first = _step(job.stdout, 1)
            pid = first[0]
            while time.monotonic() < begin + settle:
                job.stdout.readline()
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            again = _step(job.stdout, 1)
            Path(stop).touch()
            job.stdout.read()
            code = job.wait(60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return {"launch": first[1] - begin, "restart": again[1] - killed, "code": code}


def _step(lines, number: int) -> tuple[int, float]:
    for line in lines:
        words = line.split()
        if words[:2] == ["step", str(number)]:
            return int(words[2]), float(words[3])
    raise RuntimeError("the job ended before its first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--settle", type=float, default=SETTLE)
    parser.add_argument("--ways", default="torchrun,auto,standby")
    parser.add_argument("--out")
    options = parser.parse_args()
    ways = options.ways.split(",")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for way in ways:  # once unmeasured: page cache, byte code, and the list of modules
        measure(way, 15.0)
    for _ in range(options.runs):
        for way in ways:
            found[way].append(measure(way, options.settle))
            print(way, json.dumps(found[way][-1]), flush=True)
    import torch

    summary = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "runs": options.runs,
        "median_s": {
            way: {
                what: round(statistics.median(run[what] for run in runs), 3) for what in ("launch", "restart")
            }
            for way, runs in found.items()
        },
    }
    text = json.dumps({"summary": summary, "runs": found}, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text)


if __name__ == "__main__":
    main()
