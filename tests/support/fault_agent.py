"""A small agent that fault tests start, signal and kill. Usage: fault_agent.py SCENARIO DIRECTORY."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

# Every process leaves its pid: the worker, a child in its session, one that called setsid, and one that
# forked twice, called setsid and lost all its ancestors.
FAMILY = """
echo $$ > {dir}/worker.$RANK
sleep 300 & echo $! > {dir}/child.$RANK
setsid sh -c 'echo $$ > {dir}/session.'$RANK'; exec sleep 300' &
setsid sh -c '(setsid sh -c "echo \\$\\$ > {dir}/stray.'$RANK'; exec sleep 300" &) ; exit 0' &
{wait}
"""
KINDS = ("worker", "child", "session", "stray")


def family(directory: Path, wait: str = "sleep 300") -> str:
    return FAMILY.format(dir=directory, wait=wait)


def sleeper(directory: str) -> None:
    Path(directory, f"worker.{os.environ['RANK']}").write_text(str(os.getpid()))
    threading.Event().wait()


def main() -> None:
    scenario, directory = sys.argv[1], Path(sys.argv[2])
    n = 2
    envs = {rank: {"RANK": str(rank)} for rank in range(n)}
    specs = DefaultLogsSpecs(log_dir=str(directory / "logs"))
    if scenario == "family":
        args = {rank: ("-c", family(directory)) for rank in range(n)}
        group = start_processes("fault", "/bin/sh", args, envs, specs)
    elif scenario == "stubborn":
        script = (
            f"trap '' TERM INT HUP QUIT; echo $$ > {directory}/worker.$RANK; while :; do sleep 0.05; done"
        )
        args = dict.fromkeys(range(n), ("-c", script))
        group = start_processes("fault", "/bin/sh", args, envs, specs)
    else:  # a start method of function workers
        args = {rank: (str(directory),) for rank in range(n)}
        group = start_processes("fault", sleeper, args, envs, specs, start_method=scenario)
    (directory / "helpers").write_text(str(group.spawner.pid if group.spawner else 0))
    try:
        (directory / "waiting").touch()
        group.wait()
    except SignalException as stop:
        (directory / "stopping").touch()
        grace = float(os.environ.get("GRACE", "30"))
        try:
            group.close(stop.sigval, timeout=grace)
        except SignalException:
            pass
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    main()
