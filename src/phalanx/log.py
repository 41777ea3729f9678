"""A line for whoever looks after the process: through logging where somebody listens, else on stderr as ours.

Without a handler logging would print the bare text, and nobody could tell it from the workers' output.
"""

from __future__ import annotations

import sys


def warn(message: str) -> None:
    """Say it; what cannot be said is no reason to fail."""
    import logging  # late: it is not on the way to the first worker

    logger = logging.getLogger("phalanx")
    if logger.hasHandlers():
        logger.warning("%s", message)
    elif sys.stderr is not None:
        try:
            sys.stderr.write(f"phalanx: {message}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
