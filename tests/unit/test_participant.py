"""One node's state machine: golden traces, its tables, illegal moves. Single rules are in test_rounds.

A trace in `traces/participant/` is a script and, below each event, the full answer: `= PHASE` begins with a
node in that phase, `options` changes what the next ones are started with, `> TIME EVENT` is an event.
`PHALANX_GOLDEN=write` writes the answers again; read the difference before keeping it.
"""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.group.group import IllegalMove
from phalanx.core.rounds import participant_events
from phalanx.core.rounds.leader_view import Options
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant import DUTIES, LATE, LEASE, MOVES, Participant
from phalanx.core.rounds.participant_events import (
    Answer,
    Begin,
    ClockTick,
    End,
    Event,
    LeaseMissed,
    LeaveRequested,
    Noticed,
    Send,
    StartRound,
    StoreLost,
    WorkersStopped,
    WorkersSucceeded,
)
from phalanx.core.rounds.participant_state import MEANINGS, NodePhase
from phalanx.core.rounds.records import NodeInfo, Place, Round, encode
from phalanx.core.rounds.requests import CONTROL, PLACE
from phalanx.core.rounds.store_commands import Change, Entry, Grant, Notice, Reply, Txn
from tests.support.state_diagram import of_the_participant

TRACES = pathlib.Path(__file__).parent / "traces" / "participant"
OPTIONS = Options(min_nodes=1, max_nodes=2, ttl=6.0, linger=1.0, join_timeout=30.0, store_grace=60.0)
MINE, INCARNATION = 3, 42  # this node's lease, and the revision that created its key


class Played:
    """A participant, with words for what the store says to it."""

    def __init__(self, phase: str = "NEW", options: Options = OPTIONS) -> None:
        self.node = Participant(NodeInfo("me", "me"), options)
        self.revision = 50
        self.requests: dict[int, str] = {}
        self.taken: set[tuple[str, str, str]] = set()
        joined = ["Begin()", "control()", "answer('WATCH_PLACE')", "granted()"]
        running = [*joined, "place(1)", "round(1, 'active')"]
        ways = {
            "NEW": [],
            "JOINING": joined[:3],
            "WAITING": joined,
            "RUNNING": running,
            "FINISHED": [*running, "WorkersSucceeded(1)"],
            "STOPPING": [*running, "round(2, 'forming')"],
            "FENCED": [*running, "LeaseMissed(1)"],
            "LEAVING": [*joined, "LeaveRequested('SIGTERM')"],
            "ENDING": [*running, "StoreLost('gone')"],
        }
        for text in ways[phase]:
            self.play(0.0, text)
        assert self.node.phase == phase

    def play(self, now: float, text: str) -> list[str]:
        names = ("control", "granted", "answer", "round", "place", "key")
        words = {name: getattr(self, name) for name in names}
        event = eval(text, {**vars(participant_events), "NodeFailure": NodeFailure, **words})
        node = self.node
        actions = node.step(now, event)
        # From the history, which has every move; a node forgets the oldest ones.
        self.taken.update(re.findall(r"(\w+) --(.+?)--> (\w+):", "\n".join(node._recent)))
        lines = [f"  {node.phase.value}: {node.reason}"]
        for action in actions:
            if isinstance(action, Send):
                asked = node._requests._pending[action.tag].purpose.name
                self.requests[action.tag] = asked
                lines.append(f"    asks {asked}: {shown(action.command)}")
            else:
                lines.append(f"    {shown(action)}")
        return lines

    def answer(self, asked: str, ok: bool = True, *entries: Entry, error: str = "") -> Event:
        tag = max(tag for tag, name in self.requests.items() if name == asked)
        self.revision += 1
        if not entries and asked in ("REGISTER", "UPDATE", "REPORT", "CAMPAIGN"):
            entries = (Entry("node/me", b"", INCARNATION, self.revision, self.node.lease.number),)
        return Answer(tag, Reply(ok, self.revision, entries, MINE, error))

    def granted(self, registered: bool = True) -> Event:
        self.revision += 1
        lease = MINE if registered else 0
        mine = Entry("node/me", b"", INCARNATION, self.revision, lease)
        return self.answer("GRANT", registered, Entry("ctl/round"), *([mine] if registered else []))

    def key(self, name: str, revision: int, lease: int = 0) -> Entry:
        return Entry(name, b"", revision, revision, lease)

    def control(self, leader: bool = True) -> Event:
        return self.answer("WATCH_CONTROL", True, *([Entry("ctl/leader", b"boss", 5, 5, 99)] * leader))

    def place(self, number: int, refused: str = "") -> Event:
        self.revision += 1
        value = Place(f"5.{number}", INCARNATION, 0, 0, 1, 0, 1)
        entry = Entry("place/me", encode(Place(refused=refused) if refused else value), 1, self.revision)
        return Noticed(Notice(PLACE, (Change(entry),), self.revision))

    def round(self, number: int, phase: str, **more: Any) -> Event:
        self.revision += 1
        value = Round(number, phase, 1, reason=f"round {number} is {phase}", term=5, stamp=f"5.{number}")
        entry = Entry("ctl/round", encode(value._replace(**more)), 1, self.revision)
        return Noticed(Notice(CONTROL, (Change(entry),), self.revision))


