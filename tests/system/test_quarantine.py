"""Hosts that a job keeps out: who caused failures, cannot start workers, or was named by a person."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.exit_codes import UNFIT_NODE
from tests.conftest import HUNG, gone, wait_until
from tests.support.conforming import conforming
from tests.support.netns import Job, tell
from tests.support.run_helpers import PHALANX, Running, plain_environment
from tests.system.test_cluster import everybody, succeed
from tests.system.test_hang_consensus import QUICK
from tests.system.test_hostile_rounds import bad_program
from tests.system.test_namespaces import hosts_possible, three_hosts

pytestmark = pytest.mark.thorough


def command(*words: str, env: dict[str, str], code: int = 0) -> str:
    """What a command says."""
    done = subprocess.run(
        [PHALANX[0], *words], env=env, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_a_host_that_causes_failures_is_kept_out_and_all_nodes_say_so(tmp_path: Path) -> None:
    """The host of the store is one of those that go on; a person lets the host in again, and keeps it out."""
    env = plain_environment(PHALANX_TOKEN="a token for tests", XDG_STATE_HOME=str(tmp_path / "state"))
    words = ("--max-restarts", "5", "--quarantine", "2:600:600")
    with Job(tmp_path, "2:3", "", *words, conf="last_call_timeout=20") as job:
        job.run_id = f"kept-out-{os.getpid()}"
        job._words[job._words.index("--rdzv-id") + 1] = job.run_id
        job.environment |= env
        a, b, c = nodes = [job.node(name) for name in "abc"]
        for attempt in range(2):
            workers = everybody(nodes, 3)
            assert {worker.attempt for worker in workers} == {attempt}
            tell([one for one in workers if one.node == 2], signal.SIGUSR2)
        workers = everybody([a, b], 2)
        line = "c is quarantined for 600 s: root cause of 2 failures within "
        for node in nodes:
            node.read_until(line)
            node.read_until("the last: rank 2: exit code 9")

        def status() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(command("status", job.run_id, "--json", env=env))
            return found

        for one in status():
            (held,) = one["quarantine"]
            assert held["host"] == "c"
            assert 0 < held["left"] <= 600
            assert one["records"][-1]["quarantined"].startswith(line), one["records"]
        wait_until(lambda: {one["state"] for one in status()} == {"running", "spare"}, "a spare")
        assert "quarantined: c: root cause of 2 failures" in command("status", job.run_id, env=env)
        (listed,) = json.loads(command("quarantine", "list", "--run", job.run_id, "--json", env=env))
        assert listed["reason"].startswith("root cause of 2 failures"), listed

        assert "c may take part again" in command("quarantine", "remove", "--run", job.run_id, "c", env=env)
        workers = everybody(nodes, 3)
        for node in nodes:
            node.read_until("c is no longer quarantined: removed")
        assert "no host is quarantined" in command("quarantine", "list", "--run", job.run_id, env=env)
        assert "name the hosts" in command("quarantine", "add", "--run", job.run_id, env=env, code=2)
        assert "is not quarantined" in command(
            "quarantine", "remove", "--run", job.run_id, "c", env=env, code=1
        )
        at_store = ["--rdzv-endpoint", job.endpoint, "--run", job.run_id]
        command("quarantine", "add", "b", "--reason", "XID 79", "--for", "300", *at_store, env=env)
        for node in nodes:
            node.read_until("b is quarantined for 300 s: XID 79")
        assert "b: XID 79 (for another 5" in command("quarantine", *at_store, env=env)
        tell(workers[:1], signal.SIGUSR2)  # there was no spare: the next round is the first without it
        succeed(nodes, everybody([a, c], 2))


def test_a_new_job_begins_with_the_hosts_that_another_one_keeps_out(tmp_path: Path) -> None:
    """The hook is called once, by one node of the job that found the host."""
    shared, called = tmp_path / "shared", tmp_path / "called"
    shared.mkdir()
    env = plain_environment(PHALANX_TOKEN="a token for tests", XDG_STATE_HOME=str(tmp_path / "state"))
    hook = f'cat > {called}.new; echo " for $1" >> {called}.new; cat {called}.new >> {called}'
    words = ("--max-restarts", "5", "--quarantine", "1:600:600", "--quarantine-dir", str(shared))
    with Job(tmp_path, "2:3", "", *words, "--quarantine-hook", hook, conf="last_call_timeout=20") as job:
        job.environment |= env
        a, b, c = nodes = [job.node(name) for name in "abc"]
        tell([one for one in everybody(nodes, 3) if one.node == 2], signal.SIGUSR2)
        workers = everybody([a, b], 2)
        succeed(nodes, workers)
    (line,) = called.read_text().splitlines()
    assert line.endswith("} for c")
    found = json.loads(line.removesuffix(" for c"))
    assert (found["host"], found["run_id"]) == ("c", job.run_id)
    assert found["reason"].startswith("root cause of a failure: rank 2")
    (listed,) = json.loads(command("quarantine", "--dir", str(shared), "--json", env=env))
    assert (listed["host"], 0 < listed["left"] <= 600) == ("c", True)
    assert [path.name for path in shared.iterdir()] == ["c.json"]

    again = tmp_path / "again"
    again.mkdir()
    with Job(again, "2:3", "", *words, "--quarantine-hook", hook, conf="last_call_timeout=0.1") as job:
        job.environment |= env
        c = job.node("c")  # the first to come, and yet it has no part
        c.read_until("c is quarantined for")
        a, b = nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        assert f"(run {found['run_id']})" in c.text
        assert "c may take part again" in command("quarantine", "remove", "c", "--dir", str(shared), env=env)
        assert "no host is quarantined" in command("quarantine", "--dir", str(shared), env=env)
        succeed([a, b, c], workers)
    assert len(called.read_text().splitlines()) == 1, "the one who found it has told"


def test_a_host_is_kept_out_of_all_jobs_by_a_person(tmp_path: Path) -> None:
    env = plain_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    at = ["--dir", str(tmp_path)]
    assert "no host is quarantined" in command("quarantine", *at, env=env)
    command("quarantine", "add", "gpu-1", "gpu-2", "--reason", "XID 79", *at, env=env)
    command("quarantine", "add", "gpu-3", "--for", "60", *at, env=env)
    (tmp_path / "gpu-4.json").write_text("no JSON")
    (tmp_path / "gpu-5.json").write_text('{"reason": "over", "until": 1}')
    (tmp_path / "gpu-6.json").symlink_to(tmp_path / "gpu-1.json")
    listed = conforming("quarantine", command("quarantine", "list", *at, "--json", env=env))
    assert [one["host"] for one in listed] == ["gpu-1", "gpu-2", "gpu-3"]
    assert listed[0] == {"host": "gpu-1", "reason": "XID 79", "left": None}
    assert 0 < listed[2]["left"] <= 60
    assert "gpu-1 may take part again" in command("quarantine", "remove", "gpu-1", *at, env=env)
    assert "is not quarantined" in command("quarantine", "remove", "gpu-1", *at, env=env, code=1)
    assert "not the name of a host" in command("quarantine", "add", "../x", *at, env=env, code=2)
    assert "to choose a job, use --run RUN" in command("quarantine", "list", "x", *at, env=env, code=2)
    gone_dir = command("quarantine", "--dir", str(tmp_path / "no"), env=env, code=1)
    assert f"--dir {tmp_path / 'no'}: No such file or directory" in gone_dir
    refused = command("run", "--quarantine-dir", str(tmp_path / "no"), "x.py", env=env, code=2)
    assert "make one that all nodes share" in refused or "no such script" in refused


def test_a_host_that_is_lost_again_and_again_is_kept_out(tmp_path: Path) -> None:
    """Its agent is killed twice; to leave on SIGTERM does not count."""
    env = plain_environment(PHALANX_TOKEN="a token for tests", XDG_STATE_HOME=str(tmp_path / "state"))
    run = f"lost-{os.getpid()}"
    words = ("--max-restarts", "5", "--quarantine", "2:600:600", "--rdzv-id", run)
    # A killed process hangs up, which is noticed at once; a long lease, because only those are to be lost.
    with Job(tmp_path, "2:3", "", *words, conf="last_call_timeout=20,ttl=15") as job:
        job.environment |= env
        a, b, c = nodes = [job.node(name) for name in "abc"]
        everybody(nodes, 3)
        for sig in (signal.SIGTERM, signal.SIGKILL):
            c.signal(sig)
            everybody([a, b], 2)
            c = job.node("c")
            everybody([a, b, c], 3)
        c.signal(signal.SIGKILL)
        workers = everybody([a, b], 2)
        c = job.node("c")
        for node in (a, b, c):
            node.read_until("c is quarantined for 600 s: root cause of 2 failures within ")
            node.read_until("the last: its node was lost")
        assert {worker.attempt for worker in workers} == {0}, "no restart was used"
        with Running(["status", run, "--watch"], env=env, terminal=True, launcher=PHALANX[:1]) as view:
            view.read_until("quarantined: ")
            view.read_until("c: root cause of 2 failures")
            view.type(b"q")
            view.end()
        succeed([a, b, c], workers)


@hosts_possible
def test_a_host_that_cannot_start_workers_is_kept_out_of_the_rounds_of_three_hosts(tmp_path: Path) -> None:
    """It leaves with its reason; when it returns it is a spare, and steps in once the job needs it."""
    with three_hosts(tmp_path, "2:3") as (network, job):
        a, b = nodes = [job.node(name, host=network.hosts[name]) for name in "ab"]
        everybody(nodes, 2)
        bad = job.node("c", "--no-python", bad_program(tmp_path), host=network.hosts["c"])
        ended = bad.end()
        assert ended.code == UNFIT_NODE, ended
        line = "c is quarantined for 3600 s: "
        for node in nodes:
            node.read_until(line)
        workers = everybody(nodes, 2)
        c = job.node("c", host=network.hosts["c"])
        c.read_until(line)
        c.read_until("2 nodes running, quarantined: c")
        assert {worker.attempt for worker in workers} == {0}, "no restart was used"
        assert not any(gone(worker.pid) for worker in workers), "a spare disturbs nobody"
        b.signal(signal.SIGKILL)
        for node in (a, c):
            node.read_until("c: quarantined, but the job needs 2 nodes and has 1 other")
        succeed([a, c], everybody([a, c], 2))


def test_a_host_that_fails_its_check_later_on_is_quarantined(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with Job(tmp_path, "1:2", "", "--max-restarts", "3") as job:
        a, b = job.node("a"), job.node("b", "--check-command", f"test ! -e {broken} || (echo no GPU; false)")
        workers = everybody([a, b], 2)
        broken.touch()
        tell(workers[:1], signal.SIGUSR2)
        a.read_until("b is quarantined for 3600 s: ")
        a.read_until("no GPU")
        assert b.end().code == UNFIT_NODE
        succeed([a], everybody([a], 1))


HANGS = """\
import os, threading
from phalanx import worker
def lost(): threading.Event().wait()
def wait_for_the_others(): threading.Event().wait()
for step in range(3): worker.heartbeat(step)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1": lost()
    worker.heartbeat(3)
    wait_for_the_others()
