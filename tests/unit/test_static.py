"""Static rendezvous: nodes with given ranks meet at node 0's store, as threads here and as real agents."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.group_events import MembershipChanged, PeerFailed
from phalanx.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from phalanx.membership.address import free_port
from phalanx.membership.static import StaticRendezvous
from phalanx.membership.static_watch import StaticInfo
from phalanx.store.torch.client import TorchStoreClient
from tests.conftest import HUNG, wait_until

Make = Callable[..., StaticRendezvous]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def node(port: int) -> Iterator[Make]:
    """Makes handlers of one job; all of them are shut down at the end."""
    made: list[StaticRendezvous] = []

    def make(rank: int, world_size: int = 2, run_id: str = "job", timeout: float = HUNG) -> StaticRendezvous:
        made.append(StaticRendezvous("127.0.0.1", port, rank, world_size, run_id, timeout))
        return made[-1]

    yield make
    for handler in sorted(made, key=lambda handler: -handler.rank):
        handler.shutdown()


class Joining:
    """A node's `next_rendezvous` in a thread, as the agent calls it."""

    def __init__(self, handler: StaticRendezvous) -> None:
        self._outcome: queue.Queue[StaticInfo | Exception] = queue.Queue()
        self._handler = handler
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.put(self._handler.next_rendezvous())
        except Exception as error:  # noqa: BLE001 - handed to the test
            self._outcome.put(error)

    def outcome(self) -> StaticInfo | Exception:
        found = self._outcome.get(timeout=HUNG)
        self._thread.join(HUNG)
        return found

    def info(self) -> StaticInfo:
        found = self.outcome()
        if isinstance(found, Exception):
            raise found
        return found


def form(*handlers: StaticRendezvous) -> list[StaticInfo]:
    joining = [Joining(handler) for handler in handlers]
    return [one.info() for one in joining]


def listening(handler: StaticRendezvous) -> queue.Queue[Any]:
    heard: queue.Queue[Any] = queue.Queue()
    handler.listener = heard.put
    return heard


def test_all_nodes_are_in_the_round_with_their_ranks(node: Make, port: int) -> None:
    infos = form(*(node(rank, 3) for rank in (2, 0, 1)))
    assert [info.rank for info in infos] == [2, 0, 1]
    for info in infos:
        assert (info.world_size, info.round, info.attempt) == (3, 1, 0)
        where = info.bootstrap_store_info
        assert where is not None
        assert (where.master_addr, where.master_port) == ("127.0.0.1", port)
    infos[0].store.set("key", "from node 2")
    assert infos[1].store.get("key") == b"from node 2"


def test_the_others_may_come_first(node: Make) -> None:
    one = Joining(node(1))
    assert [info.rank for info in (*form(node(0)), one.info())] == [0, 1]


def test_workers_share_the_store_and_find_it_empty_in_every_round(node: Make, port: int) -> None:
    nodes = [node(0), node(1)]
    form(*nodes)
    with TorchStoreClient("127.0.0.1", port, HUNG) as worker:
        worker.set("address of rank 0", "old")
    infos = form(*nodes)
    assert [info.round for info in infos] == [2, 2]
    with TorchStoreClient("127.0.0.1", port, HUNG) as worker:
        assert not worker.check(["address of rank 0"])


def test_a_failure_is_told_and_all_form_again_with_the_same_attempt(node: Make) -> None:
    nodes = [node(rank, 3) for rank in range(3)]
    heard = [listening(handler) for handler in nodes]
    form(*nodes)
    assert [handler.num_nodes_waiting() for handler in nodes] == [0, 0, 0]
    nodes[1].report_failure(1, 1, "rank 3: exit code 7", delay=0.5)
    for rank in (0, 2):
        event = heard[rank].get(timeout=HUNG)
        assert event == PeerFailed("1", 1, 1, "rank 3: exit code 7", final=False, delay=0.5)
        assert nodes[rank].num_nodes_waiting() == 1
    infos = form(*nodes)
    assert [(info.round, info.attempt) for info in infos] == [(2, 1)] * 3
    assert heard[1].empty(), "a node is not told what it said itself"
    assert [handler.num_nodes_waiting() for handler in nodes] == [0, 0, 0]


def test_a_node_that_joins_again_is_noticed_without_a_report(node: Make) -> None:
    nodes = [node(0), node(1)]
    heard = listening(nodes[0])
    form(*nodes)
    again = Joining(nodes[1])
    assert heard.get(timeout=HUNG) == MembershipChanged(waiting=1, round=1)
    form(nodes[0])
    assert again.info().round == 2


