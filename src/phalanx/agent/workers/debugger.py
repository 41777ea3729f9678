"""A debugger in the agent that follows child processes (debugpy, with `subProcess` on, as VS Code has it).

It replaces the functions of `os` that start processes, so that every Python they start runs under it. The
helpers are started past it (agent/warm/spawner.py): they are not the user's program, and nothing that they
fork could attach. Each Python worker attaches by itself instead, with what the debugger has for one.
"""

from __future__ import annotations

import sys

VARIABLE = "PHALANX_DEBUGGER"  # as in worker/bootstrap.py, which runs the code and removes the variable


def attaching() -> dict[str, str]:
    """What a worker's environment needs so that it attaches; nothing where no debugger follows processes."""
    pydevd, monkey = sys.modules.get("pydevd"), sys.modules.get("_pydev_bundle.pydev_monkey")
    setup = getattr(getattr(pydevd, "SetupHolder", None), "setup", None)
    if monkey is None or not isinstance(setup, dict) or not setup.get("multiprocess"):
        return {}
    try:
        code = monkey.patch_args([sys.executable, "-c", "pass"])[2]
    except Exception:  # noqa: BLE001 - another version of it: the job runs, without the debugger
        return {}
    return {VARIABLE: code} if code != "pass" else {}
