"""The worker group's state machine: golden traces, the contract under random worlds, illegal moves.

A trace in `traces/` is a script (`>` lines: time and event; a `policy` line; `=` begins a new group) and,
below each event, the full answer. `python tests/unit/test_group.py` writes the answers again; read the
difference before keeping it.
"""

from __future__ import annotations

import pathlib
import random
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.group import events as group_events
from phalanx.core.group import group
from phalanx.core.group.events import (
    AllSucceeded,
    BarrierDone,
    EnterBarrier,
    Finish,
    GroupRound,
    Hang,
    Join,
    MembershipChanged,
    Outcome,
    PeerFailed,
    RecallWorkers,
    ReportFailure,
    RoundFailed,
    RoundOver,
    RoundReady,
    Signal,
    Start,
    Started,
    StartFailed,
    StartWorkers,
    Stopped,
    StopWorkers,
    Tick,
    Uninterruptible,
    WakeAt,
    WorkerFailed,
    WorkersReenter,
)
from phalanx.core.group.group import GroupPolicy, GroupState, IllegalMove, Phase, WorkerState, step
from phalanx.core.group.restarts import RestartPolicy
from tests.support.state_diagram import of_the_group

TRACES = pathlib.Path(__file__).parent / "traces"


# ---- golden traces -----------------------------------------------------------------------------------


def parse_policy(words: list[str]) -> GroupPolicy:
    values: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("no_restart_on", "hopeless"):  # `2|ImportError`
            values[key] = frozenset(int(one) if one.isdigit() else one for one in value.split("|"))
        else:
            values[key] = float(value) if "." in value or key == "grace" else int(value)
    grace, preempt = values.pop("grace", 30.0), int(values.pop("preempt_signal", 0))
    reenter = float(values.pop("reenter_timeout", 0))
    return GroupPolicy(RestartPolicy(**values), grace=grace, preempt_signal=preempt, reenter_timeout=reenter)


def replay(script: str) -> str:
    """The script with the full answer below each event."""
    state, policy = GroupState(), GroupPolicy()
    out = []
    for line in script.splitlines():
        if line.startswith("policy "):
            policy = parse_policy(line.split()[1:])
        if line.startswith("= "):
            state = GroupState()
        if line.startswith(("#", "policy ", "= ")):
            out.append(line)
        if not line.startswith("> "):
            continue
        time, _, text = line[2:].partition(" ")
        event = eval(text, vars(group_events))
        made = step(state, event, float(time), policy)
        state = made.state
        out += [
            line,
            f"  {state.phase.value} {state.worker_state.value} attempt={state.attempt}: {made.reason}",
        ]
        out += [f"    {command!r}" for command in made.commands]
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("name", sorted(path.stem for path in TRACES.glob("*.txt")))
def test_golden_trace(name: str) -> None:
    text = (TRACES / f"{name}.txt").read_text()
    assert replay(text) == text


def test_all_traces_together_take_every_arrow_of_the_table() -> None:
    """So that a change of any move shows in a trace."""
    taken = set()
    for path in TRACES.glob("*.txt"):
        phase = "NEW"
        for line in path.read_text().splitlines():
            if line.startswith("= "):
                phase = "NEW"
            elif line.startswith("> "):
                event = line.split()[2].partition("(")[0]
            elif line.startswith("  ") and not line.startswith("    "):
                after = line.split()[0]
                taken.add((phase, event, after))
                phase = after
    table = {
        (phase.value, kind.__name__, target.value)
        for phase, row in group.MOVES.items()
        for kind, (_, targets) in row.items()
        for target in targets
    }
    assert sorted(table - taken) == []


# ---- the table ---------------------------------------------------------------------------------------

EVENTS: list[group_events.Event] = [
    Start(),
    RoundReady(GroupRound(9)),
    RoundFailed("error", "x"),
    RoundOver(1, "x"),
    Started((1,)),
    StartFailed("x"),
    WorkerFailed("x", 1),
    AllSucceeded(),
    Stopped(),
    MembershipChanged(waiting=1),
    PeerFailed("b", 9, 1, "x"),
    Signal(15),
    BarrierDone(),
    Uninterruptible((1,)),
    WorkersReenter(),
    Hang("x"),
    group_events.RestartRequested("asked"),
    Tick(),
]


