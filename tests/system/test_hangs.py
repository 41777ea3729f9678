"""Real hangs under `phalanx run`: detected, reported with stacks and the rank that differs, and handled."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from phalanx.core.exit_codes import HANG, UNFIT_NODE
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import Ended, Running, all_gone, plain_environment, run, script

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

# A few heartbeats, then the guilty rank hangs while the others continue.
BEGIN = """
import os, signal, sys, threading, time
from phalanx import worker
rank, guilty = int(os.environ["RANK"]), 1
for step in range(5):
    worker.heartbeat(step)
def go_on():
    while True:
        worker.heartbeat(6)
        time.sleep(0.01)
"""
DEADLOCK = """
def locked(first, second):
    with first:
        barrier.wait()
        with second: pass
if rank == guilty:
    a, b, barrier = threading.Lock(), threading.Lock(), threading.Barrier(2)
    other = threading.Thread(target=locked, args=(a, b), daemon=True)
    other.start()
    locked(b, a)
go_on()
"""
SPIN = """
def spin():
    while True: pass
if rank == guilty: spin()
go_on()
"""
STOPPED = """
if rank == guilty: os.kill(os.getpid(), signal.SIGSTOP)
go_on()
"""
IGNORES_SIGTERM = """
def spin_on():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: pass
if rank == guilty: spin_on()
go_on()
"""


def hang(directory: Path, body: str, *flags: str, workers: int = 3, begin: str = BEGIN) -> Ended:
    path = script(directory, begin + textwrap.dedent(body))
    logs = ("--log-dir", str(directory / "logs"), "--grace", "1")
    return run("--nproc-per-node", str(workers), *logs, *flags, path)


def kept(directory: Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted((directory / "logs").glob(f"*/*/{name}"))]


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (DEADLOCK, "in locked"),
        (SPIN, "in spin"),
        (STOPPED, "stopped by a signal"),
        (IGNORES_SIGTERM, "in spin_on"),
    ],
    ids=["deadlock", "spin", "stopped", "ignores-sigterm"],
)
def test_the_guilty_rank_is_named(tmp_path: Path, body: str, at: str) -> None:
    ended = hang(tmp_path, body, "--heartbeat-timeout", "1")
    assert ended.code == HANG, ended
    lines = [line for line in ended.said if "heartbeat" in line]
    assert len(lines) == 1, ended
    assert re.match(r"no heartbeat from rank 1 for \d+\.\d s", lines[0]), ended
    assert "(last at step 4)" in lines[0]
    assert at in lines[0], ended
    assert "not restarted" in lines[0]
    # The report comes last, with the rank that differs before the others.
    report = ended.err[ended.err.index("HANG: ") :]
    assert report.index("  rank 1") < report.index("  ranks 0, 2: "), ended
    assert "in go_on" in report
    (summary,) = kept(tmp_path, "hang.txt")
    assert "rank 1" in summary
    stacks = kept(tmp_path, "*/stacks.txt")
    assert len(stacks) == (2 if body is STOPPED else 3)
    assert ended.out == ""


def test_ranks_that_cannot_answer_are_reported_without_a_stack(tmp_path: Path) -> None:
    """One is in the kernel, where no signal reaches it, the other one blocks all signals."""
    body = f"""
    def in_the_kernel():
        # The parent of a child that has not come to its program yet sleeps without interruption.
        path = {str(tmp_path / "fifo")!r}
        os.mkfifo(path)
        waits = (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)
        os.posix_spawn("/bin/true", ["true"], {{}}, file_actions=[waits])
    def deaf():
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        threading.Event().wait()
    if rank == 1: in_the_kernel()
    if rank == 2: deaf()
    go_on()
    """
    ended = hang(tmp_path, body, "--heartbeat-timeout", "1")
    assert ended.code == HANG, ended
    (report,) = kept(tmp_path, "hang.txt")
    assert "  ranks 1, 2: pid" in report
    assert "no Python stack: no answer" in report
    assert report.count("in go_on") == 1
    (decided,) = re.findall(r"  decided (\S+) s after the detection", report)
    assert float(decided) < HUNG
    assert len(kept(tmp_path, "*/stacks.txt")) == 1


def test_handlers_of_torch_that_have_no_recorder_are_noted(tmp_path: Path) -> None:
    """As of another version of torch; here a server that answers each request with 404."""
    body = """
    import socket
    def serve():
        while True:
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\\r\\nContent-Length: 0\\r\\n\\r\\n")
            connection.close()
    if rank == guilty:
        path = os.environ["PHALANX_COLLECTIVES"]
        os.mkdir(os.path.dirname(path), 0o700)
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        threading.Event().wait()
    go_on()
    """
    ended = hang(tmp_path, body, "--heartbeat-timeout", "1", workers=2)
    assert ended.code == HANG, ended
    (report,) = kept(tmp_path, "hang.txt")
    assert "  collectives: not recorded on rank 1 (no flight recorder answered)\n" in report


def test_native_stacks_where_the_tool_is_installed(tmp_path: Path) -> None:
    """With a replacement for py-spy that only prints its arguments."""
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho native stacks of $4\n")
    tool.chmod(0o755)
    path = script(tmp_path, BEGIN + SPIN)
    env = plain_environment()
    env["PATH"] = f"{tool.parent}:{env['PATH']}"
    logs = ("--log-dir", str(tmp_path / "logs"), "--grace", "1")
    ended = run("--nproc-per-node", "3", *logs, "--heartbeat-timeout", "1", path, env=env)
    assert ended.code == HANG, ended
    found = kept(tmp_path, "*/native-stacks.txt")
    assert len(found) == 3
    assert all(text.startswith("native stacks of ") for text in found)


def test_a_restart_after_a_hang(tmp_path: Path) -> None:
    body = """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == guilty: spin()
        go_on()
    """
    ended = hang(
        tmp_path, "def spin():\n    while True: pass\n" + textwrap.dedent(body), "--heartbeat-timeout", "1",
        "--max-restarts", "1",
    )  # fmt: skip
    assert ended.code == 0, ended
    assert any(line.endswith("restart 1 of 1") for line in ended.said), ended
    assert ended.said[-1].startswith("all workers succeeded")
    assert ended.said[-1].endswith(", 1 restart")


def test_a_hang_that_ends_the_job_is_kept_as_json(tmp_path: Path) -> None:
    ended = hang(tmp_path, SPIN, "--heartbeat-timeout", "1", "--on-hang", "fail")
    assert ended.code == HANG, ended
    (path,) = (tmp_path / "logs").glob("*/failure.json")
    kept = json.loads(path.read_text())
    assert kept["exit_code"] == HANG
    assert kept["root_rank"] is None
    assert kept["reason"].startswith("no heartbeat from rank 1")
    assert "in spin" in kept["report"]
    (found,) = kept["watch"]
    assert (found["kind"], found["rule"], found["ranks"]) == ("hang", "heartbeat", [1])
    assert ended.err.endswith(f"The same as JSON: {path}\n")


def test_fail_uses_no_restart(tmp_path: Path) -> None:
    ended = hang(tmp_path, SPIN, "--heartbeat-timeout", "1", "--max-restarts", "5", "--on-hang", "fail")
    assert ended.code == HANG, ended
    assert not any("restart" in line for line in ended.said), ended
    assert "HANG: " in ended.err


def test_warn_prints_one_line_per_hang(tmp_path: Path) -> None:
    body = """
    for turn in range(2):
        if rank == guilty: time.sleep(1.5)
        else:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                worker.heartbeat(6)
                time.sleep(0.01)
        for _ in range(30):
            worker.heartbeat(7)
            time.sleep(0.05)
    """
    ended = hang(tmp_path, body, "--heartbeat-timeout", "1", "--on-hang", "warn")
    assert ended.code == 0, ended
    assert 1 <= sum("no heartbeat from rank 1" in line for line in ended.said) <= 2, ended
    assert not any("restart" in line for line in ended.said), ended


def test_a_worker_stuck_in_import(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import threading\nthreading.Event().wait()\n")
    body = """
    import os
    from phalanx import worker
    if os.environ["RANK"] == "1": import slow_module
    worker.ready()
    import time
    time.sleep(1000)
    """
    ended = hang(tmp_path, body, "--startup-timeout", "2", begin="")
    assert ended.code == HANG, ended
    (line,) = [line for line in ended.said if "not ready" in line]
    assert line.startswith("rank 1 not ready 2 s after the start, at slow_module.py:2 in <module>"), ended


def test_no_output_at_all(tmp_path: Path) -> None:
    body = """
    import os, time
    print("hello", os.environ["RANK"])
    end = time.monotonic() + 1.5
    while os.environ["RANK"] == "0" and time.monotonic() < end:
        print("still here")
        time.sleep(0.05)
    def quiet(): time.sleep(1000)
    quiet()
    """
    begin = time.monotonic()
    ended = hang(tmp_path, body, "--silence-timeout", "1", workers=2, begin="")
    assert ended.code == HANG, ended
    assert time.monotonic() - begin >= 2.5
    assert any(re.match(r"no output from ranks 0, 1 for \d+\.\d s", line) for line in ended.said), ended
    assert "hello 1" in ended.out  # implied tee


def test_a_scope_that_is_not_left(tmp_path: Path) -> None:
    body = """
    with worker.expires(1000), worker.section("load"):
        for _ in range(100):
            with worker.expires(0.5): pass
        if rank == guilty:
            with worker.expires(0.5): time.sleep(1000)
    time.sleep(1000)
    """
    ended = hang(tmp_path, body)
    assert ended.code == HANG, ended
    assert any(line.startswith("rank 1 did not leave expires() in time") for line in ended.said), ended
    assert "in section 'load'" in ended.err


def test_some_ranks_finish_and_others_still_run(tmp_path: Path) -> None:
    ended = hang(
        tmp_path, "def late(): time.sleep(1000)\nif rank == 2: late()\n", "--partial-exit-timeout", "1"
    )
    assert ended.code == HANG, ended
    (line,) = [line for line in ended.said if "finished" in line]
    assert re.match(r"rank 2 still runs \d+\.\d s", line), ended
    assert "after ranks 0, 1 have finished" in line
    assert "in late" in line


COLLECTIVE = """
import os, threading, time
import torch, torch.distributed as dist
from phalanx import worker
dist.init_process_group("gloo")
rank = dist.get_rank()
def lost(): threading.Event().wait()
for step in range(1000):
    if rank == 1 and step == 5: lost()
    dist.all_reduce(torch.ones(1))
    worker.heartbeat(step)
