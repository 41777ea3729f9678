"""`phalanx status [RUN] [--json]`: the state of this user's jobs on this machine.

It asks the agents; see agent/status.py. RUN selects jobs by the beginning of their run id or by the name of
their script. The exit code is 1 when there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.agent.status import PREFIX, user_of
from phalanx.cli.store import Parser
from phalanx.observe.status_text import format_status

_PATIENCE = 5.0


def main(argv: Sequence[str]) -> int:
    """Find the agents, ask them, print."""
    parser = Parser(
        prog="phalanx status",
        description="The state of this user's jobs on this machine: workers, steps, stragglers, incidents.",
    )
    parser.add_argument("run", nargs="?", default="", help="a run id, or its beginning, or a script's name")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(argv)
    found = [job for job in jobs() if _is_meant(job, options.run)]
    if options.json:
        print(json.dumps(found, indent=2))
    elif found:
        width = shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 100_000
        print("\n\n".join(format_status(job, width) for job in found))
    else:
        what = f"no job {options.run!r}" if options.run else "no job"
        print(f"phalanx status: {what} of this user runs on this machine", file=sys.stderr)
    return 0 if found else 1


def _is_meant(job: dict[str, Any], word: str) -> bool:
    return str(job["run"]).startswith(word) or job["name"] == word


def jobs() -> list[dict[str, Any]]:
    """The answers of all agents of this user (of all users, for root), the oldest job first."""
    found = [job for name in _names() if (job := _ask(name)) is not None]
    return sorted(found, key=lambda job: (job["since"], job["pid"]))


def _names() -> Iterator[str]:
    user = os.geteuid()
    wanted = f"@{PREFIX}" if user == 0 else f"@{PREFIX}{user}/"
    try:
        with open("/proc/net/unix") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        name = line.rpartition(" ")[2]
        listens = line.split()[3:4] == ["00010000"]  # the flag of a socket that accepts
        if name.startswith(wanted) and listens:
            yield "\0" + name[1:]


def _ask(name: str) -> dict[str, Any] | None:
    """An agent's answer; None when it is gone, does not answer, or belongs to another user."""
    data = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_PATIENCE)
        try:
            peer.connect(name)
            if os.geteuid() != 0 and user_of(peer) != os.geteuid():
                return None
            while chunk := peer.recv(1 << 16):
                data += chunk
            job = json.loads(data)
        except (OSError, ValueError):
            return None
    return job if isinstance(job, dict) else None
