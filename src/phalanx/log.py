"""Lines of Phalanx's own: on stderr, or through logging where the program has set it up.

Such a line may quote another process, user or host. Characters that a terminal obeys are shown as escapes.
With `--log-format json` every line is one JSON object (observe/json_lines.py).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    class LineFrame(Protocol):
        """What frames lines as objects (observe/json_lines.py)."""

        def of_lines(self, lines: Iterable[str], /) -> str:
            """The objects of these lines."""


_frame: LineFrame | None = None
_PREFIX = "phalanx: "


def printable(text: str) -> str:
    """The text without characters that a terminal obeys; only line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def use_frame(frame: LineFrame | None) -> None:
    """Write lines as objects from now on; None: as text."""
    global _frame
    _frame = frame


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return _frame is not None


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write to stderr; a closed or full stderr is not a reason to fail. `styled`: made safe, with colours."""
    if _frame is not None:
        lines = (line.removeprefix(_PREFIX) for line in text.splitlines() if line.strip())
        text, styled = _frame.of_lines(lines), True
    try:
        if sys.stderr is not None:
            sys.stderr.write(text if styled else printable(text))
            sys.stderr.flush()
    except (OSError, ValueError):
        pass


def warn(message: str) -> None:
    """A warning. Without a handler, logging would print the bare text, like a line of the workers' output."""
    import logging  # late: it is not on the way to the first worker

    logger = logging.getLogger("phalanx")
    if logger.hasHandlers():
        logger.warning("%s", printable(message))
    else:
        write_stderr(f"phalanx: {message}\n")
