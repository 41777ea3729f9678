"""Signals to `phalanx run`: workers get them, have their grace, nothing survives, the exit code is right."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import gone, wait_until
from tests.support.run_helpers import FATAL, FOREVER, READY, Running, all_gone, helpers_of, script, unshare
from tests.system.test_faults import in_time

# Says which signal came, and takes a moment over it, which is what a grace is for.
POLITE = (
    "import os, signal, sys\n"
    "def leave(number, frame):\n"
    "    os.write(1, f'got {signal.Signals(number).name}\\n'.encode())\n"
    "    sys.exit(0)\n"
    "for number in (1, 2, 3, 15): signal.signal(number, leave)\n" + READY + "while True: signal.pause()\n"
)
# Hears nothing, so that only SIGKILL ends it.
DEAF = (
    "import os, signal, sys\n"
    "for number in (1, 2, 3, 15): signal.signal(number, lambda *_: os.write(1, b'deaf\\n'))\n"
    + READY
    + "while True: signal.pause()\n"
)
# A worker with children of its own, one of them in a session of its own.
FAMILY = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '1000'])\n"
    "other = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "print('family', child.pid, other.pid, flush=True)\n" + FOREVER
)


@pytest.mark.parametrize("sig", FATAL, ids=lambda sig: sig.name)
def test_workers_get_the_signal_itself(sig: signal.Signals, tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, POLITE)]) as job:
        workers = job.workers(2)
        job.signal(sig)
        ended = job.end()
    assert ended.code == 128 + sig, ended
    assert ended.out.count(f"got {sig.name}") == 2
    assert ended.said[-2:] == [f"{sig.name}: stopping", ended.said[-1]]
    assert f"stopped by {sig.name}" in ended.said[-1]
    assert "Root cause" not in ended.out
    assert all_gone(workers)


@pytest.mark.parametrize("sig", [signal.SIGUSR1, signal.SIGALRM, signal.SIGXCPU], ids=lambda sig: sig.name)
def test_any_other_signal_that_ends_a_process_gets_a_line_and_an_orderly_stop(
    sig: signal.Signals, tmp_path: Path
) -> None:
    with Running(["--nproc-per-node", "2", "--max-restarts", "3", script(tmp_path, POLITE)]) as job:
        workers = job.workers(2)
        job.signal(sig)
        ended = job.end()
    assert ended.code == 128 + sig, ended
    assert ended.out.count("got SIGTERM") == 2, ended
    assert f"{sig.name}: stopping (it is not one of --signals-to-handle)" in ended.said
    assert f"stopped by {sig.name}" in ended.said[-1]
    assert all_gone(workers)


def test_a_signal_that_is_ignored_on_purpose_stays_ignored(tmp_path: Path) -> None:
    shell = ["sh", "-c", 'trap "" USR1; exec "$@"', "sh"]
    with Running([script(tmp_path, POLITE)], before=shell) as job:
        job.workers(1)
        job.signal(signal.SIGUSR1)
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 128 + signal.SIGTERM, ended
    assert "SIGUSR1" not in ended.out


def test_nothing_of_the_workers_families_survives(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, FAMILY)]) as job:
        workers = job.workers(2)
        words = [line.split() for line in job.text.splitlines() if line.startswith("family")]
        family = [int(pid) for line in words for pid in line[1:]]
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 143, ended
    assert len(family) == 4
    assert all_gone(family)
    assert all_gone(workers)


def test_grace_then_kill(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", "--grace", "3", script(tmp_path, DEAF)]) as job:
        workers = job.workers(2)
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 143, ended
    assert ended.out.count("deaf") == 2
    assert all_gone(workers)


def test_second_interrupt_kills_now(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", "--grace", "1000", script(tmp_path, DEAF)]) as job:
        workers = job.workers(2)
        job.signal(signal.SIGINT)
        job.read_until("deaf", 2)
        assert not gone(workers[0])
        job.signal(signal.SIGINT)
        ended = job.end()
    assert ended.code == 130, ended
    assert any("again: killing" in line for line in ended.said)
    assert all_gone(workers)


def test_no_grace_at_all(tmp_path: Path) -> None:
    with Running(["--grace", "0", script(tmp_path, DEAF)]) as job:
        job.workers(1)
        job.signal(signal.SIGINT)
        assert job.end().code == 130


def test_nohup(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, FOREVER)], before=["nohup"]) as job:
        workers = job.workers(2)
        os.killpg(job.process.pid, signal.SIGHUP)  # as the end of a login does
        for worker in workers.values():
            os.kill(worker, signal.SIGHUP)
        assert not any(gone(worker) for worker in workers.values())
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 143, ended
    assert "SIGHUP" not in ended.out
    assert all_gone(workers)


@pytest.mark.parametrize("named", ["SIGUSR1", "SIGTERM,SIGUSR1"])
def test_signals_to_handle(named: str, tmp_path: Path) -> None:
    with Running(["--signals-to-handle", named, script(tmp_path, FOREVER)]) as job:
        workers = job.workers(1)
        job.signal(signal.SIGUSR1)
        assert job.end().code == 128 + signal.SIGUSR1
    assert all_gone(workers)


def test_signal_during_the_start(tmp_path: Path) -> None:
    """Whenever it comes: the right code, and nothing left. The moments are spread over the whole start."""
    path = script(tmp_path, FOREVER)
    codes = set()
    for step in range(12):
        with Running(["--nproc-per-node", "2", path]) as job:
            time.sleep(step * 0.008)  # not to wait for something: to hit another moment
            pids = [job.agent, *(child.pid for child in psutil.Process(job.agent).children(recursive=True))]
            job.signal(signal.SIGTERM)
            ended = job.end()
            codes.add(ended.code)
            wait_until(lambda pids=pids: all_gone(pids), "the end of all of it")  # type: ignore[misc]
            assert "Traceback" not in ended.out, ended
    assert codes == {143}


BLOCKING = """\
import sys, threading
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.agent.spec import WorkerSpec
from phalanx.errors import SignalException
from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.cluster.solo import SoloRendezvous

