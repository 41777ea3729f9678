"""What all rows share: the two sides, one launch under observation, interleaved runs, and how a row is told.

Rules that hold for every figure:
- Both sides run in the same interleaved run, with the same flags and environment; the claim is the ratio of
  the medians. A run that failed is counted and named, never dropped in silence.
- Workers stamp their own events with CLOCK_MONOTONIC, which is one clock for all processes, and tell them
  through a named pipe: no polling anywhere in the measurement.
- Everything a launch started carries a tag in its environment and is gone when the launch is closed, also
  what a launcher left behind.
"""

from __future__ import annotations

import importlib.util
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

THEIRS, OURS = "torch", "phalanx"
WORKERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "workers")
LIMIT = 60.0  # seconds; a launch that takes longer counts as failed
TAG = "BENCH_LAUNCH"
# What this machine may have set and a person's has not. Both sides are to compile their modules once, and to
# buffer their output as Python does by itself.
_UNUSUAL = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")


class FailedRun(Exception):
    """One run gave no figure; the message says what was seen instead."""


def has_torch() -> bool:
    """Whether there is anything to compare with."""
    return importlib.util.find_spec("torch") is not None


def sides() -> tuple[str, ...]:
    """The sides that can be measured here."""
    return (THEIRS, OURS) if has_torch() else (OURS,)


def environment(**more: str) -> dict[str, str]:
    """The environment of a measured process, as on an ordinary machine."""
    return {**{k: v for k, v in os.environ.items() if k not in _UNUSUAL}, **more}


def tagged(tag: str) -> list[int]:
    """Every live process that has, or whose parents had, this tag in the environment."""
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
        time.sleep(0.005)  # the end of somebody else's child has no event for us


