"""`phalanx warm [SCRIPT] [--stop]`: the processes that `--keep-warm` has left behind for the next launch.

It lists those of this user on this machine with their age, the time that they have left, and their memory;
--stop ends them. SCRIPT selects one by its path, or by the name of its file or module.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx.agent.status import memory_of
from phalanx.cli.store import Parser
from phalanx.kernel import stat_fields
from phalanx.observe.duration import duration
from phalanx.warm.keep_warm import ask, connect, converse, names
from phalanx.warm.kept_zygote import peer_of

_PATIENCE = 2.0  # seconds; one that still imports, or is stopped, does not answer


def main(argv: Sequence[str]) -> int:
    """List or stop them; the exit code."""
    parser = Parser(prog="phalanx warm", description="List what --keep-warm has left behind.")
    parser.add_argument("script", nargs="?", default="", help="only that of this script")
    parser.add_argument("--stop", action="store_true", help="end them")
    options = parser.parse_args(list(argv))
    found = [(name, kept) for name in names() if (kept := _describe(name)) is not None]
    found = [(name, kept) for name, kept in found if _is_meant(kept["script"], options.script)]
    if options.stop:
        return _stop(found)
    for _, kept in found:
        print(_line(kept))
    if not found:
        what = f"nothing is kept warm for {options.script}" if options.script else "nothing is kept warm"
        print(f"phalanx warm: {what}", file=sys.stderr)
    return 0


def _describe(name: str) -> dict[str, Any] | None:
    """What a kept process says about itself, or what is known of one that does not answer."""
    sock = connect(name)
    if sock is None:
        return None
    pid = peer_of(sock)[0]
    kept = converse(sock, ("describe",), _PATIENCE)
    fields = stat_fields(pid)
    if kept is not None or fields is None:
        return kept
    return {"script": name.rpartition("/")[2], "pids": [int(fields[1]), pid], "modules": None}


def _is_meant(script: str, word: str) -> bool:
    known = script if os.path.isabs(script) else os.path.join(os.path.dirname(os.path.realpath(word)), script)
    return not word or word in (script, os.path.basename(script)) or os.path.realpath(word) == known


def _line(kept: dict[str, Any]) -> str:
    megabytes = memory_of(kept["pids"]) / 1e6
    if kept["modules"] is None:
        return f"{kept['script']}: pid {kept['pids'][1]}, {megabytes:.0f} MB, not ready: it still imports"
    age, left = duration(max(0.0, time.time() - kept["since"])), duration(kept["left"])
    return (
        f"{kept['script']}: pid {kept['pids'][1]}, {kept['modules']} modules, {megabytes:.0f} MB, "
        f"kept for {age}, ends in {left} unless it is used"
    )


def _stop(found: list[tuple[str, dict[str, Any]]]) -> int:
    for name, kept in found:
        pid = kept["pids"][0]
        if kept["modules"] is None:
            for one in kept["pids"]:  # the keeper first, which would start another one
                _kill(one)
        else:
            ask(name, ("end",), _PATIENCE)
        end = time.monotonic() + _PATIENCE
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.005)  # not a child: its end is no event
        print(f"stopped {kept['script']} (pid {kept['pids'][1]})")
    return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
