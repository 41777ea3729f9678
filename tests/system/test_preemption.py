"""--preempt-signal: workers learn of it through the API and by the signal, save a checkpoint and exit."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.spec import AgentOptions, WorkerSpec
from phalanx.agent.supervision.supervision import Supervision
from phalanx.cluster.solo import SoloRendezvous
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.errors import SignalException
from phalanx.observe import events
from phalanx.worker.board import Boards
from tests.conftest import gone, wait_until
from tests.support.netns import Job
from tests.support.run_helpers import Ended, Running, all_gone, run, script

READY = "print('ready', os.environ['RANK'], os.getpid(), flush=True)\n"
BY_POLLING = """
import os, sys, time
from phalanx import worker
worker.should_checkpoint()
READY
step = 0
while not worker.should_checkpoint():
    step += 1
    worker.heartbeat(step)
    time.sleep(0.005)
print("saved", os.environ["RANK"], flush=True)
"""
BY_CALLBACK = """
import os, sys, time
from phalanx import worker
@worker.on_preempt
def save():
    os.write(1, f"saved {os.environ['RANK']}\\n".encode())  # print may be what was interrupted
    sys.exit(0)
READY
while True: time.sleep(1000)
"""
BY_SIGNAL = """
import os, signal, sys, time
def save(number, frame):
    os.write(1, f"saved {os.environ['RANK']}\\n".encode())  # print may be what was interrupted
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
READY
while True: signal.pause()
"""
# Only rank 0 handles it, and the others must live until it has saved.
BY_THE_FIRST = """
import os, sys, time
from phalanx import worker
rank = int(os.environ["RANK"])
if rank == 0: worker.should_checkpoint()
READY
if rank == 0:
    while not worker.should_checkpoint(): time.sleep(0.005)
    time.sleep(0.3)
    print("saved 0", "saved 1", flush=True)
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]): time.sleep(0.005)
"""
# The first signal is lost, as one that comes between Python's last look for signals and a blocking call.
MISSES_IT = """
import os, signal, sys, time
from phalanx import worker
@worker.on_preempt
def save():
    os.write(1, f"saved {os.environ['RANK']}\\n".encode())
    sys.exit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
READY
signal.sigwait([signal.SIGUSR1])
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
while True: time.sleep(1000)
"""
IGNORES_IT = """
import os, sys, time
from phalanx import worker
worker.should_checkpoint()
READY
while True: time.sleep(1000)
"""
WITH_CHILD = """
import os, signal, subprocess, sys, time
from phalanx import worker
child = subprocess.Popen(["sleep", "1000"])
worker.on_preempt(lambda: None)
READY
while not worker.should_checkpoint(): time.sleep(0.005)
print("child", child.poll(), flush=True)
for rank in "01": print("saved", rank, flush=True)
"""


def preempt(directory: Path, body: str, *flags: str, sig: str = "SIGUSR1", grace: str = "20") -> Ended:
    path = script(directory, body.replace("READY\n", READY))
    words = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--preempt-signal",
        sig,
        "--grace",
        grace,
        *flags,
    ]
    with Running([*words, path, str(directory / "done")]) as job:
        workers = job.workers(2)
        job.signal(signal.Signals[sig])
        ended = job.end()
    assert all_gone(workers)
    return ended


@pytest.mark.parametrize("warm", ["auto", "off"])
@pytest.mark.parametrize(
    "body",
    [BY_POLLING, BY_CALLBACK, BY_SIGNAL, BY_THE_FIRST],
    ids=["polling", "callback", "signal", "first"],
)
def test_workers_save_and_exit(tmp_path: Path, body: str, warm: str) -> None:
    ended = preempt(tmp_path, body, "--warm", warm)
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert sum(ended.out.count(f"saved {rank}") for rank in "01") == 2, ended
    assert "preempted by SIGUSR1" in ended.said[-1]
    assert not any("restart" in line for line in ended.said)
    assert "Root cause" not in ended.out


def test_a_worker_that_missed_the_signal_is_told_again(tmp_path: Path) -> None:
    ended = preempt(tmp_path, MISSES_IT, grace="60")
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert sum(ended.out.count(f"saved {rank}") for rank in "01") == 2, ended


@pytest.mark.parametrize("sig", ["SIGUSR2", "SIGTERM", "SIGINT"])
def test_any_signal_may_announce_it(tmp_path: Path, sig: str) -> None:
    ended = preempt(tmp_path, BY_CALLBACK, sig=sig)
    assert ended.code == 128 + signal.Signals[sig], ended
    assert sum(ended.out.count(f"saved {rank}") for rank in "01") == 2, ended


def test_the_grace_period_ends(tmp_path: Path) -> None:
    ended = preempt(tmp_path, IGNORES_IT, grace="0.5")
    assert ended.code == 128 + signal.SIGUSR1, ended
    wanted = "preemption: not saved as far as is known: ranks 0, 1 still ran after --grace 0.5s"
    assert any(wanted in line for line in ended.said), ended


# With children as data loaders have them: one forked, and for SIGUSR1 one that runs another program.
WITH_LOADERS = """
import multiprocessing, os, subprocess, sys, time
from phalanx import worker
worker.should_checkpoint()
loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
loader.start()
other = subprocess.Popen(["sleep", "1000"])
READY
while not worker.should_checkpoint():
    time.sleep(0.005)
