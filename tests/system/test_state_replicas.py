"""Copies of kept state on other nodes: a replacement node finds the state of its rank."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from phalanx.agent.state import copy_sender as frames
from phalanx.agent.state.replica_channel import dial
from phalanx.agent.state.replicas import Replicas, ReplicaSettings
from phalanx.agent.state.save_record import pack
from phalanx.errors import StoreAuthError
from phalanx.store.net.tls import Tls
from phalanx.store.net.token import Token
from phalanx.worker.state.memory_file import MemoryFile, SlotHeader
from tests.conftest import HUNG, wait_until
from tests.support.netns import Job, Node
from tests.support.run_helpers import PHALANX, Running, run, script
from tests.system.test_tls import Authority

WORKER = """
import os, signal
from phalanx import worker
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
rank = int(os.environ["RANK"])
step = worker.agree("model")
found = worker.kept("model")
print(f"found {rank} {step} {found and (found.tree['rank'], len(found.tree['data']))}", flush=True)
if step is None:
    for step in range(3):
        worker.keep("model", {"rank": rank, "data": os.urandom(2_000_000)}, step=step)
        worker.agree("model")
print("kept", rank, os.getpid(), flush=True)
signal.sigwait([signal.SIGUSR1])
"""


def newest_steps(agent: int) -> dict[int, int]:
    """Rank → the newest step that this agent has of it, as its own or as a copy."""
    found: dict[int, int] = {}
    for fd in os.listdir(f"/proc/{agent}/fd"):
        path = f"/proc/{agent}/fd/{fd}"
        try:
            if "phalanx-state" not in os.readlink(path):
                continue
            with closing(MemoryFile(os.open(path, os.O_RDONLY))) as file:
                for number in file.names().values():
                    for header in file.slots(number):
                        found[header.rank] = max(found.get(header.rank, 0), header.step)
        except FileNotFoundError:
            pass  # closed meanwhile
    return found


def lose_and_replace(job: Job, *words: str) -> list[Node]:
    job.script.write_text(WORKER)
    nodes = [job.node(name, "--keep-replicas", "1", *words) for name in "abc"]
    for node in nodes:
        node.read_until("kept")
        assert "None None" in node.text
    for node in nodes:
        wait_until(
            lambda node=node: list(newest_steps(node.agent).values()) == [2, 2],  # type: ignore[misc]
            "its own state, and the copy of another node's",
        )
    os.kill(nodes[1].agent, signal.SIGKILL)
    nodes[1] = job.node("d", "--keep-replicas", "1", *words)
    for node in nodes:
        node.read_until("kept", 1 if node is nodes[1] else 2)
    for node in nodes:
        line = next(one for one in reversed(node.text.splitlines()) if "found " in one)
        rank, step, found = line.partition("found ")[2].split(" ", 2)
        assert step == "2", line
        assert found == f"({rank}, 2000000)", line
    for node in nodes:
        pid = re.findall(r"kept \d+ (\d+)\r?\n", node.text)[-1]  # a line of the launcher may follow it
        os.kill(int(pid), signal.SIGUSR1)
    return nodes


def test_a_replacement_node_finds_the_state_of_its_rank(tmp_path: Path) -> None:
    with Job(tmp_path, "3") as job:
        for node in lose_and_replace(job):
            assert node.end().code == 0


def test_copies_travel_inside_tls(tmp_path: Path) -> None:
    tls = Authority(tmp_path).sign("node")
    words = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca)
    with Job(tmp_path, "3") as job:
        for node in lose_and_replace(job, *words):
            assert node.end().code == 0


# Every rank saves at the same steps: the next one begins when all have finished the last.
STEADY = """
import os, sys, time
from phalanx import worker
from phalanx.worker.state.agreement import round_store
rank, world, size, interval = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), LENGTH, INTERVAL
step = worker.agree("model")
found = worker.kept("model")
whole = found is None or (found.step == step and set(found.tree["data"][:: 1 << 16]) == {step % 251})
print(f"found {rank} {step} {'whole' if whole else 'broken'}", flush=True)
del found
step = 0 if step is None else step + 1
data = bytearray(size)
with round_store("the test", "steps/", 600) as store:
    while True:
        data[:] = bytes([step % 251]) * size
        worker.keep("model", {"data": data}, step=step)
        if store.add(f"{step}", 1) == world:
            store.set(f"{step}/all", b"1")
        store.wait([f"{step}/all"], 600)
        time.sleep(interval)
        step += 1
