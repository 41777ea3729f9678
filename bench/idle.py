"""What a job costs while nothing happens: memory of the launcher and its helpers, wake-ups, CPU.

All sides idle at the same time, with 8 workers each; the workers themselves are not counted. Memory is PSS,
in which a shared page counts once.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from bench.measure import Launch, Row, Samples, Target, compare, settle, sides


def run(quick: bool) -> list[Row]:
    """Memory, wake-ups a second and CPU time, with 8 idle workers."""
    seconds, rounds = (10, 1) if quick else (30, 3)
    samples = {side: Samples() for side in sides()}
    for _ in range(rounds):
        with ExitStack() as stack:
            launches = {
                side: stack.enter_context(Launch(side, "bare.py", "wait", nproc=8)) for side in sides()
            }
            for launch in launches.values():
                launch.expect("up")
            settle()
            time.sleep(2.0)  # a launcher may still be busy after its workers have started
            before = {side: _use(launch.helpers()) for side, launch in launches.items()}
            begin = time.monotonic()
            time.sleep(seconds)  # the measurement
            for side, launch in launches.items():
                helpers = launch.helpers()
                switches, cpu = _use(helpers)
                took = time.monotonic() - begin
                samples[side].figures.append(
                    {
                        "memory": sum(map(_pss, helpers)),
                        "wakeups": (switches - before[side][0]) / took,
                        "cpu": (cpu - before[side][1]) * 30 / took,
                    }
                )
    return [
        compare(
            "memory", "agent + helpers, 8 idle workers (PSS)", "MB", Target(40, "value"), samples, "memory"
        ),
        compare("idle", "idle: wake-ups a second", "/s", Target(1, "value"), samples, "wakeups"),
        compare("idle", "idle: CPU in 30 s", "ms", Target(5, "value"), samples, "cpu"),
    ]


def _pss(pid: int) -> float:
    """Megabytes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1000
    return 0.0


def _use(pids: list[int]) -> tuple[int, float]:
    """Voluntary context switches and CPU milliseconds so far, of all threads."""
    switches, cpu = 0, 0.0
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            here = f"/proc/{pid}/task/{thread}"
            with open(f"{here}/status") as file:
                switches += sum(int(x.split()[1]) for x in file if x.startswith("voluntary_ctxt_switches"))
            cpu += _cpu(here)
    return switches, cpu


def _cpu(task: str) -> float:
    """Milliseconds of one thread; from nanoseconds if the kernel counts them, else from ticks."""
    try:
        with open(f"{task}/schedstat") as file:
            return int(file.read().split()[0]) / 1e6
    except OSError:
        with open(f"{task}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")