def shown(what: Any) -> str:
    """An action, or a command, without the records in it."""
    match what:
        case StartRound(current, place):
            return f"StartRound {current.number} as rank {place.rank}"
        case End(outcome, reason, _, held, finished):
            return f"End {outcome}, held={held}, finished={finished}: {reason}"
        case Grant(ttl, Txn() as txn):
            return f"Grant for {ttl:g} s; {shown(txn)}"
        case Txn(when, puts, deletes):
            parts = [f"if {one.key}.{one.what} is {one.number}" for one in when]
            parts += [f"put {one.key}" + f" on lease {one.lease}" * bool(one.lease) for one in puts]
            return ", ".join([*parts, *(f"delete {one.key}" for one in deletes)])
    return repr(what)


def replay(script: str) -> tuple[str, set[tuple[str, str, str]]]:
    """The script with the full answer below each event, and the arrows of the tables that it took."""
    played, options, taken = Played(), OPTIONS, set[tuple[str, str, str]]()
    out = []
    for line in script.splitlines():
        if line.startswith("options "):
            named = dict(word.split("=") for word in line.split()[1:])
            options = replace(OPTIONS, **{key: eval(value) for key, value in named.items()})
        if line.startswith("= "):
            played = Played(line.split()[1], options)
        if line.startswith(("#", "options ", "= ")) or not line:
            out.append(line)
        if line.startswith("> "):
            time, _, text = line[2:].partition(" ")
            out += [line, *played.play(float(time), text)]
            taken |= played.taken
    return "\n".join(out) + "\n", taken


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.txt")), ids=lambda path: path.stem)
def test_golden_trace(path: pathlib.Path) -> None:
    text = path.read_text()
    played, _ = replay(text)
    if os.environ.get("PHALANX_GOLDEN") == "write":
        path.write_text(played)
    assert played == text or os.environ.get("PHALANX_GOLDEN") == "write"


def test_all_traces_together_take_every_arrow_of_the_tables() -> None:
    """So that a change of any move shows in a trace."""
    taken = set().union(*(replay(path.read_text())[1] for path in TRACES.glob("*.txt")))
    arrows = {
        (phase.value, kind.__name__, target.value)
        for phase, row in MOVES.items()
        for kind, (_, targets) in row.items()
        for target in targets
    }
    arrows |= {
        (phase.value, duty.name, target.value)
        for duty in (LEASE, *DUTIES)
        for phase, targets in duty.phases.items()
        for target in targets
    }
    assert sorted(arrows - taken) == []


def test_every_phase_is_reachable_leads_to_the_end_and_is_drawn() -> None:
    after: dict[NodePhase, set[NodePhase]] = {phase: set() for phase in NodePhase}
    for phase, row in MOVES.items():
        after[phase].update(target for _, targets in row.values() for target in targets)
    for duty in (LEASE, *DUTIES):
        for phase, targets in duty.phases.items():
            after[phase].update(targets)
    assert {NodePhase.NEW}.union(*after.values()) == set(NodePhase)
    assert set(MEANINGS) == set(MOVES) == set(LATE) == set(NodePhase)
    ends = {NodePhase.ENDED}
    for _ in NodePhase:
        ends |= {phase for phase, targets in after.items() if targets & ends}
    assert ends == set(NodePhase)
    for phase, targets in after.items():
        assert f"| {phase.value} | {MEANINGS[phase]} |" in of_the_participant()
        for target in targets:
            assert f"{phase.value} --> {target.value} : " in of_the_participant()


def test_no_event_is_both_a_move_and_late_and_each_is_one_of_them_after_the_start() -> None:
    events = {kind for row in MOVES.values() for kind in row} - {Begin}
    for phase in NodePhase:
        assert not MOVES[phase].keys() & LATE[phase]
        if phase is not NodePhase.NEW:
            missing = events - MOVES[phase].keys() - LATE[phase]
            assert not missing, phase


@pytest.mark.parametrize("event", [ClockTick(), StoreLost("gone"), WorkersStopped(1)], ids=repr)
def test_before_the_start_nothing_is_possible(event: Event) -> None:
    with pytest.raises(IllegalMove, match=r"NEW is not possible.*\n.*nothing"):
        Participant(NodeInfo("me", "me"), OPTIONS).step(0.0, event)


def test_a_second_start_and_an_answer_to_nothing_are_bugs_and_named_with_what_came_before() -> None:
    with pytest.raises(IllegalMove, match=r"(?s)Begin\(\) in phase WAITING.*NEW --Begin--> JOINING"):
        Played("WAITING").node.step(0.1, Begin())
    with pytest.raises(IllegalMove, match=r"(?s)answers nothing that was asked.*JOINING --Answer--> WAITING"):
        Played("WAITING").node.step(0.1, Answer(999, Reply(True, 1)))


def test_a_move_that_the_table_does_not_have_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be with a handler that goes somewhere else."""
    handler, _ = MOVES[NodePhase.RUNNING][WorkersStopped]
    monkeypatch.setitem(MOVES[NodePhase.RUNNING], WorkersStopped, (handler, (NodePhase.FENCED,)))  # type: ignore[index]
    with pytest.raises(IllegalMove, match="led to WAITING, which the table does not allow"):
        Played("RUNNING").node.step(0.1, WorkersStopped(1))


def test_what_is_late_changes_nothing() -> None:
    played = Played("WAITING")
    before = played.node.phase, played.node.work
    for event in (WorkersStopped(7), WorkersSucceeded(7), LeaseMissed(7)):
        assert played.node.step(0.1, event) == []
    assert (played.node.phase, played.node.work) == before
    ended = Played("ENDING")
    ended.node.step(0.1, WorkersStopped(1))
    assert ended.node.step(0.2, LeaveRequested("SIGTERM")) == []
    assert ended.node.wake_at() is None
