"""Lines of Phalanx's own: on stderr, or through logging where the program has set it up.

Such a line may quote another process, user or host. Characters that a terminal obeys are shown as escapes.
"""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """The text without characters that a terminal obeys; only line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def write_stderr(text: str, *, styled: bool = False) -> None:
    """Write to stderr; a closed or full stderr is not a reason to fail. `styled`: made safe, with colours."""
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