def test_a_node_that_leaves_is_replaced_by_a_new_one_of_its_rank(node: Make) -> None:
    nodes = [node(0), node(1)]
    heard = listening(nodes[0])
    form(*nodes)
    nodes[1].leave()
    assert heard.get(timeout=HUNG) == MembershipChanged(lost=("node 1",), round=1)
    assert [info.round for info in form(nodes[0], node(1))] == [2, 2]


def test_node_0_comes_back_after_it_was_lost(node: Make) -> None:
    nodes = [node(0), node(1)]
    heard = listening(nodes[1])
    form(*nodes)
    nodes[0].leave()
    event = heard.get(timeout=HUNG)
    assert isinstance(event, MembershipChanged)
    assert event.lost == ("node 0",)
    assert [info.rank for info in form(nodes[1], node(0))] == [1, 0]


def test_a_final_failure_ends_the_job_for_all(node: Make) -> None:
    nodes = [node(rank, 3) for rank in range(3)]
    heard = [listening(handler) for handler in nodes]
    form(*nodes)
    nodes[0].report_failure(1, 2, "rank 0: exit code 1", final=True)
    nodes[0].shutdown()
    for rank in (1, 2):
        event = heard[rank].get(timeout=HUNG)
        assert (event.node, event.summary, event.final) == ("0", "rank 0: exit code 1", True)
        error = Joining(nodes[rank]).outcome()
        assert isinstance(error, RendezvousError)
        assert "rank 0: exit code 1" in str(error)


def test_those_who_wait_for_a_round_hear_that_the_job_is_over(node: Make) -> None:
    nodes = [node(rank, 3) for rank in range(3)]
    form(*nodes)
    waiting = [Joining(nodes[0]), Joining(nodes[1])]
    nodes[2].close("rank 5: exit code 1", True)
    for one in waiting:
        error = one.outcome()
        assert isinstance(error, RendezvousError)
        assert "node 2: rank 5: exit code 1" in str(error)


def test_a_job_that_ended_well_is_closed_not_failed(node: Make) -> None:
    nodes = [node(0), node(1)]
    form(*nodes)
    nodes[0].close("all workers succeeded", False)
    assert isinstance(Joining(nodes[1]).outcome(), RendezvousClosedError)
    assert isinstance(Joining(nodes[0]).outcome(), RendezvousClosedError)
    assert nodes[0].is_closed()


def test_missing_nodes_are_named_on_every_node(node: Make) -> None:
    waiting = [Joining(node(rank, 4, timeout=0.5)) for rank in (0, 2)]
    for one in waiting:
        error = one.outcome()
        assert isinstance(error, RendezvousTimeoutError)
        assert "node 1, 3 of 4 did not come within 0.5 s" in str(error)


def test_without_node_0_the_address_is_named(node: Make, port: int) -> None:
    error = Joining(node(1, timeout=0.2)).outcome()
    assert isinstance(error, RendezvousConnectionError)
    assert f"127.0.0.1:{port}" in str(error)


def test_another_job_at_the_same_address_is_refused(node: Make) -> None:
    zero = Joining(node(0))
    for stranger in (node(1, run_id="other"), node(1, 3)):
        error = Joining(stranger).outcome()
        assert isinstance(error, RendezvousStateError)
        assert "--rdzv-id and --nnodes" in str(error)
        stranger.shutdown()  # which must not end the job that it came to by mistake
    form(node(1))
    assert zero.info().rank == 0


def test_two_nodes_of_the_same_rank_are_told(node: Make, port: int) -> None:
    first = Joining(node(1, 3))
    zero = Joining(node(0, 3))
    with TorchStoreClient("127.0.0.1", port, HUNG, prefix="phalanx/") as client:
        client.wait(["join/1/1"])
        before = client.get("join/1/1")
        second = Joining(node(1, 3))
        wait_until(lambda: client.get("join/1/1") != before, "the second node of this rank")
    two = Joining(node(2, 3))
    outcomes = [first.outcome(), second.outcome()]
    errors = [one for one in outcomes if isinstance(one, Exception)]
    assert len(errors) == 1
    assert "the same --node-rank" in str(errors[0])
    assert zero.info().round == two.info().round == 1


def test_a_node_whose_rank_is_asked_for_again_hears_of_it_and_one_of_the_two_goes(node: Make) -> None:
    nodes = [node(0), node(1)]
    heard = [listening(one) for one in nodes]
    form(*nodes)
    second = Joining(node(1))
    for one in heard:
        assert one.get(timeout=HUNG) == MembershipChanged(waiting=1, round=1), (
            "nobody runs on in the old round"
        )
    first = Joining(nodes[1])
    form(nodes[0])
    outcomes = [first.outcome(), second.outcome()]
    (error,) = (one for one in outcomes if isinstance(one, Exception))
    assert "the same --node-rank" in str(error)


