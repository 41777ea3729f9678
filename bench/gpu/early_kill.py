"""SIGKILL of a GPU worker shortly after its first step, with an empty cache of imports → the next first step.

    python bench/gpu/early_kill.py [--runs 3] [--after 0.2,1,3,8] [--modes torchrun,off,auto] [--out FILE]

Nothing is known of the script yet but its text. Helpers that import more in the background must not
delay a restart. The modes alternate; each run has an empty cache. Nothing is asserted: `to_off`, the ratio of
the medians to `--warm off`, is to stay below 1.1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from restart import HERE, MODES, _step, publish


def measure(mode: str, after: float) -> dict[str, float]:
    """Seconds from the launch and from the kill to the first complete step."""
    with tempfile.TemporaryDirectory() as scratch:
        stop = os.path.join(scratch, "stop")
        env = {
            **os.environ,
            "STOP_FILE": stop,
            "XDG_CACHE_HOME": os.path.join(scratch, "cache"),
            "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}",
        }
        command = [*MODES[mode], "--nproc-per-node", "1", "--max-restarts", "1", str(HERE / "train_step.py")]
        begin = time.monotonic()
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=env, start_new_session=True
        )
        try:
            assert job.stdout is not None
            pid, first = _step(job.stdout, 1)
            while time.monotonic() < first + after:
                time.sleep(max(0.0, min(0.01, first + after - time.monotonic())))
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            _, again = _step(job.stdout, 1)
            Path(stop).touch()
            job.stdout.read()
            code = job.wait(60)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    return {"launch": first - begin, "restart": again - killed, "code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--after", default="0.2,1,3,8")
    parser.add_argument("--modes", default="torchrun,off,auto")
    parser.add_argument("--out")
    options = parser.parse_args()
    modes = options.modes.split(",")
    times = [float(text) for text in options.after.split(",")]
    measure(modes[0], 0.2)  # once unmeasured: page cache and byte code
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for after in times:
        found = runs[f"{after:g}"] = {mode: [] for mode in modes}
        for number in range(options.runs):
            for mode in modes if number % 2 == 0 else modes[::-1]:
                found[mode].append(measure(mode, after))
                print(after, mode, json.dumps(found[mode][-1]), flush=True)
    medians = {
        after: {mode: statistics.median(run["restart"] for run in taken) for mode, taken in found.items()}
        for after, found in runs.items()
    }
    rounded = {after: {mode: round(s, 3) for mode, s in row.items()} for after, row in medians.items()}
    to_off = {
        after: {mode: round(s / row["off"], 3) for mode, s in row.items()}
        for after, row in medians.items()
        if "off" in row
    }
    publish(runs, options.out, median_s=rounded, to_off=to_off)


if __name__ == "__main__":
    main()