if sys.argv[2] == "SIGUSR1":
    assert loader.exitcode is None and other.poll() is None, (loader.exitcode, other.poll())
loader.terminate()
loader.join()
other.terminate()
other.wait()
print("saved", os.environ["RANK"], flush=True)
"""


@pytest.mark.parametrize("warm", ["auto", "off"])
@pytest.mark.parametrize("first", ["agent first", "agent last"])
@pytest.mark.parametrize("sig", ["SIGUSR1", "SIGUSR2", "SIGTERM"])
def test_the_signal_may_come_to_every_process_of_the_job(
    tmp_path: Path, sig: str, first: str, warm: str
) -> None:
    path = script(tmp_path, WITH_LOADERS.replace("READY\n", READY))
    words = ["--nproc-per-node", "2", "--max-restarts", "3", "--preempt-signal", sig, "--grace", "60"]
    with Running([*words, "--warm", warm, path, str(tmp_path / "done"), sig]) as job:
        workers = job.workers(2)
        agent = psutil.Process(job.process.pid)
        everyone = [agent, *agent.children(recursive=True)]
        for process in everyone if first == "agent first" else reversed(everyone):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.Signals[sig])
        ended = job.end()
    assert all_gone(workers)
    assert ended.code == 128 + signal.Signals[sig], ended
    assert sum(ended.out.count(f"saved {rank}") for rank in "01") == 2, ended
    assert not any("not saved" in line or "restart" in line for line in ended.said), ended


def test_a_failure_still_stops_the_others_at_once_when_sigterm_announces(tmp_path: Path) -> None:
    """They hold SIGTERM off for the sake of their checkpoints, so that they are stopped by another signal."""
    body = """
import os, sys, time
from phalanx import worker
worker.should_checkpoint()
READY
if os.environ["RANK"] == "1":
    sys.exit("no data")
