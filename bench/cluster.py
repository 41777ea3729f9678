"""Several nodes: agents that form a world, lose a node, admit one, and end; torchrun's c10d beside phalanx.

All agents run on this machine with one bare worker each, over loopback. The figures are what a user waits
for: from the first exec, the kill or the last exit, until all workers run or all agents are gone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid

from bench.measure import (
    TAG,
    THEIRS,
    WORKERS,
    Event,
    EventPipe,
    FailedRun,
    Figures,
    Row,
    Target,
    compare,
    environment,
    interleave,
    kill_group,
    kill_tagged,
    last_lines,
    phalanx_sides,
    program,
    python,
    settle,
    sides,
)

LIMIT = 120.0
HANDLERS = 64


class Agents:
    """The observed agents of one job; closing kills all of them."""

    def __init__(
        self, side: str, nnodes: str, *, env: dict[str, str] | None = None, restarts: int = 0
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self._pipe = EventPipe(self._folder)
        self.events = self._pipe.events
        self._tag = uuid.uuid4().hex
        self._env = environment(
            side, BENCH_EVENTS=self._pipe.path, PHALANX_TOKEN="bench", **{TAG: self._tag}, **(env or {})
        )
        self._output = open(os.path.join(self._folder, "output"), "wb")  # noqa: SIM115 - closed in __exit__
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._command = [
            *program(side), f"--nnodes={nnodes}", "--nproc-per-node=1", f"--max-restarts={restarts}",
            f"--rdzv-backend={'c10d' if side == THEIRS else 'phalanx'}", f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=bench", "--local-addr=127.0.0.1",
        ]  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int = 1, *, host: bool = False) -> float:
        """Start agents, the first one as the store's host if `host`; returns the time of the first exec."""
        begin = time.monotonic()
        for number in range(count):
            more = ["--rdzv-conf", f"is_host={int(host and number == 0)}"]
            self.processes.append(
                subprocess.Popen(
                    [*self._command, *more, os.path.join(WORKERS, "bare.py"), "wait"],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    start_new_session=True,
                )
            )
        return begin

    def up(self, count: int, since: float, limit: float = LIMIT) -> dict[int, Event]:
        """Wait until that many ranks have started since then; the last event of each."""
        end = time.monotonic() + limit
        while True:
            found = {e.rank: e for e in self.events if e.what == "up" and e.at >= since}
            if len(found) >= count:
                return found
            self._listen(end, f"{len(found)} of {count} workers")

    def wait_for(self, what: str, count: int) -> list[Event]:
        """Wait for that many events of a kind."""
        end = time.monotonic() + LIMIT
        while len(found := [e for e in self.events if e.what == what]) < count:
            self._listen(end, f"{what} of {len(found)} of {count} workers")
        return found

    def _listen(self, end: float, missing: str) -> None:
        left = end - time.monotonic()
        dead = [p.returncode for p in self.processes if p.poll() is not None and p.returncode > 0]
        if left <= 0 or dead:
            raise FailedRun(f"only {missing}; exit codes {dead}: {self._tail()}")
        if select.select([self._pipe], [], [], min(left, 0.5))[0]:
            self._pipe.read()

    def ended(self) -> float:
        """Wait for the exit of all agents; returns when the last one was gone."""
        for process in self.processes:
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise FailedRun(f"an agent did not exit: {self._tail()}") from None
        return time.monotonic()

    def _tail(self) -> str:
        return last_lines(os.path.join(self._folder, "output"))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            kill_group(process)
        kill_tagged(self._tag)
        self._pipe.close()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _latest(found: dict[int, Event]) -> float:
    return max(event.at for event in found.values())


def _form_and_end(side: str, count: int) -> Figures:
    with Agents(side, str(count)) as job:
        begin = job.start(count, host=True)
        workers = job.up(count, begin)
        settle()
        for event in workers.values():
            os.kill(event.pid, signal.SIGUSR1)
        last = max(event.at for event in job.wait_for("exit", count))
        return {"up": _latest(workers) - begin, "exit": job.ended() - last}


def _last_call(side: str) -> Figures:
    with Agents(side, "1:4") as job:
        begin = job.start(3, host=True)
        return {"up": _latest(job.up(3, begin)) - begin}


def _late_node(side: str) -> Figures:
    """Without torchrun's shared store, with which (its default) the job dies."""
    with Agents(side, "1:4", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) as job:
        begin = job.start(3, host=True)
        job.up(3, begin)
        settle()
        begin = job.start()
        return {"up": _latest(job.up(4, begin)) - begin}


