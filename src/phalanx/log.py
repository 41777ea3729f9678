"""Lines of Phalanx's own: on stderr, or through logging where the program has set it up."""

from __future__ import annotations

import sys


def write_stderr(text: str) -> None:
    """Write to stderr; a closed or full stderr is not a reason to fail."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError):
        pass


def warn(message: str) -> None:
    """A warning. Without a handler, logging would print the bare text, like a line of the workers' output."""
    import logging  # late: it is not on the way to the first worker

    logger = logging.getLogger("phalanx")
    if logger.hasHandlers():
        logger.warning("%s", message)
    else:
        write_stderr(f"phalanx: {message}\n")