def kill_group(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to the group that a process leads, and reap it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- one launch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """What a worker told: what, who, in which attempt, when."""

    what: str
    rank: int
    attempt: int
    pid: int
    at: float


class Launch:
    """A launcher with its workers, observed; closing it ends all of them."""

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
    ) -> None:
        """`side` may be `floor`: the script by itself, nproc times. `console`: a descriptor for stdout."""
        self.side, self.nproc, self.events = side, nproc, list[Event]()
        self.folder = tempfile.mkdtemp(prefix="bench-")
        self._fifo_path = os.path.join(self.folder, "events")
        os.mkfifo(self._fifo_path)
        self._fifo = os.open(self._fifo_path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        self._tag = uuid.uuid4().hex
        environ = environment(BENCH_EVENTS=self._fifo_path, **{TAG: self._tag}, **(env or {}))
        command = [os.path.join(WORKERS, script), *args]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._said = open(os.path.join(self.folder, "said"), "wb")  # noqa: SIM115 - closed in close()
        try:
            if side == "floor":
                commands = [([sys.executable, *command], {**environ, "RANK": str(n)}) for n in range(nproc)]
            else:
                commands = [([*launcher(side, nproc, restarts), *flags, *command], environ)]
            self.begin = time.monotonic()
            for words, variables in commands:
                self._processes.append(
                    subprocess.Popen(
                        words,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=self._said if console is None else console,
                        stderr=self._said,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise
        self.pid = self._processes[0].pid
        self._pidfd = os.pidfd_open(self.pid)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(
        self, what: str, attempt: int = 0, count: int | None = None, limit: float = LIMIT
    ) -> dict[int, Event]:
        """Wait until `count` ranks (all of them) have told `what` in this attempt or a later one."""
        wanted = self.nproc if count is None else count
        end = time.monotonic() + limit
        while True:
            found = {e.rank: e for e in reversed(self.events) if e.what == what and e.attempt >= attempt}
            if len(found) >= wanted:
                return found
            self._listen(end, f"{what!r} of attempt {attempt} from {len(found)} of {wanted} workers")

    def _listen(self, end: float, missing: str) -> None:
        poll = select.poll()
        poll.register(self._fifo, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}
        if self._fifo in ready:
            *lines, self._rest = (self._rest + os.read(self._fifo, 65536)).split(b"\n")
            for line in lines:
                what, rank, attempt, pid, at = line.decode().split()
                self.events.append(Event(what, int(rank), int(attempt), int(pid), float(at)))
        elif ready and self.side != "floor":
            code = self._processes[0].wait()
            raise FailedRun(f"the launcher ended with code {code} and only {missing}: {self.tail()}")
        elif time.monotonic() >= end:
            raise FailedRun(f"only {missing} in time: {self.tail()}")

    def ended(self, limit: float = LIMIT) -> float:
        """Wait for the launcher's end; when it was. Events that came meanwhile are kept for `expect`."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(limit * 1000):
            raise FailedRun(f"the launcher did not end within {limit:.0f} s: {self.tail()}")
        at = time.monotonic()
        for process in self._processes:
            process.wait()
        while select.select([self._fifo], [], [], 0)[0]:
            self._listen(at, "")
        return at

    def helpers(self) -> list[int]:
        """The launcher and everything of this launch that is not a worker."""
        workers = {e.pid for e in self.events}
        return [pid for pid in self.processes() if pid not in workers]

    def processes(self) -> list[int]:
        """Every live process of this launch, whoever its parent is by now."""
        return tagged(self._tag)

    def tail(self) -> str:
        """The last thing the launcher said, on one line."""
        with open(os.path.join(self.folder, "said"), errors="replace") as file:
            lines = [line.strip() for line in file.read().splitlines() if line.strip(" *=-\n")]
        return " / ".join(lines[-3:])[-300:]

    def close(self) -> None:
        """SIGKILL to the process groups, and to whatever has left them, until nothing is there."""
        for process in self._processes:
            kill_group(process)
        kill_tagged(self._tag)
        self._processes = []
        for fd in (self._fifo, getattr(self, "_pidfd", -1)):
            if fd >= 0:
                os.close(fd)
        self._said.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def launcher(side: str, nproc: int, restarts: int) -> list[str]:
    """The same words for both."""
    there = os.path.dirname(sys.executable)
    program = [os.path.join(there, "torchrun")] if side == THEIRS else [os.path.join(there, "phalanx"), "run"]
    return [*program, "--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]


def settle() -> None:
    """Let a launch come to rest; at random, so that no polling interval is always met at the same moment."""
    time.sleep(0.3 + random.uniform(0, 0.2))


# -- interleaved runs ---------------------------------------------------------------------------------------

Figures = dict[str, float]


@dataclass
class Samples:
    """All figures of one side, and what went wrong in the runs that gave none."""

    figures: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def of(self, name: str) -> list[float]:
        """The samples of one figure."""
        return [figures[name] for figures in self.figures if name in figures]


def interleave(
    once: Callable[[str], Figures], rounds: int, *, names: Sequence[str] | None = None, warm: bool = True
) -> dict[str, Samples]:
    """Run every side `rounds` times in turn, first one way round and then the other."""
    chosen = list(sides() if names is None else names)
    samples = {name: Samples() for name in chosen}
    for name in (
        chosen if warm else []
    ):  # byte code, page cache, and what a launcher learns from a first launch
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
    """What ours is to reach: a ratio to the other side (of the medians), or a value of its own."""

    limit: float
    kind: str = "ratio"  # ratio, value
    least: bool = False  # the limit is a lower one

    def met(self, ours: float | None, theirs: float | None) -> bool | None:
        """None: cannot be told here."""
        if ours is None or (self.kind == "ratio" and not theirs):
            return None
        value = ours if self.kind == "value" else ours / (theirs or 1.0)
        return value >= self.limit if self.least else value <= self.limit

    def words(self, unit: str) -> str:
        """As in the table."""
        sign = "≥" if self.least else "≤"
        if self.kind == "value":
            return f"{sign} {in_words(self.limit, unit)}"
        return f"{sign} {self.limit:g}×" if self.limit >= 1 else f"{sign} 1/{1 / self.limit:.3g}"


@dataclass
class Row:
    """One line of the table."""

    key: str
    what: str
    unit: str
    target: Target | None  # None: told for its own sake
    ours: float | None = None
    theirs: float | None = None
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ours to theirs."""
        return self.ours / self.theirs if self.ours is not None and self.theirs else None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached."""
        return self.target.met(self.ours, self.theirs) if self.target else None

    @property
    def goal(self) -> str:
        """The target in words."""
        return self.target.words(self.unit) if self.target else "-"

    def as_json(self) -> dict[str, Any]:
        """All there is to know about the row."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met, "target": self.goal}


def compare(
    key: str,
    what: str,
    unit: str,
    target: Target,
    samples: dict[str, Samples],
    figure: str,
    notes: Sequence[str] = (),
) -> Row:
    """The row of one figure of interleaved runs; other sides than the two (a floor) become notes."""
    row = Row(key, what, unit, target, notes=list(notes))
    for name, taken in samples.items():
        values = taken.of(figure)
        row.samples[name] = values
        median = statistics.median(values) if values else None
        if name == OURS:
            row.ours = median
        elif name == THEIRS:
            row.theirs = median
        elif median is not None:
            row.notes.append(f"{name}: {in_words(median, unit)}")
        if taken.failures:
            total = len(taken.figures) + len(taken.failures)
            row.notes.append(f"{name}: {len(taken.failures)} of {total} runs failed: {taken.failures[0]}")
    return row


def in_words(value: float | None, unit: str) -> str:
    """A figure with its unit, three digits."""
    if value is None:
        return "-"
    if unit == "s":
        if value >= 1:
            return f"{value:.2f} s"
        return f"{value * 1e3:.3g} ms" if value >= 5e-5 else f"{value * 1e6:.3g} µs"
    return f"{value:.3g} {unit}".rstrip() if abs(value) < 1000 else f"{value:,.0f} {unit}".rstrip()
