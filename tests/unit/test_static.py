"""Static rendezvous: nodes with given ranks meet at MASTER_PORT, as threads here and as real agents."""

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
from typing import Any, NamedTuple

import pytest

from phalanx.cluster.elastic import ElasticInfo, error_of
from phalanx.cluster.listener import Meeting
from phalanx.cluster.membership import Membership
from phalanx.cluster.static import StaticRendezvous
from phalanx.cluster.store_host import NOT_AUTHENTICATED
from phalanx.core.exit_codes import NO_MEETING
from phalanx.core.group.events import PeerFailed
from phalanx.core.group.ranks import Offsets
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant_events import End, Remark, RoundEnd
from phalanx.core.rounds.records import Round
from phalanx.core.rounds.store_commands import Get, Put
from phalanx.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    StoreAuthError,
)
from phalanx.store.embedded.client import Client
from phalanx.store.net.wire import MAGIC
from phalanx.store.tcpstore.client import TorchStoreClient
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port

Make = Callable[..., StaticRendezvous]
QUICK = {"ttl": 1.2, "linger": 0.2}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_TOKEN", "PHALANX_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def node(port: int) -> Iterator[Make]:
    """Makes handlers of one job; all of them are shut down at the end."""
    made: list[StaticRendezvous] = []

    def make(
        rank: int, world_size: int = 2, run_id: str = "job", timeout: float = HUNG, **conf: Any
    ) -> StaticRendezvous:
        settings = {**QUICK, **conf}
        made.append(StaticRendezvous("127.0.0.1", port, rank, world_size, run_id, timeout, **settings))
        return made[-1]

    yield make
    for handler in sorted(made, key=lambda handler: -handler.rank):
        if handler._attached and handler.membership is not None:
            handler.membership.release()
        else:
            handler.shutdown()


class Joining:
    """A node's `next_rendezvous` in a thread, as a torch agent calls it."""

    def __init__(self, handler: StaticRendezvous) -> None:
        self._outcome: queue.Queue[ElasticInfo | Exception] = queue.Queue()
        self._handler = handler
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.put(self._handler.next_rendezvous())
        except Exception as error:  # noqa: BLE001 - handed to the test
            self._outcome.put(error)

    def outcome(self) -> ElasticInfo | Exception:
        found = self._outcome.get(timeout=HUNG)
        self._thread.join(HUNG)
        return found

    def info(self) -> ElasticInfo:
        found = self.outcome()
        if isinstance(found, Exception):
            raise found
        return found


def form(*handlers: StaticRendezvous) -> list[ElasticInfo]:
    joining = [Joining(handler) for handler in handlers]
    return [one.info() for one in joining]


class Over(NamedTuple):
    """The end of a round, and the round of the job that followed."""

    event: RoundEnd
    now: Round | None


class Attached:
    """A node that listens as an agent does; its workers are gone when they are told to go."""

    def __init__(self, handler: StaticRendezvous, restarts: int = 3, slots: int = 1, role: str = "r") -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.settings = handler.settings
        self.number = -1
        self.member: Membership = handler.attach(
            self, lambda _: (None, 1), slots=slots, role=role, max_restarts=restarts
        )
        self.member.start()

    def round_ready(self, meeting: Meeting) -> None:
        self.number = meeting.round.number
        self.heard.put(meeting)

    def round_over(self, event: RoundEnd, now: Round | None) -> None:
        self.heard.put(Over(event, now))

    def job_over(self, end: End) -> None:
        self.heard.put(end)

    def remarks(self, remark: Remark) -> None:
        self.heard.put(remark)

    def waits(self, text: str) -> None:
        """It depends on the time that passes."""

    def lease_until(self, when: float) -> None:
        """There are no workers."""

    def asked(self, request: Any, answer: Any) -> None:
        """Nobody asks."""

    def until(self, kind: type[Any]) -> Any:
        while True:
            found = self.heard.get(timeout=HUNG)
            if isinstance(found, kind):
                return found
            if isinstance(found, End):
                raise AssertionError(f"{found} instead of {kind}")

    def over(self) -> Over:
        number, found = self.number, self.until(Over)
        self.member.workers_gone(number)
        assert isinstance(found, Over)
        return found

    def release(self) -> None:
        self.member.release()


