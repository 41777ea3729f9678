"""What must hold, as pure functions over what was recorded; each returns the violations that it finds.

A life sign is a time at which a worker provably ran user code. All times are seconds of one clock of the
machine (wall clock: a node's monotonic clock may differ by intention).
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from phalanx.helpers.keeper import KEEPER, ZYGOTE

LINE = "chaos-line"
HELPERS = {KEEPER: "keeper-stop", ZYGOTE: "zygote-stop"}
# How long after SIGCONT workers may still run that neither their agent nor its helpers could end before.
WAKE_UP = 1.0
_ON_CONSOLE = re.compile(rf"\[\w+\]:{LINE} (\d+) (\d+) ([0-9a-f]{{8}})")


class Violation(NamedTuple):
    """A broken promise."""

    invariant: str
    at: float
    text: str
    pids: tuple[int, ...] = ()


class LifeSigns(NamedTuple):
    """The record of one worker."""

    node: str
    pid: int
    world: str  # names the round
    rank: int
    size: int
    beats: tuple[float, ...]
    lines: int = 0  # numbered lines that it had written completely
    log: str = ""
    owner: str = ""  # node and incarnation of its agent

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank}/{self.size} of world {self.world} on {self.node} (pid {self.pid})"


class Disturbance(NamedTuple):
    """A fault as it was applied: from when to when."""

    fault: str
    node: str
    begin: float
    end: float  # infinity while it lasts

    def covers(self, at: float, after: float = 0.0) -> bool:
        """Whether it may excuse something at this time."""
        return self.begin <= at <= self.end + after


# ---- worlds ------------------------------------------------------------------------------------------


def one_world(signs: Iterable[LifeSigns], disturbances: Sequence[Disturbance]) -> list[Violation]:
    """Workers of two rounds never run at the same time.

    Excused, until one of them continues: agent and helpers of a node that are all stopped.
    """
    worlds = _worlds(signs)
    began = sorted((min(s.beats[0] for s in members), name) for name, members in worlds.items())
    found = []
    for position, (_, older) in enumerate(began):
        newer = next(((at, name) for at, name in began[position + 1 :] if name != older), None)
        if newer is None:
            break
        begin, name = newer
        for sign in worlds[older]:
            late = [at for at in sign.beats if at > begin and not _all_stopped(sign.node, at, disturbances)]
            if late:
                first = min(worlds[name], key=lambda s: s.beats[0])
                text = f"{sign.name} ran for {late[-1] - begin:.2f} s beside {first.name}"
                found.append(Violation("one world", late[0], text, (sign.pid, first.pid)))
    return found


def _all_stopped(node: str, at: float, disturbances: Sequence[Disturbance]) -> bool:
    stopped = {d.fault for d in disturbances if d.node == node and d.covers(at, WAKE_UP)}
    return "node-freeze" in stopped or stopped >= {"agent-stop", *HELPERS.values()}


def _worlds(signs: Iterable[LifeSigns]) -> dict[str, list[LifeSigns]]:
    worlds: dict[str, list[LifeSigns]] = defaultdict(list)
    for sign in signs:
        if sign.beats:
            worlds[sign.world].append(sign)
    return worlds


def ranks(signs: Iterable[LifeSigns]) -> list[Violation]:
    """In a round every rank exists once, is below the world size, and all agree on that size."""
    found = []
    for name, members in _worlds(signs).items():
        at = members[-1].beats[0]
        sizes = {sign.size for sign in members}
        if len(sizes) > 1:
            text = f"world {name}: world sizes {sorted(sizes)}"
            found.append(Violation("ranks", at, text, tuple(s.pid for s in members)))
        for rank, count in Counter(sign.rank for sign in members).items():
            twice = tuple(sign.pid for sign in members if sign.rank == rank)
            if count > 1:
                found.append(Violation("ranks", at, f"world {name}: rank {rank} exists {count} times", twice))
            if not 0 <= rank < max(sizes):
                found.append(Violation("ranks", at, f"world {name}: rank {rank} of {max(sizes)}", twice))
    return found


def whole(
    signs: Iterable[LifeSigns],
    disturbances: Sequence[Disturbance],
    now: float,
    within: float,
    finished: float = float("inf"),
) -> list[Violation]:
    """A round does not go on without one of its ranks for longer than `within` seconds.

    Excused: a stopped worker (the agent does not watch progress here), a slow link, and a store that is away
    (no loss can be agreed on without it). `finished`: when workers were asked to end by themselves.
    """
    found = []
    for name, members in _worlds(signs).items():
        last = max(sign.beats[-1] for sign in members)
        if last < now - within / 2 or last > finished:
            continue
        begin = last - within
        if min(sign.beats[0] for sign in members) > begin:
            continue
        if any(
            d.fault in ("worker-stop", "delay", "store-kill") and d.begin <= last and d.end + within >= begin
            for d in disturbances
        ):
            continue
        there = {sign.rank for sign in members if sign.beats[-1] >= begin}
        missing = sorted(set(range(members[0].size)) - there)
        if missing:
            alive = tuple(sign.pid for sign in members if sign.beats[-1] >= begin)
            text = f"world {name} goes on without ranks {missing} for more than {within:g} s"
            found.append(Violation("whole world", last, text, alive))
    return found


def is_complete(signs: Iterable[LifeSigns], size: int, now: float, fresh: float = 1.0) -> bool:
    """Whether exactly one round runs, with this world size, and every rank of it is alive."""
    alive = [sign for sign in signs if sign.beats and sign.beats[-1] >= now - fresh]
    return (
        len({sign.world for sign in alive}) == 1
        and {sign.size for sign in alive} == {size}
        and {sign.rank for sign in alive} == set(range(size))
    )


# ---- output ------------------------------------------------------------------------------------------


def numbered_line(pid: int, number: int) -> str:
    """A line that a worker writes; the checksum shows that it is whole."""
    return f"{LINE} {pid} {number} {zlib.crc32(f'{pid} {number}'.encode()):08x}"


def log_complete(sign: LifeSigns, text: str) -> list[Violation]:
    """The worker's file holds every line that it wrote, in order, and nothing else."""
    at = sign.beats[-1] if sign.beats else 0.0
    for number, line in enumerate(text.splitlines(), 1):
        if line != numbered_line(sign.pid, number):
            what = f"{sign.log}: line {number} of {sign.name} is {line[:80]!r}"
            return [Violation("log bytes", at, what, (sign.pid,))]
    count = len(text.splitlines())
    if count < sign.lines:
        what = f"{sign.log}: {count} lines of {sign.name}, which wrote {sign.lines}"
        return [Violation("log bytes", at, what, (sign.pid,))]
    return []