"""


@needs_torch
@pytest.mark.parametrize("workers", [2, 3])
def test_a_collective_that_waits_for_a_lost_peer(tmp_path: Path, workers: int) -> None:
    ended = hang(tmp_path, COLLECTIVE, "--heartbeat-timeout", "2", workers=workers, begin="")
    assert ended.code == HANG, ended
    (line,) = [line for line in ended.said if "heartbeat" in line]
    everybody = "ranks 0, 1" if workers == 2 else "ranks 0-2"
    assert re.search(rf": no heartbeat from {everybody} for \d+\.\d s", line), ended
    never = "rank 1 never entered all_reduce #6 of the default group (last was all_reduce #5), at train.py:"
    assert line.startswith(never), ended
    assert "in lost; " + ("rank 0 waits in it" if workers == 2 else "the other 2 wait in it") in line
    assert "  rank 1 (the others wait for it): pid " in ended.err, ended
    assert "in all_reduce" in ended.err
    (path,) = (tmp_path / "logs").glob("*/failure.json")
    (found,) = json.loads(path.read_text())["watch"]
    told = [found["collectives"][key] for key in ("kind", "ranks", "operation", "number")]
    assert told == ["missing", [1], "all_reduce", 6]


def test_slow_ranks_are_reported_and_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, to shorten the window."""
    import phalanx.core.diagnosis.stragglers as progress
    from phalanx.agent.logs.specs import DefaultLogsSpecs
    from phalanx.agent.spec import AgentOptions, WorkerSpec
    from phalanx.cluster.solo import SoloRendezvous
    from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monkeypatch.setattr(progress, "WINDOW", 0.5)
    go = tmp_path / "go"
    path = script(tmp_path, BEGIN + f"while not os.path.exists({str(go)!r}):\n    step += 1\n"
                  "    worker.heartbeat(step)\n    time.sleep(0.01 if rank != 1 else 0.1)\n")  # fmt: skip
    spec = WorkerSpec("w", 3, SoloRendezvous("r", "phalanx"), entrypoint=sys.executable, args=(path,))
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        if "slow" in line:
            go.touch()

    options = AgentOptions(note=note)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), options=options)
    assert not agent.run().is_failed()
    slow = [line for line in notes if "slow" in line]
    assert len(slow) == 1, notes
    assert slow[0].startswith("rank 1 is slow: ")
    assert agent.supervision is not None
    assert [finding["kind"] for finding in agent.supervision.incidents.findings] == ["straggler"]


