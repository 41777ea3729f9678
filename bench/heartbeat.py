"""What the calls of `phalanx.worker` cost a training loop, and how soon a busy agent answers a health probe.

- inside: the calls write into a real board, as in a worker. The budget is 2 µs for a heartbeat.
- outside: the same script by itself; the calls do nothing.
- probes: milliseconds for an answer of /healthz, while twice as many workers as processors spin.

A figure is the least of several rounds, in microseconds a call, without the cost of the loop itself: what
others do on the machine can only add.

`python bench/heartbeat.py [--quick]` prints the result as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

LIMIT = 2.0

_WORK = """
import json, sys, time
from phalanx import worker

count, rounds = int(sys.argv[1]), int(sys.argv[2])

def nothing(step): pass
def scope(step):
    with worker.expires(60): pass
def part(step):
    with worker.section("step"): pass

def cost(call):
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for step in range(count):
            call(step)
        best = min(best, time.perf_counter() - begin)
    return best / count * 1e6

base = cost(nothing)
calls = {
    "heartbeat": worker.heartbeat,
    "should_checkpoint": lambda _step: worker.should_checkpoint(),
    "section": part,
    "expires": scope,
}
print(json.dumps({name: round(max(0.0, cost(call) - base), 3) for name, call in calls.items()}))
"""


def measure(inside: bool, quick: bool) -> dict[str, float]:
    """Microseconds a call, by name."""
    from phalanx.supervision.heartbeat import STACK_SIGNAL, VARIABLE, Boards

    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    fds: tuple[int, ...] = ()
    boards = Boards(1)
    try:
        if inside:
            board, bell = (fd for _, fd, _ in boards.places(0, executed=True))
            file = os.fstat(board)
            env[VARIABLE] = f"{board},{bell},{file.st_dev},{file.st_ino},{STACK_SIGNAL}"
            fds = (board, bell)
        words = ["20000", "3"] if quick else ["200000", "7"]
        done = subprocess.run(
            [sys.executable, "-c", _WORK, *words], env=env, pass_fds=fds, capture_output=True, check=True
        )
        assert bool(boards.read(0).count) == inside, "the calls went where they should"
    finally:
        boards.close()
    found: dict[str, float] = json.loads(done.stdout)
    return found


def probes(quick: bool) -> dict[str, float]:
    """Milliseconds until the answer: the middle one and the slowest."""
    import http.client
    import statistics
    import tempfile
    import time

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "spin.py")
        with open(path, "w") as file:
            file.write("print('up', flush=True)\nwhile True: pass\n")
        count = 2 * (os.cpu_count() or 1)
        words = ["-q", "--nproc-per-node", str(count), "--health-port", "0", "--grace", "1", path]
        code = (
            "import sys\nfrom phalanx.web.health import HealthServer\nstart = HealthServer.start\n"
            "def told(self): start(self); print('port', self.port, flush=True)\n"
            "HealthServer.start = told\nfrom phalanx.cli.run import main\nsys.exit(main(sys.argv[1:]))"
        )
        agent = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
        try:
            assert agent.stdout is not None
            lines = [agent.stdout.readline() for _ in range(count + 1)]
            port = next(int(line.split()[1]) for line in lines if line.startswith("port"))
            took = []
            for _ in range(20 if quick else 200):
                begin = time.perf_counter()
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("GET", "/healthz")
                assert connection.getresponse().status == 200
                connection.close()
                took.append((time.perf_counter() - begin) * 1000)
                time.sleep(0.01)
        finally:
            agent.terminate()
            agent.communicate()
    return {"median": round(statistics.median(took), 2), "slowest": round(max(took), 2)}


def run(quick: bool = False) -> dict[str, Any]:
    """Both sides, and whether the budget is kept."""
    inside = measure(True, quick)
    return {
        "unit": "microseconds a call",
        "inside": inside,
        "outside": measure(False, quick),
        "limit": {"heartbeat": LIMIT},
        "probes, milliseconds": probes(quick),
        "met": inside["heartbeat"] <= LIMIT,
    }


if __name__ == "__main__":
    print(json.dumps(run("--quick" in sys.argv), indent=2))
