"""Participants over real connections to a real server: the pieces fit, and a crowd forms quickly."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from phalanx.core.participant import Participant
from phalanx.core.participant_events import (
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
    StopRound,
    StoreLost,
    WorkersEnded,
    WorkersStopped,
)
from phalanx.core.round_records import NodeInfo
from phalanx.core.rounds import Options
from phalanx.core.store_commands import Notice
from phalanx.store.embedded.client import Client, State
from phalanx.store.embedded.server import Server
from phalanx.store.embedded.token import Token
from tests.conftest import HUNG

TOKEN = Token(b"test secret", "the test")


class Node(threading.Thread):
    """The thinnest shell around a participant: one queue in, `said` out; workers are pretended."""

    def __init__(
        self, name: str, server: Server, options: Options, said: queue.Queue[tuple[str, object]]
    ) -> None:
        super().__init__(name=name)
        self.inbox: queue.Queue[Event] = queue.Queue()
        self.said = said
        self.participant = Participant(NodeInfo(name, name), options)
        self.client = Client(*server.address, token=TOKEN, on_state=self.state, on_notice=self.notice)
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
            if self.participant.ended is not None:
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
            case StopRound(number):
                self.inbox.put(WorkersStopped(number))
            case StartRound() | End():
                self.said.put((self.name, action))


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
        nodes = {name: Node(name, server, options, said) for name in (f"node{n}" for n in range(8, 0, -1))}
        names = [f"node{n}" for n in range(1, 9)]
        assert starts(said, 1, 8) == names
        nodes["node3"].inbox.put(WorkersEnded(1, False, "exit code 1"))
        assert starts(said, 2, 8) == names
        nodes["node8"].inbox.put(LeaveRequested("SIGTERM"))
        assert said.get(timeout=HUNG)[1].outcome == "left"  # type: ignore[attr-defined]
        assert starts(said, 3, 7) == names[:7]
        for name in names[:7]:
            nodes[name].inbox.put(WorkersEnded(3, True))
        ends = [said.get(timeout=HUNG)[1] for _ in range(7)]
        assert {end.outcome for end in ends} == {"succeeded"}  # type: ignore[attr-defined]
        assert ends[0].round.restarts == 1  # type: ignore[attr-defined]
        for node in nodes.values():
            node.join(HUNG)
