"""What all rows share: the sides, one observed launch, interleaved samples, and the rows of the table.

The sides are torch, this checkout (`phalanx`) and, with `--against`, another checkout (`other`).

Rules for every figure:
- All sides run interleaved in the same run, with the same flags and environment; the result is the ratio of
  the medians. A sample that failed is counted and reported.
- Workers stamp their own events with CLOCK_MONOTONIC, which is the same for all processes, and send them
  through a named pipe: no polling during a measurement.
- Every process of a launch has a tag in its environment and is killed when the launch is closed, including
  what a launcher left behind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

THEIRS, OURS, OTHER = "torch", "phalanx", "other"
BENCH = os.path.dirname(os.path.abspath(__file__))
WORKERS = os.path.join(BENCH, "workers")
LIMIT = 60.0  # seconds; a launch that takes longer counts as failed
TAG = "BENCH_LAUNCH"
_CHECKOUT = "BENCH_AGAINST"  # the path of the other checkout
# Removed, so that all sides compile their modules once and buffer their output as Python does by default.
_REMOVED = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")


class FailedRun(Exception):
    """A sample gave no figure; the message says what happened instead."""


# -- sides --------------------------------------------------------------------------------------------------


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def compare_against(checkout: str) -> None:
    """Measure the phalanx of another checkout, too."""
    os.environ[_CHECKOUT] = os.path.abspath(checkout)


def phalanx_sides() -> tuple[str, ...]:
    """This checkout, and the other one if there is one."""
    return (OURS, OTHER) if _CHECKOUT in os.environ else (OURS,)


def sides() -> tuple[str, ...]:
    """The sides that can be measured here."""
    return (THEIRS, *phalanx_sides()) if has_torch() else phalanx_sides()


def python(side: str) -> str:
    """The interpreter of a side."""
    folder = os.path.join(os.environ.get(_CHECKOUT, ""), ".venv", "bin")
    found = side == OTHER and os.path.exists(os.path.join(folder, "phalanx"))
    return os.path.join(folder, "python") if found else sys.executable


def program(side: str) -> list[str]:
    """The launcher of a side: torchrun or `phalanx run`."""
    folder = os.path.dirname(python(side))
    return [os.path.join(folder, "torchrun")] if side == THEIRS else [os.path.join(folder, "phalanx"), "run"]


def environment(side: str, **more: str) -> dict[str, str]:
    """The environment of a measured process, as on an ordinary machine."""
    kept = {k: v for k, v in os.environ.items() if k not in _REMOVED}
    if side == OTHER and python(side) == sys.executable:  # it has no .venv: this interpreter, its source
        checkout = os.environ[_CHECKOUT]
        kept |= {"PYTHONPATH": f"{checkout}/src", "XDG_CACHE_HOME": f"{checkout}/bench/results/cache"}
    return {**kept, **more}


class Sampler:
    """A process of one side that takes samples on request, so that each library is loaded once.

    The module is run with the side as its argument and calls `serve_samples`: it answers every line
    (arguments as JSON) with a line of JSON.
    """

    def __init__(self, side: str, module: str) -> None:
        self._tag = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [python(side), "-m", module, side],
            cwd=os.path.dirname(BENCH),
            env=environment(side, **{TAG: self._tag}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def sample(self, *arguments: Any) -> Any:
        """The answer to one request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise FailedRun(f"the sampler exited with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedRun(answer["error"])
        return answer

    def close(self) -> None:
        """End the process and all that it started."""
        kill_group(self._process)
        kill_tagged(self._tag)
        self._process.communicate()


@contextmanager
def samplers(module: str) -> Iterator[Callable[..., Any]]:
    """`sample(side, *arguments)`; each side has a process of its own until the end."""
    made: dict[str, Sampler] = {}

    def sample(side: str, *arguments: Any) -> Any:
        if side not in made:
            made[side] = Sampler(side, module)
        return made[side].sample(*arguments)

    try:
        yield sample
    finally:
        for sampler in made.values():
            sampler.close()


def serve_samples(take: Callable[..., Any]) -> None:
    """The other end of a `Sampler`: `take(side, *arguments)` for every request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    for line in sys.stdin:
        try:
            answer = take(sys.argv[1], *json.loads(line))
        except Exception as error:  # noqa: BLE001 - a failed sample must not end the process
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# -- processes ----------------------------------------------------------------------------------------------


def tagged(tag: str) -> list[int]:
    """Every live process with this tag in its environment."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):  # a zombie's is empty
                    found.append(int(name))
        except OSError:
            pass  # gone, or another user's
    return found


def kill_tagged(tag: str) -> None:
    """SIGKILL until nothing with this tag is left."""
    while left := tagged(tag):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.005)  # there is no event for the end of another process's child