def attached(*handlers: StaticRendezvous, restarts: int = 3) -> tuple[list[Attached], list[Meeting]]:
    made = [Attached(handler, restarts) for handler in handlers]
    return made, [one.until(Meeting) for one in made]


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


def test_roles_and_worker_counts_may_differ(node: Make) -> None:
    made = [Attached(node(0), slots=2, role="a"), Attached(node(1), slots=3, role="b")]
    places = [one.until(Meeting).place for one in made]
    assert [place.offsets for place in places] == [Offsets(0, 5, 0, 2), Offsets(2, 5, 0, 3)]


def test_workers_share_the_port_and_find_an_empty_store_in_every_round(node: Make, port: int) -> None:
    nodes = [node(0), node(1)]
    form(*nodes)
    old = TorchStoreClient("127.0.0.1", port, HUNG)
    old.set("address of rank 0", "old")
    infos = form(*nodes)
    assert [info.round for info in infos] == [2, 2]
    with pytest.raises(ConnectionError):
        old.set("address of rank 0", "old")  # the connections of the old round are closed
    with TorchStoreClient("127.0.0.1", port, HUNG) as worker:
        assert not worker.check(["address of rank 0"])
    old.close()


def test_connections_that_send_nothing_or_nonsense_hold_up_nothing(node: Make, port: int) -> None:
    zero = Joining(node(0))
    silent = [_connection(port) for _ in range(20)]
    broken = _connection(port)
    broken.sendall(b"PHALANX9" + bytes(100))
    half = _connection(port)
    half.sendall(b"P")
    with TorchStoreClient("127.0.0.1", port, HUNG) as worker:
        worker.set("a", b"1")
        assert worker.check(["a"])
    assert [info.rank for info in (*form(node(1)), zero.info())] == [1, 0]
    assert broken.recv(200)[:8] == MAGIC
    for sock in (*silent, broken, half):
        sock.close()


