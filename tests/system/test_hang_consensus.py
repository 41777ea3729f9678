"""Progress over the nodes of a job: hangs, stragglers, silence and exits on another node."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.core.exit_codes import HANG
from tests.support.netns import Job, Node, free_port
from tests.support.run_helpers import Ended, plain_environment, script

pytestmark = pytest.mark.thorough

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

BEGIN = """
import os, sys, threading, time
from phalanx import worker
rank = int(os.environ["RANK"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
"""
# Compares the rates more often than by default.
QUICK = (
    "import sys; from phalanx.core.diagnosis import stragglers;"
    " stragglers.WINDOW = 0.5; sys.argv = sys.argv[1:];"
    "from phalanx.__main__ import main; main()"
)


# Ignores verdicts when they arrive.
IGNORES_VERDICTS = (
    "import sys; from phalanx.agent.supervision.hang_detector import HangDetector;"
    "handle = HangDetector._handle;"
    "HangDetector._handle = lambda self, consensus, message, now: None"
    " if message.get('kind') == 'verdict' and message['node'] >= 0"
    " else handle(self, consensus, message, now);"
    "sys.argv = sys.argv[1:]; from phalanx.__main__ import main; main()"
)


@contextmanager
def nodes(
    backend: str, tmp_path: Path, body: str, *words: str, quick: bool = False, b: str = ""
) -> Iterator[list[Node]]:
    """Two nodes, a and b, with two workers each; node b runs the code `b` instead of the launcher."""
    path = script(tmp_path, BEGIN + body)
    usual = (sys.executable, "-c", QUICK) if quick else ()
    befores = {"a": usual, "b": (sys.executable, "-c", b) if b else usual}
    words = ("--grace", "1", "--max-restarts", "0", *words)
    if backend == "elastic":
        with Job(tmp_path, "2", "", *words) as job:
            job.script.write_text(BEGIN + body)
            yield [
                job.node(name, "--log-dir", str(tmp_path / name), nproc=2, before=before)
                for name, before in befores.items()
            ]
        return
    port = str(free_port())
    common = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        *words,
    )
    made: list[Node] = []
    try:
        for rank, (name, before) in enumerate(befores.items()):
            more = ("--node-rank", str(rank), "--log-dir", str(tmp_path / name))
            made.append(Node(name, [*common, *more, path], 2, before=before, env=plain_environment()))
        yield made
    finally:
        for node in made:
            node.__exit__(*sys.exc_info())


def ends(running: list[Node]) -> list[Ended]:
    return [node.end() for node in running]


both = pytest.mark.parametrize("backend", ["elastic", "static"])


@both
def test_a_rank_that_blocks_those_of_another_node_is_reported_on_both(backend: str, tmp_path: Path) -> None:
    """All heartbeats stop together; three ranks are at the same place, one is elsewhere."""
    body = """
def wait_for_the_others(): threading.Event().wait()
def lost(): threading.Event().wait()
for step in range(5): worker.heartbeat(step)
if rank == 3: lost()
worker.heartbeat(5)
wait_for_the_others()
"""
    with nodes(backend, tmp_path, body, "--heartbeat-timeout", "1.5") as running:
        found = ends(running)
    for end in found:
        assert end.code == HANG, end
        assert re.search(r"no heartbeat from ranks 0-3 for \d", end.err), end
        assert "rank 3 differs (behind the others)" in end.err, end
        assert "in lost" in end.err, end
        assert end.err.count("in wait_for_the_others") == 1, end  # one group of identical stacks
    for name in "ab":
        (kept,) = (tmp_path / name).glob("*/*/hang.txt")
        assert "in lost" in kept.read_text()
        assert "ranks 0-2: pid" in kept.read_text()
        assert len(list((tmp_path / name).glob("*/*/*/stacks.txt"))) == 2


def test_a_node_that_learns_of_the_end_before_the_verdict_fetches_it(tmp_path: Path) -> None:
    body = """
def stuck(): threading.Event().wait()
for step in range(5): worker.heartbeat(step)
if rank < 2: stuck()
while True:
    worker.heartbeat(6)
    time.sleep(0.01)
"""
    with nodes("elastic", tmp_path, body, "--heartbeat-timeout", "1.5", b=IGNORES_VERDICTS) as running:
        for end in ends(running):
            assert end.code == HANG, end
    for name in "ab":
        (kept,) = (tmp_path / name).glob("*/*/hang.txt")
        assert "no heartbeat from ranks 0, 1" in kept.read_text()


@needs_torch
def test_a_collective_over_two_nodes_that_waits_for_a_lost_rank(tmp_path: Path) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def lost(): threading.Event().wait()
for step in range(1000):
    if rank == 2 and step == 5: lost()
    dist.all_reduce(torch.ones(1))
    worker.heartbeat(step)
"""
    with nodes("elastic", tmp_path, body, "--heartbeat-timeout", "2") as running:
        for end in ends(running):
            assert end.code == HANG, end
            never = "rank 2 never entered all_reduce #6 of the default group (last was all_reduce #5)"
            assert f"{never}, at train.py:" in end.err, end
            assert "; the other 3 wait in it: no heartbeat from ranks " in end.err, end
            assert " on b, step 4" in end.err, end
    # The node that decided keeps the records of all ranks, the other one those of its own.
    kept = [sorted(path.name for path in (tmp_path / name).glob("*/*/flight_recorder/*")) for name in "ab"]
    own = [["rank_0", "rank_1"], ["rank_2", "rank_3"]]
    everyone = sorted(own[0] + own[1])
    assert kept in ([everyone, own[1]], [own[0], everyone]), kept


@both
def test_only_the_other_node_hangs_and_both_restart_once(backend: str, tmp_path: Path) -> None:
    body = """
def stuck(): threading.Event().wait()
for step in range(5): worker.heartbeat(step)
if first:
    if rank == 3: stuck()
    while True:
        worker.heartbeat(6)
        time.sleep(0.01)
"""
    flags = ("--heartbeat-timeout", "1.5", "--max-restarts", "1")
    with nodes(backend, tmp_path, body, *flags) as running:
        for end in ends(running):
            assert end.code == 0, end
            assert "1 restart" in end.err, end
            assert "no heartbeat from rank 3" in end.err, end
            assert "in stuck" in end.err, end


@both
def test_warn_prints_one_line_on_every_node_and_the_job_continues(backend: str, tmp_path: Path) -> None:
    body = f"""
path = {str(tmp_path / "go")!r}
def stuck():
    while not os.path.exists(path): time.sleep(0.02)
worker.heartbeat(0)
stuck()
"""
    with nodes(backend, tmp_path, body, "--heartbeat-timeout", "1", "--on-hang", "warn") as running:
        for node in running:
            node.read_until("no heartbeat from ranks 0-3 ")
        (tmp_path / "go").touch()
        for end in ends(running):
            assert end.code == 0, end
            assert end.err.count("no heartbeat from") == 1, end


@both
def test_a_node_of_silent_ranks_does_not_hang_while_another_node_writes(backend: str, tmp_path: Path) -> None:
    """Only rank 0 prints, as in most jobs; then it stops, too."""
    body = """
def quiet(): threading.Event().wait()
if rank == 0:
    for step in range(30):
        print(f"loss {step}", flush=True)
        time.sleep(0.1)
quiet()
"""
    with nodes(backend, tmp_path, body, "--silence-timeout", "1", "--redirects", "3") as running:
        found = ends(running)
    for end in found:
        assert end.code == HANG, end
        assert re.search(r"no output from ranks 0-3 for \d+\.\d s", end.err), end
    (log,) = (tmp_path / "a").glob("*/*/0/stdout.log")
    assert "loss 29" in log.read_text()


@both
def test_ranks_that_still_run_after_those_of_another_node_have_finished(backend: str, tmp_path: Path) -> None:
    body = """
def late(): threading.Event().wait()
if rank == 2: late()
"""
    with nodes(backend, tmp_path, body, "--partial-exit-timeout", "1") as running:
        a, b = ends(running)
    for end in (a, b):
        assert end.code == HANG, end
    assert re.search(r"rank 2 still runs \d+\.\d s after .* finished", b.err), b
    assert "in late" in b.err


@both
def test_a_slow_host_is_reported_on_every_node(backend: str, tmp_path: Path) -> None:
    body = f"""
path = {str(tmp_path / "go")!r}
step = 0
while not os.path.exists(path):
    worker.heartbeat(step)
    step += 1
    time.sleep(0.01 if rank < 2 else 0.05)
"""
    with nodes(backend, tmp_path, body, quick=True) as running:
        for node in running:
            node.read_until("is slow: ", times=1 if backend == "elastic" else 2)
        (tmp_path / "go").touch()
        found = ends(running)
    who = [r"b \(ranks 2, 3\)"] if backend == "elastic" else ["rank 2", "rank 3"]  # here they share a host
    for end in found:
        assert end.code == 0, end
        lines = sorted(line for line in end.err.splitlines() if "is slow" in line)
        for line, name in zip(lines, who, strict=True):
            assert re.search(rf"{name} is slow: [\d.]+ steps/s, median", line), lines


def test_a_node_whose_agent_does_not_answer_is_listed_and_delays_no_other(tmp_path: Path) -> None:
    body = """
worker.heartbeat(0)
print(f"beating {rank} {os.getppid()}", flush=True)
threading.Event().wait()
"""
    with nodes("static", tmp_path, body, "--heartbeat-timeout", "2") as (a, b):
        for node in (a, b):
            node.read_until("beating ", times=2)
        b.signal(signal.SIGSTOP)
        a.read_until("no answer")
        assert "node 1: no answer" in a.text
        a.read_until(" s after the detection")
        assert a.end().code == HANG
        b.signal(signal.SIGCONT)
        b.signal(signal.SIGTERM)
        assert b.end().code in (
            HANG,
            1,
            143,
        )  # it hears of the failed job and gets the signal in the same moment


def test_malformed_messages_in_the_store_are_ignored(tmp_path: Path) -> None:
    """The store of a static job without a token is open to its workers."""
    body = """
from phalanx.store.embedded.client import Client
from phalanx.cluster.torch_store_adapter import StoreFacade
client = Client(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).connect(20)
store = StoreFacade(client, f"shared/{os.environ['TORCHELASTIC_RUN_ID']}/1/store/")
prefix = "phalanx/progress/1/"
if rank == 0:
    messages = [b"[]", b"{", b'{"kind": "exit"}', b'{"kind": "hang"}', b'{"kind": "straggler", "reason": 1}',
            b'{"kind": "verdict", "node": 7}', b'{"kind": "output", "age": "x"}']
    for text in messages:
        store.set(f"{prefix}messages/{store.add(prefix + 'count', 1) - 1}", text)
    store.set(prefix + "values/rates/1", b'{"window": "x"}')
    store.set("sent", b"1")
store.wait(["sent"])
worker.heartbeat(0)  # only now: on a busy machine, all that can take a while
threading.Event().wait()
"""
    with nodes("static", tmp_path, body, "--heartbeat-timeout", "1.5") as running:
        for end in ends(running):
            assert end.code == HANG, end
            assert "no heartbeat from ranks 0-3" in end.err, end
