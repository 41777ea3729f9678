"""`phalanx status --watch`: a live view of one job on the whole terminal, for 80×24 over ssh and more.

    a headline, goodput and what was lost, hosts that are kept out
    the rank grid: one cell per rank, its letter and colour the state
    the ranks that are behind, or a table of all (scrolled, filtered)
    incidents, and the last lines that workers wrote

`screen` is pure: a snapshot and what the user chose in, lines out. The agent is asked once a second while
somebody looks, and not at all otherwise. No library is needed: a terminal that knows the usual escapes is
enough. Everything that came from others is made printable before it is drawn.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.core.diagnosis.progress import ranks_text
from phalanx.core.ledger.goodput import LOST, seconds
from phalanx.job import units
from phalanx.log import printable, write_stderr
from phalanx.observe.duration import duration
from phalanx.observe.snapshot import JobSnapshot, WorkerSnapshot, nodes_of, totals_of, workers_of
from phalanx.observe.status_text import PHASES, quarantine_lines
from phalanx.observe.worker_states import FAILED, MARKS, STOPPED, UNKNOWN, StateMarks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.observe.local_agents import LocalAgent

_EVERY = 1.0
_HELP = "q end  j/k scroll  / ranks  a all  g grid  l lines  space pause"

_SLOW = StateMarks("", "▼", "35")
_DOWN = (FAILED, STOPPED)
_BAR = {
    "productive": "42",
    "running": "42",
    "checkpointing": "46",
    "recomputed": "45",
    "recovering": "41",
    "hung": "41",
    "starting": "43",
    "nodes": "100",
    "slowest": "100",
}


class WatchView(NamedTuple):
    """What the user chose."""

    scroll: int = 0
    ranks: str = ""
    typing: str | None = None
    grid: bool = True
    logs: bool = True
    paused: bool = False
    colour: bool = True


class StyledLine(NamedTuple):
    """A piece of a line and its colour; empty: none."""

    text: str
    style: str = ""


def screen(job: JobSnapshot | None, view: WatchView, width: int, height: int, why: str = "") -> list[str]:
    """The lines of the terminal, at most `height` of `width` cells."""
    if job is None:
        return [_paint([StyledLine(why or "asking …")], width, view.colour)]
    shown = _filtered(view.ranks)
    pairs = [pair for pair in workers_of(job) if shown is None or pair[1].rank in shown]
    lines = [_headline(job), *_summary(job, width)]
    kept_out = quarantine_lines(job.quarantine, max(2, height // 8))
    lines += [[StyledLine("quarantined: ", "31"), StyledLine(one)] for one in kept_out]
    if view.grid and pairs:
        lines += _grid([worker for _, worker in pairs], width, max(2, height // 4))
    foot = [StyledLine(f"/{view.typing}█" if view.typing is not None else _footer(job, view), "7")]
    incidents = _incidents(job, max(2, height // 6))
    least = max(2, height // 5) if view.logs else 0
    room = height - len(lines) - 1 - len(incidents) - least
    lines += _table(pairs, view, max(0, room))
    lines += incidents
    lines += _tails(pairs, height - 1 - len(lines)) if view.logs else []
    lines += [[]] * max(0, height - 1 - len(lines))
    return [_paint(line, width, view.colour) for line in (*lines[: height - 1], foot)]


def _filtered(words: str) -> frozenset[int] | None:
    """The ranks that a person has typed; None: all, also for half a range."""
    try:
        return units.ranks(words)
    except ValueError:
        return None


def _headline(job: JobSnapshot) -> list[StyledLine]:
    nodes = nodes_of(job)
    words = [
        f" run {job.run}",
        f"{PHASES.get(job.phase, job.phase)} for {duration(max(0.0, job.now - job.since))}",
    ]
    if len(job.nodes) > 1:
        words.append(f"{len(job.nodes)} nodes, round {job.round}")
    spares = sum(node.state == "spare" for node in nodes)
    standbys = sum(node.standbys.count for node in nodes)
    words += [f"{job.world_size} ranks"] * (job.world_size > 0)
    words += [f"{spares} spare"] * bool(spares) + [f"{standbys} standby"] * bool(standbys)
    words += [f"restart {job.restarts} of {job.max_restarts}"] * bool(job.restarts)
    words += [f"{job.silent} nodes silent"] * bool(job.silent)
    if job.waiting_for:
        words.append(job.waiting_for)
    return [StyledLine(job.name, "1"), StyledLine(", ".join(words))]


def _summary(job: JobSnapshot, width: int) -> list[list[StyledLine]]:
    totals = totals_of(job)
    ranks, total = max(1, totals.ranks), totals.total
    names = [name for name in LOST if total and totals.seconds[name] / total >= 0.001]
    names.sort(key=lambda name: -totals.seconds[name])
    line = f"{totals.measure} {100 * totals.ratio:.1f} %"
    bar: list[StyledLine] = []
    cells = max(10, min(30, width // 4))
    for name, style in _BAR.items():
        count = round(cells * totals.seconds[name] / total) if total else 0
        bar += [StyledLine(" " * count, style)] * (count > 0)
    room = width - sum(len(piece.text) for piece in bar) - len(line) - 3
    lost = ""
    for name in names:  # the largest first, none of them cut off
        more = f"{', ' * bool(lost)}{name} {seconds(totals.seconds[name] / ranks)}"
        if len(lost) + len(more) <= room:
            lost += more
    return [[*bar, StyledLine(f" {line}", "1"), StyledLine(f"  {lost}")]]


def _slow(workers: Sequence[WorkerSnapshot]) -> set[int]:
    """The ranks that are behind: clearly fewer steps, or no heartbeat for much longer, than most."""
    beats = [worker for worker in workers if worker.running and worker.quiet is not None]
    if len(beats) < 2:
        return set()
    steps = sorted(worker.step for worker in beats if worker.step is not None)
    quiet = sorted(worker.quiet or 0.0 for worker in beats)[len(beats) // 2]
    middle = steps[len(steps) // 2] if steps else 0
    least = middle - max(1.0, 0.02 * middle)  # ranks that do not wait for each other are never quite even
    return {
        worker.rank
        for worker in beats
        if (worker.step is not None and worker.step < least) or (worker.quiet or 0.0) > 3 * quiet + 5
    }


def _grid(workers: Sequence[WorkerSnapshot], width: int, most: int) -> list[list[StyledLine]]:
    slow = _slow(workers)
    size = max(1, width - 8)
    lines: list[list[StyledLine]] = []
    for begin in range(0, len(workers), size):
        if len(lines) == most - 1 and len(workers) > begin + size:
            left = len(workers) - begin
            odd = sum(one.state in _DOWN or one.rank in slow for one in workers[begin:])
            lines.append([StyledLine(f"        … {left} more ranks, {odd} of them behind or down")])
            break
        row = [StyledLine(f"{workers[begin].rank:>6}  ", "90")]
        for one in workers[begin : begin + size]:
            behind = one.rank in slow and one.state not in _DOWN
            marks = _SLOW if behind else MARKS.get(one.state, UNKNOWN)
            row.append(StyledLine(marks.cell, marks.colour))
        lines.append(row)
    return lines


def _table(
    pairs: Sequence[tuple[JobSnapshot, WorkerSnapshot]], view: WatchView, room: int
) -> list[list[StyledLine]]:
    """Rows of ranks: those that are behind first, then by rank."""
    if room < 2 or not pairs:
        return []
    slow = _slow([worker for _, worker in pairs])
    ordered = sorted(pairs, key=lambda pair: (pair[1].rank not in slow, pair[1].rank))
    several = len({node.host for node, _ in pairs}) > 1
    head = "  rank state              pid        up   cpu  memory      step steps/s    beat  "
    lines = [[StyledLine(head + ("host" if several else "last line"), "4")]]
    first = min(view.scroll, max(0, len(ordered) - (room - 1)))
    for node, one in ordered[first : first + room - 1]:
        words = [
            f"{one.rank:>6}",
            f"{(one.section or one.state):<13.13}",
            f"{one.pid or '':>8}",
            f"{duration(one.uptime) if one.uptime is not None else '':>9.9}",
            f"{one.cpu:>5.2f}" if one.cpu is not None else " " * 5,
            f"{size_of(one.memory) if one.memory is not None else '':>7}",
            f"{one.step if one.step is not None else '':>9}",
            f"{one.rate:>7.3g}" if one.rate is not None else " " * 7,
            f"{f'{one.quiet:.1f} s' if one.quiet is not None else '':>7}",
        ]
        gpu = "".join(f" gpu {g.index} {g.busy or 0:.0f} %" for g in one.gpus[:1])
        style = (_SLOW if one.rank in slow else MARKS.get(one.state, UNKNOWN)).colour
        tail = node.host if several else one.last_line
        lines.append([StyledLine(" ".join(words), style), StyledLine(f"{gpu}  {tail}")])
    return lines


def _incidents(job: JobSnapshot, most: int) -> list[list[StyledLine]]:
    if not job.records:
        return []
    lines = [[StyledLine(f"{job.incident_count} incident{'s' * (job.incident_count != 1)}", "4")]]
    for one in job.records[-(most - 1) :][::-1]:
        ago = duration(max(0.0, job.now - one.timestamp))
        took = f" in {seconds(one.total)}" if one.total is not None else " …" if not one.over else ""
        style = "31" if one.recovery == "end" or not one.over else ""
        lines.append([StyledLine(f"{one.number:>6} {ago} ago, {one.recovery}{took}: {one.reason}", style)])
    return lines


def _tails(pairs: Sequence[tuple[JobSnapshot, WorkerSnapshot]], most: int) -> list[list[StyledLine]]:
    told = [(worker.rank, worker.last_line) for _, worker in pairs if worker.last_line]
    if not told or most < 2:
        return []
    groups: dict[str, list[int]] = {}
    for rank, line in told:
        groups.setdefault(line, []).append(rank)
    lines = [[StyledLine("last lines", "4")]]
    for line, ranks in list(groups.items())[: most - 1]:
        lines.append([StyledLine(f"{ranks_text(tuple(ranks)):>12} ", "90"), StyledLine(line)])
    return lines


def _footer(job: JobSnapshot, view: WatchView) -> str:
    chosen = f" ranks {view.ranks}" if view.ranks else ""
    return f" {time.strftime('%H:%M:%S', time.localtime(job.now))}{' paused' * view.paused}{chosen}  {_HELP}"


def size_of(count: int) -> str:
    """Bytes in four characters or so."""
    if count < 10**9:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e9:.1f} GB"


def _paint(pieces: Sequence[StyledLine], width: int, colour: bool) -> str:
    """One line, cut at the width, that no character of it can break out of."""
    out, left = "", width
    for text, style in pieces:
        shown = printable(text.replace("\n", " ").replace("\t", " "))[:left]
        left -= len(shown)
        out += f"\x1b[{style}m{shown}\x1b[0m" if style and colour and shown else shown
        if left <= 0:
            break
    return out


# ---- the terminal ------------------------------------------------------------------------------------


def press(view: WatchView, key: str) -> WatchView | None:
    """The view after a key; None: the end."""
    if view.typing is not None:
        if key in ("\r", "\n"):
            return view._replace(ranks=view.typing, typing=None, scroll=0)
        if key == "\x1b":
            return view._replace(typing=None)
        if key in ("\x7f", "\b"):
            return view._replace(typing=view.typing[:-1])
        return view._replace(typing=(view.typing + key)[:200]) if re.fullmatch(r"[0-9,\-]", key) else view
    match key:
        case "q" | "\x03" | "\x04":
            return None
        case "j" | "\x1b[B":
            return view._replace(scroll=view.scroll + 1)
        case "k" | "\x1b[A":
            return view._replace(scroll=max(0, view.scroll - 1))
        case "\x1b[6~" | "d":
            return view._replace(scroll=view.scroll + 10)
        case "\x1b[5~" | "u":
            return view._replace(scroll=max(0, view.scroll - 10))
        case "/":
            return view._replace(typing="")
        case "a":
            return view._replace(ranks="", scroll=0)
        case "g":
            return view._replace(grid=not view.grid)
        case "l":
            return view._replace(logs=not view.logs)
        case " ":
            return view._replace(paused=not view.paused)
    return view


def watch(here: Sequence[LocalAgent], run: str) -> int:
    """Draw until the user ends it; the agents of this machine have been asked."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        write_stderr("phalanx status: --watch needs a terminal; use --json for programs\n")
        return 2
    import termios
    import tty

    from phalanx.cli.runs import running
    from phalanx.job.environment import allows_colour
    from phalanx.job.time_budgets import WORK
    from phalanx.observe.local_agents import find, states

    found = running(here, run)
    chosen = found[0].job.run
    keyboard, before = sys.stdin.fileno(), termios.tcgetattr(sys.stdin.fileno())
    view: WatchView | None = WatchView(colour=allows_colour())
    job: JobSnapshot | None = None
    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    why = ""
    try:
        tty.setcbreak(keyboard)
        ask_at = 0.0
        while view is not None:
            now = time.monotonic()
            if now >= ask_at and not view.paused:
                ask_at = now + _EVERY
                if not any(agent.runs for agent in found):  # it may have begun again
                    found = [agent for agent in find()[0] if agent.job.run == chosen]
                told = states(found[:1], {"ask": "status", "all": True, "gpus": True}, WORK)
                if told:
                    job, why = told[0].job, ""
                elif found:
                    why = f"no answer from pid {found[0].job.pid}"
                else:
                    job, why = None, f"run {chosen} has ended; q ends this view"
            size = shutil.get_terminal_size((80, 24))
            # 0: unknown; Python 3.10 says so itself.
            lines = screen(job, view, size.columns or 80, size.lines or 24, why)
            drawn = "\r\n".join(f"{line}\x1b[K" for line in lines)
            sys.stdout.write(f"\x1b[H{drawn}\x1b[J")
            sys.stdout.flush()
            rest = _EVERY if view.paused else max(0.0, ask_at - time.monotonic())
            if select.select([keyboard], [], [], rest)[0]:
                for key in _keys(os.read(keyboard, 64).decode(errors="replace")):
                    view = press(view, key) if view is not None else None
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
    return 0


def _keys(text: str) -> list[str]:
    """Single keys, escape sequences whole."""
    return re.findall(r"\x1b\[[0-9;]*[A-Za-z~]|.|\n", text, re.DOTALL)
