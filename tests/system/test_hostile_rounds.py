"""One bad part must not end the job: refusals, unfit nodes, preemption, foreign records, lost messages."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.core.exit_codes import UNFIT_NODE
from phalanx.core.rounds.store_commands import Get, Put
from phalanx.store.embedded.client import Client
from phalanx.store.net.token import Token
from tests.conftest import HUNG, gone, wait_until
from tests.support.netns import TOKEN, Job, Node
from tests.support.run_helpers import all_gone
from tests.support.trials import few_or_many, play
from tests.system.test_cluster import everybody, separate_store, succeed

pytestmark = pytest.mark.thorough


class Line:
    """A way to the store that can refuse, or lose connections at random messages.

    `silent`: a lost connection stays open and passes nothing any more; each message takes 20 ms."""

    def __init__(self, endpoint: str, loss: float = 0.0, seed: int = 0, silent: bool = False) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = host, int(port)
        self._loss, self._chance, self._silent = loss, random.Random(seed), silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, ...]] = []
        self._lost: list[tuple[socket.socket, ...]] = []
        self._all: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._serve()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _serve(self) -> None:
        self._begin(self._accept, self._listener)

    def _begin(self, what: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=what, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            pair: tuple[socket.socket, ...] = near, far
            self._pairs.append(pair)
            self._all += pair
            for source, sink in ((near, far), (far, near)):
                self._begin(self._carry, source, sink, pair)

    def _carry(self, source: socket.socket, sink: socket.socket, pair: tuple[socket.socket, ...]) -> None:
        try:
            while data := source.recv(1 << 16):
                if self._silent:
                    time.sleep(0.02)  # the way is that long
                    if pair in self._lost:
                        continue
                if self._loss and self._chance.random() < self._loss:
                    if not self._silent:
                        break
                    self._lost.append(pair)
                    continue
                sink.sendall(data)
        except OSError:
            pass
        if pair in self._pairs and pair not in self._lost:
            for sock in pair:
                _hang_up(sock)

    def refuse(self, *, told: bool) -> None:
        """Refuse connections and end those that stand; `told`: the store sees that too."""
        _hang_up(self._listener)
        self._listener.close()
        pairs, self._pairs = self._pairs, []
        for near, far in pairs:
            _hang_up(near)
            if told:
                _hang_up(far)

    def allow(self) -> None:
        """Undo `refuse`."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()

    def close(self) -> None:
        self._loss = 0.0
        _hang_up(self._listener)
        self._listener.close()
        for sock in self._all:
            _hang_up(sock)
        for thread in self._threads:
            thread.join(HUNG)
        for sock in self._all:
            sock.close()


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


@contextmanager
def line(endpoint: str, loss: float = 0.0, seed: int = 0, silent: bool = False) -> Iterator[Line]:
    made = Line(endpoint, loss, seed, silent)
    try:
        yield made
    finally:
        made.close()


# -- refused is not down ----------------------------------------------------------------------------------


@few_or_many(ways=4)
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("journal", [True, False], ids=["with a journal", "without"])
def test_a_node_that_a_living_store_refuses_stops_before_the_others_go_on(
    tmp_path: Path, journal: bool, told: bool, times: int
) -> None:
    def trial(folder: Path) -> None:
        with Job(folder, "2:3", conf="is_host=0,ttl=3,linger=1") as job:
            separate_store(job, *(["--journal", str(folder / "journal")] if journal else []))
            with line(job.endpoint) as way:
                nodes = [job.node(name) for name in "ab"]
                nodes.append(job.node("c", "--rdzv-endpoint", way.endpoint))
                workers = everybody(nodes, 3)
                way.refuse(told=told)
                nodes[0].up(2)
                assert gone(workers[2].pid), "two worlds at the same time"
                nodes[1].up(2)

    play(times, tmp_path, trial)


# -- a newcomer that cannot start workers -----------------------------------------------------------------


def bad_program(folder: Path) -> str:
    """A script that the kernel cannot run."""
    path = folder / "bad"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    return str(path)


