"""`phalanx status` shows the jobs of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import HUNG, wait_until
from tests.support.run_helpers import PHALANX, Running, plain_environment, script

BEATS = """
import os, signal, time
from phalanx import worker
worker.heartbeat(7)
print(f"ready {os.environ['RANK']} {os.getpid()}", flush=True)
with worker.section("evaluation"):
    while True: time.sleep(1)
"""


def status(*words: str) -> subprocess.CompletedProcess[str]:
    command = [PHALANX[0], "status", *words]
    return subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, timeout=HUNG, check=False
    )


def job_status(run: str) -> dict[str, Any]:
    """The job of this run, once its agent answers: workers may start before that."""
    wait_until(lambda: status(run).returncode == 0, f"a status of {run}")
    (job,) = json.loads(status(run, "--json").stdout)
    assert isinstance(job, dict)
    return job


def socket_name(run: str) -> str:
    """The name of the agent's abstract socket."""
    pid = job_status(run)["pid"]
    with open("/proc/net/unix") as file:
        (name,) = {line.split()[-1] for line in file if f"/{pid}-" in line}
    return name[1:]


def test_a_running_job_shows_its_workers_and_their_activity(tmp_path: Path) -> None:
    run = f"status-{os.getpid()}"
    words = ["--nproc-per-node", "2", "--rdzv-id", run, "--log-dir", str(tmp_path / "logs")]
    with Running([*words, script(tmp_path, BEATS)]) as job:
        pids = job.workers(2)
        wait_until(
            lambda: all(w["section"] for w in job_status(run)["workers"]), "both workers in their section"
        )
        found = job_status(run)
        assert (found["run"], found["name"], found["pid"], found["phase"]) == (
            run,
            "train.py",
            job.agent,
            "RUNNING",
        )
        assert {w["rank"]: w["pid"] for w in found["workers"]} == pids
        assert [(w["step"], w["section"], w["ready"]) for w in found["workers"]] == [
            (7, "evaluation", True)
        ] * 2
        assert Path(found["logs"]).parent == tmp_path / "logs"
        text = status(run)
        assert text.returncode == 0
        assert f"train.py (run {run}) on " in text.stdout
        assert "evaluation" in text.stdout
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
    gone = status(run)
    assert (gone.returncode, gone.stdout) == (1, "")
    # The list of runs knows of it, unless it was very short.
    ended = rf"(; run {run} stopped .* ago, exit code 143)?"
    line = rf"phalanx status: no job '{run}' of this user runs on this machine{ended}\n"
    assert re.fullmatch(line, gone.stderr)


def test_standbys_are_counted_with_their_memory(tmp_path: Path) -> None:
    run = f"standby-{os.getpid()}"
    words = ["--nproc-per-node", "2", "--rdzv-id", run, "--warm", "standby"]
    with Running([*words, script(tmp_path, BEATS)]) as job:
        job.workers(2)
        wait_until(lambda: job_status(run)["standbys"]["count"] == 2, "two standby processes")
        parked = job_status(run)["standbys"]
        agent = psutil.Process(job.agent)
        assert set(parked["pids"]) <= {child.pid for child in agent.children(recursive=True)}
        assert parked["memory"] > 0
        assert "2 standbys, " in status(run).stdout
        job.signal(signal.SIGTERM)
        job.end()


def test_standbys_of_helpers_that_have_no_workers_yet_are_counted(tmp_path: Path) -> None:
    """At the first launch of a script the helpers that know its modules are a second set."""
    run = f"first-{os.getpid()}"
    heavy = "import asyncio, concurrent.futures, email.mime.text, http.server, unittest, xml.dom.minidom\n"
    words = ["--nproc-per-node", "2", "--rdzv-id", run, "--warm", "standby"]
    with Running([*words, script(tmp_path, heavy + BEATS)]) as job:
        job.workers(2)
        wait_until(lambda: job_status(run)["standbys"]["count"] == 2, "two standby processes")
        job.signal(signal.SIGTERM)
        job.end()


def test_a_killed_agent_is_not_listed(tmp_path: Path) -> None:
    run = f"killed-{os.getpid()}"
    with Running(["--rdzv-id", run, script(tmp_path, BEATS)]) as job:
        job.workers(1)
        assert job_status(run)["pid"] == job.agent
        job.signal(signal.SIGKILL)
        job.end()
    assert status(run).returncode == 1


def test_clients_that_send_nothing_or_leave_do_not_delay_the_job(tmp_path: Path) -> None:
    run = f"rude-{os.getpid()}"
    with Running(["--rdzv-id", run, script(tmp_path, BEATS)]) as job:
        job.workers(1)
        name = socket_name(run)
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect("\0" + name)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect("\0" + name)
            assert job_status(run)["pid"] == job.agent
        job.signal(signal.SIGTERM)
        assert job.end().code == 143


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_no_answer(tmp_path: Path) -> None:
    run = f"private-{os.getpid()}"
    with Running(["--rdzv-id", run, script(tmp_path, BEATS)]) as job:
        job.workers(1)
        name = socket_name(run)
        code = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        code += "s.connect('\\0' + sys.argv[1]); print(s.recv(99))"
        ask = subprocess.run(["python3", "-c", code, name], capture_output=True, text=True, check=True)
        assert ask.stdout == "b''\n"
        job.signal(signal.SIGTERM)
        job.end()


def test_bad_arguments_are_refused_in_one_line() -> None:
    done = status("a", "b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
