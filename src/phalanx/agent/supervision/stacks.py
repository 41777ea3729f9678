"""The stacks of hung workers: requested by signal, parsed, and formatted for the report.

A Python worker has faulthandler's handler on `STACK_SIGNAL` from its first moment (bootstrap.py). The handler
is C code that needs neither the interpreter lock nor memory, so it also works while a thread spins or sleeps
in C. It writes to the worker's board, not to a file or to the worker's output.

Invariants
- The signal goes only to a process that catches it (according to /proc): it would kill any other.
- It goes to the worker alone, never to its children, which may have inherited the handler and the board.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.core.diagnosis.progress import Beat, Blame, Evidence, View, alike, ranks_text

# Libraries in which a rank waits for the other ranks.
_COLLECTIVES = ("/torch/distributed/", "/mpi4py/", "/horovod/", "/deepspeed/comm/")
_INNER = 8  # such a call must be among this many innermost frames
_SHOWN = 6
_LAUNCHER = ("_importlib_bootstrap.py", os.path.join("phalanx", "zygote", "bootstrap.py"))


def catches(pid: int, sig: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        with open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (sig - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


# ---- faulthandler's text -----------------------------------------------------------------------------


def parse(text: str) -> tuple[tuple[str, ...], ...]:
    """The threads of a dump, the main one first; frames innermost first, as `file:line in f`.

    A dump lists the newest thread first, so the main thread comes last. Its end is not marked: in a truncated
    dump the last thread is truncated.
    """
    threads: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x", "Stack (")):
            threads.append([])
        elif line.startswith('  File "') and threads:
            place, found, function = line[8:].rpartition(" in ")
            name, quoted, number = place.rpartition('", line ')
            if found and quoted:
                threads[-1].append(f"{name}:{number} in {function}")
        elif line.startswith("  <no Python frame>") and threads:
            threads[-1].append("no Python frame")
    return tuple(_without_launcher(frames) for frames in reversed(threads))


def _without_launcher(frames: list[str]) -> tuple[str, ...]:
    """The frames of the program, without those of the launcher below it."""
    end = len(frames)
    while end > 1 and any(name in frames[end - 1] for name in _LAUNCHER):
        end -= 1
    return tuple(frames[:end])


def evidence(rank: int, text: str, stopped: bool) -> Evidence:
    """The evidence in a rank's dump; it waits if an inner frame is in a collective."""
    threads = parse(text)
    main = threads[0] if threads else ()
    waiting = any(part in frame for frame in main[:_INNER] for part in _COLLECTIVES)
    return Evidence(rank, main, stopped, waiting)


def short(frame: str) -> str:
    """A frame with the file's name instead of its path."""
    place, found, function = frame.rpartition(" in ")
    return f"{os.path.basename(place)} in {function}" if found else frame


def innermost(stack: tuple[str, ...]) -> str:
    """The innermost frame of the user's own code, or of any code if there is none."""
    own = [frame for frame in stack if not _in_library(frame)]
    return short(own[0] if own else stack[0]) if stack else ""


def _in_library(frame: str) -> bool:
    return frame.startswith("<") or any(
        part in frame for part in ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3")
    )


# ---- the report --------------------------------------------------------------------------------------


def in_one_line(blame: Blame, found: Mapping[int, Evidence]) -> str:
    """`rank 1 differs (the others wait for it), at train.py:12 in load`."""
    where = place(blame.ranks, found)
    at = f", at {where}" if where else ""
    if not blame.reason:
        return f"all of them{at}" if at and len(blame.ranks) > 1 else at.removeprefix(", ")
    verb = "differ" if len(blame.ranks) > 1 else "differs"
    return f"{ranks_text(blame.ranks)} {verb} ({blame.reason}){at}"


def place(ranks: tuple[int, ...], found: Mapping[int, Evidence]) -> str:
    """Where these ranks are, if all are at the same place."""
    places = {innermost(stack) for stack in {found[rank].stack for rank in ranks if rank in found}}
    return places.pop() if len(places) == 1 else ""


def in_full(
    reason: str, view: View, blame: Blame, found: Mapping[int, Evidence], where: Mapping[int, str]
) -> list[str]:
    """The report: ranks with identical stacks together, the blamed ones first.

    `where` locates each rank: `pid 12` or `pid 12 on node-b`.
    """
    lines = [reason]
    beats = {beat.rank: beat for beat in view.alive}
    first = [group for group in alike(tuple(found.values())) if set(group) & set(blame.ranks)]
    rest = [group for group in alike(tuple(found.values())) if group not in first]
    for group in (*first, *rest):
        one = found[group[0]]
        why = f" ({blame.reason})" if blame.reason and group in first else ""
        about = "; ".join(filter(None, (_about(beats.get(rank), where.get(rank)) for rank in group[:4])))
        lines.append(f"  {ranks_text(group)}{why}: {about}")
        if one.stopped:
            lines.append("    stopped by a signal, so it has no stack to show (kill -CONT continues it)")
        elif not one.stack:
            lines.append("    no Python stack: no answer, or not a Python process started by Phalanx")
        lines += [f"    {short(frame)}" for frame in one.stack[:_SHOWN]]
        if len(one.stack) > _SHOWN:
            lines.append(f"    ... {len(one.stack) - _SHOWN} more frames")
    if view.finished:
        lines.append(f"  {ranks_text(view.finished)}: finished")
    return lines


def _about(beat: Beat | None, where: str | None) -> str:
    parts = [where] if where else []
    if beat is not None and beat.step is not None:
        parts.append(f"step {beat.step}")
    if beat is not None and beat.section:
        parts.append(f"in section {beat.section!r}")
    return ", ".join(parts)
