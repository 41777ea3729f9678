"""`python -m phalanx`, and the target of the `phalanx` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command and end the process at once.

    Everything is closed and written by then; finalizing the interpreter would take longer than all that
    happens after the last worker's exit.
    """
    from phalanx.cli import main as run

    code = run()
    if sys.gettrace() or sys.getprofile() or "pydevd" in sys.modules:  # they need the normal exit
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass  # its reader is gone; only the exit code is left
    os._exit(code)


if __name__ == "__main__":
    main()
