"""One line on a terminal that shows what the agent is waiting for, erased afterwards.

Driven by the agent's own loop, which asks `limit` how long it may sleep and calls `show` when it wakes up:
there is no thread, and no wake-up without a terminal (`on_terminal` returns None). Waits shorter than
`PATIENCE` are not shown: most stops and rounds take milliseconds.
"""

from __future__ import annotations

import os

from phalanx.job.environment import rewrites_lines
from phalanx.log import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

PATIENCE = 1.0
REDRAW = 0.5
_ERASE = "\r\x1b[K"
_WHEEL = "|/-\\"


def on_terminal(stream: TextIO | None) -> Progress | None:
    """A progress line for this stream; None if it is not a terminal that can erase a line."""
    try:
        able = stream is not None and stream.isatty() and rewrites_lines()
    except ValueError:  # closed
        able = False
    return Progress(stream) if able and stream is not None else None


class Progress:
    """The line, for one wait at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._what = ""
        self._since = 0.0
        self._drawn = 0
        self._shown = False

    def limit(self, what: str, now: float, timeout: float | None) -> float | None:
        """How long to sleep at most: `timeout`, or until the line is due. Empty `what`: nothing to show."""
        if what != self._what:
            self.clear()
            self._what, self._since, self._drawn = what, now, 0
        if not what:
            return timeout
        due = max(0.0, self._next() - now)
        return due if timeout is None else min(timeout, due)

    def show(self, now: float) -> None:
        """Draw the line if it is due."""
        if not self._what or now < self._next():
            return
        waited = now - self._since
        self._drawn = int((waited - PATIENCE) / REDRAW) + 1
        text = printable(f"{_WHEEL[self._drawn % len(_WHEEL)]} {self._what} ({waited:.0f} s)")
        self._write(_ERASE + text[: self._columns() - 1])
        self._shown = True

    def clear(self) -> None:
        """Erase the line, so that other text can be written; it is drawn again when it is due."""
        if self._shown:
            self._write(_ERASE)
            self._shown = False

    def _next(self) -> float:
        return self._since + PATIENCE + self._drawn * REDRAW

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._what = ""  # the terminal is gone
