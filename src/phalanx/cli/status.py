"""`phalanx status [RUN] [--all | --watch | --link] [--json]`: the state of this user's jobs on this machine.

It asks the agents; see agent/status.py. RUN selects jobs by the beginning of their run id or by the name of
their script, and then the other nodes of the job are asked as well, through the agent. The exit code is 1
when there is none. --all lists finished runs, too. With --rdzv-endpoint it asks the nodes of a job on other
machines, through their store.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence

from phalanx.cli.parser import Parser
from phalanx.cli.remote_job import add_endpoint, remote_job
from phalanx.cli.runs import NoSuchRun, add_run, answering_and_silent, fitting, one_run
from phalanx.errors import UsageError
from phalanx.job.time_budgets import FIND, WORK
from phalanx.log import printable
from phalanx.observe.duration import duration
from phalanx.observe.local_agents import LocalAgent, as_dict, put_all, states
from phalanx.observe.status_text import format_job

_DEVICES = 0.5  # seconds for the devices at least, where an agent has not answered before


def make_parser() -> Parser:
    """The options."""
    parser = Parser(
        "status",
        "The state of this user's jobs on this machine: workers, steps, stragglers, incidents, "
        "goodput. With RUN, of all nodes of that job.",
    )
    add_run(parser, "all")
    parser.add_flag("--json", "print everything as JSON")
    one = parser.add_mutually_exclusive_group()
    for flag, about in (
        ("--all", "a table of all runs, finished ones too, the latest last"),
        ("--watch", "a live view of one job; q ends it"),
        ("--link", "the link to the page of a job that was started with --dashboard"),
    ):
        one.add_argument(flag, action="store_true", help=about)
    add_endpoint(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Find the agents, ask them, print."""
    options = make_parser().parse_args(argv)
    if options.rdzv_endpoint:
        for flag in ("all", "watch", "link"):
            if getattr(options, flag):
                raise UsageError(
                    f"--{flag} shows jobs of this machine; leave out --rdzv-endpoint, or --{flag}"
                )
        with remote_job(options) as job:
            found = [LocalAgent("", os.geteuid(), job.status())]
    else:
        begin = time.monotonic()
        here, silent = answering_and_silent("status", options.all_users)
        if options.watch:
            from phalanx.cli.watch import watch

            return watch(here, options.run)
        if options.all:
            return _all_runs(here, silent, options.run, options.json)
        if options.link:
            return _links(fitting(here, options.run), options.run)
        left = max(_DEVICES, begin + FIND - time.monotonic())
        found = with_peers(fitting(here, options.run), bool(options.run), WORK if options.run else left)
    if options.json:
        print(json.dumps([as_dict(one) for one in found], indent=2))
    elif found:
        width = (shutil.get_terminal_size((160, 24)).columns or 160) if sys.stdout.isatty() else 100_000
        print("\n\n".join(format_job(one.job, width, one.other_user) for one in found))
    else:
        what = f"no job {options.run!r}" if options.run else "no job"
        ended = how_it_ended(options.run) if options.run else ""
        print(f"phalanx status: {what} of this user runs on this machine{ended}", file=sys.stderr)
    return 0 if found else 1


def _all_runs(here: Sequence[LocalAgent], silent: Sequence[int], word: str, as_json: bool) -> int:
    from phalanx.cli.run_list import entries, table

    rows = [row for row in entries(here, silent) if row["run"].startswith(word) or row["name"] == word]
    print(json.dumps(rows, indent=2) if as_json else table(rows).rstrip("\n"))
    return 0


def _links(agents: Sequence[LocalAgent], word: str) -> int:
    """The link holds the page's token, so it is in no log and no file: the agent gives it to its own user."""
    answers = [answer.get("link") for answer in put_all(agents, {"ask": "dashboard"}, FIND)]
    links = [printable(link) for link in answers if isinstance(link, str) and link]
    if not links:
        what = f"no job {word!r} of this user" if word else "no job of this user"
        raise NoSuchRun(f"{what} on this machine has a page; start one with phalanx run --dashboard")
    print("\n".join(links))
    return 0


def how_it_ended(word: str) -> str:
    """What the list of runs knows of the last one with this name, to go on with; empty: nothing."""
    try:
        run, _ = one_run((), word)
    except NoSuchRun:
        return ""
    if run.until is None:
        return ""
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    why = f": {run.why}" if run.why else ""
    ago = duration(max(0.0, time.time() - run.until))
    return printable(f"; run {run.run} {run.outcome} {ago} ago{code}{why}".replace("\n", " "))


def with_peers(here: Sequence[LocalAgent], everywhere: bool, patience: float) -> list[LocalAgent]:
    """These agents with their devices; `everywhere`: the first of each job with the nodes elsewhere, too.

    An agent that does not answer within `patience` is shown as it was, without its devices."""
    told = states(here, {"ask": "status", "gpus": True, **({"all": True} if everywhere else {})}, patience)
    found = [{one.name: one for one in told}.get(agent.name, agent) for agent in here]
    local = {(agent.job.run, agent.job.pid, agent.job.id) for agent in found}
    known: set[str] = set()
    for agent in found:
        job = agent.job
        first = job.run not in known
        job.peers = [one for one in job.peers if first and (one.run, one.pid, one.id) not in local]
        known.add(job.run)
    return found