def test_every_event_is_either_a_move_or_late_or_illegal() -> None:
    kinds = {type(event) for event in EVENTS}
    for phase in Phase:
        moves, late = set(group.MOVES[phase]), set(group.LATE[phase])
        assert moves | late <= kinds
        assert not moves & late


def test_every_phase_leads_to_done_by_a_signal_and_a_stop() -> None:
    for phase in Phase:
        if phase is Phase.DONE:
            continue
        targets = set(group.MOVES[phase][Signal][1])
        assert targets in ({Phase.DONE}, {Phase.ENDING})
    assert group.MOVES[Phase.ENDING][Stopped][1] == (Phase.DONE,)


def test_every_phase_is_reachable_and_drawn() -> None:
    text = of_the_group()
    reached = {Phase.NEW}
    for row in group.MOVES.values():
        reached.update(target for _, targets in row.values() for target in targets)
    assert reached == set(Phase) == set(group.WORDS)
    for phase, row in group.MOVES.items():
        assert f"| {phase.value} | {group.WORDS[phase].meaning} |" in text
        for _, targets in row.values():
            for target in targets:
                assert target is phase or f"{phase.value} --> {target.value} : " in text


@pytest.mark.parametrize("event", [e for e in EVENTS if type(e) not in (Start, Signal)], ids=repr)
def test_before_the_start_only_start_and_signal_are_possible(event: Any) -> None:
    with pytest.raises(IllegalMove, match=r"NEW.*\n.*nothing"):
        step(GroupState(), event, 0.0, GroupPolicy())


def drive(*events: Any, policy: GroupPolicy | None = None) -> group.Step:
    state = GroupState()
    for event in events:
        result = step(state, event, 0.0, policy or GroupPolicy())
        state = result.state
    return result


def test_an_illegal_move_tells_the_history() -> None:
    with pytest.raises(IllegalMove) as caught:
        drive(Start(), RoundReady(GroupRound(1)), Started((5,)), RoundReady(GroupRound(2)))
    text = str(caught.value)
    assert "RoundReady(round=GroupRound(number=2" in text
    assert "NEW --Start--> JOINING" in text
    assert "STARTING --Started--> RUNNING: workers are running (pids 5)" in text


def test_news_of_workers_after_their_stop_is_illegal() -> None:
    """It would be taken for news of the next ones."""
    with pytest.raises(IllegalMove):
        drive(Start(), RoundReady(GroupRound(1)), Started(), WorkerFailed("x"), Stopped(), WorkerFailed("y"))


def test_round_numbers_must_grow() -> None:
    with pytest.raises(IllegalMove, match="numbers must grow"):
        drive(Start(), RoundReady(GroupRound(3)), Started(), WorkerFailed("x"), RoundReady(GroupRound(3)))


def test_the_stop_is_the_first_command_of_a_failure() -> None:
    """What is waited for most goes out first."""
    for policy in (GroupPolicy(), GroupPolicy(RestartPolicy(max_restarts=0))):
        commands = drive(
            Start(), RoundReady(GroupRound(1)), Started(), WorkerFailed("x"), policy=policy
        ).commands
        assert type(commands[0]) is StopWorkers
        assert type(commands[1]) is ReportFailure


def test_the_history_is_bounded() -> None:
    policy = GroupPolicy(RestartPolicy(max_restarts=10_000, backoff_max=0))
    state = step(GroupState(), Start(), 0.0, policy).state
    for number in range(500):
        for event in (RoundReady(GroupRound(number)), Started(), WorkerFailed("x"), Stopped()):
            state = step(state, event, 0.0, policy).state
    assert state.attempt == 500
    assert len(state.recent) < 50
    assert len(state.history.failures) < 50


def test_worker_state_is_torchs() -> None:
    names = ["UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED"]
    assert [s.value for s in WorkerState] == [s.name for s in WorkerState] == names
    assert [s.value for s in WorkerState if WorkerState.is_running(s)] == ["HEALTHY", "UNHEALTHY"]
    assert WorkerState("HEALTHY") == "HEALTHY"
    assert str(WorkerState.INIT) == "WorkerState.INIT"


# ---- the contract under random worlds ----------------------------------------------------------------