class Never(SoloRendezvous):
    immediate = False
    def next_rendezvous(self):
        print("waiting", flush=True)
        threading.Event().wait()
    def leave(self):
        print("left", flush=True)

agent = LocalElasticAgent(WorkerSpec("r", 2, Never("job"), entrypoint="true"), DefaultLogsSpecs())
try:
    agent.run()
except SignalException as stop:
    sys.exit(128 + stop.sigval)
"""


def test_signal_during_the_first_rendezvous(tmp_path: Path) -> None:
    with Running([script(tmp_path, BLOCKING)], launcher=[sys.executable]) as job:
        job.read_until("waiting")
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert ended.code == 143, ended
    assert "left" in ended.out
    assert "Traceback" not in ended.out


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=lambda sig: sig.name)
def test_as_process_1_of_a_container(sig: signal.Signals, tmp_path: Path) -> None:
    before = unshare()
    if not before:
        assert not os.environ.get("CI"), "namespaces must be allowed in CI"
        pytest.skip("namespaces are not allowed here")
    with Running(["--nproc-per-node", "2", script(tmp_path, FAMILY)], before=before) as job:
        job.workers(2)
        (one,) = psutil.Process(job.process.pid).children()
        inside = [child.pid for child in one.children(recursive=True)]
        assert len(inside) >= 8  # keeper, zygote, two workers with two children each
        os.kill(one.pid, sig)
        ended = job.end()
    assert ended.code == 128 + sig, ended
    assert all_gone(inside)


def test_process_1_reaps_nothing_of_others(tmp_path: Path) -> None:
    """Orphans of a container end up with process 1; a run there must still end with its own code."""
    before = unshare()
    if not before:
        assert not os.environ.get("CI"), "namespaces must be allowed in CI"
        pytest.skip("namespaces are not allowed here")
    with Running(
        [script(tmp_path, "import os, sys\nos.system('sleep 0 &'); sys.exit(7)")], before=before
    ) as job:
        assert job.end().code == 7


# ---- a terminal ----------------------------------------------------------------------------------------


def test_ctrl_c_reaches_workers_through_the_agent(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, POLITE)], terminal=True) as job:
        workers = job.workers(2)
        # The terminal sends its signals to its own session: no worker may be in it.
        assert all(os.getsid(worker) != os.getsid(job.agent) for worker in workers.values())
        job.type(b"\x03")
        ended = job.end()
    assert ended.code == 130, ended
    assert ended.out.count("got SIGINT") == 2, ended  # once each, not twice
    assert all_gone(workers)


def test_ctrl_c_twice(tmp_path: Path) -> None:
    with Running(["--grace", "1000", script(tmp_path, DEAF)], terminal=True) as job:
        workers = job.workers(1)
        job.type(b"\x03")
        job.read_until("deaf")
        job.type(b"\x03")
        ended = job.end()
    assert ended.code == 130, ended
    assert all_gone(workers)


def test_closing_the_terminal_ends_it(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, FOREVER)], terminal=True) as job:
        workers = job.workers(2)
        job.hang_up()
        ended = job.end()
    assert ended.code == 129
    assert all_gone(workers)


def test_progress_line_on_a_terminal_only(tmp_path: Path) -> None:
    path = script(tmp_path, DEAF)
    with Running(["--grace", "1000", path], terminal=True) as job:
        job.workers(1)
        job.signal(signal.SIGTERM)
        job.read_until("waiting for the workers to end (1 s)")
        job.signal(signal.SIGTERM)
        ended = job.end()
    shown = ended.out.rindex("waiting for the workers")
    assert "\r\x1b[K" in ended.out[shown:], "the line was not erased"
    last = ended.out.rstrip().splitlines()[-1].removeprefix("\x1b[K")  # it may follow the erased line at once
    assert last.startswith("phalanx: stopped by SIGTERM")
    with Running(["--grace", "4", path], terminal=True) as job:
        job.workers(1)
        job.signal(signal.SIGTERM)
        ended = job.end()
    shown = ended.out.rindex("waiting for the workers")
    assert "\r\x1b[Kphalanx: stopped by" in ended.out[shown:], "the line was not erased at the end"
    with Running(["--grace", "1.6", path]) as job:
        job.workers(1)
        job.signal(signal.SIGTERM)
        ended = job.end()
    assert "waiting for" not in ended.out
    assert "\x1b" not in ended.out


# ---- the agent's own death -----------------------------------------------------------------------------


def test_kill_9_of_the_agent_ends_everything(tmp_path: Path) -> None:
    with Running(["--nproc-per-node", "2", script(tmp_path, FAMILY)]) as job:
        workers = job.workers(2)
        words = [line.split() for line in job.text.splitlines() if line.startswith("family")]
        pids = [*workers.values(), *(int(pid) for line in words for pid in line[1:]), *helpers_of(job.agent)]
        assert len(pids) >= 8
        os.kill(job.agent, signal.SIGKILL)
        assert in_time(lambda: all_gone(pids)), "the promise is one second"
        assert job.end().code == 137
