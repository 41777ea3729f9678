"""The command line of a Python process that runs a module of this package.

`python -m` and `python -c` put the current directory first in `sys.path`: a `select.py` in a directory that
others can write to would run in our process. `-P` prevents that from Python 3.11 on; this works in 3.10 too.
The directory of the package comes last, for a parent whose own `sys.path` was changed while it ran.
"""

from __future__ import annotations

import os
import sys

PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# `sys` is built in: nothing is imported before the current directory, an empty string, is gone.
_RUN = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def python_command(module: str, *words: str) -> list[str]:
    """`python -m module words…`, without the current directory in its `sys.path`."""
    return [sys.executable, "-c", _RUN, PACKAGE_ROOT, module, *words]
