"""The leader's decisions and the node's steps, one rule at a time; whole stories are in tests/simulation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core import participant_events as happen
from phalanx.core.participant import Participant
from phalanx.core.participant_events import End, Send, StartRound, StopRound
from phalanx.core.rounds import (
    ACTIVE,
    CLOSED,
    FORMING,
    LeaderView,
    Member,
    NodeInfo,
    NodeRecord,
    Options,
    Result,
    Round,
    RoundDecision,
    assign_ranks,
    decide,
    decode_node,
    decode_round,
    encode,
    natural,
)
from phalanx.core.store_commands import (
    Change,
    Delete,
    Entry,
    Get,
    Grant,
    KeepAlive,
    Put,
    Reply,
    Txn,
    Watch,
    When,
)

OPTIONS = Options(min_nodes=2, max_nodes=3, last_call=2.0, settle=0.2, join_timeout=30.0, max_restarts=1)


class Job:
    """A view of the store, written key by key."""

    def __init__(self, options: Options = OPTIONS) -> None:
        self.options, self.view = options, LeaderView(options, term=7)
        self.revision, self.now = 10, 0.0
        self.view.learn(0.0, (), reset=True)

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        entry = Entry(key, value, self.revision, self.revision)
        self.view.learn(self.now, (Change(entry),))

    def node(self, name: str, ready: int = 1, leaving: str = "", **info: int) -> None:
        self.put(f"node/{name}", encode(NodeRecord(NodeInfo(name, name, **info), ready, leaving)))

    def lose(self, name: str) -> None:
        self.revision += 1
        self.view.learn(self.now, (Change(Entry(f"node/{name}", mod=self.revision), True),))

    def ready(self, name: str, ready: int) -> None:
        """The same life of a node, with a new record."""
        self.revision += 1
        seen = self.view.nodes[name]
        entry = Entry(
            f"node/{name}", encode(seen.record._replace(ready=ready)), seen.incarnation, self.revision
        )
        self.view.learn(self.now, (Change(entry),))

    def decide(self) -> RoundDecision:
        return decide(self.now, self.view, self.options)

    def published(self) -> Round:
        """Decide, and carry out what was decided."""
        decision = self.decide()
        (txn,) = decision.commands
        assert isinstance(txn, Txn)
        self.revision += 1
        changes = tuple(Change(Entry(p.key, p.value, mod=self.revision)) for p in txn.puts)
        self.view.learn(self.now, changes)
        for delete in txn.deletes:
            if delete.prefix:
                self.view.results.clear()
        return decode_round(txn.puts[0].value)

    def running(self, *names: str) -> Job:
        for name in names:
            self.node(name)
        self.now += self.options.last_call
        assert self.published().phase == ACTIVE
        return self


def names(round_: Round) -> list[str]:
    return [m.name for m in round_.members]


def test_natural_order() -> None:
    assert sorted(["node10", "node2", "node", "b1", "node2a10", "node2a9"], key=natural) == [
        "b1", "node", "node2", "node2a9", "node2a10", "node10",
    ]  # fmt: skip


def test_waiting_says_who_is_here_and_how_long_it_will_wait() -> None:
    job = Job(replace(OPTIONS, min_nodes=4, max_nodes=4))
    for name in ("node-c", "node-a", "node-b"):
        job.node(name)
    job.now = 3.0
    decision = job.decide()
    assert decision == RoundDecision(
        (), "3 of 4 nodes here (node-a node-b node-c), waiting for 1 more, 27 s left", 30.0
    )
    job.now = 30.0
    closed = job.published()
    assert (closed.phase, closed.outcome) == (CLOSED, "timeout")


def test_last_call_counts_from_the_moment_min_is_reached() -> None:
    job = Job()
    job.node("a")
    job.now = 5.0
    job.node("b")
    job.now = 6.9
    assert job.decide().commands == ()
    assert job.decide().wake_at == 7.0
    job.now = 7.0
    assert names(job.published()) == ["a", "b"]


def test_max_completes_at_once_and_the_rest_are_spares() -> None:
    job = Job()
    for name in ("d", "c", "b", "a"):
        job.node(name)
    assert names(job.published()) == ["b", "c", "d"]
    assert job.decide().reason == "round 1: 3 nodes running"
    job.ready("a", 2)
    assert job.decide() == RoundDecision((), "round 1: 3 nodes running, 1 spare")


def test_a_late_node_makes_all_re_form_after_a_moment_and_ranks_stay() -> None:
    job = Job(replace(OPTIONS, max_nodes=4)).running("b", "c")
    job.node("a", ready=2)
    assert job.decide().commands == ()
    job.now += 0.2
    forming = job.published()
    assert (forming.number, forming.phase, forming.restarts) == (2, FORMING, 0)
    assert job.decide().commands == ()  # b and c still run
    job.ready("b", 2)
    job.ready("c", 2)
    assert names(job.published()) == ["b", "c", "a"]


def test_nothing_starts_while_a_member_that_has_its_lease_may_still_run() -> None:
    job = Job().running("a", "b", "c")
    job.lose("c")
    assert job.published().reason == "lost c"
    job.ready("a", 2)
    waiting = job.decide()
    assert waiting.commands == ()
    assert "workers still stopping on b" in waiting.reason
    job.ready("b", 2)
    assert names(job.published()) == ["a", "b"]


def test_the_same_name_with_a_new_key_is_somebody_else() -> None:
    job = Job().running("a", "b")
    job.node("b", ready=2)  # slept, lost its key, came back
    forming = job.published()
    assert (forming.phase, forming.reason) == (FORMING, "lost b")


def test_failures_cost_one_restart_per_round_and_name_the_first() -> None:
    job = Job().running("a", "b")
    job.put("result/1/b", encode(Result(False, "exit code 3")))
    job.put("result/1/a", encode(Result(False, "connection reset")))
    forming = job.published()
    assert (forming.restarts, forming.cause) == (1, ("b", "b", "exit code 3"))
    assert forming.reason == "workers on b failed, 0 restarts left"
    for name in ("a", "b"):
        job.ready(name, 2)
    assert job.published().phase == ACTIVE
    job.put("result/1/a", encode(Result(False, "late news of an old round")))
    assert job.decide().commands == ()
    job.put("result/2/a", encode(Result(False, "again")))
    closed = job.published()
    assert (closed.phase, closed.outcome, closed.cause[2]) == (CLOSED, "failed", "again")
    assert job.decide().commands == ()


def test_success_needs_all_who_are_still_there() -> None:
    job = Job().running("a", "b", "c")
    job.put("result/1/a", encode(Result(True)))
    job.lose("a")  # done: not a loss
    job.put("result/1/b", encode(Result(True)))
    assert job.decide().commands == ()
    job.lose("c")
    closed = job.published()
    assert (closed.outcome, closed.reason) == (
        "succeeded",
        "workers of 2 nodes succeeded; lost before they reported: c",
    )


def test_drain_and_leave_cost_nothing() -> None:
    job = Job().running("a", "b", "c")
    job.put("drain/b", b"")
    forming = job.published()
    assert (forming.out, forming.restarts, forming.reason) == (("b",), 0, "b leaving")
    for name in ("a", "c"):
        job.ready(name, 2)
    job.lose("b")
    active = job.decide().commands[0]
    assert isinstance(active, Txn)
    assert Delete("drain/b") in active.deletes
    assert names(job.published()) == ["a", "c"]


def test_every_write_is_fenced_by_term_and_round() -> None:
    job = Job().running("a", "b")
    job.put("close/1", b"enough")
    (txn,) = job.decide().commands
    assert isinstance(txn, Txn)
    assert [(w.key, w.what, w.number) for w in txn.when] == [
        ("ctl/leader", "create", 7),
        ("ctl/round", "mod", job.view.round_mod),
    ]


def test_ranks_given_then_sticky_then_scheduler_then_name() -> None:
    def order(*nodes: NodeInfo, before: dict[str, int] | None = None) -> list[str]:
        return [n.id for n in assign_ranks(list(nodes), before or {})]

    a, b, c = NodeInfo("a", "a"), NodeInfo("b", "b"), NodeInfo("c", "c")
    assert order(c, a, b) == ["a", "b", "c"]
    assert order(c, a, b, before={"c": 0, "a": 2}) == ["c", "b", "a"]
    assert order(a, b, c._replace(rank=0)) == ["c", "a", "b"]
    assert order(a._replace(position=9), b._replace(position=2), c) == ["b", "a", "c"]
    assert order(a._replace(rank=1), b._replace(rank=1), c._replace(rank=7)) == ["b", "a", "c"]
    assert order(a, b, before={"a": 5, "b": 1}) == ["a", "b"]


info = st.builds(
    NodeInfo, st.integers(0, 40).map(str), st.sampled_from(["n1", "n2", "n10"]), rank=st.integers(-1, 6),
    position=st.integers(-1, 4),
)  # fmt: skip


@given(
    st.lists(info, max_size=8, unique_by=lambda n: n.id),
    st.dictionaries(st.integers(0, 40).map(str), st.integers(0, 8)),
    st.randoms(),
)
def test_any_ranks_are_a_permutation_whatever_the_order_of_arrival(
    nodes: list, before: dict, random: object
) -> None:
    ranked = assign_ranks(nodes, before)
    assert sorted(n.id for n in ranked) == sorted(n.id for n in nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign_ranks(shuffled, before) == ranked


class Node:
    """A participant with a store that says yes to everything."""

    def __init__(self, options: Options = OPTIONS) -> None:
        self.it = Participant(NodeInfo("me", "me"), options)
        self.revision, self.log = 50, []
        self.answer(0.0, self.it.start(0.0))

    def step(self, now: float, event: happen.Event, *, answers: bool = True) -> list:
        actions = self.it.step(now, event)
        self.log += actions
        if answers:
            self.answer(now, actions)
        return actions

    def answer(self, now: float, actions: list) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.step(now, happen.Answer(action.tag, self.reply(action.command)))

    def reply(self, command: object) -> Reply:
        self.revision += 1
        match command:
            case Watch():
                leader = Entry("ctl/leader", b"boss", 5, 5, 99)
                return Reply(True, self.revision, (leader,))
            case Grant():
                return Reply(True, self.revision, number=3)
            case Txn(when, (Put(key, value, lease), *_)):
                entry = Entry(key, value, 42, self.revision, lease) if key == when[0].key else None
                return Reply(True, self.revision, (entry or Entry(when[0].key, b"", 42, 42, 3),))
        return Reply(True, self.revision)

    def active(self, now: float, number: int = 1, incarnation: int = 42) -> list:
        self.revision += 1
        me = Member("me", incarnation, "me", "", 1, "default")
        value = encode(Round(number, ACTIVE, (me,), reason=f"round {number}"))
        entry = Entry("ctl/round", value, 1, self.revision)
        return self.step(now, happen.Noticed(happen.Notice(1, (Change(entry),), self.revision)))


def late(job: int, phase: str, mod: int) -> Entry:
    value = encode(Round(3, phase, reason="done", outcome="succeeded", restarts=1, job=job))
    return Entry("ctl/round", value, 1, mod)


class Latecomer:
    """A node whose first look finds a round, of a job that has ended or not; the test plays the store."""

    def __init__(self, phase: str = CLOSED, *more: Entry) -> None:
        self.it = Participant(NodeInfo("me", "me"), OPTIONS)
        watch, grant = self.it.start(0.0)
        assert isinstance(grant, Send)
        self.it.step(0.0, happen.Answer(grant.tag, Reply(True, 20, number=3)))
        assert isinstance(watch, Send)
        self.asked = self.answer(watch, Reply(True, 20, (*more, late(1, phase, 20))))

    def answer(self, asked: object, reply: Reply) -> Send | End:
        """What comes out of an answer: exactly one thing."""
        assert isinstance(asked, Send)
        (action,) = self.it.step(0.1, happen.Answer(asked.tag, reply))
        assert isinstance(action, Send | End)
        return action


def test_who_finds_the_job_closed_and_nobody_left_begins_the_next_one() -> None:
    node = Latecomer()
    assert isinstance(node.asked, Send)
    assert node.asked.command == Get("node/", prefix=True)
    claim = node.answer(node.asked, Reply(True, 21))
    assert isinstance(claim, Send)
    assert isinstance(claim.command, Txn)
    assert claim.command.when == (When("ctl/round", "mod", 20),)
    fresh = decode_round(claim.command.puts[0].value)
    assert (fresh.number, fresh.phase, fresh.restarts, fresh.job) == (4, FORMING, 0, 2)
    assert {d.key for d in claim.command.deletes} == {"result/", "drain/", "close/", "members", "status"}
    entry = Entry("ctl/round", claim.command.puts[0].value, 1, 22)
    register = node.answer(claim, Reply(True, 22, (entry,)))
    assert isinstance(register, Send)
    assert isinstance(register.command, Txn)
    assert decode_node(register.command.puts[0].value).job == 2


def test_who_finds_a_round_without_a_leader_or_any_node_begins_it_anew_with_all_restarts() -> None:
    node = Latecomer(ACTIVE)
    assert isinstance(node.asked, Send)
    assert node.asked.command == Get("node/", prefix=True)
    claim = node.answer(node.asked, Reply(True, 21))
    assert isinstance(claim, Send)
    assert isinstance(claim.command, Txn)
    fresh = decode_round(claim.command.puts[0].value)
    assert (fresh.number, fresh.phase, fresh.restarts, fresh.job) == (4, FORMING, 0, 1)


def test_who_finds_a_round_with_a_leader_asks_nothing_but_to_be_in() -> None:
    node = Latecomer(ACTIVE, Entry("ctl/leader", b"boss", 5, 5, 99))
    assert isinstance(node.asked, Send)
    assert isinstance(node.asked.command, Txn)
    assert node.asked.command.puts[0].key == "node/me"


def test_who_finds_the_job_closed_and_nodes_still_leaving_has_its_end() -> None:
    node = Latecomer()
    check = node.answer(node.asked, Reply(True, 21, (Entry("node/other", b"", 5, 5, 9),)))
    assert isinstance(check, Send)
    assert check.command == Txn((When("ctl/round", "mod", 20),))
    end = node.answer(check, Reply(True, 21, (late(1, CLOSED, 20),)))
    assert isinstance(end, End)
    assert (end.outcome, end.reason) == ("succeeded", "done")


def test_nodes_of_the_next_job_are_not_taken_for_leftovers_of_the_last() -> None:
    node = Latecomer()  # somebody else was quicker, registered, and our watch has not told us yet
    check = node.answer(node.asked, Reply(True, 30, (Entry("node/other", b"", 29, 29, 9),)))
    register = node.answer(check, Reply(False, 30, (late(2, FORMING, 28),), error="condition"))
    assert isinstance(register, Send)
    assert isinstance(register.command, Txn)
    assert register.command.puts[0].key == "node/me"


def test_a_look_that_is_older_than_the_end_of_the_job_does_not_count() -> None:
    node = Latecomer()
    notice = happen.Notice(1, (Change(late(2, CLOSED, 25)),), 25)
    assert node.it.step(0.1, happen.Noticed(notice)) == []
    again = node.answer(node.asked, Reply(True, 21))
    assert isinstance(again, Send)
    assert again.command == Get("node/", prefix=True)


def test_a_node_does_not_pass_from_its_job_into_the_next() -> None:
    node = Node()
    node.active(0.1)
    node.step(0.2, happen.WorkersStopped(1))
    node.revision += 1
    told = Change(late(2, FORMING, node.revision))  # the end of its own job is forgotten history
    actions = node.step(0.3, happen.Noticed(happen.Notice(1, (told,), node.revision, reset=True)))
    assert [a.outcome for a in actions if isinstance(a, End)] == ["replaced"]
    both = Node()
    both.active(0.1)
    both.step(0.2, happen.WorkersStopped(1))
    changes = (Change(late(1, CLOSED, 900)), Change(late(2, FORMING, 901)))
    actions = both.step(0.3, happen.Noticed(happen.Notice(1, changes, 901)))
    assert [a.outcome for a in actions if isinstance(a, End)] == ["succeeded"]


def test_the_leader_has_no_ear_for_nodes_and_requests_of_another_job() -> None:
    job = Job(replace(OPTIONS, min_nodes=1))
    job.put("ctl/round", encode(Round(4, job=2)))
    stray = NodeRecord(NodeInfo("stray", "stray"), 4, job=1)
    job.put("node/stray", encode(stray))
    job.put("close/1", b"of the job before")
    job.put("node/a", encode(stray._replace(info=NodeInfo("a", "a"), job=2)))
    job.now += OPTIONS.last_call
    round_ = job.published()
    assert (round_.phase, names(round_), round_.job) == (ACTIVE, ["a"], 2)
    job.put("close/2", b"of this one")
    assert job.published().outcome == "closed"


def test_a_node_starts_only_as_the_incarnation_that_was_chosen() -> None:
    node = Node()
    assert not any(isinstance(a, StartRound) for a in node.active(0.1, incarnation=41))
    assert any(isinstance(a, StartRound) for a in node.active(0.2, number=2))


def test_silence_fences_before_the_lease_can_be_over_and_answers_put_it_off() -> None:
    node = Node()
    node.active(0.1)
    for second in range(1, 20):
        assert not any(isinstance(a, StopRound) for a in node.step(float(second), happen.ClockTick()))
    wake = node.it.wake_at()
    assert wake is not None
    last_sent = max(t for t in (2.0 * n for n in range(10)) if t <= 19.0)
    while not (
        stops := [a for a in node.step(wake, happen.ClockTick(), answers=False) if isinstance(a, StopRound)]
    ):
        wake = node.it.wake_at()
        assert wake is not None
    assert stops[0].at_once
    assert wake <= last_sent + OPTIONS.ttl


def test_a_refused_connection_lets_workers_run_on_and_silence_does_not() -> None:
    def stops_at(refused: bool) -> float:
        node = Node()
        node.active(0.1)
        node.step(1.0, happen.Disconnected())
        for tenth in range(11, 600):
            now = tenth / 10
            events = (
                [happen.Refused(now), happen.ClockTick()] if refused and now < 20 else [happen.ClockTick()]
            )
            for event in events:
                if any(isinstance(a, StopRound) for a in node.step(now, event, answers=False)):
                    return now
        raise AssertionError("never")

    assert stops_at(refused=False) < 1.0 + OPTIONS.linger
    assert 20 < stops_at(refused=True) < 20 + OPTIONS.ttl


def test_after_a_sleep_the_fence_comes_before_the_news() -> None:
    node = Node()
    node.active(0.1)
    actions = node.active(100.0, number=2)
    assert isinstance(actions[0], StopRound)
    assert actions[0].at_once
    assert not any(isinstance(a, StartRound) for a in actions)


def test_a_lost_store_ends_the_node_with_the_reason() -> None:
    node = Node()
    node.active(0.1)
    actions = node.step(1.0, happen.StoreLost("its data are gone"))
    assert isinstance(actions[0], StopRound)
    assert actions[-1] == End("store", "its data are gone", node.it.round)
    assert node.step(2.0, happen.ClockTick()) == []
    assert node.it.wake_at() is None


def test_keep_alives_are_three_to_a_lease() -> None:
    node = Node()
    node.active(0.1)
    for tenth in range(600):
        node.step(tenth / 10, happen.ClockTick())
    beats = [a for a in node.log if isinstance(a, Send) and isinstance(a.command, KeepAlive)]
    assert 28 <= len(beats) <= 31