def _connection(port: int) -> socket.socket:
    """A connection to node 0, which may not serve yet."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), HUNG)
        except ConnectionRefusedError:
            continue


def test_a_failure_is_told_and_all_form_again_with_the_same_attempt(node: Make) -> None:
    nodes, _ = attached(*(node(rank, 3) for rank in range(3)))
    nodes[1].member.failed(1, NodeFailure("rank 3: exit code 7", report="a report", exit_code=7))
    for one in nodes:
        over = one.over()
        name = f"node 1 ({os.uname().nodename})"
        assert over.event == PeerFailed(name, 1, 1, "rank 3: exit code 7")
    formed = [one.until(Meeting) for one in nodes]
    assert [(f.round.number, f.round.restarts, f.place.rank) for f in formed] == [
        (2, 1, 0), (2, 1, 1), (2, 1, 2),
    ]  # fmt: skip


def test_the_failure_that_ends_the_job_is_the_same_on_all_nodes(node: Make) -> None:
    nodes, _ = attached(*(node(rank, 3) for rank in range(3)), restarts=0)
    failure = NodeFailure("rank 0: exit code 1", "", "the report", 9, 0.5)
    nodes[2].member.failed(1, failure)
    for one in nodes:
        over = one.over()
        assert over.now is not None
        assert over.event == PeerFailed(over.now.cause[1], 1, 0, "rank 0: exit code 1", final=True)
        assert (over.now.outcome, NodeFailure.read(over.now.cause[2])) == ("failed", failure)
        end = one.until(End)
        assert (end.outcome, NodeFailure.read(end.round.cause[2])) == ("failed", failure)


def test_a_node_that_leaves_is_replaced_by_a_new_one_of_its_rank(node: Make) -> None:
    (zero, one), _ = attached(node(0), node(1))
    one.member.leave("SIGTERM")
    one.over()
    assert f"node 1 ({os.uname().nodename})" in zero.over().event.reason
    again = Attached(node(1))
    assert [n.until(Meeting).round.number for n in (zero, again)] == [2, 2]


def test_a_lost_node_is_waited_for_although_all_others_succeeded(node: Make) -> None:
    (zero, one), _ = attached(node(0), node(1))
    zero.member.finished(1, HUNG)
    one.member.client.close()  # type: ignore[union-attr]  # as a killed agent's connection is closed
    over = zero.over()
    assert f"lost node 1 ({os.uname().nodename}), which had not reported success" in over.event.reason
    again = Attached(node(1))
    assert [n.until(Meeting).round.number for n in (zero, again)] == [2, 2]
    for n in (zero, again):
        n.member.finished(2, HUNG)
    assert {n.until(End).outcome for n in (zero, again)} == {"succeeded"}


def test_a_lost_node_that_does_not_return_fails_the_job_with_its_rank(node: Make) -> None:
    (zero, one), _ = attached(node(0, timeout=3.0), node(1, timeout=3.0))
    zero.member.finished(1, HUNG)
    one.member.client.close()  # type: ignore[union-attr]
    zero.over()
    error = error_of(zero.until(End), zero.settings)
    assert isinstance(error, RendezvousTimeoutError)
    assert "node 1 of 2 did not come within 3 s" in str(error)


def test_node_0_comes_back_and_the_counts_go_on(node: Make) -> None:
    (zero, one), _ = attached(node(0), node(1))
    one.member.failed(1, NodeFailure("exit code 1"))
    for n in (zero, one):
        n.over()
    for n in (zero, one):
        n.until(Meeting)
    zero.member.leave("SIGTERM")
    zero.over()
    one.over()
    zero.release()
    again = Attached(node(0))
    formed = [n.until(Meeting) for n in (again, one)]
    assert [(f.place.rank, f.round.restarts) for f in formed] == [(0, 1), (1, 1)]
    assert formed[0].round.number == formed[1].round.number > 2


def test_node_0_that_is_killed_stops_the_others_at_once(node: Make, port: int) -> None:
    code = (
        "import sys; from phalanx.cluster.static import StaticRendezvous as S;"
        f"S('127.0.0.1', {port}, 0, 2, 'job').next_rendezvous(); print('in', flush=True); sys.stdin.read()"
    )
    zero = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert zero.stdin is not None
    assert zero.stdout is not None
    one = Attached(node(1))
    first = one.until(Meeting)
    assert zero.stdout.readline() == "in\n"
    zero.kill()
    zero.communicate()
    assert "lost node 0" in one.over().event.reason
    again = Attached(node(0))
    formed = [n.until(Meeting) for n in (again, one)]
    assert formed[0].round.number > first.round.number
    assert [f.place.rank for f in formed] == [0, 1]


def test_a_job_that_ended_well_is_closed_not_failed(node: Make) -> None:
    nodes = [node(0), node(1)]
    form(*nodes)
    nodes[0].set_closed()
    assert isinstance(Joining(nodes[1]).outcome(), RendezvousClosedError)
    assert isinstance(Joining(nodes[0]).outcome(), RendezvousClosedError)
    assert nodes[0].is_closed()


def test_missing_nodes_are_named_on_every_node(node: Make) -> None:
    waiting = [Joining(node(rank, 4, timeout=3.0)) for rank in (0, 2)]
    for one in waiting:
        error = one.outcome()
        assert isinstance(error, RendezvousTimeoutError)
        assert "node 1, 3 of 4 did not come within 3 s" in str(error)


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


def test_a_second_node_of_a_rank_is_refused_with_the_host_that_has_it(node: Make) -> None:
    first, zero = Joining(node(1, 3)), Joining(node(0, 3))
    handler = node(1, 3)
    second = Joining(handler)
    outcomes: queue.Queue[Any] = queue.Queue()
    for one in (first, second):
        threading.Thread(target=lambda one=one: outcomes.put(one.outcome())).start()
    error = outcomes.get(timeout=HUNG)
    assert isinstance(error, RendezvousStateError)
    assert f"node rank 1 is taken by {os.uname().nodename} (127.0.0.1)" in str(error)
    assert "the same --node-rank" in str(error)
    two = Joining(node(2, 3))
    assert zero.info().round == two.info().round == outcomes.get(timeout=HUNG).round == 1


def test_a_second_node_of_a_rank_does_not_disturb_a_running_round(node: Make) -> None:
    (zero, one), _ = attached(node(0), node(1))
    error = Joining(node(1)).outcome()
    assert isinstance(error, RendezvousStateError)
    assert "the same --node-rank" in str(error)
    assert zero.heard.empty()
    assert one.heard.empty()


def test_a_second_node_0_is_refused(node: Make, port: int) -> None:
    form(node(0), node(1))
    error = Joining(node(0)).outcome()
    assert isinstance(error, RendezvousConnectionError)
    assert "--node-rank 0" in str(error)


def test_leaving_ends_a_join_that_waits(node: Make) -> None:
    for rank in (0, 1):  # node 0 waits for the others, node 1 for node 0
        handler = node(rank)
        joining = Joining(handler)
        wait_until(lambda h=handler: h.membership is not None and h.membership.started, "the join")
        handler.leave()
        assert isinstance(joining.outcome(), RendezvousGracefulExitError)


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


# -- trust ------------------------------------------------------------------------------------------------


def test_without_a_token_node_0_says_that_the_job_is_open(node: Make) -> None:
    nodes = [Attached(node(rank)) for rank in (0, 1)]
    assert nodes[0].until(Remark).text == NOT_AUTHENTICATED
    assert isinstance(nodes[1].heard.get(timeout=HUNG), Meeting)


def test_with_a_token_the_job_is_authenticated(
    node: Make, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("PHALANX_TOKEN", "secret")
    made = [Attached(node(0)), Attached(node(1, token_file=str(tmp_path / "token")))]
    assert isinstance(made[0].heard.get(timeout=HUNG), Meeting), "no remark"
    stranger = Client("127.0.0.1", port, grace=HUNG)
    with pytest.raises(StoreAuthError, match="wants a token and we have no token"):
        stranger.connect(HUNG)
    stranger.close()


@pytest.mark.parametrize(
    ("zero", "one", "says"),
    [
        ("", "secret", "has no token, so its job is not authenticated; our token is from the variable"),
        ("secret", "", r"wants a token and we have no token \(set PHALANX_TOKEN\)"),
        ("secret", "other", "refused our token"),
    ],
)
def test_nodes_with_and_without_a_token_are_told(
    node: Make, monkeypatch: pytest.MonkeyPatch, zero: str, one: str, says: str
) -> None:
    made = []
    for rank, token in ((0, zero), (1, one)):
        monkeypatch.setenv("PHALANX_TOKEN", token)
        made.append(Attached(node(rank)))
        # It looks for its token in the environment, which changes for the next one.
        wait_until(lambda: made[-1].member.client is not None, "the node's token")
    error = error_of(made[1].until(End), made[1].settings)
    assert isinstance(error, RendezvousConnectionError)
    with pytest.raises(RendezvousConnectionError, match=says):
        raise error


def test_nonsense_of_a_stranger_in_an_open_job_ends_nothing(node: Make, port: int) -> None:
    (zero, one), _ = attached(node(0), node(1))
    with Client("127.0.0.1", port) as stranger:
        for key, value in {
            "node/x": b"[", "node/y": b'{"info":{"id":"y","name":"\\u001b[31m"},"ready":7}', "drain/": b"",
            "result/1/x": b"\xff", "result/one/x": b"{}", "result/1/y": b'{"ok":"no"}', "place/x": b"7",
            "ctl/meeting/9": b"\xff", "ctl/meeting/x": b"here 1", "ctl/x": b"{", "members/x": b"[]",
        }.items():  # fmt: skip
            stranger.request(Put(f"job/job/{key}", value), HUNG)
        assert stranger.request(Get("job/job/node/x"), HUNG).ok
    one.member.failed(1, NodeFailure("exit code \x1b[31m7"))
    for n in (zero, one):
        event = n.over().event
        assert isinstance(event, PeerFailed)
        assert event.summary == r"exit code \x1b[31m7"
    assert [n.until(Meeting).round.number for n in (zero, one)] == [2, 2]


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
    assert process.returncode == NO_MEETING
    assert "node 1 of 2 did not come within 1 s" in process.stderr