class World:
    """A shell that keeps the contract, with the timing and the misfortunes of a seed."""

    def __init__(self, seed: int, policy: GroupPolicy) -> None:
        self.random = random.Random(seed)
        self.policy = policy
        self.state = GroupState()
        self.now = 0.0
        self.round = 0
        self.join = self.start = self.stop = self.barrier = False
        self.alive = False
        self.unkillable = self.kill = False
        self.failed: dict[int, int] = {}
        """Rounds known to have failed, with the attempt that followed."""
        self.wake: float | None = None
        self.finished: Finish | None = None
        self.trail: list[str] = []

    def post(self, event: Any) -> None:
        before = self.state.attempt
        self.trail.append(f"{self.now:.1f} {event!r}")
        made = step(self.state, event, self.now, self.policy)
        self.state = made.state
        assert made.reason
        assert self.state.attempt >= before
        if self.state.attempt > before and not isinstance(event, PeerFailed):
            self.failed[self.round] = self.state.attempt
        for command in made.commands:
            self.obey(command)
        assert self.state.attempt == len(self.failed), "a failure counts once"
        phase = self.state.phase
        assert self.join or phase not in (Phase.JOINING, Phase.REFORMING), "nobody will bring a round"
        assert self.stop or phase not in (Phase.REFORMING, Phase.CLEARING, Phase.ENDING), "nobody stops"
        assert self.start or phase is not Phase.STARTING, "nobody starts"
        assert self.barrier or phase is not Phase.BARRIER, "nobody ends the barrier"
        assert self.wake is not None or phase is not Phase.WAITING, "nobody wakes us"

    def obey(self, command: Any) -> None:
        assert self.finished is None, "nothing may follow Finish"
        match command:
            case Join():
                assert not self.join, "one Join at a time"
                assert command.attempt == self.state.attempt
                self.join = True
            case StartWorkers():
                assert not self.alive, "started over living workers"
                assert not self.stop, "started during a stop"
                assert not self.join, "started without a settled round"
                assert command.round.number == self.round
                assert self.round not in self.failed, "started a round that has failed"
                assert not self.unkillable, "started over a worker that cannot be killed"
                self.start = self.alive = True
            case RecallWorkers():
                assert self.alive
                assert self.state.ending is None, "an ending recalls nobody"
                self.stop = True
            case StopWorkers():
                assert command.grace >= 0
                self.stop = True
                self.kill = self.kill and (command.sig, command.grace) != (signal.SIGKILL, 0.0)
            case EnterBarrier():
                self.barrier = True
            case WakeAt():
                self.wake = command.time
            case Finish():
                assert not self.alive or self.unkillable
                self.finished = command

    def choices(self) -> list[Any]:
        """What the world could do now."""
        pick: list[Any] = []
        if self.join:
            pick += [self.round_ready] * 6 + [self.round_failed]
        if self.stop:
            pick += [self.stopped] * 6
        elif self.start:
            pick += [self.started] * 6
        if self.alive and not self.stop:
            pick += [lambda: self.fail(WorkerFailed("x", 1))] * 2 + [self.succeed]
            pick += [lambda: self.fail(Hang("h")), lambda: self.fail(Uninterruptible((1,)))]
        if self.state.phase is Phase.RUNNING:
            pick += [lambda: self.post(WorkersReenter(self.random.random() < 0.8))] * 2
        if self.barrier:
            pick += [self.barrier_done] * 2
        if self.wake is not None:
            pick += [self.tick] * 4
        pick += [lambda: self.post(MembershipChanged(waiting=1)), self.peer_failed, self.peer_failed]
        pick.append(self.round_over)
        if self.random.random() < 0.1:
            pick.append(lambda: self.post(Signal(signal.SIGTERM)))
        return pick

    def round_over(self) -> None:
        """The rendezvous ends a round, perhaps an old one, perhaps without time for a grace."""
        at_once = self.random.random() < 0.5
        number = self.round - self.random.choice([0, 0, 1])
        dying = self.state.phase in (Phase.REFORMING, Phase.CLEARING, Phase.ENDING)
        self.kill = at_once and (dying or number == self.round) and (self.alive or self.stop)
        self.post(RoundOver(number, "lost c", at_once))
        assert not self.kill, "what must not live on is killed"

    def peer_failed(self) -> None:
        """News of the round at hand, of the one that others are already in, or once more of an old one."""
        number = self.random.choice([*self.failed, self.round, self.round + 1])
        if self.random.random() < 0.05:
            return self.post(PeerFailed("b", number, self.state.attempt, "p", final=True))
        if self.state.phase not in (Phase.ENDING, Phase.DONE):
            self.failed.setdefault(number, self.state.attempt + 1)
        delay = self.random.choice([0.0, 2.0])
        return self.post(PeerFailed("b", number, self.failed.get(number, 0), "p", delay=delay))

    def round_ready(self) -> None:
        self.join = False
        self.round += 1
        self.post(RoundReady(GroupRound(self.round, ("a", "b"), attempt=self.state.attempt)))

    def round_failed(self) -> None:
        self.join = False
        self.post(RoundFailed(self.random.choice(["closed", "timeout", "graceful", "error"])))

    def stopped(self) -> None:
        self.stop = self.start = self.alive = False
        self.unkillable = self.random.random() < 0.03
        self.post(Stopped(("pid 7",) if self.unkillable else ()))

    def started(self) -> None:
        self.start = False
        failed = self.random.random() < 0.1
        self.alive = not failed
        self.post(StartFailed("no", retry=self.random.random() < 0.8) if failed else Started((1,)))

    def fail(self, event: Any) -> None:
        self.post(event)

    def succeed(self) -> None:
        self.alive = self.start = False
        self.post(AllSucceeded())

    def barrier_done(self) -> None:
        self.barrier = False
        self.post(BarrierDone(round=self.random.choice([self.round, None])))

    def tick(self) -> None:
        assert self.wake is not None
        self.now, self.wake = max(self.now, self.wake), None
        self.post(Tick())

    def run(self, steps: int) -> None:
        self.post(Start())
        for _ in range(steps):
            if self.finished:
                return
            self.now += self.random.choice([0.0, 0.1, 3.0, 20.0])
            options = self.choices()
            assert options, f"stuck in {self.state.phase}"
            self.random.choice(options)()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.sampled_from([None, 30.0]), st.integers(0, 2))
