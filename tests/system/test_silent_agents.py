"""Commands beside agents that do not answer, that belong to another user, or to another namespace."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.cli import status
from phalanx.cli.runs import local_agents
from phalanx.errors import UsageError
from phalanx.observe import run_registry
from phalanx.observe.local_agents import LocalAgent
from tests.conftest import HUNG, as_nobody, drop_privileges, wait_until
from tests.support.run_helpers import FOREVER, PHALANX, Running, plain_environment, script
from tests.system.hostile_user import NOBODY, as_root, doing

pytestmark = pytest.mark.thorough


def told(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PHALANX[0], *words], env=plain_environment(**env), capture_output=True, text=True, timeout=HUNG
    )


def listen(user: int, pid: int) -> socket.socket:
    """A socket under the name of an agent; nobody accepts."""
    listener = socket.socket(socket.AF_UNIX)
    scope = f"{user}/{os.environ['PHALANX_NAMESPACE']}"
    listener.bind(f"\0phalanx/{scope}/{pid}-{os.urandom(4).hex()}")
    listener.listen(64)
    return listener


def questions(listener: socket.socket) -> int:
    """How many clients have connected since the last call."""
    count = 0
    while select.select([listener], [], [], 0)[0]:
        listener.accept()[0].close()
        count += 1
    return count


@contextmanager
def a_job(tmp_path: Path, run: str) -> Iterator[Running]:
    words = ["--rdzv-id", run, "--tee", "3", "--log-dir", str(tmp_path / "logs"), "--dashboard"]
    with Running([*words, script(tmp_path, FOREVER)]) as job:
        job.workers(1)
        job.read_until("; its link: phalanx status ")
        wait_until(lambda: told("status", run).returncode == 0, "an answer of the agent")
        yield job


def test_a_command_waits_once_for_an_agent_that_does_not_answer(tmp_path: Path) -> None:
    run, missing = f"beside-{os.getpid()}", 4_000_000 + os.getpid()
    with a_job(tmp_path, run) as job, listen(os.geteuid(), missing) as silent:
        questions(silent)
        for words, expected in (
            (["status", "--all"], run),
            (["status", run], run),
            (["status", run, "--link"], "http://"),
            (["logs", run], "ready 0"),
            (["logs", run, "--events"], ""),
            (["stacks", run], "rank 0: "),
            (["quarantine", "--run", run], "no host is quarantined"),
            (["restart", run], "the workers are being restarted"),
            (["stop", run], "the job is being stopped"),
        ):
            done = told(*words)
            assert done.returncode == 0, (words, done)
            assert expected in done.stdout
            assert done.stderr == f"phalanx {words[0]}: no answer from pid {missing} within 2 s\n"
            assert questions(silent) == 1, words
        assert job.end().code == 143
        for command in ("drain", "stacks"):
            done = told(command, run)
            assert done.returncode == 1
            assert f"no job '{run}' of this user runs on this machine\n" in done.stderr


def test_the_state_of_all_jobs_does_not_wait_for_their_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that has answered, and does not answer again; with a RUN, the question is for other nodes."""
    run = f"again-{os.getpid()}"
    with a_job(tmp_path, run) as job:
        monkeypatch.setattr(status, "WORK", 10 * HUNG)
        answer = status.answering_and_silent

        def once(command: str, everyone: bool) -> tuple[list[LocalAgent], list[int]]:
            found = answer(command, everyone)
            job.signal(signal.SIGSTOP)
            return found

        monkeypatch.setattr(status, "answering_and_silent", once)
        assert status.main([]) == 0
        assert run in capsys.readouterr().out
        job.signal(signal.SIGCONT)


def registered(run: str) -> bool:
    """Whether the run is in this user's list of runs, as two seconds after the start of its workers."""
    return any(one.run == run for one in run_registry.runs(os.environ))


def listed(run: str, **env: str) -> list[str]:
    """The states in which `phalanx status --all` shows a run."""
    rows = json.loads(told("status", "--all", "--json", **env).stdout)
    return [row["state"] for row in rows if row["run"] == run]


def test_an_agent_that_is_stopped_does_not_look_ended(tmp_path: Path) -> None:
    run = f"stopped-{os.getpid()}"
    with a_job(tmp_path, run) as job, Running([run, "-f"], launcher=[PHALANX[0], "logs"]) as follower:
        follower.read_until("ready 0")
        wait_until(lambda: registered(run), "the run in the registry")
        job.signal(signal.SIGSTOP)
        assert f"no answer from pid {job.agent} within 2 s" in told("status", run).stderr
        assert follower.process.poll() is None
        assert listed(run) == ["no answer"]
        assert f"{run}  train.py  no answer  " in told("status", "--all").stdout
        job.signal(signal.SIGCONT)
        wait_until(lambda: listed(run) == ["running"], "an answer of the agent")
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
        assert follower.end().code == 0


@as_root
def test_an_agent_of_another_user_is_asked_only_if_root_wants_it() -> None:
    ready, told_ready = os.pipe()

    def serve() -> None:
        with listen(NOBODY, os.getpid()) as listener:
            os.write(told_ready, b"r")
            while True:
                peer = listener.accept()[0]
                os.write(told_ready, b"a")
                peer.close()

    try:
        with doing(serve):
            assert os.read(ready, 1) == b"r"
            for words in (["status", "--all"], ["status"], ["stacks"], ["status", "--link"]):
                told(*words)
            assert not select.select([ready], [], [], 0)[0]
            told("status", "--all-users")
            assert os.read(ready, 1) == b"a"
    finally:
        os.close(ready)
        os.close(told_ready)


def test_only_root_may_ask_for_all_users() -> None:
    refused = "--all-users: only root may ask the agents of other users"
    with as_nobody():
        drop_privileges()
        with pytest.raises(UsageError, match=refused):
            local_agents("status", True)


def test_jobs_of_two_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    run, other = f"apart-{os.getpid()}", f"other-{os.urandom(4).hex()}"
    with a_job(tmp_path, run) as job:
        wait_until(lambda: registered(run), "the run in the registry")
        assert listed(run) == ["running"]
        for apart in (other, ""):
            assert listed(run, PHALANX_NAMESPACE=apart) == []
            for words in (["logs"], ["logs", run], ["logs", run, "--events"]):
                done = told(*words, PHALANX_NAMESPACE=apart)
                assert (done.returncode, done.stdout) == (1, ""), words
        assert told("status", run, PHALANX_NAMESPACE=other).returncode == 1
        assert told("stop", run, PHALANX_NAMESPACE=other).returncode == 1
        assert told("stop", run, PHALANX_NAMESPACE="").returncode == 1
        assert told("stop", run).returncode == 0
        assert job.end().code == 143


@pytest.mark.parametrize("value", ["a/b", "x" * 25])
def test_a_namespace_that_cannot_be_part_of_a_name_is_refused(value: str, tmp_path: Path) -> None:
    for words in (["status"], ["run", script(tmp_path, "")]):
        done = told(*words, PHALANX_NAMESPACE=value)
        assert (done.returncode, done.stdout) == (2, "")
        why = f"PHALANX_NAMESPACE={value!r}: must be at most 24 letters, digits, '-' and '_'"
        assert done.stderr == f"phalanx {words[0]}: {why}\n"