time.sleep(1000)
"""
    path = script(tmp_path, body.replace("READY\n", READY))
    ended = run("--nproc-per-node", "2", "--preempt-signal", "SIGTERM", "--grace", "1000", path)
    assert ended.code == 1, ended
    assert "preemption" not in ended.err


def test_a_worker_that_fails_while_it_saves_is_named(tmp_path: Path) -> None:
    body = BY_POLLING + "if os.environ['RANK'] == '1': raise OSError('disk full')\n"
    ended = preempt(tmp_path, body)
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert any("not saved as far as is known: rank 1 failed (OSError: disk full)" in s for s in ended.said)


def test_no_worker_handles_it(tmp_path: Path) -> None:
    body = "import os, time\nREADY\ntime.sleep(1000)\n"
    ended = preempt(tmp_path, body, grace="1000")
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert any("no worker handles it" in line for line in ended.said)


def test_children_of_workers_do_not_get_the_signal(tmp_path: Path) -> None:
    ended = preempt(tmp_path, WITH_CHILD, grace="5")
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert ended.out.count("child None") == 2, ended


def test_repeated_announcements_do_not_shorten_the_grace_period(tmp_path: Path) -> None:
    path = script(tmp_path, BY_THE_FIRST.replace("READY\n", READY).replace("0.3", "0.5"))
    words = ["--nproc-per-node", "2", "--preempt-signal", "USR1", "--grace", "20"]
    with Running([*words, path, str(tmp_path / "done")]) as job:
        job.workers(2)
        job.signal(signal.SIGUSR1)
        job.read_until("SIGUSR1: stopping")
        for _ in range(5):
            job.signal(signal.SIGUSR1)
        ended = job.end()
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert "saved 0" in ended.out


def test_an_interrupt_does(tmp_path: Path) -> None:
    path = script(tmp_path, IGNORES_IT.replace("READY\n", READY))
    with Running(["--nproc-per-node", "2", "--preempt-signal", "USR1", "--grace", "1000", path]) as job:
        workers = job.workers(2)
        job.signal(signal.SIGUSR1)
        job.read_until("SIGUSR1: stopping")
        assert not gone(workers[0])
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert all_gone(workers)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGNO", "12"])
def test_a_signal_that_cannot_be_handled_is_refused(tmp_path: Path, name: str) -> None:
    ended = run("--preempt-signal", name, script(tmp_path, textwrap.dedent("print('never')")))
    assert ended.code == 2
    assert f"--preempt-signal {name}: name a signal that can be handled" in ended.err


# Exit at once with their own code; the last one to be ready announces the preemption.
QUICK = """
import os, signal, sys, time
from phalanx import worker
signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(3))
worker.should_checkpoint()
folder, world = sys.argv[1], int(os.environ["WORLD_SIZE"])
open(os.path.join(folder, os.environ["RANK"]), "w").close()
if os.environ["RANK"] == "0":
    while len(os.listdir(folder)) < world: time.sleep(0.005)
    os.kill(int(sys.argv[2]), signal.SIGUSR1)
while not worker.should_checkpoint(): time.sleep(0.001)
os._exit(3)
"""


@pytest.fixture
def event_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "events.jsonl"
    events.set_file(path)
    yield path
    events.set_file(None)


@pytest.mark.parametrize("slow", [False, True], ids=["", "delayed"])
def test_a_worker_that_exits_at_once_when_preempted_has_not_failed(
    slow: bool, event_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    command = ("-c", QUICK, str(ready), str(os.getpid()))
    spec = WorkerSpec("r", 4, SoloRendezvous("job"), entrypoint=sys.executable, args=command, max_restarts=0)
    spec.event_log_handler = "file"
    options = AgentOptions(supervision=Supervision(preempt_signal=signal.SIGUSR1))
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), options=options)
    if slow:  # the agent gets no processor between this and the next step
        set_preempted = Boards.set_preempted

        def set_and_wait(boards: Boards, rank: int) -> None:
            set_preempted(boards, rank)
            pid = agent.get_worker_group().workers[rank].id
            wait_until(lambda: gone(pid), "the worker leaves")

        monkeypatch.setattr(Boards, "set_preempted", set_and_wait)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")
    with pytest.raises(SignalException):
        agent.run()
    found = [json.loads(line) for line in event_file.read_text().splitlines()]
    ends = [
        e["metadata"]["state"] for e in found if e["source"] == "WORKER" and not e["name"].endswith("START")
    ]
    assert ends == ["TERMINATED"] * 4


# -- the same step in all ranks ---------------------------------------------------------------------------

# Ranks without a collective between them drift apart; they save together all the same.
BY_STEP = """
import os, random, sys, time
from phalanx import worker
e = os.environ
step = 0
while not worker.should_checkpoint(step):
    if step == 5:
        print("ready", e["RANK"], e["WORLD_SIZE"], os.getpid(), 0, e["GROUP_RANK"], e["MASTER_ADDR"],
              e["MASTER_PORT"], "-", e["ROLE_RANK"], flush=True)
    step += 1
    worker.heartbeat(step)
    time.sleep(PACE * random.uniform(0.8, 1.2))
