"""Hangs in torch's collectives, without a line of code in the job: the rank and the collective are named."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import HUNG
from tests.support.hang_scenarios import Plan, expected, program
from tests.support.netns import Job
from tests.support.run_helpers import Ended, Running, plain_environment
from tests.support.trials import TRIALS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

KINDS = ("missing", "operation", "group", "ahead", "stopped", "locked", "loader", "dead", "slow")


def verdicts(end: Ended) -> list[str]:
    """One line for each restart, on the node that decided or on another one."""
    return [line for line in end.said if re.search(r"; (restart \d+ of|re-forming for attempt) \d+", line)]


def check(plan: Plan, size: int, end: Ended) -> None:
    """Every line of the launcher names the rank and the collective of its turn."""
    assert end.code == 0, end
    found = verdicts(end)
    assert len(found) == len(plan), end
    wrong = [
        (name, guilty, line)
        for (name, guilty), line in zip(plan, found, strict=True)
        if expected(name, guilty, size) not in line
    ]
    assert not wrong, wrong


def show_times(plan: Plan, logs: list[Path]) -> None:
    """Print how long the verdicts took, by kind; a dead rank needs none."""
    found: dict[str, list[float]] = {}
    for turn, (name, _) in enumerate(plan):
        reports = [one.read_text() for path in logs for one in path.glob(f"*/attempt_{turn}/hang.txt")]
        times = {float(time) for text in reports for time in re.findall(r"decided (\S+) s after", text)}
        if times:
            found.setdefault(name, []).append(max(times))
    for name, times_of_it in found.items():
        ordered = sorted(times_of_it)
        middle, late = ordered[len(ordered) // 2], sum(time > 1.0 for time in ordered)
        print(f"{name}: {len(ordered)} verdicts, median {middle} s, most {ordered[-1]} s, {late} over 1 s")
        assert ordered[-1] < HUNG, (name, ordered)
    assert set(found) == {name for name, _ in plan} - {"dead"}


def flags(plan: Plan, timeout: float) -> list[str]:
    restarts = ["--max-restarts", str(len(plan)), "--restart-always", "--backoff", "0", "--grace", "0.2"]
    return [*restarts, "--hang-timeout", str(timeout)]


@pytest.mark.timeout(300)
def test_which_rank_and_which_collective(tmp_path: Path) -> None:
    """First a long evaluation on one rank, which is not a hang."""
    plan: Plan = [("evaluation", 2), ("missing_in_group", 0)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = tmp_path / "train.py"
    path.write_text(program(plan))
    logs = tmp_path / "logs"
    words = ["--nproc-per-node", "3", "--log-dir", str(logs), *flags(plan, 1.0), str(path)]
    with Running(words, env=plain_environment(TMPDIR=str(scratch))) as running:
        for turn in range(len(plan)):
            for what in ("started", "imported", "stepped"):  # each may take long on a busy machine
                running.read_until(what, times=3 * (turn + 1))
            running.read_until(f"; restart {turn + 1} of ")
        end = running.end()
    check(plan, 3, end)
    show_times(plan, [logs])
    assert "and rank 2 is running outside of it; not a hang" in end.err, end
    assert "WorkerServer" not in end.err, end  # torch's own line
    assert list(scratch.iterdir()) == []
    # torch's own tool comes to the same result.
    (recorded,) = logs.glob("*/attempt_1/flight_recorder")
    assert sorted(os.listdir(recorded)) == ["rank_0", "rank_1", "rank_2"]
    tool = [str(Path(sys.executable).with_name("torchfrtrace")), str(recorded)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=3 * HUNG, check=True)
    assert "missing ranks: {0}" in done.stdout + done.stderr, done
    assert "group info: 1:tp" in done.stdout + done.stderr, done


@pytest.mark.timeout(300)
def test_the_same_hang_again_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(program([("missing", 1)] * 3))
    again = [word for word in flags([("missing", 1)] * 3, 1.0) if word != "--restart-always"]
    with Running(["--nproc-per-node", "2", *again, str(path)]) as running:
        end = running.end()
    assert end.code == 93, end
    hang = "hang, missing: all_reduce #4 of the default group"
    assert f"not restarted: the same failure twice in a row without progress ({hang})" in end.err, end


UNRECORDED = """
import datetime, os, sys, threading
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend, _create_work_from_future

