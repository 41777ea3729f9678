"""How a run went, at its end: the goodput line, `summary.json` beside the logs, and the registry of runs.

A short run to which nothing happened says nothing of it: its goodput would mostly be the time of its start.
"""

from __future__ import annotations

import os
import time

from phalanx.observe.log_layout import SUMMARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.agent import Agent

_LONG = 60.0  # seconds after which the figure means something
_LONGEST_REASON = 4096
_MOST_NODES = 1000  # whose names are kept
_EVENTFUL = 10.0  # the same for a job that had an incident


def tells(agent: Agent) -> bool:
    """Whether the goodput of this job is worth a line."""
    lasted = time.monotonic() - agent.history.began
    return lasted >= (_EVENTFUL if agent.history.incident_count else _LONG)


def line(agent: Agent) -> str:
    """`goodput 97.3 %: 41 s lost to 3 restarts, 12 s to a hang`: of the job, or of this node if that is all
    that is known."""
    from phalanx.core.ledger.goodput import goodput_line

    if agent.nodes.job_goodput is not None:
        return agent.nodes.job_goodput.line
    text = goodput_line(agent.history.totals(), agent.history.incidents())
    current = agent.state.round
    if current is not None and len(current.members) > 1:
        head, colon, rest = text.partition(":")
        return f"{head} on {agent.host}{colon}{rest}"
    return text


def ledger(agent: Agent) -> dict[str, Any]:
    """The ledger of the job as plain values; `node`: of this node alone, `nodes`: how many it is made of."""
    own, job = agent.history.totals().as_dict(), agent.nodes.job_goodput
    if job is None:
        current = agent.state.round
        alone = current is None or len(current.members) < 2
        return {**own, "of": "job" if alone else "node", "nodes": 1}
    return {**job.totals.as_dict(), "of": "job", "nodes": job.nodes, "lost_nodes": job.lost, "node": own}


def describe(agent: Agent, since: float) -> dict[str, Any]:
    """The run as `observe.snapshot.RunFile` has it, while it runs."""
    current = agent.state.round
    return {
        "run": agent.run_id,
        "name": agent.record.job_name,
        "host": agent.host,
        "pid": os.getpid(),
        "since": since,
        "logs": agent.run_dir or "",
        "ranks": [worker.global_rank for worker in agent.get_worker_group().workers],
        "nodes": list(current.members[:_MOST_NODES]) if current and len(current.members) > 1 else [],
    }


def conclude(agent: Agent, since: float, outcome: str, exit_code: int, why: str = "") -> dict[str, Any]:
    """The same at its end; `why`: what ended it, if that was not its workers."""
    found = {
        **describe(agent, since),
        "until": time.time(),
        "outcome": outcome,
        "exit_code": exit_code,
        "why": why[:_LONGEST_REASON],
        "restarts": agent.attempt,
    }
    if not agent.history.is_known:  # no worker ever ran
        return found
    return {
        **found,
        "goodput": ledger(agent),
        "line": line(agent),
        "incidents": [one.as_dict() for one in agent.history.incidents()],
    }


def in_short(run: dict[str, Any]) -> dict[str, Any]:
    """The same without what grows with the number of incidents, for the registry."""
    if "goodput" not in run:
        return run
    goodput = {name: value for name, value in run["goodput"].items() if name != "node"}
    return {**run, "incidents": [], "goodput": {**goodput, "lost": {}}}


def keep(run: dict[str, Any]) -> None:
    """Write `summary.json` beside the logs, if they are still there; a full disk must cost nothing else."""
    import json

    directory = run["logs"]
    if not directory or not os.path.isdir(directory):
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(os.path.join(directory, SUMMARY), flags, 0o600), "w") as file:
            json.dump(run, file, indent=2)
    except OSError:
        pass