def console_complete(
    node: str, text: str, written: Mapping[int, int], *, ended: bool, at: float = 0.0
) -> list[Violation]:
    """No line on the console is split or doubled; none is missing if the agent ended by itself.

    `written`: pid → lines in the worker's file.
    """
    found = []
    shown: dict[int, int] = defaultdict(int)
    lines = text.split("\n")
    for line in lines if ended else lines[:-1]:
        if LINE not in line:
            continue
        match = _ON_CONSOLE.fullmatch(line.rstrip("\r"))
        pid, number = (int(match[1]), int(match[2])) if match else (0, 0)
        if match is None or numbered_line(pid, number) != line.rstrip("\r").partition("]:")[2]:
            found.append(Violation("console", at, f"{node}: torn line {line[:120]!r}"))
        elif number != shown[pid] + 1:
            what = f"{node}: line {number} of pid {pid} follows line {shown[pid]}"
            found.append(Violation("console", at, what, (pid,)))
            shown[pid] = number
        else:
            shown[pid] = number
    if ended and not found:
        for pid, count in written.items():
            if shown[pid] < count:
                what = f"{node}: {shown[pid]} of {count} lines of pid {pid} are on the console"
                found.append(Violation("console", at, what, (pid,)))
    return found[:3]


# ---- processes ---------------------------------------------------------------------------------------


class ProcessSeen(NamedTuple):
    """A living process that carries a marker of the campaign."""

    pid: int
    owner: str  # the agent (node and incarnation) below which it was started
    what: str  # as a person would recognise it


