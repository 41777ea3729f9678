"""Workers that keep their processes when another one fails: what they find then, and who is replaced."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import HUNG
from tests.support import jobs
from tests.support.jobs import python_with
from tests.support.netns import Job, Network, Node, free_port, possible
from tests.support.run_helpers import Ended, ended, plain_environment, run, script

# Each call writes one line: round, rank, pid, and more.
BEGIN = """
import os, signal, sys, threading, time
from phalanx import worker

def tell(round, *more):
    print("call", round.number, round.rank, os.getpid(), *more, flush=True)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def calls(done: Ended, word: str = "call") -> dict[int, dict[int, list[str]]]:
    """Round → rank → the words of its line: the pid first."""
    found: dict[int, dict[int, list[str]]] = {}
    for line in done.out.splitlines():
        words = line.split()
        if words[:1] == [word]:
            found.setdefault(int(words[1]), {})[int(words[2])] = words[3:]
    return found


def kept(done: Ended, number: int) -> set[int]:
    """The ranks whose process is that of the round before."""
    all_of_them = calls(done)
    before, now = all_of_them[number - 1], all_of_them[number]
    return {rank for rank in now if rank in before and now[rank][0] == before[rank][0]}


PLAIN = (
    BEGIN
    + """
state, lock = {"rounds": 0}, threading.Lock()
lock.acquire()
BOARD = os.environ["PHALANX_WORKER"].split(",")[0]

def healthy():
    return not (state["rounds"] == 2 and os.environ["RANK"] == "1")

aborted, final = lambda: state.update(aborted=True), lambda: state.update(final=True)

@worker.reenter(abort=aborted, finalize=[final], check=healthy)
def train(round, word):
    found = worker.kept("rounds")
    state["rounds"] += 1
    logs = os.path.basename(os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
    same = logs == f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    tell(round, state["rounds"], found and found.tree, same, word)
    print("who", round.number, round.rank, *round.survivors, "|", *round.joined, "|", *round.left, flush=True)
    assert (round.cause == "") == (round.number == 1), round
    assert not round.reentered or (state.pop("aborted") and state.pop("final"))
    worker.keep("rounds", round.number, step=round.number)
    worker.heartbeat(round.number)
    try:
        worker.agree("rounds")  # all have come this far
        if (round.number, round.rank) in ((1, 1), (3, 0)):
            die()
        if (round.number, round.rank) == (2, 2):
            raise ValueError("its own")
        if round.number == 4:
            return f"result {round.rank}"
        if round.rank == 0:
            lock.acquire()
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                if state.setdefault("caught", 0) < 1:
                    state["caught"] += 1
                    continue  # the next one comes
                raise
    finally:
        print("finally", round.number, round.rank, flush=True)

print(train("word"), worker.supervised())
"""
)


BEATS = """
import os, threading
from phalanx import worker

@worker.reenter
def train(round):
    for step in range(30):  # from the beginning each time: past the step of the round before
        worker.heartbeat(step)
    worker.keep("rounds", round.number, step=round.number)
    worker.agree("rounds")
    if round.number < 4 and round.rank == 1:
        os.kill(os.getpid(), 9)
    if round.number < 4:
        threading.Event().wait()

train()
"""


