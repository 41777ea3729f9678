"""`phalanx dashboard [RUN]`: prints the link to the page of a job that runs on this machine.

The link holds the page's token, so it is in no log and no file: the agent tells it to its own user only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phalanx.cli.parser import Parser
from phalanx.cli.runs import add_run, fitting, local_agents
from phalanx.log import printable
from phalanx.observe.local_agents import FIND, put_all


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        "dashboard",
        "Print the link to the page of a job on this machine that was started with --dashboard.",
    )
    add_run(parser, "all")
    return parser


def main(argv: Sequence[str]) -> int:
    """Ask the agents; 1 when no job has a page."""
    options = make_parser().parse_args(argv)
    agents = fitting(local_agents("dashboard", options.all_users), options.run)
    answers = [answer.get("link") for answer in put_all(agents, {"ask": "dashboard"}, FIND)]
    links = [printable(link) for link in answers if isinstance(link, str) and link]
    if not links:
        what = f"no job {options.run!r} of this user" if options.run else "no job of this user"
        print(f"phalanx dashboard: {what} on this machine has a page", file=sys.stderr)
        return 1
    print("\n".join(links))
    return 0