def nothing_left(
    processes: Iterable[ProcessSeen],
    ended: Mapping[str, float],
    disturbances: Sequence[Disturbance],
    now: float,
    within: float,
) -> list[Violation]:
    """Nothing that an agent started is alive `within` seconds after its end (`ended`: owner → when).

    Excused until it continues: a helper that is itself stopped, and everything on a frozen node.
    """
    left: dict[str, list[ProcessSeen]] = defaultdict(list)
    for process in processes:
        stops = ("node-freeze", HELPERS.get(process.what))
        node = process.owner.partition(".")[0]
        if any(d.node == node and d.fault in stops and d.covers(now, within) for d in disturbances):
            continue
        if process.owner in ended and now - ended[process.owner] > within:
            left[process.owner].append(process)
    found = []
    for owner, those in left.items():
        names = ", ".join(f"{p.pid} ({p.what})" for p in those)
        text = f"{owner}: alive {now - ended[owner]:.1f} s after the agent's end: {names}"
        found.append(Violation("left behind", now, text, tuple(p.pid for p in those)))
    return found


class CpuSample(NamedTuple):
    """CPU seconds that an agent and its helpers had used at a time."""

    owner: str
    at: float
    used: float


def idle(
    samples: Sequence[CpuSample],
    disturbances: Sequence[Disturbance],
    starts: Sequence[float],
    bound: float,
    window: float = 2.5,
    settle: float = 2.0,
) -> list[Violation]:
    """While nothing happens, an agent with its helpers uses less than `bound` of a core.

    "Nothing happens": from `settle` seconds before the window on, no fault is active and no worker started.
    """
    by_owner: dict[str, list[CpuSample]] = defaultdict(list)
    for sample in samples:
        by_owner[sample.owner].append(sample)
    found = []
    for owner, those in by_owner.items():
        last = those[-1]
        first = next((s for s in reversed(those) if last.at - s.at >= window), None)
        if first is None:
            continue
        begin = first.at - settle
        if any(d.begin <= last.at and d.end >= begin for d in disturbances):
            continue
        if those[0].at > begin or any(begin <= at <= last.at for at in starts):
            continue
        share = (last.used - first.used) / (last.at - first.at)
        if share > bound:
            text = f"{owner}: {share:.0%} of a core over {last.at - first.at:.1f} s in which nothing happened"
            found.append(Violation("idle", last.at, text))
    return found


class StatusAnswer(NamedTuple):
    """One run of `phalanx status` on a node."""

    node: str
    asked: float
    seconds: float
    answered: bool


def answers(
    asked: Iterable[StatusAnswer], disturbances: Sequence[Disturbance], bound: float
) -> list[Violation]:
    """An agent that is not stopped answers `phalanx status` in time."""
    found = []
    for one in asked:
        end = one.asked + one.seconds
        if any(d.node == one.node and d.begin <= end and d.end + WAKE_UP >= one.asked for d in disturbances):
            continue
        if not one.answered or one.seconds > bound:
            how = f"took {one.seconds:.1f} s" if one.answered else f"failed after {one.seconds:.1f} s"
            found.append(Violation("status", end, f"{one.node}: phalanx status {how}"))
    return found


# ---- endings -----------------------------------------------------------------------------------------


class AgentExit(NamedTuple):
    """How one agent ended, and how it should have."""

    owner: str
    at: float
    code: int | None  # None: it did not end
    expected: tuple[int, ...]  # empty: any
    report: str = ""  # the end of its console
    cause: str = ""  # what the report has to contain


def endings(exits: Iterable[AgentExit]) -> list[Violation]:
    """Every agent ends with the right code, and a failed job shows the same root cause on every node."""
    found = []
    for one in exits:
        tail = " | ".join(line for line in one.report.strip().splitlines()[-4:] if LINE not in line)
        if one.code is None:
            found.append(Violation("exit code", one.at, f"{one.owner} does not end; its last lines: {tail}"))
        elif one.expected and one.code not in one.expected:
            wanted = " or ".join(map(str, one.expected))
            text = f"{one.owner} exited with {one.code}, not {wanted}; its last lines: {tail}"
            found.append(Violation("exit code", one.at, text))
        elif one.cause and not re.search(one.cause, one.report):
            text = f"{one.owner}: the report does not show {one.cause!r}; its last lines: {tail}"
            found.append(Violation("root cause", one.at, text))
    return found
