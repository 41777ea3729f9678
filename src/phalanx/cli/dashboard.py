"""`phalanx dashboard [RUN]`: prints the link to the page of a job that runs on this machine.

The link holds the page's token, so it is in no log and no file: the agent tells it to its own user only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.agent.status import user_of
from phalanx.cli.store import Parser
from phalanx.log import printable

_PATIENCE = 5.0
_LONGEST = 4 << 20


def main(argv: Sequence[str]) -> int:
    """Ask the agents; 1 when no job has a page."""
    parser = Parser(
        prog="phalanx dashboard",
        description="Print the link to the page of a job on this machine that was started with --dashboard.",
    )
    parser.add_argument("run", nargs="?", default="", help="a run id, or its beginning, or a script's name")
    wanted = parser.parse_args(argv).run
    links = [link for run, name, link in pages() if run.startswith(wanted) or name == wanted]
    if not links:
        what = f"no job {wanted!r} of this user" if wanted else "no job of this user"
        print(f"phalanx dashboard: {what} on this machine has a page", file=sys.stderr)
        return 1
    print("\n".join(links))
    return 0


def pages() -> list[tuple[str, str, str]]:
    """Run id, name and link of every job of this user that has a page."""
    found = []
    for name in _sockets():
        link = _ask(name, {"ask": "dashboard"}).get("link")
        if isinstance(link, str) and link:
            job = _ask(name, {"ask": "status"})
            found.append((str(job.get("run", "")), str(job.get("name", "")), printable(link)))
    return found


def _sockets() -> list[str]:
    from phalanx.agent.status import PREFIX

    wanted = f"@{PREFIX}{os.geteuid()}/"
    try:
        with open("/proc/net/unix", errors="surrogateescape") as file:
            rows = [line.split() for line in file]
    except OSError:
        return []
    return [
        "\0" + row[7][1:]
        for row in rows
        if row[3:4] == ["00010000"] and row[7:] and row[7].startswith(wanted)
    ]


def _ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """An agent's answer; empty if there is none, or the socket is another user's."""
    data = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_PATIENCE)
            peer.connect(name)
            if user_of(peer) != os.geteuid():
                return {}
            peer.sendall(json.dumps(request).encode() + b"\n")
            while (more := peer.recv(1 << 16)) and len(data) < _LONGEST:
                data += more
        found = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
