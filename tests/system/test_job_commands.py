"""`phalanx status`, `logs`, `stacks`, `restart`, `stop` and the live view, for real jobs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from phalanx.observe import run_registry
from tests.conftest import HUNG, wait_until
from tests.support.conforming import conforming
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, Running, plain_environment, script

STEPS = """
import os, time
from phalanx import worker
print(f"begin {os.environ['TORCHELASTIC_RESTART_COUNT']} \\x1b[31mred", flush=True)
step = 0
while True:
    step += 1
    worker.heartbeat(step)
    time.sleep(0.05)
"""


def told(*words: str, env: dict[str, str], code: int | None = 0) -> str:
    done = subprocess.run(
        [PHALANX[0], *words], env=env, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert code in (None, done.returncode), (words, done.stdout, done.stderr)
    assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr)
    return done.stdout + done.stderr


def node(run: str, env: dict[str, str]) -> dict[str, Any] | None:
    """The first node of a job, once all its workers have sent a heartbeat."""
    done = subprocess.run(
        [PHALANX[0], "status", run, "--json"], env=env, capture_output=True, timeout=HUNG, check=False
    )
    jobs = [job for job in conforming("status", done.stdout.decode()) if job["workers"]]
    found: dict[str, Any] | None = jobs[0] if jobs else None
    return found if found and all(worker["step"] for worker in found["workers"]) else None


def test_a_job_is_seen_restarted_stopped_and_remembered(tmp_path: Path) -> None:
    run, env = f"seen-{os.getpid()}", plain_environment(XDG_STATE_HOME=str(tmp_path / "state"), TERM="xterm")
    words = ["--nproc-per-node", "2", "--rdzv-id", run, "--redirects", "3"]
    words += ["--log-dir", str(tmp_path / "logs")]
    with Running([*words, script(tmp_path, STEPS)], env=env) as job:
        wait_until(lambda: node(run, env), "two workers with steps")
        first = node(run, env)
        assert first is not None
        one = first["workers"][0]
        assert (one["state"], one["last_line"]) == ("ready", "begin 0 \x1b[31mred")
        assert one["memory"] > 0
        assert one["uptime"] > 0
        assert (first["state"], first["ledger"]["ranks"]) == ("running", 2)
        assert sum(first["ledger"]["seconds"].values()) > 0
        stacks = told("stacks", run, env=env)
        assert stacks.startswith("rank")
        assert "train.py:" in stacks
        assert told("logs", run, "--rank", "1", "--grep", "red", env=env) == "[1]  begin 0 \\x1b[31mred\n"
        with Running([run, "--watch"], launcher=[PHALANX[0], "status"], terminal=True, env=env) as view:
            view.read_until("goodput ")
            view.type(b"/1\r")
            view.read_until("ranks 1")
            view.type(b"q")
            assert view.end().code == 0
            assert "begin 0 \\x1b[31mred" in view.text
        assert "required: RUN" in told("restart", env=env, code=2), "never a job that was not named"
        assert "restarted" in told("restart", run, env=env)
        wait_until(
            lambda: (now := node(run, env)) and now["workers"][0]["pid"] != one["pid"],
            "workers of a new start",
        )
        again = node(run, env)
        assert again is not None
        assert [(r["trigger"], r["recovery"]) for r in again["records"]] == [("request", "restart")]
        assert again["restarts"] == 0
        assert "a restart was asked for" in told("logs", run, "--events", env=env)
        events = told("logs", run, "--events", "--json", env=env).splitlines()
        assert {conforming("event", line)["kind"] for line in events} >= {"note"}
        assert "stopped" in told("stop", run, env=env)
        assert job.end().code == 143
    listed = {
        one["run"]: one["state"] for one in conforming("runs", told("status", "--all", "--json", env=env))
    }
    assert listed[run] == "stopped"
    assert run[:16] in told("status", "--all", env=env)
    assert "train.py" in told("status", run, "--all", env=env)
    assert told("status", "no-such-run", "--all", env=env) == "no runs\n"
    assert "has a page" in told("status", run, "--link", env=env, code=1)
    assert told("logs", run, "--rank", "0", env=env) == "[0]  begin 0 \\x1b[31mred\n"
    assert "SIGTERM: stopping" in told("logs", run, "--events", env=env)
    assert "no job" in told("stacks", run, env=env, code=1)
    registry = run_registry.directory(env)
    assert registry is not None
    assert os.stat(registry).st_mode & 0o777 == 0o700


def test_all_nodes_of_a_job_are_seen_and_stopped_from_one(tmp_path: Path) -> None:
    run, port = f"nodes-{os.getpid()}", free_port()
    env = plain_environment(PHALANX_TOKEN="secret " * 5, XDG_STATE_HOME=str(tmp_path / "state"))
    words = ["--nnodes", "2", "--rdzv-backend", "phalanx", "--rdzv-id", run]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    python = [*words, "--rdzv-conf", "name=snake", *logs, script(tmp_path, STEPS)]
    other = [*words, "--rdzv-conf", "name=stone", *logs, "--no-python", "sleep", "1000"]
    with Running(python, env=env) as one, Running(other, env=env) as two:
        wait_until(
            lambda: told_stacks(run, env) == {"snake": True, "stone": False}, "the stacks of both nodes"
        )
        found = json.loads(told("status", run, "--json", env=env))
        assert {job["host"]: job["address"] for job in found} == {"snake": "127.0.0.1", "stone": "127.0.0.1"}
        assert all(job["lease_age"] is not None and job["nodes"] for job in found)
        assert "no Python stack" in told("stacks", run, env=env)
        assert "[snake " in told("logs", run, "--node", "snake", env=env)
        assert "stopped" in told("stop", run, env=env)
        assert (one.end().code, two.end().code) == (143, 143)


def told_stacks(run: str, env: dict[str, str]) -> dict[str, bool]:
    done = subprocess.run(
        [PHALANX[0], "stacks", run, "--json"], env=env, capture_output=True, timeout=HUNG, check=False
    )
    if not done.stdout:
        return {}
    told = conforming("stacks", done.stdout.decode())
    return {one["host"]: bool(one["stack"]) for one in told["stacks"]}
