"""`python -m phalanx`, and the target of the `phalanx` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command and end the process at once.

    Everything is closed and said by then. Taking the interpreter apart as well would cost longer than the
    whole way from the last worker's end to here.
    """
    from phalanx.cli import main as run

    code = run()
    if sys.gettrace() or sys.getprofile():  # somebody watches, and reports at the usual end
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            pass  # its reader is gone; the exit code is all that is left to give
    os._exit(code)


if __name__ == "__main__":
    main()