def test_the_first_step_of_survivors_is_seen_in_every_round(tmp_path: Path) -> None:
    """The agent waits for it: an incident is over with it, and hangs are looked for from then on."""
    words = ("--nproc-per-node", "2", "--max-restarts", "3", "--backoff", "0", "--log-dir", str(tmp_path))
    done = run(*words, script(tmp_path, BEATS))
    assert done.code == 0, done
    (summary,) = (json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json"))
    assert [one["recovery"] for one in summary["incidents"]] == ["re-entry"] * 3
    assert all(one["first_step"] is not None for one in summary["incidents"]), summary


def test_survivors_keep_their_processes_and_find_the_next_round(tmp_path: Path) -> None:
    """Killed, raised, killed with rank 0 and a failed check: the others stay, and find all of it anew."""
    logs = ("--log-dir", str(tmp_path / "logs"), "--tee", "3")
    words = ("--nproc-per-node", "3", "--max-restarts", "3", "--backoff", "0")
    done = run(*words, *logs, script(tmp_path, PLAIN))
    out = re.sub(r"^\[\w+\]:", "", done.out, flags=re.MULTILINE)
    done = Ended(done.code, out, done.err)
    assert done.code == 0, done
    assert [kept(done, number) for number in (2, 3, 4)] == [{0, 2}, {0, 1}, {2}], done
    found = calls(done)
    assert [found[number][0][1] for number in (1, 2, 3, 4)] == ["1", "2", "3", "1"]
    for number in (2, 3, 4):  # kept state, the log directory of the attempt, the argument
        assert {tuple(words[2:5]) for words in found[number].values()} == {(str(number - 1), "True", "word")}
    who = calls(done, "who")
    assert who[1][0] == ["|", "0", "1", "2", "|"]
    assert {" ".join(words) for words in who[2].values()} == {"0 2 | 1 | 1"}
    assert {" ".join(words) for words in who[3].values()} == {"0 1 | 2 | 2"}
    assert {" ".join(words) for words in who[4].values()} == {"2 | 0 1 | 0 1"}
    for line in (
        "finally 1 0",
        "finally 1 2",
        "finally 2 0",
        "finally 3 1",
        "result 0 True",
        "result 2 True",
    ):
        assert line in done.out
    said = "\n".join(done.said)
    assert "rank 2: ValueError: its own; restart 2 of 3" in said
    assert re.search(r"re-entered: 2 of 3 workers kept, rank 1 started anew, \d+\.\d\d s", said), done
    assert re.search(
        r"re-entered: 1 of 3 workers kept, ranks 0, 1 started anew, rank 1 cannot re-enter", said
    )
    # The logs of an attempt hold what was printed in it.
    texts = {path.parent.parent.name: path.read_text() for path in tmp_path.glob("logs/*/*/2/stdout.log")}
    assert {name: text.count("call") for name, text in texts.items()} == {f"attempt_{n}": 1 for n in range(4)}


LATE = (
    BEGIN
    + """
@worker.reenter
def train(round):
    tell(round)
    mark = os.path.join(os.path.dirname(__file__), "rank0")
    if round.number == 1 and round.rank == 0:
        with open(mark, "w") as file:
            file.write(str(os.getpid()))
    worker.agree("here")
    if round.number == 1 and round.rank == 0:
        time.sleep(1000)
    if round.number == 1 and round.rank == 1:
        os.kill(int(open(mark).read()), signal.SIGSTOP)  # it does not unwind
        die()
    if round.number < 4 and round.rank == 1:
        raise ValueError("always the same")
    if round.number < 4:
        time.sleep(1000)

train()
"""
)


def test_who_does_not_come_is_replaced_and_what_does_not_help_is_not_repeated(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "--max-restarts", "4", "--backoff", "0", "--reenter-timeout", "5")
    done = run(*words, script(tmp_path, LATE.replace("< 4", "< 5")))
    assert done.code == 0, done
    # Two re-entries in a row ended with the same error: after the third time all processes are new.
    assert [kept(done, number) for number in (2, 3, 4, 5)] == [{2}, {0, 2}, {0, 2}, set()], done
    said = "\n".join(done.said)
    assert "rank 0 did not re-enter within 5 s" in said
    assert "restart 4 of 4, in new processes: 2 re-entries in a row ended with the same error" in said


ENDS = (
    BEGIN
    + """
@worker.reenter
def train(round):
    tell(round)
    worker.agree("here")
    if round.number == 1 and round.rank == 1:
        die()
    if round.number == 1 and round.rank == 2:
        try:
            time.sleep(1000)
        except worker.Reentry:
            sys.exit("not in the way")
    if round.number == 1:
        time.sleep(1000)
    if round.number == 2 and round.rank == 0:
        return  # and goes on behind the call
    if round.number == 2 and round.rank == 2:
        while not os.path.exists(behind):
            time.sleep(0.01)
        die()
    if round.number == 2:
        time.sleep(1000)

behind = os.path.join(os.path.dirname(__file__), "behind")
train()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    open(behind, "w").close()
    time.sleep(1000)
"""
)


def test_a_worker_behind_the_call_is_started_anew(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "--max-restarts", "2", "--backoff", "0")
    done = run(*words, script(tmp_path, ENDS))
    assert done.code == 0, done
    assert [kept(done, number) for number in (2, 3)] == [{0, 2}, {1}], done


def test_outside_of_a_worker_the_function_is_called_once(tmp_path: Path) -> None:
    text = "@worker.reenter\ndef train(round):\n    tell(round, round.world_size, round.survivors)\n"
    path = script(tmp_path, BEGIN + text + "    return 7\nprint(train())\n")
    done = ended([sys.executable, path], plain_environment())
    assert done.code == 0, done
    assert calls(done)[0][0][1:] == ["1", "()"]
    assert done.out.endswith("7\n")
    off = run("--reenter-timeout", "0", path)
    assert off.code == 0, off
    bad = run("--reenter-timeout", "-1", path)
    assert (bad.code, len(bad.err.splitlines())) == (2, 1), bad


HANGS = (
    BEGIN
    + """
@worker.reenter
def train(round):
    tell(round)
    worker.agree("here")
    for step in range(10**9 if round.number == 1 else 3):
        worker.heartbeat(step)
        if round.number == 1 and round.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)

train()
"""
)


def test_the_rank_that_a_hang_is_due_to_is_not_waited_for(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "--max-restarts", "1", "--heartbeat-timeout", "3")
    done = run(*words, "--reenter-timeout", "1000", script(tmp_path, HANGS))  # to wait for it would hang
    assert done.code == 0, done
    assert kept(done, 2) == {0, 2}, done
    assert "re-entered: 2 of 3 workers kept, rank 1 started anew, " in "\n".join(done.said), done


@pytest.mark.parametrize("warm", ["off", "standby"])
def test_executed_workers_and_standbys_take_part(tmp_path: Path, warm: str) -> None:
    text = LATE.replace("SIGSTOP", "SIGURG").replace("< 4", "< 2")
    done = run("--nproc-per-node", "2", "--max-restarts", "2", "--warm", warm, script(tmp_path, text))
    assert done.code == 0, done
    assert kept(done, 2) == {0}, done


NODES = (
    BEGIN
    + """
@worker.reenter
def train(round):
    tell(round, round.world_size, os.environ["MASTER_PORT"], *round.survivors)
    worker.agree("here")
    if round.number == 1 and round.rank == 3:
        die()
    if round.number == 1:
        time.sleep(1000)

train()
"""
)


@pytest.mark.parametrize("backend", ["elastic", "static"])
def test_survivors_of_all_nodes_keep_their_processes(tmp_path: Path, backend: str) -> None:
    with two_nodes(backend, tmp_path, NODES) as nodes:
        ends = [node.end() for node in nodes]
    assert [one.code for one in ends] == [0, 0], ends
    found = calls(Ended(0, "".join(one.out + one.err for one in ends), ""))
    (number,) = set(found) - {1}
    same = {rank for rank in range(4) if found[number][rank][0] == found[1][rank][0]}
    assert same == {0, 1, 2}, ends
    assert {tuple(words[3:]) for words in found[number].values()} == {("0", "1", "2")}
    assert any("re-entered: 2 of 2 workers kept" in one.err for one in ends), ends
    assert any("re-entered: 1 of 2 workers kept, rank 3 started anew" in one.err for one in ends), ends


@contextmanager
def two_nodes(backend: str, tmp_path: Path, text: str, *words: str) -> Iterator[list[Node]]:
    words = ("--max-restarts", "2", *words)
    if backend == "elastic":
        with Job(tmp_path, "2", "", *words) as job:
            job.script.write_text(text)
            yield [job.node(name, nproc=2) for name in ("a", "b")]
        return
    where = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    common = (*where, "--master-port", str(free_port()), *words)
    made: list[Node] = []
    try:
        for rank in (0, 1):
            command = [*common, "--node-rank", str(rank), script(tmp_path, text)]
            made.append(Node(f"node {rank}", command, 2, env=plain_environment()))
        yield made
    finally:
        for node in made:
            node.__exit__(*sys.exc_info())


# ---- torch -------------------------------------------------------------------------------------------

GLOO = (
    BEGIN
    + """
import socket
import torch, torch.distributed as dist

torch.set_num_threads(1)
weights = torch.ones(1000)
listener = socket.create_server(("127.0.0.1", 0))  # of the program: nothing of it is gloo's
client = socket.create_connection(listener.getsockname())
server = listener.accept()[0]

@worker.reenter
def train(round):
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    own = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    tell(round, weights.data_ptr(), int(total), *own)
    step = 0
    while step < 5 or round.number < 4:
        many = torch.ones(100_000)
        dist.all_reduce(many)
        if round.rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
        worker.heartbeat(step)
        step += 1
        if step == 3 and (round.number, round.rank) in ((1, 1), (3, 0)):
            die()
        if step == 3 and (round.number, round.rank) == (2, 2):
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    dist.destroy_process_group()

train()
"""
)


@pytest.mark.parametrize(
    ("lazy", "sig"),
    [("0", "SIGKILL"), *(pytest.param(lazy, "SIGSTOP", marks=pytest.mark.long) for lazy in "01")],
)
def test_gloo_works_again_in_the_same_processes(tmp_path: Path, lazy: str, sig: str) -> None:
    """Ranks are killed or stopped, rank 0 as well; sockets of the program stay as they are."""
    python = python_with("torch")
    words = ("--nproc-per-node", "3", "--max-restarts", "3", "--backoff", "0", "--preload", "torch")
    hang = ("--heartbeat-timeout", "3") if sig == "SIGSTOP" else ()
    words = (*words, *hang, script(tmp_path, GLOO), sig)
    with jobs.Job(tmp_path / "job", *words, python=python, TORCH_GLOO_LAZY_INIT=lazy) as job:
        done = Ended(0, job.succeeds(2 * HUNG), job.err)
    assert [kept(done, number) for number in (2, 3, 4)] == [{0, 2}, {0, 1}, {1, 2}], done
    found = calls(done)
    assert {words[2] for ranks in found.values() for words in ranks.values()} == {"3"}
    for number in (2, 3, 4):
        for rank in kept(done, number):
            before, now = found[number - 1][rank], found[number][rank]
            assert (now[1], now[3:]) == (before[1], before[3:]), "addresses, descriptors and threads"


ABORTED = (
    BEGIN
    + """
import datetime
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend, _create_work_from_future

class Hooked(Backend):
    # As a device's: the main thread waits in C++ for what another thread completes, and only `abort` ends it.
    def __init__(self, store, rank, size):
        super().__init__(rank, size)
        self.store, self.own, self.calls = store, rank, 0

    def getBackendName(self):
        return "hooked"

    def allreduce(self, tensors, options):
        self.calls += 1
        self.done = torch.futures.Future()
        threading.Thread(target=self.meet, args=(self.calls, self.done, tensors), daemon=True).start()
        return _create_work_from_future(self.done)

    def meet(self, call, done, tensors):
        try:
            self.store.set(f"{call}/{self.own}", "here")
            ranks = [f"{call}/{rank}" for rank in range(self.size())]
            self.store.wait(ranks, datetime.timedelta(hours=1))
        except RuntimeError:
            return  # the round's store is gone
        done.set_result(tensors)

    def abort(self):
        print("aborted", flush=True)
        if not self.done.done():
            self.done.set_exception(RuntimeError("aborted"))

def make(store, rank, size, timeout): return Hooked(store, rank, size)
dist.Backend.register_backend("hooked", make, devices=["cpu"])

@worker.reenter
def train(round):
    dist.init_process_group("cpu:hooked")
    tell(round)
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        worker.heartbeat(step)
    if round.number == 1 and round.rank == 1:
        die()
    if round.number == 1:
        dist.all_reduce(torch.ones(1))

train()
os._exit(0)
"""
)


@pytest.mark.newest_torch  # backends in Python
def test_groups_of_other_backends_are_aborted(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "3", "--max-restarts", "1", "--backoff", "0", script(tmp_path, ABORTED))
    with jobs.Job(tmp_path / "job", *words) as job:
        done = Ended(0, job.succeeds(), job.err)
    assert kept(done, 2) == {0, 2}, done
    assert done.out.count("aborted") == 2, done


JOINED = (
    BEGIN
    + """
@worker.reenter
def train(round):
    tell(round, round.world_size)
    worker.ready()
    if round.world_size == 2:
        print("alone", flush=True)
        time.sleep(1000)
    worker.agree("here")

train()
"""
)


def test_a_node_that_joins_leaves_the_workers_of_the_others_as_they_are(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        job.script.write_text(JOINED)
        first = job.node("a", nproc=2)
        first.read_until("alone", times=2)
        second = job.node("b", nproc=2)
        ends = [first.end(), second.end()]
    assert [one.code for one in ends] == [0, 0], ends
    pids = [{words[0] for ranks in calls(one).values() for words in ranks.values()} for one in ends]
    assert [len(one) for one in pids] == [2, 2], ends
    assert {words[1] for words in max(calls(ends[0]).items())[1].values()} == {"4"}


FUNCTION = """
import os, signal, sys, time
from phalanx import LaunchConfig, elastic_launch

def work(word):
    from phalanx import worker

    def train(round):
        worker.agree("here")
        if round.number == 1 and round.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if round.number == 1:
            time.sleep(1000)
        return round.rank, word, round.reentered

    return worker.reenter(train)()

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, max_restarts=1, start_method=sys.argv[1])
    print(sorted(elastic_launch(config, work)("word").items()))
"""


@pytest.mark.parametrize("start", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_functions_re_enter_and_return(tmp_path: Path, start: str) -> None:
    done = ended([sys.executable, script(tmp_path, FUNCTION), start], plain_environment())
    assert done.code == 0, done
    assert "[(0, (0, 'word', True)), (1, (1, 'word', False))]" in done.out, done


MANY = (
    BEGIN
    + """
import torch, torch.distributed as dist

torch.set_num_threads(1)
weights = torch.ones(1000)
count = int(sys.argv[1])

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

@worker.reenter
def train(round):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    own = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    tell(round, weights.data_ptr(), int(total), *own, resident(), time.monotonic())
    for step in range(3):
        dist.all_reduce(torch.ones(10_000))
    if round.number <= count:
        if round.rank == 1 + round.number % (round.world_size - 1):
            print("killed", round.number, round.rank, time.monotonic(), flush=True)
            die()
        while True:
            dist.all_reduce(torch.ones(10_000))

train()
"""
)


@pytest.mark.parametrize("count", [pytest.param(2, id="few"), pytest.param(20, id="many")])
@pytest.mark.long
@pytest.mark.timeout(900)
def test_gloo_over_two_hosts(tmp_path: Path, count: int) -> None:
    """Ranks of both hosts are killed in turn; all the others keep their processes."""
    if not possible():
        pytest.skip("needs root and network namespaces, to have two hosts")
    python = python_with("torch")
    path = script(tmp_path, MANY)
    with Network("a", "b") as network:
        words = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "phalanx", "--rdzv-id", "job"]
        words += ["--rdzv-endpoint", f"{network.hosts['a'].address}:29400", "--rdzv-conf", "ttl=4"]
        words += ["--max-restarts", str(count), "--backoff", "0", "--preload", "torch"]
        made = [
            jobs.Job(
                tmp_path / name, *words, path, str(count),
                python=python, before=host.inside, PHALANX_TOKEN="secret",
            )
            for name, host in network.hosts.items()
        ]  # fmt: skip
        try:
            out = "".join(job.succeeds(800.0) for job in made)
        finally:
            for job in made:
                job.__exit__()
    done = Ended(0, out, "")
    for number in range(2, count + 2):
        assert kept(done, number) == set(range(4)) - {1 + (number - 1) % 3}, number


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_hundred_kills_in_a_row(tmp_path: Path) -> None:
    """Rank 0 lives through all of them: same process, same address, and no growth."""
    python, count = python_with("torch"), 200
    words = ("--nproc-per-node", "8", "--max-restarts", str(count), "--backoff", "0", "--preload", "torch")
    path = script(tmp_path, MANY)
    with jobs.Job(tmp_path / "job", "--warm", "standby", *words, path, str(count), python=python) as job:
        done = Ended(0, job.succeeds(1400.0), job.err)
    found = calls(done)
    assert set(found) == set(range(1, count + 2))
    for number in range(2, count + 2):
        assert kept(done, number) == set(range(8)) - {1 + (number - 1) % 7}
        assert {words[2] for words in found[number].values()} == {"8"}
    lives = [found[number][0] for number in sorted(found)]
    assert {(words[0], words[1], words[3], words[4]) for words in lives[2:]} == {
        (lives[0][0], lives[0][1], lives[2][3], lives[2][4])
    }, "process, address, descriptors and threads"
    early, late = int(lives[count // 2][5]), int(lives[-1][5])
    assert late <= 1.01 * early, (early, late)
