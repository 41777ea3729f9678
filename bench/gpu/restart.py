"""SIGKILL of a GPU worker → its first completed training step after the restart: torchrun, auto, standby.

    python bench/gpu/restart.py [--runs 5] [--out FILE]

One worker on one GPU; the modes alternate. Each run trains for `--settle` seconds (the same for both
launchers), kills the worker, and reads the time of the restarted worker's first complete step from the worker
itself (CLOCK_MONOTONIC is the same for all processes). Nothing is asserted.
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
SETTLE = 25.0  # seconds of training before the kill: helpers in the background are ready by then
MODES = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "off": [sys.executable, "-m", "phalanx", "run", "--warm", "off"],
    "auto": [sys.executable, "-m", "phalanx", "run", "--warm", "auto"],
    "standby": [sys.executable, "-m", "phalanx", "run", "--warm", "standby", "--warmup", "warm_device:warm"],
}


def measure(mode: str, settle: float, worker: str = "train_step.py") -> dict[str, float]:
    """Seconds from the launch and from the kill to the first complete step."""
    root = str(HERE.parents[1] / "src")
    with tempfile.TemporaryDirectory() as scratch:
        stop = os.path.join(scratch, "stop")
        env = {**os.environ, "STOP_FILE": stop, "PYTHONPATH": f"{root}:{HERE}"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*MODES[mode], "--nproc-per-node", "1", "--max-restarts", "1", str(HERE / worker)]
        begin = time.monotonic()
        job = subprocess.Popen(
            command,
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
        fields = line.split()
        if fields[:2] == ["step", str(number)]:
            return int(fields[2]), float(fields[3])
    raise RuntimeError("the job ended before its first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--settle", type=float, default=SETTLE)
    parser.add_argument("--modes", default="torchrun,auto,standby")
    parser.add_argument("--out")
    options = parser.parse_args()
    modes = options.modes.split(",")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for mode in modes:  # once unmeasured: page cache, byte code, and the cache of imports
        measure(mode, 15.0)
    for _ in range(options.runs):
        for mode in modes:
            found[mode].append(measure(mode, options.settle))
            print(mode, json.dumps(found[mode][-1]), flush=True)
    medians = {
        mode: {what: round(statistics.median(run[what] for run in runs), 3) for what in ("launch", "restart")}
        for mode, runs in found.items()
    }
    publish(found, options.out, median_s=medians)


def publish(runs: object, out: str | None, **summary: object) -> None:
    """Print the runs with a summary and the conditions, and write them to a file."""
    import torch

    conditions = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    text = json.dumps({"summary": {**conditions, **summary}, "runs": runs}, indent=1)
    print(text)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    main()
