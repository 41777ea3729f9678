"""`phalanx dashboard [RUN]`: prints the link to the page of a job that runs on this machine.

The link holds the page's token, so it is in no log and no file: the agent tells it to its own user only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phalanx.cli.store import Parser
from phalanx.log import printable
from phalanx.observe.local_agents import agents, put

_PATIENCE = 5.0


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
    for agent in agents():
        link = put(agent, {"ask": "dashboard"}, _PATIENCE).get("link")
        if isinstance(link, str) and link:
            found.append((agent.job.run, agent.job.name, printable(link)))
    return found
