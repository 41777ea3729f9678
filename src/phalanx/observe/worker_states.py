"""The states of a worker, as `phalanx status`, its live view, the page and `/metrics` show them."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.record import Record

STARTING = "starting"
RUNNING = "running"  # no heartbeat so far
READY = "ready"
CHECKPOINTING = "checkpointing"
STOPPED = "stopped"  # by a signal or a debugger
ENDED = "ended"
FAILED = "failed"


class StateMarks(Record):
    """How a state is drawn: its letter on the page; its cell in a terminal, and the colour (SGR) of that."""

    letter: str
    cell: str
    colour: str


MARKS: Mapping[str, StateMarks] = {
    STARTING: StateMarks("s", "s", "33"),
    RUNNING: StateMarks("r", "·", "32"),
    READY: StateMarks("t", "■", "32"),
    CHECKPOINTING: StateMarks("c", "c", "36"),
    STOPPED: StateMarks("p", "T", "31"),
    ENDED: StateMarks("e", "-", "90"),
    FAILED: StateMarks("f", "x", "31"),
}
UNKNOWN = StateMarks(".", "?", "")
"""Of a worker whose node is not there, or has not answered."""