def test_any_world_that_keeps_the_contract_is_served_and_ends(
    seed: int, budget: int, window: float | None, free: int
) -> None:
    reenter = 5.0 if seed % 2 else 0.0
    world = World(seed, GroupPolicy(RestartPolicy(budget, window=window, free=free), reenter_timeout=reenter))
    try:
        world.run(60)
        # Whatever the state, two signals and the answers still owed lead to the end.
        if world.finished is None:
            world.post(Signal(15))
        if world.finished is None:
            before = world.state
            again = step(before, Signal(15), world.now, world.policy).commands
            assert before.signals > 1 or StopWorkers(signal.SIGKILL, 0.0) in again, "the second signal kills"
        if world.finished is None:
            world.stopped()
    except (AssertionError, IllegalMove) as error:
        raise AssertionError("\n".join([str(error), *world.trail])) from error
    assert world.finished is not None
    assert world.state.phase is Phase.DONE
    if world.finished.outcome is Outcome.FAILED:
        assert world.finished.state is WorkerState.FAILED
    for event in EVENTS[1:]:
        assert step(world.state, event, world.now, world.policy).commands == ()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5), st.lists(st.floats(0, 40), min_size=7, max_size=12))
def test_own_failures_never_get_more_restarts_than_the_budget(budget: int, lives: list[float]) -> None:
    policy = GroupPolicy(RestartPolicy(budget))
    state, now, starts = step(GroupState(), Start(), 0.0, policy).state, 0.0, 0
    for number, lived in enumerate(lives):
        result = step(state, RoundReady(GroupRound(number)), now, policy)
        if result.state.phase is Phase.WAITING:
            now = result.state.not_before
            result = step(result.state, Tick(), now, policy)
        assert [type(c) for c in result.commands] == [StartWorkers]
        starts += 1
        state = step(result.state, Started((1,)), now, policy).state
        now += lived
        state = step(state, WorkerFailed("x", 1), now, policy).state
        state = step(state, Stopped(), now, policy).state
        if state.phase is Phase.DONE:
            break
    assert state.phase is Phase.DONE
    assert starts == budget + 1


if __name__ == "__main__":
    for trace in sorted(TRACES.glob("*.txt")):
        trace.write_text(replay(trace.read_text()))