"""


def test_a_hang_is_put_down_to_the_host_that_the_others_wait_for(tmp_path: Path) -> None:
    """Whichever node finds it; the job needs that host, so it takes part all the same."""
    words = ("--max-restarts", "1", "--heartbeat-timeout", "1.5", "--grace", "1", "--quarantine", "1:600:600")
    with Job(tmp_path, "2", "", *words) as job:
        job.script.write_text(HANGS)
        nodes = [job.node(name) for name in "ab"]
        for node in nodes:
            node.read_until("b is quarantined for 600 s: root cause of a failure: no heartbeat from rank")
            ended = node.end()
            assert ended.code == 0, ended
            assert "a is quarantined" not in node.text


SLOW = """\
import os, sys, time
from phalanx import worker
e = os.environ
print("begin", e["RANK"], e["WORLD_SIZE"], e["TORCHELASTIC_RESTART_COUNT"], flush=True)
first = not os.path.exists("done")
for step in range(10**6 if first else 5):
    worker.heartbeat(step)
    if worker.should_checkpoint():
        open("done", "w").close()
        print("saved", e["RANK"], flush=True)
        sys.exit()
    time.sleep(0.1 if "SLOW" in e else 0.02)
"""


def test_a_host_that_stays_slow_is_replaced_by_the_spare_at_a_checkpoint(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "0", "--straggler-policy", "replace") as job:
        job.script.write_text(SLOW.replace('"done"', repr(str(tmp_path / "done"))))
        quick = (sys.executable, "-c", QUICK)
        a, b = job.node("a", before=quick), job.node("b", before=("env", "SLOW=1", *quick))
        b.read_until("begin 1 2 0")
        c = job.node("c", before=quick)
        for node in (a, b, c):
            node.read_until("b is quarantined for 3600 s: slow: ")
        a.read_until("saved 0")
        b.read_until("saved 1")
        c.read_until("begin 1 2 0")  # in the place of b, and no restart was used
        for node in (a, b, c):
            ended = node.end()
            assert ended.code == 0, ended
        assert a.text.count("begin 0 2 0") == 2
        assert b.text.count("begin") == c.text.count("begin") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quarantine", "forget", "a"], "not an action; use list, add, remove"),
        (["quarantine", "add"], "name the hosts"),
        (["quarantine", "add", "a", "--for", "0"], "--for: 0: must be 0.001 or more"),
        (["quarantine", "add", "a\nb", "--rdzv-endpoint", "127.0.0.1:1"], "not the name of a host"),
        (["run", "--quarantine", "3:x", "--no-python", "true"], "write K:WINDOW:COOLDOWN"),
        (["run", "--quarantine", "0", "--no-python", "true"], "write K:WINDOW:COOLDOWN"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], says: str) -> None:
    said = command(*words, env=plain_environment(PHALANX_TOKEN="x"), code=2)
    assert says in said
    assert said.count("\n") == 1


def test_a_host_whose_gpu_has_failed_is_kept_out_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, "2:3", "", "--max-restarts", "2", conf="last_call_timeout=20") as job:
        failure = 'raise RuntimeError("CUDA error: uncorrectable ECC error encountered")'
        last, told = "os._exit(told[signal.sigwait(told)])", "signal.sigwait(told) == signal.SIGUSR2"
        job.script.write_text(job.script.read_text().replace(last, f"if {told}:\n    {failure}"))
        a, b, c = nodes = [job.node(name) for name in "abc"]
        workers = everybody(nodes, 3)
        tell([one for one in workers if one.node == 2], signal.SIGUSR2)
        workers = everybody([a, b], 2)
        for node in nodes:
            node.read_until(
                "c is quarantined for 3600 s: rank 2: RuntimeError: CUDA error: uncorrectable ECC"
            )
        succeed([a, b], workers)
        assert c.end().code == 0