def ask(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HUNG)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_health_of_a_run(tmp_path: Path, how: str) -> None:
    port = free_port()
    flags = ["--health-listen", str(port)] if how == "flag" else []
    env = plain_environment(**({"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)} if how == "variable" else {}))
    path = script(
        tmp_path, "import os, time; print('ready', os.environ['RANK'], os.getpid()); time.sleep(1000)\n"
    )
    with Running([*flags, path], env=env) as job:
        job.workers(1)
        wait_until(lambda: ask(port, "/readyz") == 200, "workers started")
        assert ask(port, "/healthz") == 200
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
    assert ask(port, "/healthz") == 0


def test_an_agent_whose_loop_stalls_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, so that an event handler that does not return can block the loop."""
    import threading

    from phalanx.agent.logs.specs import DefaultLogsSpecs
    from phalanx.agent.spec import AgentOptions, WorkerSpec
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.cluster.solo import SoloRendezvous
    from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monkeypatch.setattr("phalanx.web.health.LoopProbe.__init__.__defaults__", (None, 0.5))
    path = script(tmp_path, "import time; time.sleep(1000)\n")
    handler = SoloRendezvous("r", "phalanx")
    spec = WorkerSpec("w", 1, handler, entrypoint=sys.executable, args=(path,), max_restarts=0)
    watch = Supervision(health="0")
    go_on, seen = threading.Event(), []

    def stall(reason: str) -> None:
        if "are running" in reason:
            prober.start()
            assert go_on.wait(HUNG)

    def probe() -> None:
        assert watch.services.health is not None
        port = watch.services.health.port
        for expected in (503, 200):
            wait_until(lambda code=expected: ask(port, "/healthz") == code, str(expected))
            seen.append(expected)
            go_on.set()
        os.kill(agent.get_worker_group().workers[0].id, signal.SIGKILL)

    prober = threading.Thread(target=probe)
    options = AgentOptions(supervision=watch, reason=stall)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), options=options)
    assert agent.run().is_failed()
    prober.join()
    assert seen == [503, 200]


def test_a_health_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ended = run("--health-listen", str(other.getsockname()[1]), script(tmp_path, "print('never')"))
    assert ended.code == 1, ended
    assert "cannot listen on 127.0.0.1" in ended.err
    assert ended.out == ""


def test_a_node_that_fails_its_check_stays_out(tmp_path: Path) -> None:
    path = script(tmp_path, "print('never')")
    ended = run("--check-command", "echo GPU 3 is lost; exit 7", path)
    assert ended.code == UNFIT_NODE, ended
    assert ended.out == ""
    assert "failed (exit code 7): GPU 3 is lost" in ended.said[-1]
    quiet = run("-q", "--check-command", "echo GPU 3 is lost; exit 7", path)
    assert (quiet.code, len(quiet.said)) == (UNFIT_NODE, 1), quiet


def test_the_node_is_checked_before_every_round(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    ended = run("--max-restarts", "1", "--check-command", f"echo x >> {tmp_path}/checks", path)
    assert ended.code == 0, ended
    assert (tmp_path / "checks").read_text().split() == ["x", "x"]


def test_a_signal_during_the_check(tmp_path: Path) -> None:
    path = script(tmp_path, "print('never')")
    with Running(["--check-command", f"echo $$ > {tmp_path}/pid; exec sleep 1000", path]) as job:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the check")
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: gone(pid), "the end of the check")


def test_the_watchdog_of_the_timers_runs_beside_the_agent(tmp_path: Path) -> None:
    body = """
    import os, time
    from phalanx.elastic.timer import FileTimerClient, configure, expires
    configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with expires(after=60): pass
    if os.environ["RANK"] == "1":
        with expires(after=0.3): time.sleep(1000)
    time.sleep(1000)
    """
    env = plain_environment(TORCHELASTIC_ENABLE_FILE_TIMER="1")
    ended = run("--nproc-per-node", "2", script(tmp_path, textwrap.dedent(body)), env=env)
    assert ended.code == 137, ended
    assert "rank 1" in ended.err
    assert not list(Path(env["TMPDIR"]).glob("phalanx_*/timers"))


# A worker that cannot be killed cannot be had without a broken kernel. What can: a worker in uninterruptible
# sleep (the parent of a vfork, until its child ends), and one that is dead but whose death nobody may see
# (traced by somebody who does not look), which for the helper is the same as one that outlives SIGKILL.

VFORK = """
import ctypes, os, time
libc = ctypes.CDLL(None)
print("ready", os.environ["RANK"], os.getpid(), flush=True)
CLONE_VFORK, SYS_CLONE = 0x4000, {"x86_64": 56, "aarch64": 220}[os.uname().machine]
if os.environ["RANK"] == "1" and libc.syscall(SYS_CLONE, CLONE_VFORK | 17, 0, 0, 0, 0) == 0:
    time.sleep(1000)
time.sleep(1000)
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the number of a system call")
def test_uninterruptible_sleep_is_noticed(tmp_path: Path) -> None:
    env = plain_environment(TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT="1")
    with Running(["--nproc-per-node", "2", "--grace", "1", script(tmp_path, VFORK)], env=env) as job:
        workers = job.workers(2)
        ended = job.end()
    assert ended.code == HANG, ended
    assert f"workers in uninterruptible sleep (pid {workers[1]})" in ended.err
    assert all_gone(workers)


TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) != 0:  # seize
    sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
print("traced", flush=True)
time.sleep(1000)
"""


def test_a_worker_that_survives_sigkill_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    body = "import os, time; print('ready', os.environ['RANK'], os.getpid(), flush=True)\n"
    path = script(tmp_path, body + "if os.environ['RANK'] == '0': input()\ntime.sleep(1000)\n")
    read, write = os.pipe()
    with Running(["--nproc-per-node", "2", "--max-restarts", "3", "--grace", "1", path], stdin=read) as job:
        os.close(read)
        workers = job.workers(2)
        tracer = subprocess.Popen(
            [sys.executable, "-c", TRACE, str(workers[1])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert tracer.stdout is not None
            assert tracer.stderr is not None
            if tracer.stdout.readline() != "traced\n":
                pytest.skip(f"tracing is not allowed here ({tracer.stderr.read().strip()})")
            os.close(write)  # rank 0 fails, and the group is to be restarted
            ended = job.end()
        finally:
            tracer.kill()
            tracer.communicate()
    assert ended.code == 1, ended
    assert f"could not be killed: pid {workers[1]} (" in ended.err, ended
    assert "state Z" in ended.err
    assert ended.out.count("ready") == 2
