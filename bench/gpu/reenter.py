"""SIGKILL of one of four GPU ranks → the next step of that rank and of the others, with 10 GB of state.

    python bench/gpu/reenter.py [--runs 3] [--gigabytes 10] [--modes disk,reenter] [--out FILE]

    disk     torchrun; every rank saves its state to a local disk and loads it after the restart
    reenter  `--warm standby` and worker.reenter: survivors keep their processes, and state is kept in memory

The modes alternate. Times are those that the workers print (CLOCK_MONOTONIC). Nothing is asserted.
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

from restart import HERE, MODES, publish

RANKS, VICTIM = 4, 2
SETTLE = 20.0  # seconds after the first step: standbys are ready then
LIMIT = 120.0
COMMANDS = {
    "disk": MODES["torchrun"],
    "reenter": [sys.executable, "-m", "phalanx", "run", "--warm", "standby"],
}


class Steps:
    """The steps that the workers print."""

    def __init__(self, lines) -> None:
        self._lines = lines
        self.phases: dict[int, dict[str, float]] = {rank: {} for rank in range(RANKS)}  # the last of each

    def next(self) -> tuple[int, int, int, float]:
        for line in self._lines:
            if line.startswith("phase "):
                where, phase, _, at = line.split()[1:]
                self.phases[int(where)][phase] = float(at)
            elif line.startswith("step "):
                rank, number, pid, at = line.split()[1:]
                return int(rank), int(number), int(pid), float(at)
        raise RuntimeError("the job ended")

    def until(self, done) -> dict[int, tuple[int, int, int, float]]:
        """Read until `done` holds for the last step of every rank; those."""
        last: dict[int, tuple[int, int, int, float]] = {}
        end = time.monotonic() + LIMIT
        while len(last) < RANKS or not all(done(one) for one in last.values()):
            if time.monotonic() > end:
                raise RuntimeError("no step in time")
            one = self.next()
            if one[0] not in last or not done(last[one[0]]):
                last[one[0]] = one
        return last


def measure(mode: str, state: int) -> dict[str, float]:
    """Seconds from the kill to the first step after it: of the killed rank, and of the slowest other one."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCRATCH_DIR")) as scratch:
        env = {
            **os.environ,
            "SCRATCH": scratch,
            "MODE": mode,
            "STATE_BYTES": str(state // RANKS),
            "PYTHONPATH": str(HERE.parents[1] / "src"),
        }
        if mode == "disk":
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or torchrun's restart does not always recover
        worker = str(HERE / "reenter_step.py")
        command = [*COMMANDS[mode], "--nproc-per-node", str(RANKS), "--max-restarts", "1", worker]
        job = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=env, start_new_session=True
        )
        try:
            steps = Steps(job.stdout)
            begin = time.monotonic()
            first = steps.until(lambda one: one[1] >= 1)
            began = max(one[3] for one in first.values())
            steps.until(lambda one: one[3] > began + SETTLE and one[1] > 2 * 20)
            killed = time.monotonic()
            os.kill(first[VICTIM][2], signal.SIGKILL)
            # Steps that a rank took before it noticed do not count: all have to meet the new process.
            new = {}
            while VICTIM not in new:
                one = steps.next()
                if one[0] == VICTIM and one[2] != first[VICTIM][2]:
                    new[VICTIM] = one
            others = steps.until(lambda one: one[1] >= new[VICTIM][1])
            Path(scratch, "stop").touch()
            job.stdout.read()
            code = job.wait(LIMIT)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    phases = {
        f"{whose}_{phase}": max(steps.phases[rank].get(phase, 0.0) for rank in ranks) - killed
        for whose, ranks in (("killed", [VICTIM]), ("others", [rank for rank in others if rank != VICTIM]))
        for phase in steps.phases[VICTIM]
    }
    kept = sum(others[rank][2] == first[rank][2] for rank in others)
    return {
        "launch": began - begin,
        "killed_rank": new[VICTIM][3] - killed,
        "others": max(one[3] for one in others.values()) - killed,
        **phases,
        "processes_kept": kept,
        "code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--modes", default="disk,reenter")
    parser.add_argument("--out")
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes.split(",")}
    for _ in range(options.runs):
        for mode, runs in found.items():
            runs.append(measure(mode, int(options.gigabytes * 1e9)))
            print(mode, json.dumps(runs[-1]), flush=True)
    medians = {
        mode: {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
        for mode, runs in found.items()
    }
    publish(found, options.out, median_s=medians)


if __name__ == "__main__":
    main()
