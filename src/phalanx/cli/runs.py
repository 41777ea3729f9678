"""The runs that a command may mean: those that run on this machine, and those that have ended.

A word selects runs by the beginning of their id or by the name of their script. Commands about one run take
the latest that fits; with several running jobs and no word, they ask for one.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence

from phalanx.errors import PhalanxError, UsageError
from phalanx.job.environment import variables
from phalanx.job.time_budgets import FIND
from phalanx.job.units import duration
from phalanx.log import printable, write_stderr
from phalanx.observe.local_agents import LocalAgent, find, put
from phalanx.observe.run_registry import runs
from phalanx.observe.snapshot import RunFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def add_all_users(parser: argparse.ArgumentParser) -> None:
    """The option --all-users."""
    parser.add_argument(
        "--all-users", action="store_true", help="as root: the jobs of all users, not of root alone"
    )


def local_agents(command: str, everyone: bool) -> list[LocalAgent]:
    """The agents of this machine that answer; one line on stderr for each that does not.

    A command asks once, and selects with `fitting`, `running` or `one_run`."""
    return answering_and_silent(command, everyone)[0]


def answering_and_silent(command: str, everyone: bool) -> tuple[list[LocalAgent], list[int]]:
    """The same, and the pids of the agents that do not answer."""
    if everyone and os.geteuid():
        raise UsageError("--all-users: only root may ask the agents of other users")
    found, silent = find(everyone)
    for pid in silent:
        write_stderr(f"phalanx {command}: no answer from pid {pid} within {FIND:g} s\n")
    return found, silent


def fitting(found: Sequence[LocalAgent], word: str) -> list[LocalAgent]:
    """The agents whose run id begins with this word, or whose script has this name; empty: all."""
    return [agent for agent in found if agent.job.run.startswith(word) or agent.job.name == word]


def running(found: Sequence[LocalAgent], word: str) -> list[LocalAgent]:
    """The agents of the one running job that fits; NoSuchRun if there is none, UsageError if several."""
    found = fitting(found, word)
    if not found:
        what = f"no job {word!r}" if word else "no job"
        raise NoSuchRun(f"{what} of this user runs on this machine")
    found = [agent for agent in found if agent.job.run == word] or found  # not "10" where "1" runs
    ids = sorted({agent.job.run for agent in found})
    if len(ids) > 1:
        raise UsageError(f"several jobs fit; name one: {' '.join(map(printable, ids))}")
    return found


class NoSuchRun(PhalanxError):
    """There is no such run; the message is for the user."""


def one_run(found: Sequence[LocalAgent], word: str) -> tuple[RunFile, list[LocalAgent]]:
    """The latest run that fits, and its agents on this machine if it runs."""
    alive = fitting(found, word)
    if alive:
        run = run_of(alive[-1])
        return run, [agent for agent in found if agent.job.run == run.run]
    ended = [run for run in runs(variables()) if run.run.startswith(word) or run.name == word]
    if not ended:
        what = f"no run {word!r}" if word else "no run"
        raise NoSuchRun(f"{what} of this user is known on this machine; see phalanx status --all")
    return ended[-1], []


def run_of(agent: LocalAgent) -> RunFile:
    """A run that goes on, as the registry would have it."""
    job = agent.job
    ranks = [worker.rank for worker in sorted(job.workers, key=lambda one: one.local_rank)]
    return RunFile(job.run, job.name, job.host, job.pid, job.since, job.logs, ranks=ranks)


def request(agent: LocalAgent, what: dict[str, Any]) -> dict[str, Any]:
    """Put a request to an agent; NoSuchRun with its words where it cannot answer."""
    answer = put(agent, what)
    if "error" in answer:
        raise NoSuchRun(printable(str(answer["error"])))
    return answer


def add_run(
    parser: argparse.ArgumentParser, what: str = "the latest by default", required: bool = False
) -> None:
    """The argument RUN, and --all-users.

    A command that changes a job has it named, even if there is only one: on a shared machine that may be
    another than the one that was meant."""
    about = "a run id, or its beginning, or a script's name"
    if required:
        parser.add_argument("run", metavar="RUN", help=f"{about} (phalanx status)")
    else:
        parser.add_argument("run", nargs="?", default="", metavar="RUN", help=f"{about} [{what}]")
    add_all_users(parser)


def since_of(text: str) -> float | None:
    """`10m`, `2h` or a time such as `2026-11-16T05:00` as seconds of the wall clock."""
    if not text:
        return None
    from datetime import datetime

    try:
        return time.time() - duration(text)
    except ValueError:
        pass  # a time
    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()  # 3.10 knows no Z
    except ValueError:
        raise UsageError(f"--since {text}: write a span (10m, 2h) or a time (2026-11-16T05:00)") from None


def check_directory(run: RunFile) -> str:
    """The directory of a run's logs; NoSuchRun if it is gone."""
    if not run.logs or not os.path.isdir(run.logs):
        raise NoSuchRun(f"run {printable(run.run)} has no logs (any more)")
    return run.logs
