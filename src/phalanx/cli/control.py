"""`phalanx restart RUN`, `phalanx stop RUN`: for a running job, on all its nodes.

A restart stops the workers as after a failure and starts them again; it uses none of the job's restarts. A
stop is SIGTERM for every agent: workers get the signal and their grace.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from phalanx.cli.parser import Parser
from phalanx.cli.runs import NoSuchRun, add_run, local_agents, request, running
from phalanx.errors import UsageError
from phalanx.log import printable, write_stderr
from phalanx.observe.local_agents import LocalAgent


def make_parser(what: str, description: str) -> Parser:
    """The argument RUN."""
    parser = Parser(what, description)
    add_run(parser, required=True)
    return parser


def act(what: str, options: Namespace, everywhere: bool) -> int:
    """Have it done by the run that the options name; `everywhere`: on each of its nodes."""
    return _put(what, running(local_agents(what, options.all_users), options.run), everywhere)


def leave(options: Namespace) -> int:
    """`phalanx drain RUN`: a node of this machine leaves the job; of several, the one that is named."""
    nodes = running(local_agents("drain", options.all_users), options.run)
    found = [agent for agent in nodes if options.node in ("", agent.job.host)]
    if len(found) == 1:
        return _put("drain", found, everywhere=False)
    here = printable(" ".join(sorted({agent.job.host for agent in nodes})))
    if found:
        raise UsageError(f"drain {options.run}: several nodes run here; choose one with --node: {here}")
    raise NoSuchRun(f"--node {printable(options.node)}: not on this machine ({here}); add --rdzv-endpoint")


def _put(what: str, found: Sequence[LocalAgent], everywhere: bool) -> int:
    # A restart on one node restarts all of them.
    answer = request(found[0], {"do": what, **({"all": True} if everywhere else {})})
    refused = [
        str(one["error"]) for one in answer.get("peers") or [] if isinstance(one, dict) and "error" in one
    ]
    print(printable(f"{found[0].job.name} (run {found[0].job.run}): {answer.get('done', 'asked')}"))
    for line in refused:
        write_stderr(f"phalanx {what}: another node: {printable(line)}\n")
    if answer.get("silent"):
        write_stderr(f"phalanx {what}: {answer['silent']} nodes did not answer\n")
    return 1 if refused or answer.get("silent") else 0
