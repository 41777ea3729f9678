"""This user's runs on this machine, those that run and those that have ended (`phalanx status --all`)."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from phalanx.job.environment import variables
from phalanx.log import printable
from phalanx.observe.duration import duration
from phalanx.observe.local_agents import LocalAgent
from phalanx.observe.run_registry import runs, this_machine
from phalanx.observe.snapshot import RunFile

_NO_ANSWER = "no answer"


def entries(alive: Sequence[LocalAgent], silent: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Running jobs and finished ones, by their begin; `silent`: the pids of agents that did not answer."""
    here = {(agent.job.run, agent.job.pid) for agent in alive}
    found: list[dict[str, Any]] = [
        {
            "run": job.run,
            "name": job.name,
            "host": job.host,
            "pid": job.pid,
            "since": job.since,
            "until": None,
            "state": job.state or job.phase.lower(),
            "exit_code": None,
            "why": "",
            "restarts": job.restarts,
            "goodput": job.ledger.goodput,
            "uptime": job.ledger.uptime,
            "logs": job.logs,
        }
        for job in (agent.job for agent in alive)
    ]
    home, known = this_machine(), runs(variables())
    # A pid may have been that of an earlier run: the latest one counts.
    held_up = {run.pid: run for run in known if run.machine == home and run.pid in silent}

    def state_without_end(run: RunFile) -> str:
        if run.machine != home:
            return "unknown"
        return _NO_ANSWER if held_up.get(run.pid) is run else "killed"

    found += [
        {
            "run": run.run,
            "name": run.name,
            "host": run.host,
            "pid": run.pid,
            "since": run.since,
            "until": run.until,
            "state": run.outcome or state_without_end(run),
            "exit_code": run.exit_code,
            "why": run.why or ("" if run.outcome or run.machine == home else f"began on {run.machine}"),
            "restarts": run.restarts,
            "goodput": None if run.goodput is None else run.goodput.goodput,
            "uptime": None if run.goodput is None else run.goodput.uptime,
            "logs": run.logs,
        }
        for run in known
        if (run.run, run.pid) not in here
    ]
    return sorted(found, key=lambda row: (row["since"], row["pid"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a person."""
    if not rows:
        return "no runs\n"
    cells = [["RUN", "NAME", "STATE", "BEGAN", "TOOK", "RESTARTS", "GOODPUT", "LOGS", ""]]
    for row in rows:
        took = (row["until"] or time.time()) - row["since"]
        unknown = row["until"] is None and row["state"] in ("killed", "unknown")
        good = "" if row["goodput"] is None else f"{100 * row['goodput']:.1f} %"
        good = f"{100 * row['uptime']:.1f} % up" if row.get("uptime") is not None else good
        began = time.strftime("%m-%d %H:%M", time.localtime(row["since"]))
        words = [row["run"][:16], row["name"], row["state"], began, "" if unknown else duration(took)]
        cells.append([*words, str(row["restarts"]), good, row["logs"], row.get("why", "").partition("\n")[0]])
    cells = [[printable(cell).replace("\n", "\\n").replace("\t", " ") for cell in line] for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    width = (shutil.get_terminal_size((160, 24)).columns or 160) if sys.stdout.isatty() else 100_000
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True)) for line in cells]
    return "".join(line.rstrip()[:width] + "\n" for line in lines)