print(f"saved {e['RANK']} at {step}", flush=True)
"""


def saved_steps(ended: list[Ended]) -> list[str]:
    return [line.split(" at ")[1] for one in ended for line in one.out.splitlines() if "saved " in line]


@pytest.mark.parametrize("pace", ["0.001", "0.02", "0.4"])
def test_all_ranks_of_a_node_save_at_the_same_step(tmp_path: Path, pace: str) -> None:
    body = BY_STEP.replace('e["WORLD_SIZE"], os.getpid()', 'os.getpid(), e["WORLD_SIZE"]')  # for `workers`
    ended = preempt(tmp_path, body.replace("PACE", pace))
    assert ended.code == 128 + signal.SIGUSR1, ended
    steps = saved_steps([ended])
    assert len(steps) == 2, ended
    assert len(set(steps)) == 1, ended


@pytest.mark.parametrize("pace", ["0.001", "0.02", "0.4"])
def test_all_ranks_of_all_nodes_save_at_the_same_step(tmp_path: Path, pace: str) -> None:
    with Job(tmp_path, "3", "", "--preempt-signal", "SIGUSR1", "--grace", "20") as job:
        job.script.write_text(BY_STEP.replace("PACE", pace))
        nodes = [job.node(name, nproc=2) for name in "abc"]
        for node in nodes:
            node.up(6)
        nodes[1].signal(signal.SIGUSR1)
        assert nodes[1].end().code == 128 + signal.SIGUSR1
        for node in (nodes[0], nodes[2]):
            node.read_until("saved", 2)
            node.signal(signal.SIGUSR1)
        steps = saved_steps([node.end() for node in nodes])
        assert len(steps) == 6, steps
        assert len(set(steps)) == 1, steps


# One rank asks by step, one by flag, one not at all: nobody waits for anybody.
MIXED = """
import os, time
from phalanx import worker
rank = int(os.environ["RANK"])
worker.should_checkpoint()
READY
step = 0
while True:
    if rank == 0 and worker.should_checkpoint(step): break
    if rank == 1 and worker.should_checkpoint(): break
    step += 1
    time.sleep(0.01)
print(f"saved {rank}", flush=True)
"""


def test_ranks_that_do_not_ask_by_step_are_not_waited_for(tmp_path: Path) -> None:
    ended = preempt(tmp_path, MIXED)
    assert ended.code == 128 + signal.SIGUSR1, ended
    assert sum(ended.out.count(f"saved {rank}") for rank in "01") == 2, ended


WITH_DCP = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from phalanx import worker
dist.init_process_group("gloo")
rank, e = dist.get_rank(), os.environ
weights = torch.zeros(4)
folder = os.path.join(os.path.dirname(__file__), "checkpoint")
step = 0
if os.path.exists(os.path.join(folder, ".metadata")):
    state = {"weights": weights, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    print(f"loaded {rank} {state['step']} {weights.tolist()}", flush=True)
    os._exit(0)
while True:
    step += 1
    grad = torch.ones(4)
    dist.all_reduce(grad)
    weights += grad
    if step == 5:
        print("ready", e["RANK"], e["WORLD_SIZE"], os.getpid(), 0, e["GROUP_RANK"], e["MASTER_ADDR"],
              e["MASTER_PORT"], "-", e["ROLE_RANK"], flush=True)
    if worker.should_checkpoint(step):
        dcp.save({"weights": weights, "step": step}, checkpoint_id=folder)
        print(f"saved {rank} at {step}", flush=True)
        os._exit(0)
"""


def test_a_collective_save_of_two_nodes_finds_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Job(tmp_path, "2", "", "--preempt-signal", "SIGUSR1", "--grace", "60") as job:
        job.script.write_text(WITH_DCP)
        nodes = [job.node(name) for name in "ab"]
        for node in nodes:
            node.up(2)
        nodes[1].signal(signal.SIGUSR1)
        nodes[0].read_until("saved")
        nodes[0].signal(signal.SIGUSR1)
        ended = [node.end() for node in nodes]
        steps = saved_steps(ended)
        assert len(steps) == 2, ended
        assert len(set(steps)) == 1, ended
    with Job(tmp_path, "2") as job:
        job.script.write_text(WITH_DCP)
        nodes = [job.node(name) for name in "ab"]
        step = int(steps[0])
        for rank, one in enumerate(node.end() for node in nodes):
            assert f"loaded {rank} {step} {[2.0 * step] * 4}" in one.out, one