@few_or_many(ways=3)
@pytest.mark.parametrize("how", ["program", "descriptors", "disk"])
def test_a_newcomer_that_cannot_start_workers_leaves_and_the_others_go_on(
    tmp_path: Path, how: str, times: int
) -> None:
    jobs = min(4, times)
    play(jobs, tmp_path, lambda folder: let_in(folder, how, -(-times // jobs)))


def let_in(folder: Path, how: str, times: int) -> None:
    """Newcomers that cannot start workers, one after the other."""
    with Job(folder, "1:3", "", "--max-restarts", "10") as job:
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        words, before = {
            "program": (["--no-python", bad_program(folder)], []),
            "descriptors": (["--nproc-per-node", "64"], ["prlimit", "--nofile=60"]),
            "disk": ([], ["prlimit", "--fsize=0"]),
        }[how]
        for turn in range(times):
            bad = job.node(f"c{turn}", *words, before=before)
            ended = bad.end()
            assert ended.code == UNFIT_NODE, ended
            for node in nodes:
                wait_until(lambda node=node: node.latest() is not None, "output")  # type: ignore[misc]
        last = [worker for node in nodes if (worker := node.latest()) is not None]
        wait_until(
            lambda: (
                {w.world for node in nodes if (w := node.latest())} == {2}
                and all(not gone(w.pid) for node in nodes if (w := node.latest()))
            ),
            "the world of the others",
        )
        again = [worker for node in nodes if (worker := node.latest()) is not None]
        assert {w.attempt for w in again} == {0}, "no restart was used"
        succeed(nodes, again)
        assert all_gone([w.pid for w in (*workers, *last)])


@pytest.mark.parametrize("who", ["one that is needed", "the host of the store"])
def test_a_node_that_is_needed_and_cannot_start_ends_the_job_with_its_reason(
    tmp_path: Path, who: str
) -> None:
    """The host of the store is needed, whatever the minimum is: the others cannot go on without it."""
    hosts = who == "the host of the store"
    with Job(
        tmp_path, "1:2" if hosts else "2", "", "--max-restarts", "10", conf="last_call_timeout=20"
    ) as job:
        words = ["--no-python", bad_program(tmp_path)]
        nodes = [job.node("a", *(words if hosts else [])), job.node("b", *([] if hosts else words))]
        for node in nodes:
            ended = node.end()
            assert ended.code == UNFIT_NODE, ended
            assert "bad: No such file" in ended.err


# -- preemption -------------------------------------------------------------------------------------------

SAVES = """\
import os, sys, time
from phalanx import worker
worker.should_checkpoint()
e = os.environ
print("ready", e["RANK"], e["WORLD_SIZE"], os.getpid(), e["TORCHELASTIC_RESTART_COUNT"], e["GROUP_RANK"],
      e["MASTER_ADDR"], e["MASTER_PORT"], "-", e["ROLE_RANK"], flush=True)
while not worker.should_checkpoint():
    time.sleep(0.005)
# A collective save: done when all ranks have come, and it takes a moment.
folder = os.path.join(os.path.dirname(__file__), e["MASTER_PORT"])
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, e["RANK"]), "w").close()
while len(os.listdir(folder)) < int(e["WORLD_SIZE"]):
    time.sleep(0.005)
time.sleep(0.3)
print("saved", e["RANK"], flush=True)
"""


@few_or_many(ways=4)
@pytest.mark.parametrize("apart", [None, 0.0, 0.05, 0.5], ids=["one node", "together", "0.05 s", "0.5 s"])
def test_a_preemption_of_one_node_lets_every_rank_of_the_job_save(
    tmp_path: Path, apart: float | None, times: int
) -> None:
    def trial(folder: Path) -> None:
        words = ["--preempt-signal", "SIGUSR1", "--grace", "20"]
        with Job(folder, "1:3", "", *words) as job:
            job.script.write_text(SAVES)
            nodes = [job.node(name) for name in "abc"]
            everybody(nodes, 3)
            told = nodes[2:] if apart is None else nodes[::-1]
            for node in told:
                node.signal(signal.SIGUSR1)
                if node is not told[-1]:
                    time.sleep(apart or 0.0)  # the time between the signals is what is tested
            for node in told:
                ended = node.end()
                assert ended.code == 128 + signal.SIGUSR1, ended
                # One world that was up when its signal came has saved, whichever it was.
                assert ended.out.count("saved") >= 1, ended
            if apart is None:
                for node in nodes[:2]:
                    node.read_until("saved")
                again = everybody(nodes[:2], 2)
                assert {w.attempt for w in again} == {0}, "no restart was used"

    play(times, tmp_path, trial)


# -- records of others ------------------------------------------------------------------------------------

RECORDS = (
    b"",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"7",
    b"{}",
    b'{"number":"one","ok":3,"stamp":[],"nodes":{},"info":7,"rank":"x","phase":9}',
    b'{"number":1,"phase":"active","nodes":2,"stamp":"1.1","of":"a later version"}',
    b'{"number":9,"phase":"closed","outcome":"succeeded"}',
    b'{"ok":false,"detail":"\\u001b[31m"}',
)
KEYS = ("node/NODE", "node/x", "result/1/NODE", "result/1/x", "members", "ctl/round", "ctl/leader", "ctl/x",
        "place/NODE", "place/x", "status", "ctl/meeting/1")  # fmt: skip


@few_or_many(ways=len(KEYS))
@pytest.mark.parametrize("key", KEYS)
def test_a_record_of_another_program_ends_and_hangs_nothing(tmp_path: Path, key: str, times: int) -> None:
    play(times, tmp_path, lambda folder: write_records(folder, key))


def write_records(folder: Path, key: str) -> None:
    """Each of the records, under one of the keys of a job that runs."""
    with Job(folder, "2", "", "--max-restarts", "2", conf="ttl=3") as job:
        nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        host, _, port = job.endpoint.rpartition(":")
        prefix = f"job/{job.run_id}/"
        with Client(host, int(port), token=Token(TOKEN.encode(), "the test")) as stranger:
            named = stranger.request(Get(f"{prefix}node/b.", prefix=True)).entries[0].key
            name = named.removeprefix(f"{prefix}node/")
            for value in RECORDS:
                stranger.request(Put(prefix + key.replace("NODE", name), value))
                if key == "result/1/NODE" and value.startswith(b'{"ok":false'):
                    break  # a failure of that node, in the words of this version
            last = f"{prefix}node/"
            wait_until(
                lambda: sum(bool(e.lease) for e in stranger.request(Get(last, prefix=True)).entries) >= 2,
                "both nodes",
            )

        def settled() -> bool:
            found = [node.latest() for node in nodes]
            return len({(w.address, w.port) for w in found if w}) == 1 and all(
                w and w.world == 2 and not gone(w.pid) for w in found
            )

        wait_until(settled, "one world")
        # Whatever round it is by now, it ends as it should.
        while any(node.process.poll() is None for node in nodes):
            for node in nodes:
                worker = node.latest()
                if worker is not None and not gone(worker.pid):
                    try:
                        os.kill(worker.pid, signal.SIGUSR1)
                    except ProcessLookupError:
                        pass
            time.sleep(0.05)
        for node in nodes:
            ended = node.end()
            assert ended.code == 0, ended
            assert "\x1b[31m" not in ended.err
        if key in ("node/x", "result/1/x", "members", "ctl/round"):
            both = "".join(node.text for node in nodes)
            assert len(re.findall(rf"the record {prefix}{key} is ignored", both)) == 1, both


# -- lost messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 13))])
@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cut", "silent"])
def test_connections_that_die_at_random_messages_only_take_time(
    tmp_path: Path, seed: int, silent: bool
) -> None:
    """Every connection, also one that is being opened, is lost with a chance of 8 % per message."""
    with Job(tmp_path, "2:3", conf="is_host=0,ttl=6") as job:
        separate_store(job)
        with line(job.endpoint, 0.08, seed, silent) as way:
            nodes = [job.node(name, "--rdzv-endpoint", way.endpoint) for name in "abc"]
            for _ in range(3):
                worlds(nodes)
                victim = nodes.pop()
                victim.signal(signal.SIGKILL)
                worlds(nodes)
                nodes.append(job.node("d", "--rdzv-endpoint", way.endpoint))


def worlds(nodes: list[Node]) -> None:
    """Wait until these nodes run one world."""

    def one() -> bool:
        found = [node.latest() for node in nodes]
        return len({w.port for w in found if w}) == 1 and all(
            w and w.world == len(nodes) and not gone(w.pid) for w in found
        )

    wait_until(one, f"a world of {len(nodes)}")
