"""What each process of a launch imports, up to the first line of the user's program."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli import COMMANDS
from tests.support.run_helpers import plain_environment, run, script

HOOK = """
import os, sys

def note(text, path=os.environ["IMPORTS"], flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND):
    fd = os.open(path, flags, 0o600)
    os.write(fd, f"{os.getpid()} {text}\\n".encode())
    os.close(fd)

def hook(event, args):
    if event == "import":
        note(args[0])
        watch_requests()

def watch_requests():
    # What the agent imports while the workers start delays nobody.
    spawner = getattr(sys.modules.get("phalanx.agent.warm.spawner"), "Spawner", None)
    request = getattr(spawner, "request", note)
    if request.__name__ == "request":
        def noted(*args, **more):
            note("REQUEST")
            return request(*args, **more)
        spawner.request = noted

sys.addaudithook(hook)
"""
PROGRAM = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()} FIRST-LINE\\n")
"""
# Each takes half a millisecond or more.
SLOW = {
    "argparse", "asyncio", "concurrent", "ctypes", "dataclasses", "inspect", "json", "logging",
    "multiprocessing", "pickle", "queue", "random", "selectors", "shutil", "socket", "ssl", "subprocess",
    "tempfile", "threading", "traceback", "typing", "urllib", "uuid",
}  # fmt: skip
# The rooms and root modules that the agent of one node needs before its workers run.
AGENT = {
    "__main__", "agent", "cli", "cluster", "core", "devices", "errors", "helpers", "job", "kernel", "log",
    "observe", "python_command", "rawsignal", "trusted_files", "worker",
}  # fmt: skip
COMMAND = {"phalanx.cli", "phalanx.cli.terminal", COMMANDS["run"][0]}
HELPER = {"core", "helpers", "kernel", "python_command", "rawsignal"}


@pytest.mark.untraced
@pytest.mark.parametrize("warm", ["off", "auto"])
def test_the_way_to_the_first_line(tmp_path: Path, warm: str) -> None:
    log, site = tmp_path / "imports", tmp_path / "site"
    site.mkdir()
    script(site, HOOK, "sitecustomize.py")
    env = plain_environment(IMPORTS=str(log), PYTHONPATH=str(site))
    done = run("--warm", warm, script(tmp_path, PROGRAM), env=env)
    assert done.code == 0, done
    lines = [(pid, name) for pid, name in map(str.split, log.read_text().splitlines())]
    worker = next(pid for pid, name in lines if name == "FIRST-LINE")
    agent, requested = next((pid, at) for at, (pid, name) in enumerate(lines) if name == "REQUEST")
    of_agent = {name for pid, name in lines[:requested] if pid == agent}
    first_line = lines.index((worker, "FIRST-LINE"))
    of_helpers = {name for pid, name in lines[:first_line] if pid not in (agent, worker)}
    of_worker = {name for pid, name in lines[:first_line] if pid == worker}
    assert of_agent & SLOW == set()
    assert ours(of_agent) <= AGENT
    assert {name for name in of_agent if name.startswith("phalanx.cli")} == COMMAND
    assert of_helpers & SLOW == set()
    assert ours(of_helpers) <= HELPER
    assert of_worker & SLOW == set()
    assert ours(of_worker) <= HELPER | {"worker"}


def ours(names: set[str]) -> set[str]:
    """The rooms and root modules among these imports."""
    return {name.split(".")[1] for name in names if name.startswith("phalanx.")}