def test_a_second_node_0_is_refused(node: Make, port: int) -> None:
    form(node(0), node(1))
    error = Joining(node(0)).outcome()
    assert isinstance(error, RendezvousConnectionError)
    assert "--node-rank 0" in str(error)


def test_leaving_ends_a_join_that_waits(node: Make) -> None:
    for rank in (0, 1):  # node 0 waits for the others, node 1 for node 0
        handler = node(rank)
        joining = Joining(handler)
        handler.leave()
        assert isinstance(joining.outcome(), RendezvousClosedError)


def test_without_the_shared_store_workers_get_a_port_of_their_own(
    node: Make, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    nodes = [node(0), node(1)]
    infos = form(*nodes)
    ports = {info.bootstrap_store_info.master_port for info in infos if info.bootstrap_store_info}
    assert len(ports) == 1
    assert ports != {port}
    assert not nodes[0].use_agent_store
    with socket.socket() as own:
        own.bind(("127.0.0.1", ports.pop()))


def test_bad_places_are_refused() -> None:
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"node rank {rank} of {world}"):
            StaticRendezvous("127.0.0.1", 29500, rank, world, "job")
    with pytest.raises(ValueError, match="master port 0"):
        StaticRendezvous("127.0.0.1", 0, 0, 2, "job")


# -- real agents ------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
path = os.path.join(sys.argv[1], os.environ["RANK"])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with open(path, "w") as file:
    json.dump({name: os.environ[name] for name in names}, file)
if first and os.environ["RANK"] == sys.argv[2]:
    sys.exit(int(sys.argv[3]))
if first and len(sys.argv) > 4:
    import signal
    signal.pause()
"""


class Agents:
    """`phalanx run` on several nodes, all of them here."""

    def __init__(self, place: Path, port: int) -> None:
        self.place = place
        self.port = port
        self.script = place / "worker.py"
        self.script.write_text(WORKER)
        self.told = place / "told"
        self.told.mkdir()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, nodes: int, *words: str, options: tuple[str, ...] = ()) -> list[tuple[int, str]]:
        """Run all of them to the end: exit code and screen, by node."""
        for rank in range(nodes):
            command = [
                sys.executable,
                "-m",
                "phalanx",
                "run",
                "--nnodes",
                str(nodes),
                "--node-rank",
                str(rank),
            ]
            command += [
                "--nproc-per-node",
                "2",
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(self.port),
            ]
            command += [*options, str(self.script), str(self.told), *words]
            self.running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        outcomes = []
        for process in self.running:
            screen, _ = process.communicate(timeout=2 * HUNG)
            outcomes.append((process.returncode, screen))
        return outcomes

    def ranks(self) -> dict[int, dict[str, str]]:
        return {int(path.name): json.loads(path.read_text()) for path in self.told.iterdir()}


@pytest.fixture
def agents(tmp_path: Path, port: int) -> Iterator[Agents]:
    made = Agents(tmp_path, port)
    yield made
    for process in made.running:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def test_agents_meet_and_their_workers_have_one_world(agents: Agents) -> None:
    outcomes = agents.start(3, "none", "0")
    assert [code for code, _ in outcomes] == [0, 0, 0], outcomes
    told = agents.ranks()
    assert sorted(told) == list(range(6))
    for rank, environment in told.items():
        assert environment["WORLD_SIZE"] == "6"
        assert (environment["GROUP_RANK"], environment["LOCAL_RANK"]) == (str(rank // 2), str(rank % 2))
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", str(agents.port))


@pytest.mark.parametrize("failing", ["0", "3"])
def test_agents_start_again_together_after_a_failure(agents: Agents, failing: str) -> None:
    # The others wait for ever in their first life: only a restart of the whole group ends this.
    outcomes = agents.start(2, failing, "7", "wait", options=("--max-restarts", "1"))
    assert [code for code, _ in outcomes] == [0, 0], outcomes


def test_agents_end_together_when_no_restart_is_left(agents: Agents) -> None:
    outcomes = agents.start(2, "3", "7", "wait")
    assert outcomes[1][0] == 7, outcomes
    assert outcomes[0][0] != 0, outcomes


def test_an_agent_says_who_is_missing(agents: Agents) -> None:
    command = ["--nnodes", "2", "--node-rank", "0", "--master-port", str(agents.port)]
    command += ["--rdzv-conf", "join_timeout=1"]
    process = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *command, str(agents.script), str(agents.told), "none", "0"],
        capture_output=True,
        text=True,
        timeout=2 * HUNG,
        check=False,
    )
    assert process.returncode == 1
    assert "node 1 of 2 did not come within 1 s" in process.stderr
