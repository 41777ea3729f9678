"""Participants over real connections to a real server: the pieces fit, and a crowd forms quickly."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.core.group.events import PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant import Participant
from phalanx.core.rounds.participant_events import (
    Action,
    Answer,
    ClockTick,
    Connected,
    Disconnected,
    End,
    Event,
    LeaveRequested,
    Noticed,
    Send,
    StartRound,
    StoreLost,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from phalanx.core.rounds.records import NodeInfo, Round
from phalanx.core.rounds.store_commands import Notice
from phalanx.store.client import State
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until
from tests.support.trials import play
from tests.system.test_hostile_rounds import line

TOKEN = Token(b"test secret", "the test")


class Node(threading.Thread):
    """The thinnest shell around a participant: one queue in, `said` out; workers are pretended."""

    def __init__(
        self, name: str, address: tuple[str, int], options: Options, said: queue.Queue[tuple[str, object]]
    ) -> None:
        super().__init__(name=name)
        self.running: Round | None = None
        self.killed = False
        self.inbox: queue.Queue[Event] = queue.Queue()
        self.said = said
        self.participant = Participant(NodeInfo(name, name), options)
        patience = min(5.0, options.ttl / 2)
        self.client = Client(
            *address, token=TOKEN, patience=patience, on_state=self.state, on_notice=self.notice
        )
        self.start()

    def state(self, state: State) -> None:
        events: dict[str, Callable[[], Event]] = {
            "connected": Connected,
            "disconnected": Disconnected,
            "lost": lambda: StoreLost(state.why),
        }
        if state.what in events:
            self.inbox.put(events[state.what]())

    def notice(self, notice: Notice) -> None:
        self.inbox.put(Noticed(notice))

    def run(self) -> None:
        self.client.connect(HUNG)
        actions = self.participant.start(time.monotonic())
        while True:
            for action in actions:
                self.act(action)
            if self.participant.ended is not None or self.killed:
                break
            wake = self.participant.wake_at()
            try:
                left = None if wake is None else max(0.0, wake - time.monotonic())
                event: Event = self.inbox.get(timeout=left)
            except queue.Empty:
                event = ClockTick()
            actions = self.participant.step(time.monotonic(), event)
        self.client.close()

    def act(self, action: Action) -> None:
        match action:
            case Send(tag, command):
                self.client.send(command, lambda reply: self.inbox.put(Answer(tag, reply)))
            case RoundOver() | PeerFailed() | RoundFailed():
                assert self.running is not None
                self.inbox.put(WorkersStopped(self.running.number))
                self.running = None
            case StartRound() | End():
                self.running = action.round if isinstance(action, StartRound) else None
                self.said.put((self.name, action))

    def kill(self) -> None:
        """End it as SIGKILL would; its connection may be one that passes nothing."""
        self.killed = True
        self.inbox.put(ClockTick())


def starts(said: queue.Queue[tuple[str, object]], number: int, nodes: int) -> list[str]:
    """Wait until a round runs on all its nodes; their names by rank."""
    ranks: dict[int, str] = {}
    while len(ranks) < nodes:
        name, action = said.get(timeout=HUNG)
        assert isinstance(action, StartRound), action
        if action.round.number == number:
            assert action.round.nodes == nodes
            ranks[action.place.rank] = name
    return [ranks[rank] for rank in range(nodes)]


def test_form_fail_re_form_lose_one_and_succeed() -> None:
    options = Options(min_nodes=2, max_nodes=8, last_call=HUNG, prefix="job/", ttl=HUNG)
    said: queue.Queue[tuple[str, object]] = queue.Queue()
    with Server(token=TOKEN) as server:
        names = [f"node{n}" for n in range(1, 9)]
        nodes = {name: Node(name, server.address, options, said) for name in reversed(names)}
        assert starts(said, 1, 8) == names
        nodes["node3"].inbox.put(WorkersFailed(1, NodeFailure("exit code 1")))
        assert starts(said, 2, 8) == names
        nodes["node8"].inbox.put(LeaveRequested("SIGTERM"))
        assert said.get(timeout=HUNG)[1].outcome == "left"  # type: ignore[attr-defined]
        assert starts(said, 3, 7) == names[:7]
        for name in names[:7]:
            nodes[name].inbox.put(WorkersSucceeded(3))
        ends = [said.get(timeout=HUNG)[1] for _ in range(7)]
        assert {end.outcome for end in ends} == {"succeeded"}  # type: ignore[attr-defined]
        assert ends[0].round.restarts == 1  # type: ignore[attr-defined]
        for node in nodes.values():
            node.join(HUNG)


def in_one_round(nodes: list[Node]) -> bool:
    found = [node.running for node in nodes]
    return all(one and one.nodes == len(nodes) and one.number == found[0].number for one in found)  # type: ignore[union-attr]


@pytest.mark.long
def test_connections_that_pass_nothing_any_more_only_take_time(tmp_path: Path) -> None:
    """At any message, with a chance of 8 %, also in the handshake; 12 jobs, each of which forms six times."""
    options = Options(min_nodes=2, max_nodes=3, last_call=0.3, prefix="job/", ttl=6.0)

    def trial(folder: Path) -> None:
        said: queue.Queue[tuple[str, object]] = queue.Queue()
        with (
            Server(token=TOKEN) as server,
            line("{}:{}".format(*server.address), 0.08, int(folder.name), silent=True) as way,
        ):
            every = [Node(name, ("127.0.0.1", way.port), options, said) for name in "abc"]
            nodes = list(every)
            try:
                for turn in range(6):
                    wait_until(lambda: in_one_round(nodes), f"a round of {len(nodes)}")
                    if turn % 2 == 0:
                        nodes.pop().kill()
                    else:
                        every.append(Node(f"d{turn}", ("127.0.0.1", way.port), options, said))
                        nodes.append(every[-1])
            finally:
                for node in every:
                    node.kill()
                for node in every:
                    node.join(HUNG)

    play(12, tmp_path, trial)
