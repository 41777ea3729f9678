"""What joining costs the store: its CPU time per node, when n nodes come at once or within a second.

    python -m bench.joins [N …]

`phalanx store` runs by itself; the nodes are real participants in one process (tests/support/join_crowd.py).
The CPU time is the store's own, from the first connection until all nodes are in the round.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.measure import OURS, FailedRun, environment, python

LIMIT = 300.0
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@contextmanager
def store() -> Iterator[tuple[int, str]]:
    """A store in a process of its own: its pid and address."""
    command = [python(OURS), "-m", "phalanx", "store", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        command, env=environment(OURS, PHALANX_TOKEN="b" * 64), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"listening on (\S+?),", line)
        if found is None:
            raise FailedRun(line)
        yield process.pid, found[1]
    finally:
        process.kill()
        rest = process.communicate()[1]
        if rest:
            print(rest, file=sys.stderr, end="")


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def join(count: int, within: float) -> dict[str, float]:
    """The figures of one crowd; `cpu`: milliseconds of the store's CPU per node."""
    with store() as (pid, address):
        before = cpu_seconds(pid)
        command = [python(OURS), "-m", "tests.support.join_crowd", address, str(count)]
        done = subprocess.run(
            [*command, "--within", str(within), "--limit", str(LIMIT)],
            cwd=ROOT,
            env=environment(OURS, PHALANX_TOKEN="b" * 64),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise FailedRun(done.stderr[-500:])
        cpu = (cpu_seconds(pid) - before) / count * 1000
    found: dict[str, float] = json.loads(done.stdout)
    return {"cpu": cpu, **found}


def main() -> None:
    """Print a table."""
    print("| nodes | all within | store CPU per node | last welcome | round formed | connections dropped |")
    print("|---:|---:|---:|---:|---:|---:|")
    for count in [int(word) for word in sys.argv[1:]] or [100, 500, 1000, 2000]:
        for within in (0.0, 1.0):
            found = join(count, within)
            print(
                f"| {count:,} | {within:g} s | {found['cpu']:.2f} ms | {found['welcome']:.2f} s "
                f"| {found['formed']:.2f} s | {found['dropped']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