def kill_group(process: subprocess.Popen[Any]) -> None:
    """SIGKILL the group that a process leads, and reap it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- one launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """An event that a worker has stamped."""

    what: str
    rank: int
    attempt: int
    pid: int
    at: float


class EventPipe:
    """The named pipe through which workers send their events."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "events")
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self.events: list[Event] = []

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._fd

    def read(self) -> None:
        """Add the events that have arrived."""
        *lines, self._rest = (self._rest + os.read(self._fd, 65536)).split(b"\n")
        for line in lines:
            what, rank, attempt, pid, at = line.decode().split()
            self.events.append(Event(what, int(rank), int(attempt), int(pid), float(at)))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def last_lines(path: str) -> str:
    """The last lines of a launcher's output, as one line."""
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file.read().splitlines() if line.strip(" *=-\n")]
    return " / ".join(lines[-3:])[-300:]


class Launch:
    """An observed launcher with its workers; closing it kills all of them."""

    def __init__(
        self,
        side: str,
        script: str,
        *args: str,
        nproc: int,
        restarts: int = 0,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        console: int | None = None,
        hosts: Sequence[tuple[Sequence[str], str]] = (),
    ) -> None:
        """`side` may be `floor`: nproc plain runs of the script. `console`: a descriptor for stdout.

        `hosts`: for each node the words that run a command there, and its address; they meet at the first.
        `nproc` are then all workers.
        """
        self.side, self.nproc, self.nodes = side, nproc, max(1, len(hosts))
        self.places = [before for before, _ in hosts] or [()]
        self.folder = tempfile.mkdtemp(prefix="bench-")
        self._pipe = EventPipe(self.folder)
        self.events = self._pipe.events
        self._tag = uuid.uuid4().hex
        environ = environment(side, BENCH_EVENTS=self._pipe.path, **{TAG: self._tag}, **(env or {}))
        command = [os.path.join(WORKERS, script), *args]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = open(os.path.join(self.folder, "output"), "wb")  # noqa: SIM115 - closed in close()
        try:
            if side == "floor":
                commands = [([sys.executable, *command], {**environ, "RANK": str(n)}) for n in range(nproc)]
            else:
                options = [f"--nproc-per-node={nproc // self.nodes}", f"--max-restarts={restarts}"]
                if hosts:
                    backend = "c10d" if side == THEIRS else "phalanx"
                    options += [f"--nnodes={self.nodes}", f"--rdzv-backend={backend}", "--rdzv-id=bench"]
                    options += [f"--rdzv-endpoint={hosts[0][1]}:29400"]
                    where = [
                        (before, [f"--local-addr={address}", f"--rdzv-conf=is_host={int(number == 0)}"])
                        for number, (before, address) in enumerate(hosts)
                    ]
                else:
                    where = [((), ["--standalone"])]
                commands = [
                    ([*before, *program(side), *options, *more, *flags, *command], environ)
                    for before, more in where
                ]
            self.begin = time.monotonic()
            for argv, variables in commands:
                self._processes.append(
                    subprocess.Popen(
                        argv,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=self._output if console is None else console,
                        stderr=self._output,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise
        self.pid = self._processes[0].pid
        self.pids = {process.pid for process in self._processes}  # of the launchers, one per node
        self._pidfd = os.pidfd_open(self.pid)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(
        self, what: str, attempt: int = 0, count: int | None = None, limit: float = LIMIT
    ) -> dict[int, Event]:
        """Wait until `count` ranks (default: all) have stamped `what` in this attempt or a later one."""
        wanted = self.nproc if count is None else count
        end = time.monotonic() + limit
        while True:
            found = {e.rank: e for e in reversed(self.events) if e.what == what and e.attempt >= attempt}
            if len(found) >= wanted:
                return found
            self._listen(end, f"{what!r} of attempt {attempt} from {len(found)} of {wanted} workers")

    def _listen(self, end: float, missing: str) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}
        if self._pipe.fileno() in ready:
            self._pipe.read()
        elif ready and self.side != "floor":
            code = self._processes[0].wait()
            raise FailedRun(f"the launcher exited with code {code} and only {missing}: {self.tail()}")
        elif time.monotonic() >= end:
            raise FailedRun(f"only {missing} in time: {self.tail()}")

    def ended(self, limit: float = LIMIT) -> float:
        """Wait for the launcher's exit and return its time. Events until then are kept for `expect`."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(limit * 1000):
            raise FailedRun(f"the launcher did not exit within {limit:.0f} s: {self.tail()}")
        at = time.monotonic()
        for process in self._processes:
            process.wait()
        while select.select([self._pipe], [], [], 0)[0]:
            self._pipe.read()
        return at

    def helpers(self) -> list[int]:
        """The launcher and all processes of this launch that are not workers."""
        workers = {e.pid for e in self.events}
        return [pid for pid in self.processes() if pid not in workers]

    def processes(self) -> list[int]:
        """Every live process of this launch."""
        return tagged(self._tag)

    def tail(self) -> str:
        """The last lines of the launcher's output."""
        return last_lines(os.path.join(self.folder, "output"))

    def close(self) -> None:
        """SIGKILL the process groups and all processes that have left them."""
        for process in self._processes:
            kill_group(process)
        kill_tagged(self._tag)
        self._processes = []
        self._pipe.close()
        if hasattr(self, "_pidfd"):
            os.close(self._pidfd)
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def settle() -> None:
    """Let a launch come to rest; the time is random, to be unrelated to any polling interval."""
    time.sleep(0.3 + random.uniform(0, 0.2))


# -- interleaved samples ------------------------------------------------------------------------------------

Figures = dict[str, float]


@dataclass
class Samples:
    """All figures of one side, and the errors of the samples that gave none."""

    figures: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        """The samples of one figure."""
        return [figures[name] for figures in self.figures if name in figures]


def interleave(
    once: Callable[[str], Figures], rounds: int, *, names: Sequence[str] | None = None, warm: bool = True
) -> dict[str, Samples]:
    """Take `rounds` samples of every side in turn, reversing the order each round."""
    chosen = list(sides() if names is None else names)
    samples = {name: Samples() for name in chosen}
    for name in chosen if warm else []:  # byte code, page cache, and the launcher's cache of imports
        try:
            once(name)
        except FailedRun as error:
            samples[name].failures.append(f"(warming up) {error}")
    for number in range(rounds):
        for name in chosen if number % 2 == 0 else chosen[::-1]:
            try:
                samples[name].figures.append(once(name))
            except FailedRun as error:
                samples[name].failures.append(str(error))
    return samples


# -- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What this checkout must reach: a ratio of the medians to torch's, or an absolute value."""

    limit: float
    kind: str = "ratio"  # ratio, value
    least: bool = False  # the limit is a lower one

    def met(self, ours: float | None, theirs: float | None) -> bool | None:
        """None if unknown."""
        if ours is None or (self.kind == "ratio" and not theirs):
            return None
        value = ours if self.kind == "value" else ours / (theirs or 1.0)
        return value >= self.limit if self.least else value <= self.limit

    def text(self, unit: str) -> str:
        """The target as the table shows it."""
        sign = "≥" if self.least else "≤"
        if self.kind == "value":
            return f"{sign} {with_unit(self.limit, unit)}"
        return f"{sign} {self.limit:g}×" if self.limit >= 1 else f"{sign} 1/{1 / self.limit:.3g}"


@dataclass
class Row:
    """One line of the table."""

    key: str
    what: str
    unit: str
    target: Target | None  # None: for information only
    ours: float | None = None
    theirs: float | None = None
    other: float | None = None
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """This checkout to torch."""
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def against(self) -> float | None:
        """This checkout to the other one."""
        return self.ours / self.other if self.ours is not None and self.other else None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached."""
        return self.target.met(self.ours, self.theirs) if self.target else None

    @property
    def goal(self) -> str:
        """The target as text."""
        return self.target.text(self.unit) if self.target else "-"

    def as_json(self) -> dict[str, Any]:
        """All fields and what follows from them."""
        return {
            **asdict(self),
            "ratio": self.ratio,
            "against": self.against,
            "met": self.met,
            "target": self.goal,
        }


def compare(
    key: str,
    what: str,
    unit: str,
    target: Target | None,
    samples: dict[str, Samples],
    figure: str,
    notes: Sequence[str] = (),
    average: Callable[[list[float]], float] = statistics.median,
) -> Row:
    """The row of one figure of interleaved samples; the floor becomes a note."""
    row = Row(key, what, unit, target, notes=list(notes))
    for name, taken in samples.items():
        values = taken.of(figure)
        row.samples[name] = values
        value = average(values) if values else None
        if name == OURS:
            row.ours = value
        elif name == THEIRS:
            row.theirs = value
        elif name == OTHER:
            row.other = value
        elif value is not None:
            row.notes.append(f"{name}: {with_unit(value, unit)}")
        if taken.failures:
            total = len(taken.figures) + len(taken.failures)
            row.notes.append(f"{name}: {len(taken.failures)} of {total} samples failed: {taken.failures[0]}")
    return row


def with_unit(value: float | None, unit: str) -> str:
    """A figure with its unit, three digits."""
    if value is None:
        return "-"
    if unit == "s":
        if value >= 1:
            return f"{value:.2f} s"
        return f"{value * 1e3:.3g} ms" if value >= 5e-5 else f"{value * 1e6:.3g} µs"
    return f"{value:.3g} {unit}".rstrip() if abs(value) < 1000 else f"{value:,.0f} {unit}".rstrip()
