"""`phalanx stacks [RUN] [--rank 0,3-7]`: the Python stack of every rank, ranks with the same one together.

Nothing has to be set for it beforehand: a Python worker answers a signal from its first moment on, also while
it is stuck in C code. Other programs have no Python stack, and are named as such. All nodes are asked: by an
agent of this machine, or through their store (--rdzv-endpoint).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phalanx.agent.supervision.stacks import short
from phalanx.cli.parser import Parser
from phalanx.cli.remote_job import add_endpoint, remote_job
from phalanx.cli.runs import add_run, local_agents, request, running
from phalanx.core.diagnosis.progress import Evidence, alike, ranks_text
from phalanx.log import printable, write_stderr

_FRAMES = 12


def make_parser() -> Parser:
    """The options."""
    parser = Parser("stacks", "The Python stacks of all ranks of a running job, now.")
    add_run(parser, "the one that runs")
    parser.add_value("--rank", "ranks", "only these, such as 0,3-7")
    parser.add_argument("--full", action="store_true", help="all frames, with the paths of their files")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_endpoint(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Ask, and print groups."""
    options = make_parser().parse_args(argv)
    what: dict[str, Any] = {"ask": "stacks", "all": True}
    if options.rank is not None:
        what["ranks"] = sorted(options.rank)
    if options.rdzv_endpoint:
        with remote_job(options) as job:
            answer = job.ask(what)
    else:
        agents = running(local_agents("stacks", options.all_users), options.run)
        answer = request(agents[0], what)
    found = [one for told in (answer, *_objects(answer.get("peers"))) for one in _objects(told.get("stacks"))]
    found = [one for one in found if type(one.get("rank")) is int]
    found.sort(key=lambda one: one["rank"])
    if options.json:
        print(json.dumps({"stacks": found, "silent": answer.get("silent", 0)}, indent=2))
        return 0 if found else 1
    print(text(found, options.full), end="")
    if answer.get("silent"):
        write_stderr(f"phalanx stacks: {answer['silent']} nodes did not answer\n")
    return 0 if found else 1


def text(found: Sequence[dict[str, Any]], full: bool = False) -> str:
    """Ranks with the same stack together, the smallest group first."""
    if not found:
        return "no worker runs\n"
    by_rank = {one["rank"]: one for one in found}
    evidence = tuple(
        Evidence(rank, ("stopped",) if one.get("stopped") else tuple(map(str, _list(one.get("stack")))))
        for rank, one in by_rank.items()
    )
    lines = []
    for group in alike(evidence):
        one = by_rank[group[0]]
        where = ", ".join(f"pid {by_rank[r].get('pid')} on {by_rank[r].get('host')}" for r in group[:3])
        lines.append(f"{ranks_text(group)}: {where}{', …' * (len(group) > 3)}")
        stack = [str(frame) for frame in _list(one.get("stack"))]
        if one.get("stopped"):
            lines.append("  stopped by a signal, so it has no stack to show (kill -CONT continues it)")
        elif not stack:
            lines.append("  no Python stack: no answer, or not a Python process started by Phalanx")
        shown = stack if full else [short(frame) for frame in stack[:_FRAMES]]
        lines += [f"  {frame}" for frame in shown]
        if len(stack) > len(shown):
            lines.append(f"  ... {len(stack) - len(shown)} more frames (--full)")
    return "".join(printable(line.replace("\n", "\\n")) + "\n" for line in lines)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in _list(value) if isinstance(one, dict)]