class ByStore(Backend):
    # torch attaches its recorder to it, and does not learn what completes.
    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self.store, self.own, self.calls = store, rank, 0

    def getBackendName(self):
        return "net 2/é"  # a third party may call it anything

    def allreduce(self, tensors, options):
        self.calls += 1
        self.store.set(f"{self.calls}/{self.own}", "here")
        ranks = [f"{self.calls}/{rank}" for rank in range(self.size())]
        self.store.wait(ranks, datetime.timedelta(hours=1))
        done = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

def make(store, rank, size, timeout): return ByStore(store, rank, size)
dist.Backend.register_backend("bystore", make, devices=["cpu"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": sys.exit()
dist.init_process_group("cpu:bystore")
from phalanx import worker
for step in range(10):  # of the first, ranks whose imports took longer are late
    dist.all_reduce(torch.ones(4))
    worker.heartbeat(step)
def lost(): threading.Event().wait()
if dist.get_rank() == 1: lost()
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.newest_torch  # backends in Python, which torch's recorder is attached to
def test_a_backend_whose_recorder_has_another_name_and_no_completion(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(UNRECORDED)
    words = ["--nproc-per-node", "3", "--log-dir", str(tmp_path / "logs"), "--heartbeat-timeout", "1"]
    with Running([*words, "--max-restarts", "1", "--backoff", "0", "--grace", "0.2", str(path)]) as running:
        end = running.end()
    assert end.code == 0, end
    (line,) = verdicts(end)
    assert "rank 1 never entered all_reduce #11 of the default group (last was all_reduce #10)" in line, end
    (report,) = tmp_path.glob("logs/*/attempt_0/hang.txt")
    text = (
        "net 2/é: the last is all_reduce #11 of the default group on ranks 0, 2; whether it completed is not"
    )
    assert text in report.read_text()


def every_kind(size: int) -> Plan:
    """All kinds and ranks in turn, in one launch: a trial costs little more than its hang."""
    return [(kind, turn % size) for turn in range(TRIALS) for kind in KINDS]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_many_hangs_of_every_kind(tmp_path: Path, size: int) -> None:
    plan = every_kind(size)
    path = tmp_path / "train.py"
    path.write_text(program(plan))
    launcher = [str(Path(sys.executable).with_name("phalanx")), "run", "--nproc-per-node", str(size)]
    command = [*launcher, "--log-dir", str(tmp_path / "logs"), *flags(plan, 1.5), str(path)]
    done = subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, timeout=7000, check=False
    )
    show_times(plan, [tmp_path / "logs"])
    check(plan, size, Ended(done.returncode, done.stdout, done.stderr))


def to_the_end(node: Running) -> Ended:
    """However long it takes."""
    while select.select([node._out], [], [], 1200)[0] and (data := os.read(node._out, 65536)):
        node.seen += data
    return node.end()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_hangs_of_every_kind_on_two_nodes(tmp_path: Path) -> None:
    plan = every_kind(4)
    with Job(tmp_path, "2", "", *flags(plan, 1.5), conf="ttl=20") as job:
        job.script.write_text(program(plan))
        nodes = [job.node(name, "--log-dir", str(tmp_path / name), nproc=2) for name in "ab"]
        with ThreadPoolExecutor(len(nodes)) as pool:  # at the same time: neither waits for its console
            ends = list(pool.map(to_the_end, nodes))
    show_times(plan, [tmp_path / name for name in "ab"])
    for end in ends:
        check(plan, 4, end)
    kept = [len(os.listdir(path)) for path in tmp_path.glob("[ab]/*/attempt_0/flight_recorder")]
    assert max(kept) >= 3, "the node that decides keeps the records of all"
