"""What the calls of `phalanx.worker` cost a training loop, and how soon a busy agent answers a health probe.

A cost is the least of several rounds without the cost of the loop itself, because other load on the machine
can only add. Probes are sent while twice as many workers as processors spin.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time

from bench.measure import (
    LIMIT,
    WORKERS,
    FailedRun,
    Figures,
    Row,
    Target,
    compare,
    environment,
    interleave,
    phalanx_sides,
    program,
)

_TARGETS = {"heartbeat": Target(2e-6, "value"), "should_checkpoint": None, "section": None, "expires": None}


def calls(quick: bool) -> list[Row]:
    """Seconds per call in a worker."""
    count, rounds = (20_000, 3) if quick else (200_000, 7)
    samples = interleave(
        lambda side: _calls(side, count, rounds), 1 if quick else 3, names=phalanx_sides(), warm=False
    )
    return [
        compare("heartbeat", f"worker.{name}(), a call", "s", target, samples, name)
        for name, target in _TARGETS.items()
    ]


def _calls(side: str, count: int, rounds: int) -> Figures:
    with tempfile.NamedTemporaryFile("r") as file:
        script = [os.path.join(WORKERS, "calls.py"), file.name, str(count), str(rounds)]
        command = [*program(side), "-q", *script]
        done = subprocess.run(command, env=environment(side), check=False, timeout=LIMIT, capture_output=True)
        if done.returncode:
            raise FailedRun(done.stderr.decode()[-200:])
        figures: Figures = json.load(file)
        return figures


def probes(quick: bool) -> list[Row]:
    """The slowest answer of /healthz."""
    samples = interleave(
        lambda side: _probes(side, 20 if quick else 200), 1 if quick else 3, names=phalanx_sides(), warm=False
    )
    what = "/healthz while twice as many workers as processors spin, slowest"
    return [compare("health", what, "s", Target(0.1, "value"), samples, "slowest", average=max)]


def _probes(side: str, count: int) -> Figures:
    nproc = 2 * (os.cpu_count() or 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "spin.py")
        with open(path, "w") as file:
            file.write("print('up', flush=True)\nwhile True: pass\n")
        options = ["-q", "--nproc-per-node", str(nproc), "--health-listen", str(port), "--grace", "1", path]
        agent = subprocess.Popen(
            [*program(side), *options], env=environment(side), stdout=subprocess.PIPE, text=True
        )
        try:
            assert agent.stdout is not None
            for _ in range(nproc):
                agent.stdout.readline()
            took = []
            for _ in range(count):
                begin = time.perf_counter()
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("GET", "/healthz")
                if connection.getresponse().status != 200:
                    raise FailedRun("not healthy")
                connection.close()
                took.append(time.perf_counter() - begin)
                time.sleep(0.01)
        finally:
            agent.terminate()
            agent.communicate()
    return {"median": statistics.median(took), "slowest": max(took)}
