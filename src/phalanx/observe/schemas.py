"""What commands print with --json, as types: `phalanx help schema NAME` prints the JSON Schema of each.

A field that is added later has a default, so that a program which reads an older version goes on working.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from phalanx.observe.snapshot import Count, IncidentSnapshot, JobSnapshot, QuarantineSnapshot, Seconds

Fitness = Literal["fit", "warn", "unfit", "could not tell"]


class RunRow(msgspec.Struct):
    """A run of this machine, running or finished."""

    run: str
    name: str
    host: str
    pid: Count
    since: Seconds
    until: Seconds | None
    state: str
    exit_code: Count | None
    why: str
    restarts: Count
    goodput: Seconds | None
    uptime: Seconds | None
    logs: str


class NoteEvent(msgspec.Struct, tag="note", tag_field="kind"):
    """Something that was worth a line."""

    time: Seconds
    host: str
    text: str


class IncidentEvent(IncidentSnapshot, tag="incident", tag_field="kind", kw_only=True):
    """An incident that is over, with the seconds of its stages."""

    time: Seconds
    host: str


class RankStack(msgspec.Struct):
    """The Python stack of a rank, the innermost frame first; empty: it has none, or has not answered."""

    rank: Count
    pid: Count
    host: str
    stopped: bool
    stack: list[str]
    threads: Count


class StacksReport(msgspec.Struct):
    """The stacks of all ranks, and how many nodes did not answer."""

    stacks: list[RankStack]
    silent: Count


class CheckRow(msgspec.Struct):
    """One finding; `needed`: whether it counts that it could not be made."""

    check: str
    value: str
    fitness: Fitness
    advice: str
    needed: bool


class CheckedNode(msgspec.Struct):
    """The verdict on a node."""

    node: str
    fitness: Fitness
    reason: str


class CheckedPair(msgspec.Struct):
    """What two nodes have measured: seconds of latency, bytes per second."""

    round: Count
    nodes: tuple[str, str]
    bandwidth: Seconds | None = None
    latency: Seconds | None = None
    nccl: Seconds | None = None
    gloo: Seconds | None = None


class CheckReport(msgspec.Struct):
    """The findings on this machine and the verdict; with --nnodes, on all nodes, and what pairs measured."""

    node: str
    fitness: Fitness
    checks: list[CheckRow]
    reason: str = ""
    nodes: list[CheckedNode] = []
    pairs: list[CheckedPair] = []
    notes: list[str] = []


TYPES: dict[str, tuple[str, Any]] = {
    "status": ("phalanx status --json", list[JobSnapshot]),
    "runs": ("phalanx status --all --json", list[RunRow]),
    "event": ("phalanx logs --events --json, each line", NoteEvent | IncidentEvent),
    "stacks": ("phalanx stacks --json", StacksReport),
    "quarantine": ("phalanx quarantine --json", list[QuarantineSnapshot]),
    "check": ("phalanx check --json", CheckReport),
}


def schema(name: str) -> str:
    """The JSON Schema, as text."""
    title, kind = TYPES[name]
    found = msgspec.json.schema(kind)
    for part in found.get("$defs", {}).values():
        # Python 3.13 keeps docstrings without the indentation of their lines.
        part["description"] = " ".join(part["description"].split())
    return json.dumps({"title": title, **found}, indent=2) + "\n"
