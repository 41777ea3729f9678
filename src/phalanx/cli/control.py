"""`phalanx restart RUN`, `phalanx stop RUN`: for a running job, on all its nodes.

A restart stops the workers as after a failure and starts them again; it uses none of the job's restarts. A
stop is SIGTERM for every agent: workers get the signal and their grace.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.cli.runs import NoSuchRun, add_all_users, local_agents, request, running
from phalanx.cli.store import Parser
from phalanx.errors import UsageError
from phalanx.log import printable, write_stderr
from phalanx.observe.local_agents import LocalAgent


def restart(argv: Sequence[str]) -> int:
    """`phalanx restart`."""
    return _do("restart", "Restart the workers of a running job.", argv, everywhere=False)


def stop(argv: Sequence[str]) -> int:
    """`phalanx stop`."""
    return _do("stop", "Stop a running job on all its nodes.", argv, everywhere=True)


def leave(found: Sequence[LocalAgent], word: str) -> int:
    """`phalanx drain RUN`: the node of this machine leaves the job; of several, the one of that name."""
    if len(found) > 1:
        names = " ".join(sorted({agent.job.host for agent in found}))
        raise UsageError(f"drain {word}: several nodes of this machine fit; name one: {printable(names)}")
    return _put("drain", found, everywhere=False)


def _do(what: str, description: str, argv: Sequence[str], everywhere: bool) -> int:
    parser = Parser(prog=f"phalanx {what}", description=description)
    # Named, even if there is only one: on a shared machine that may be another than the one that was meant.
    parser.add_argument(
        "run", metavar="RUN", help="a run id, or its beginning, or a script's name (phalanx list)"
    )
    add_all_users(parser)
    options = parser.parse_args(argv)
    try:
        found = running(local_agents(what, options.all_users), options.run)
    except NoSuchRun as error:
        write_stderr(f"phalanx {what}: {error}\n")
        return 1
    return _put(what, found, everywhere)


def _put(what: str, found: Sequence[LocalAgent], everywhere: bool) -> int:
    try:
        # A restart on one node restarts all of them.
        answer = request(found[0], {"do": what, **({"all": True} if everywhere else {})})
    except NoSuchRun as error:
        write_stderr(f"phalanx {what}: {error}\n")
        return 1
    refused = [
        str(one["error"]) for one in answer.get("peers") or [] if isinstance(one, dict) and "error" in one
    ]
    print(printable(f"{found[0].job.name} (run {found[0].job.run}): {answer.get('done', 'asked')}"))
    for line in refused:
        write_stderr(f"phalanx {what}: another node: {printable(line)}\n")
    if answer.get("silent"):
        write_stderr(f"phalanx {what}: {answer['silent']} nodes did not answer\n")
    return 1 if refused or answer.get("silent") else 0