def _lost_node(side: str, with_worker: bool) -> Figures:
    with Agents(side, "2:3", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, restarts=3) as job:
        begin = job.start(3, host=True)
        workers = job.up(3, begin)
        settle()
        victim = job.processes.pop()
        mine = next(e.pid for e in workers.values() if _ancestor(e.pid, victim.pid))
        begin = time.monotonic()
        victim.kill()
        if with_worker:
            os.kill(mine, signal.SIGKILL)
        victim.wait()
        return {"up": _latest(job.up(2, begin, 90.0)) - begin}


def _replaced_node(side: str) -> Figures:
    with Agents(side, "3", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, restarts=3) as job:
        begin = job.start(3, host=True)
        job.up(3, begin)
        settle()
        victim = job.processes.pop()
        begin = time.monotonic()
        kill_group(victim)
        time.sleep(1.0)  # a scheduler replaces the node
        job.start()
        return {"up": _latest(job.up(3, begin, 60.0)) - begin}


def _ancestor(pid: int, of: int) -> bool:
    """Whether a process descends from an agent."""
    while pid > 1:
        if pid == of:
            return True
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return False


def _handlers(side: str) -> Figures:
    isolated = ["unshare", "--net"] if os.geteuid() == 0 else []
    command = [*isolated, python(side), os.path.join(WORKERS, "handlers.py"), side, str(HANDLERS)]
    done = subprocess.run(
        command,
        env=environment(side, PHALANX_TOKEN="bench"),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    if done.returncode:
        raise FailedRun(done.stderr[-200:])
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def forming(quick: bool) -> list[Row]:
    """Agents that start and end together."""
    found = []
    for count, target in ((2, 1 / 8), (8, 1 / 8)) if quick else ((2, 1 / 8), (8, 1 / 8), (32, 1 / 10)):
        # torchrun needs half a minute for 32; the smaller runs have warmed up what there is to warm up.
        times, warm = (1, True) if quick else (2, False) if count == 32 else (3, True)
        samples = interleave(
            lambda side, count=count: _form_and_end(side, count),  # type: ignore[misc]
            times,
            warm=warm,
        )
        what = f"{count} agents: first exec → all workers running"
        found.append(compare("nodes", what, "s", Target(target), samples, "up"))
        what = f"{count} agents: last worker's exit → all agents gone"
        found.append(compare("nodes-exit", what, "s", Target(1 / 8), samples, "exit"))
    return found


def joining(quick: bool) -> list[Row]:
    """Fewer nodes than the maximum, and one that joins later."""
    times = 1 if quick else 3
    samples = interleave(_last_call, times, warm=False)
    what = "3 of 1:4 nodes present → workers running"
    found = [compare("last-call", what, "s", Target(1 / 10), samples, "up")]
    samples = interleave(_late_node, times, warm=False)
    found.append(compare("join", "a fourth node joins 1:4 → all run", "s", Target(1 / 8), samples, "up"))
    return found


def losing(quick: bool) -> list[Row]:
    """A node that is lost, or replaced."""
    times = 1 if quick else 3
    # torchrun needs 45 s for each: not in a quick run.
    slow = phalanx_sides() if quick else sides()
    samples = interleave(lambda side: _lost_node(side, True), times, warm=False, names=slow)
    what = "a node of 2:3 lost → the rest run again"
    found = [compare("loss", what, "s", Target(1 / 20), samples, "up")]
    ours = interleave(lambda side: _lost_node(side, False), times, warm=False, names=phalanx_sides())
    what, note = "agent alone SIGKILLed → the rest run again", "torchrun does not notice it within a minute"
    found.append(compare("loss", what, "s", Target(2.0, "value"), ours, "up", [note]))
    samples = interleave(_replaced_node, times, warm=False, names=slow)
    what = "node of 3 SIGKILLed, replaced after 1 s → all run"
    found.append(compare("loss", what, "s", Target(2.5, "value"), samples, "up"))
    return found


def handlers(quick: bool) -> list[Row]:
    """The rendezvous alone, in many processes."""
    found = []
    samples = interleave(_handlers, 1 if quick else 5, warm=not quick)
    for key, name in (("first", "first round"), ("again", "re-formed round")):
        what = f"{HANDLERS} handlers in as many processes: {name}"
        found.append(compare("handlers", what, "s", Target(0.25, "value"), samples, key))
        found.append(
            compare("handlers", f"{what}, moved", "B", Target(1e6, "value"), samples, f"{key}_bytes")
        )
    return found