"""


def common_steps(agent: int) -> list[int]:
    """The common step of each file of an agent, its own and copies; -1: none yet."""
    found = []
    for fd in os.listdir(f"/proc/{agent}/fd"):
        path = f"/proc/{agent}/fd/{fd}"
        with suppress(OSError):
            if "phalanx-state" in os.readlink(path):
                with closing(MemoryFile(os.open(path, os.O_RDONLY))) as file:
                    common = [file.pins(number).common for number in file.names().values()]
                    found += [-1 if one is None else one[0] for one in common] or [-1]
    return found


def steps_after_kills(
    folder: Path, nodes: int, size: int, interval: float, kills: int, own_store: bool = False
) -> list[str]:
    """Kill a random node's agent at a random moment, again and again; the steps that were resumed from.

    Each is killed three times: its copies are elsewhere, whether or not this round has a common step yet.
    `own_store`: the store is a process of its own, and the first node may be killed as well."""
    seed = int(os.environ.get("SEED") or random.randrange(1 << 32))
    print(f"SEED={seed}")
    luck = random.Random(seed)
    with ExitStack() as stack:
        job = stack.enter_context(Job(folder, str(nodes), conf="is_host=0" if own_store else ""))
        if own_store:
            words = ["--listen", job.endpoint]
            store = Running(words, launcher=[PHALANX[0], "store"], env=job.environment)
            stack.enter_context(store).read_until("listening")
        job.script.write_text(STEADY.replace("LENGTH", str(size)).replace("INTERVAL", str(interval)))
        options = ("--keep-replicas", "1", "--max-restarts", "100000")
        running = [job.node(f"n{number}", *options) for number in range(nodes)]
        rounds, lost = [0] * nodes, 0  # that each has been part of; the last that was killed
        steps: list[str] = []

        def look() -> None:
            for number, node in enumerate(running):
                rounds[number] += 1
                node.read_until("whole", rounds[number])
                line = [one for one in node.text.splitlines() if "found " in one][rounds[number] - 1]
                steps.append(line.partition("found ")[2])

        look()
        for kill in range(kills):
            if kill % 3 == 0:
                for node in running:
                    wait_until(
                        lambda node=node: len(found := common_steps(node.agent)) >= 2 and min(found) >= 0,  # type: ignore[misc]
                        "a common step",
                        timeout=10 * HUNG,  # of 200 MB, beside others that need the processor
                    )
                lost = luck.randrange(0 if own_store else 1, nodes)  # the first one may have the store
            time.sleep(luck.random() * luck.choice((0.1, 1.0, 3.0)))  # any moment is as good as any other
            os.kill(running[lost].agent, signal.SIGKILL)
            running[lost] = job.node(f"n{nodes + kill}", *options)
            rounds[lost] = 0
            look()
    return steps[nodes:]


def test_a_common_step_is_held_until_there_is_a_newer_one(tmp_path: Path) -> None:
    steps = steps_after_kills(tmp_path, nodes=2, size=1_000_000, interval=0.05, kills=3)
    assert not [step for step in steps if "None" in step or "broken" in step], steps


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("interval", [0.05, 0.3, 5.0])
@pytest.mark.parametrize(("size", "kills"), [(1_000_000, 20), (200_000_000, 8)])
def test_no_kill_loses_all_that_was_kept(
    tmp_path: Path, nodes: int, interval: float, size: int, kills: int
) -> None:
    steps = steps_after_kills(tmp_path, nodes, size, interval, kills)
    assert not [step for step in steps if "None" in step or "broken" in step], steps


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("interval", [0.05, 0.3])
def test_no_kill_of_any_node_loses_all_that_was_kept(tmp_path: Path, nodes: int, interval: float) -> None:
    steps = steps_after_kills(tmp_path, nodes, 1_000_000, interval, kills=20, own_store=True)
    assert not [step for step in steps if "None" in step or "broken" in step], steps


TOKEN = Token(b"one token of thirty-two bytes or more", "the test")
OTHER = Token(b"another token of thirty-two bytes too", "the test")


@pytest.mark.parametrize("tls", [False, True])
def test_strangers_learn_and_change_nothing(tmp_path: Path, tls: bool) -> None:
    sealing: Tls | None = Authority(tmp_path).sign("node") if tls else None
    said: list[str] = []
    server = Replicas(ReplicaSettings("job", "127.0.0.1", TOKEN, sealing))
    server.note = said.append
    server.copies[3] = MemoryFile.create()
    where = ("127.0.0.1", server._door.port)
    try:
        with pytest.raises(StoreAuthError):
            dial(where, OTHER, sealing)
        wait_until(lambda: any("wrong token" in line for line in said), "the refusal")
        with closing(socket.create_connection(where)) as plain:
            plain.settimeout(HUNG)
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
            with suppress(ConnectionResetError):
                while plain.recv(4096):
                    pass  # until it is closed
        # The right token, and nonsense after it.
        header = SlotHeader(1, 5, 1, 3, 4, 0, 0, 0, 10, 10)
        record = pack("model", header)
        for kind, data in (
            (frames.HELLO, b"1 another job\n3"),
            (frames.HELLO, b"1 job\nx"),
            (frames.FETCH, b"x job"),
            (frames.SAVE, record),
            (b"?", b""),
        ):
            with closing(dial(where, TOKEN, sealing)) as channel:
                channel.send(kind, data)
                with pytest.raises(ConnectionError):
                    channel.receive()
        for bad in (record[:-1], record[:-5] + bytes([record[-5] ^ 1]) + record[-4:], b""):
            with closing(dial(where, TOKEN, sealing)) as channel:
                channel.send(frames.HELLO, b"1 job\n3")
                channel.receive()
                channel.send(frames.SAVE, bad)
                with pytest.raises(ConnectionError):
                    channel.receive()
        # More bytes than announced, fewer, or a save that is abandoned.
        for parts, end in (
            ([b"x" * 11], frames.END),
            ([b"x" * 9], frames.END),
            ([b"x" * 10], frames.ABANDON),
        ):
            with closing(dial(where, TOKEN, sealing)) as channel:
                channel.send(frames.HELLO, b"1 job\n3")
                channel.receive()
                channel.send(frames.SAVE, record)
                for part in parts:
                    channel.send(frames.DATA, part)
                channel.send(end)
        assert server.copies[3].is_empty()
        with closing(dial(where, TOKEN, sealing)) as channel:
            channel.send(frames.HELLO, b"1 job\n3")
            channel.receive()
            channel.send(frames.SAVE, record)
            channel.send(frames.DATA, b"x" * 10)
            channel.send(frames.END)
            wait_until(lambda: not server.copies[3].is_empty(), "the save")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--keep-replicas", "2"], "must be between 0 and 1"),
        (["--keep-replicas", "x"], "number"),
    ],
)
def test_a_wrong_number_is_refused(tmp_path: Path, words: list[str], why: str) -> None:
    done = run(*words, script(tmp_path, "print('ran')"))
    assert done.code == 2, done
    assert why in done.err
    assert done.err.count("\n") == 1


def test_one_node_has_nowhere_to_copy_to(tmp_path: Path) -> None:
    done = run("--keep-replicas", "1", script(tmp_path, "print('ran')"))
    assert done.code == 0, done
    assert "ran" in done.out
