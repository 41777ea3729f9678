"""The leader's decisions and the node's steps, one rule at a time; whole stories are in tests/simulation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.group.events import RoundOver
from phalanx.core.group.ranks import Offsets, natural_key
from phalanx.core.rounds.leader_view import LeaderView, Options
from phalanx.core.rounds.participant import Participant
from phalanx.core.rounds.participant_events import (
    Answer,
    ClockTick,
    Disconnected,
    End,
    Event,
    LeaveRequested,
    Noticed,
    Send,
    StartRound,
    StoreLost,
    WorkersStopped,
)
from phalanx.core.rounds.records import (
    ACTIVE,
    CLOSED,
    FORMING,
    Member,
    MemberList,
    NodeInfo,
    NodeRecord,
    Place,
    Result,
    Round,
    decode_members,
    decode_node,
    decode_place,
    decode_result,
    decode_round,
    encode,
    printable,
)
from phalanx.core.rounds.requests import CONTROL, PLACE
from phalanx.core.rounds.rounds import RoundDecision, assign_ranks, decide
from phalanx.core.rounds.store_commands import (
    Change,
    Delete,
    Entry,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Revoke,
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
        lease = 5 if key.startswith("node/") else 0
        entry = Entry(key, value, self.revision, self.revision, lease)
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
            f"node/{name}", encode(seen.record._replace(ready=ready)), seen.incarnation, self.revision, 5
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
        published = decode_round(next(p.value for p in txn.puts if p.key == "ctl/round"))
        assert published is not None
        return published

    def members(self) -> list[str]:
        """Publish the next round, which is active; its members by rank."""
        assert self.published().phase == ACTIVE
        return [m.name for m in self.view.members.nodes]

    def running(self, *names: str) -> Job:
        for name in names:
            self.node(name)
        self.now += self.options.last_call
        assert self.published().phase == ACTIVE
        return self


def test_natural_order() -> None:
    assert sorted(["node10", "node2", "node", "b1", "node2a10", "node2a9"], key=natural_key) == [
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


def test_the_job_ends_at_once_when_too_few_of_the_nodes_that_were_started_are_left() -> None:
    job = Job(replace(OPTIONS, all_nodes=3, ttl=6.0))
    job.node("a")
    assert job.decide().commands == (), "two more can come"
    job.running("b", "c")
    job.lose("b")
    assert job.published().phase == FORMING
    for name in ("a", "c"):
        job.ready(name, 2)
    assert job.members() == ["a", "c"], "enough are left"
    job.now = 100.0
    job.lose("c")
    assert job.published().phase == FORMING
    job.ready("a", 3)
    waits = job.decide()
    assert waits.commands == ()
    assert waits.wake_at == 112.0, "its network may have failed: it has two leases to return in"
    job.now = 112.0
    assert job.decide().reason == (
        "1 of 2 to 3 nodes here (a), waiting for 1 more; no other node can come: 2 of the 3 nodes that were "
        "started are gone; before that: lost c"
    )
    assert job.published().outcome == "timeout"


def test_a_node_that_leaves_on_purpose_is_not_waited_for() -> None:
    job = Job(replace(OPTIONS, all_nodes=2))
    job.node("a")
    job.node("b")
    job.node("b", leaving="preempted")
    job.lose("b")
    assert "no other node can come: 1 of the 2 nodes that were started is gone" in job.decide().reason


def test_last_call_counts_from_the_moment_min_is_reached() -> None:
    job = Job()
    job.node("a")
    job.now = 5.0
    job.node("b")
    job.now = 6.9
    assert job.decide().commands == ()
    assert job.decide().wake_at == 7.0
    job.now = 7.0
    assert job.members() == ["a", "b"]


def test_max_completes_at_once_and_the_rest_are_spares() -> None:
    job = Job()
    for name in ("d", "c", "b", "a"):
        job.node(name)
    assert job.members() == ["b", "c", "d"]
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
    assert job.members() == ["b", "c", "a"]


def test_nothing_starts_while_a_member_that_has_its_lease_may_still_run() -> None:
    job = Job().running("a", "b", "c")
    job.lose("c")
    assert job.published().reason == "lost c"
    job.ready("a", 2)
    waiting = job.decide()
    assert waiting.commands == ()
    assert "workers still stopping on b" in waiting.reason
    job.ready("b", 2)
    assert job.members() == ["a", "b"]


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


def test_a_round_that_a_node_asks_for_costs_what_the_node_has_counted() -> None:
    job = Job().running("a", "b")
    job.put("result/1/b", encode(Result(False, "detail", what="asked", request=0)))
    forming = job.published()
    assert (forming.phase, forming.restarts, forming.reason) == (FORMING, 0, "b: asked")
    for name in ("a", "b"):
        job.ready(name, 2)
    assert job.published().phase == ACTIVE
    job.put("result/2/a", encode(Result(False, "detail", what="asked and counted", request=1)))
    forming = job.published()
    assert (forming.restarts, forming.cause) == (1, ("a", "a", "detail"))


def test_a_failure_beats_a_request_and_a_request_a_success() -> None:
    job = Job().running("a", "b")
    job.put("result/1/a", encode(Result(False, what="asked", request=0)))
    job.put("result/1/b", encode(Result(True)))
    assert job.published().reason == "a: asked"
    job = Job().running("a", "b")
    job.put("result/1/a", encode(Result(False, what="asked", request=0)))
    job.put("result/1/b", encode(Result(False, "exit code 3")))
    assert (forming := job.published()).restarts == 1
    assert forming.reason == "workers on b failed, 0 restarts left"


def test_a_delay_after_a_failure_is_the_whole_jobs_newcomers_included() -> None:
    job = Job().running("a", "b")
    job.put("result/1/b", encode(Result(False, "exit code 3", delay=20.0)))
    begin = job.now
    assert job.published().delay == 20.0
    for name in ("a", "b"):
        job.ready(name, 2)
    job.now += 5.0
    job.node("c", ready=2)  # it has not seen the failure
    decision = job.decide()
    assert (decision.commands, decision.wake_at) == ((), begin + 20.0)
    assert decision.reason == "3 of 2 to 3 nodes here (a b c), back-off for 15 s"
    job.put("drain/c", b"")
    assert job.published().phase == FORMING, "c has to know"
    job.now = begin + 19.9
    assert not job.decide().commands, "it does not begin again"
    job.now = begin + 20.0
    active = job.published()
    assert (active.phase, active.nodes, active.delay) == (ACTIVE, 2, 0.0)


def test_a_new_leader_counts_a_delay_from_when_it_saw_the_round() -> None:
    round = Round(2, reason="workers on b failed", delay=20.0)
    view = LeaderView(OPTIONS, 8, round=round, since=100.0)
    members = MemberList(
        "7.1.0", tuple(Member(*one, "", 1, "default") for one in (("a", 3, "a"), ("b", 4, "b"))), 1
    )
    found = {"ctl/round": encode(round._replace(term=7)), "members": encode(members)}
    entries = [Entry(key, value, 5, 5) for key, value in found.items()]
    for name, created in (("a", 3), ("c", 6)):  # b was the leader
        entries.append(Entry(f"node/{name}", encode(NodeRecord(NodeInfo(name, name), 2)), created, 6, 5))
    view.learn(112.0, tuple(map(Change, entries)), reset=True)
    assert decide(112.0, view, OPTIONS).wake_at == 120.0
    assert decide(120.0, view, OPTIONS).commands


def test_success_needs_the_report_of_every_member() -> None:
    job = Job().running("a", "b", "c")
    job.put("result/1/a", encode(Result(True)))
    job.lose("a")  # done: not a loss
    job.put("result/1/b", encode(Result(True)))
    assert job.decide().commands == ()
    job.lose("c")
    forming = job.published()
    assert (forming.phase, forming.restarts) == (FORMING, 0)
    assert forming.reason == "lost c, which had not reported success"
    job.ready("b", 2)
    job.node("d", 2)
    assert job.published().phase == ACTIVE
    for name in ("b", "d"):
        job.put(f"result/2/{name}", encode(Result(True)))
    closed = job.published()
    assert (closed.outcome, closed.reason) == ("succeeded", "workers of 2 nodes succeeded")


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
    assert job.members() == ["a", "c"]


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

    def step(self, now: float, event: Event, *, answers: bool = True) -> list:
        actions = self.it.step(now, event)
        self.log += actions
        if answers:
            self.answer(now, actions)
        return actions

    def answer(self, now: float, actions: list) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.step(now, Answer(action.tag, self.reply(action.command)))

    def reply(self, command: object) -> Reply:
        self.revision += 1
        match command:
            case Watch():
                leader = Entry("ctl/leader", b"boss", 5, 5, 99)
                return Reply(True, self.revision, (leader,) if command.watch == CONTROL else ())
            case Grant():
                return Reply(True, self.revision, number=3)
            case Txn(when, (Put(key, value, lease), *_)):
                entry = Entry(key, value, 42, self.revision, lease) if key == when[0].key else None
                return Reply(True, self.revision, (entry or Entry(when[0].key, b"", 42, 42, 3),))
        return Reply(True, self.revision)

    def active(self, now: float, number: int = 1, incarnation: int = 42) -> list:
        self.revision += 1
        stamp = f"7.{number}"
        place = Entry("place/me", encode(Place(stamp, incarnation, 0)), 1, self.revision)
        first = self.step(now, Noticed(Notice(PLACE, (Change(place),), self.revision)))
        value = encode(Round(number, ACTIVE, 1, reason=f"round {number}", stamp=stamp, term=5))
        entry = Entry("ctl/round", value, 1, self.revision)
        return first + self.step(now, Noticed(Notice(CONTROL, (Change(entry),), self.revision)))


def late(job: int, phase: str, mod: int) -> Entry:
    value = encode(
        Round(3, phase, reason="done", outcome="succeeded", restarts=1, job=job, term=5, stamp="5.1")
    )
    return Entry("ctl/round", value, 1, mod)


def test_a_node_that_leaves_while_it_joins_gives_its_lease_back() -> None:
    it = Participant(NodeInfo("me", "me"), OPTIONS)
    grant = it.start(0.0)[0]
    assert isinstance(grant, Send)
    assert it.step(0.1, LeaveRequested("SIGTERM")) == [], "the store may have registered it"
    joined = Reply(True, 2, (Entry("ctl/round"), Entry("node/me", b"", 2, 2, 3)), 3)
    *_, revoke = it.step(0.2, Answer(grant.tag, joined))
    assert isinstance(revoke, Send)
    assert revoke.command == Revoke(3)
    (end,) = it.step(0.3, Answer(revoke.tag, Reply(True, 3)))
    assert isinstance(end, End)
    assert end.outcome == "left"


class Latecomer:
    """A node whose first look finds a round, of a job that has ended or not; the test plays the store."""

    def __init__(self, phase: str = CLOSED, *more: Entry) -> None:
        self.it = Participant(NodeInfo("me", "me"), OPTIONS)
        grant, watch, placed = self.it.start(0.0)
        assert isinstance(placed, Send)
        self.it.step(0.0, Answer(placed.tag, Reply(True, 20)))
        assert isinstance(grant, Send)
        entries = late(1, phase, 20), Entry("node/me")
        self.it.step(0.0, Answer(grant.tag, Reply(False, 20, entries, 3, "condition")))
        assert isinstance(watch, Send)
        self.asked = self.answer(watch, Reply(True, 20, (*more, late(1, phase, 20))))

    def answer(self, asked: object, reply: Reply) -> Send | End:
        """What comes out of an answer: exactly one thing."""
        assert isinstance(asked, Send)
        (action,) = self.it.step(0.1, Answer(asked.tag, reply))
        assert isinstance(action, Send | End)
        return action


def test_who_finds_the_job_closed_and_nobody_left_begins_the_next_one() -> None:
    node = Latecomer()
    assert isinstance(node.asked, Send)
    assert node.asked.command == Get("node/", prefix=True)
    claim = node.answer(node.asked, Reply(True, 21))
    assert isinstance(claim, Send)
    assert isinstance(claim.command, Txn)
    assert claim.command.when == (When("ctl/round", "mod", 20), When("ctl/leader", "mod", 0))
    fresh = decode_round(claim.command.puts[0].value)
    assert fresh is not None
    assert (fresh.number, fresh.phase, fresh.restarts, fresh.job) == (4, FORMING, 0, 2)
    assert {d.key for d in claim.command.deletes} == {
        "result/", "slow/", "drain/", "close/", "ctl/meeting/", "members", "status",
    }  # fmt: skip
    entry = Entry("ctl/round", claim.command.puts[0].value, 1, 22)
    register = node.answer(claim, Reply(True, 22, (entry,)))
    assert isinstance(register, Send)
    assert isinstance(register.command, Txn)
    record = decode_node(register.command.puts[0].value)
    assert record is not None
    assert record.job == 2


def test_who_finds_a_round_without_a_leader_or_any_node_begins_it_anew_with_all_restarts() -> None:
    node = Latecomer(ACTIVE)
    assert isinstance(node.asked, Send)
    assert node.asked.command == Get("node/", prefix=True)
    claim = node.answer(node.asked, Reply(True, 21))
    assert isinstance(claim, Send)
    assert isinstance(claim.command, Txn)
    fresh = decode_round(claim.command.puts[0].value)
    assert fresh is not None
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
    notice = Notice(1, (Change(late(2, CLOSED, 25)),), 25)
    assert node.it.step(0.1, Noticed(notice)) == []
    again = node.answer(node.asked, Reply(True, 21))
    assert isinstance(again, Send)
    assert again.command == Get("node/", prefix=True)


def test_a_node_does_not_pass_from_its_job_into_the_next() -> None:
    node = Node()
    node.active(0.1)
    node.step(0.2, WorkersStopped(1))
    node.revision += 1
    told = Change(late(2, FORMING, node.revision))  # the end of its own job is forgotten history
    actions = node.step(0.3, Noticed(Notice(1, (told,), node.revision, reset=True)))
    assert [a.outcome for a in actions if isinstance(a, End)] == ["replaced"]
    both = Node()
    both.active(0.1)
    both.step(0.2, WorkersStopped(1))
    changes = (Change(late(1, CLOSED, 900)), Change(late(2, FORMING, 901)))
    actions = both.step(0.3, Noticed(Notice(1, changes, 901)))
    assert [a.outcome for a in actions if isinstance(a, End)] == ["succeeded"]


def test_the_leader_has_no_ear_for_nodes_and_requests_of_another_job() -> None:
    job = Job(replace(OPTIONS, min_nodes=1))
    job.put("ctl/round", encode(Round(4, job=2, term=7)))
    stray = NodeRecord(NodeInfo("stray", "stray"), 4, job=1)
    job.put("node/stray", encode(stray))
    job.put("close/1", b"of the job before")
    job.put("node/a", encode(stray._replace(info=NodeInfo("a", "a"), job=2)))
    job.now += OPTIONS.last_call
    round_ = job.published()
    assert (round_.phase, round_.names, round_.job) == (ACTIVE, ("a",), 2)
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
        assert not any(isinstance(a, RoundOver) for a in node.step(float(second), ClockTick()))
    wake = node.it.wake_at()
    assert wake is not None
    last_sent = max(t for t in (2.0 * n for n in range(10)) if t <= 19.0)
    while not (stops := [a for a in node.step(wake, ClockTick(), answers=False) if isinstance(a, RoundOver)]):
        wake = node.it.wake_at()
        assert wake is not None
    assert stops[0].at_once
    assert wake <= last_sent + OPTIONS.ttl


def test_only_answers_keep_workers_alive_and_a_store_with_a_journal_gives_them_the_whole_lease() -> None:
    def stops_at(linger: float) -> float:
        node = Node(replace(OPTIONS, linger=linger))
        node.active(0.1)
        node.step(1.0, Disconnected())
        for tenth in range(11, 600):
            now = tenth / 10
            if any(isinstance(a, RoundOver) for a in node.step(now, ClockTick(), answers=False)):
                return now
        raise AssertionError("never")

    assert stops_at(linger=1.0) < 1.0 + OPTIONS.linger
    assert OPTIONS.ttl / 2 < stops_at(linger=float("inf")) < OPTIONS.ttl


def test_the_end_does_not_let_workers_outlive_the_lease() -> None:
    node = Node()
    node.active(0.1)
    assert node.step(1.0, StoreLost("gone")) == [End("store", "gone", node.it.round, held=1)]
    due = node.it.wake_at()
    assert due is not None
    assert due < OPTIONS.ttl
    assert [a.at_once for a in node.step(due, ClockTick()) if isinstance(a, RoundOver)] == [True]
    assert node.it.wake_at() is None


def test_after_a_sleep_the_fence_comes_before_the_news() -> None:
    node = Node()
    node.active(0.1)
    actions = node.active(100.0, number=2)
    assert isinstance(actions[0], RoundOver)
    assert actions[0].at_once
    assert not any(isinstance(a, StartRound) for a in actions)


def test_a_lost_store_ends_the_node_with_the_reason() -> None:
    node = Node()
    node.active(0.1)
    assert node.step(1.0, StoreLost("its data are gone")) == [
        End("store", "its data are gone", node.it.round, held=1)
    ]
    assert node.step(2.0, ClockTick()) == []
    node.step(2.1, WorkersStopped(1))
    assert node.it.wake_at() is None


def test_keep_alives_are_three_to_a_lease() -> None:
    node = Node()
    node.active(0.1)
    for tenth in range(600):
        node.step(tenth / 10, ClockTick())
    beats = [a for a in node.log if isinstance(a, Send) and isinstance(a.command, KeepAlive)]
    assert 28 <= len(beats) <= 31


# -- places -------------------------------------------------------------------------------------------------


def test_every_node_gets_its_own_place_and_the_round_names_only_a_few() -> None:
    job = Job(Options(min_nodes=12, max_nodes=12))
    for number in range(12):
        job.node(f"n{number}", slots=1 + number % 2)
    (txn,) = job.decide().commands
    assert isinstance(txn, Txn)
    values = {put.key: put.value for put in txn.puts}
    assert list(values)[-1] == "ctl/round", "places are reported before the round"
    current = decode_round(values["ctl/round"])
    assert current is not None
    assert (current.nodes, current.names) == (12, tuple(f"n{n}" for n in range(8)))
    assert current.all_names()[7:10] == ("n7", "node 8", "node 9")
    for number in (0, 1, 11):
        place = decode_place(values[f"place/n{number}"])
        assert place is not None
        assert (place.stamp, place.rank) == (current.stamp, number)
        assert place.offsets == Offsets((3 * number) // 2, 18, (3 * number) // 2, 18)
    members = decode_members(values["members"])
    assert members is not None
    assert [m.name for m in members.nodes] == [f"n{n}" for n in range(12)]


def test_places_of_a_large_round_are_written_before_it() -> None:
    job = Job(Options(min_nodes=5, max_nodes=5, batch=2))
    for name in "abcde":
        job.node(name)
    *batches, main = job.decide().commands
    assert [[p.key for p in batch.puts] for batch in batches] == [  # type: ignore[union-attr]
        ["place/a", "place/b"], ["place/c", "place/d"], ["place/e"],
    ]  # fmt: skip
    assert isinstance(main, Txn)
    assert [p.key for p in main.puts] == ["members", "ctl/round"]


def test_a_node_is_not_ready_for_the_next_round_before_it_knows_its_place() -> None:
    node = Node()
    value = encode(Round(1, ACTIVE, 1, stamp="7.1", term=5))
    entry = Entry("ctl/round", value, 1, 60)
    (asked,) = node.step(0.1, Noticed(Notice(CONTROL, (Change(entry),), 60)), answers=False)
    assert isinstance(asked, Send)
    assert asked.command == Get("place/me"), "no update of its own key"
    place = Entry("place/me", encode(Place("7.1", 42, 0)), 1, 59)
    actions = node.step(0.2, Answer(asked.tag, Reply(True, 61, (place,))), answers=False)
    assert any(isinstance(a, StartRound) for a in actions)


def test_a_node_without_a_place_is_ready_for_the_next_round_and_never_starts_this_one() -> None:
    node = Node()
    entry = Entry("ctl/round", encode(Round(1, ACTIVE, 1, stamp="7.1", term=5)), 1, 60)
    (asked,) = node.step(0.1, Noticed(Notice(CONTROL, (Change(entry),), 60)), answers=False)
    assert isinstance(asked, Send)
    (update,) = node.step(0.2, Answer(asked.tag, Reply(True, 61)), answers=False)
    assert isinstance(update, Send)
    assert isinstance(update.command, Txn)
    record = decode_node(update.command.puts[0].value)
    assert record is not None
    assert record.ready == 2
    late_place = Entry("place/me", encode(Place("7.1", 42, 0)), 1, 62)
    assert node.step(0.3, Noticed(Notice(PLACE, (Change(late_place),), 62)), answers=False) == []


# -- fixed ranks --------------------------------------------------------------------------------------------

FIXED = Options(min_nodes=3, max_nodes=3, fixed=True, join_timeout=30.0, ttl=6.0, linger=1.0, max_restarts=1)


def fixed(*ranks: int) -> Job:
    job = Job(FIXED)
    for rank in ranks:
        job.node(f"h{rank}", rank=rank)
    return job


def test_a_fixed_round_waits_for_every_rank_and_names_those_that_are_missing() -> None:
    job = fixed(2)
    assert job.decide().reason == "1 of 3 nodes here (h2), waiting for nodes 0, 1, 30 s left"
    job.node("h0", rank=0)
    assert job.decide().reason == "2 of 3 nodes here (h0 h2), waiting for node 1, 30 s left"
    job.now = 30.0
    closed = job.published()
    assert (closed.outcome, closed.reason) == (
        "timeout",
        "2 of 3 nodes here (h0 h2), waiting for node 1; node 1 of 3 did not come within 30 s",
    )


def test_the_second_node_of_a_rank_is_refused_when_the_first_has_outlived_a_lease() -> None:
    job = fixed(0, 1)
    job.node("twin", rank=1, addr="10.0.0.9")  # type: ignore[arg-type]
    waiting = job.decide()
    assert waiting.commands == ()
    assert waiting.wake_at == 7.0
    job.now = 7.0
    (txn,) = job.decide().commands
    assert isinstance(txn, Txn)
    assert [w.key for w in txn.when] == ["ctl/leader"]
    place = decode_place(txn.puts[0].value)
    assert place is not None
    assert txn.puts[0].key == "place/twin"
    assert place.refused == "node rank 1 is taken by h1: two nodes were given the same --node-rank"
    job.put(txn.puts[0].key, txn.puts[0].value)
    assert job.decide().commands == (), "once is enough"
    job.node("h2", rank=2)
    assert job.members() == ["h0", "h1", "h2"]


def test_the_second_node_of_a_rank_takes_it_when_the_first_is_gone() -> None:
    job = fixed(0, 1, 2)
    assert job.members() == ["h0", "h1", "h2"]
    job.node("twin", ready=2, rank=1)
    job.now = 1.0
    job.lose("h1")
    assert job.published().reason == "lost node 1 (h1)"
    for name in ("h0", "h2"):
        job.ready(name, 2)
    assert job.members() == ["h0", "twin", "h2"]


def test_a_rank_that_does_not_exist_is_refused_at_once() -> None:
    job = fixed(0, 1, 3)
    (txn,) = job.decide().commands
    assert isinstance(txn, Txn)
    assert txn.puts[0].key == "place/h3"
    place = decode_place(txn.puts[0].value)
    assert place is not None
    assert place.refused == "node rank 3 of 3: ranks go from 0 to 2"


def test_a_fixed_job_waits_for_a_member_that_was_lost_before_it_reported() -> None:
    job = fixed(0, 1, 2)
    job.members()
    for name in ("h0", "h2"):
        job.put(f"result/1/{name}", encode(Result(True)))
    job.lose("h1")
    forming = job.published()
    assert (forming.phase, forming.restarts) == (FORMING, 0)
    assert forming.reason == "lost node 1 (h1), which had not reported success"


def test_a_refused_node_ends_with_the_reason() -> None:
    node = Node(FIXED)
    entry = Entry("place/me", encode(Place(refused="node rank 1 is taken by h1")), 1, 60)
    actions = node.step(0.1, Noticed(Notice(PLACE, (Change(entry),), 60)))
    assert actions[-1] == End("refused", "node rank 1 is taken by h1", None)


def test_the_first_round_of_a_new_store_continues_the_counts_that_its_nodes_know() -> None:
    job = Job(FIXED)
    for rank, (rounds, restarts) in enumerate(((0, 0), (4, 1), (5, 1))):
        record = NodeRecord(NodeInfo(f"h{rank}", f"h{rank}", rank=rank), 1, rounds=rounds, restarts=restarts)
        job.put(f"node/h{rank}", encode(record))
    current = job.published()
    assert (current.number, current.restarts) == (6, 1)


# -- records ------------------------------------------------------------------------------------------------


def test_records_come_back_and_unknown_fields_are_ignored() -> None:
    import json

    info = NodeInfo("a.1", "a", "10.0.0.1", 8, "trainer", 3, 5)
    for record, decode in (
        (NodeRecord(info, 4, "SIGTERM", 2, 7, 1), decode_node),
        (
            Round(3, ACTIVE, 2, ("a", "b"), 1, "why", 9, "9.8", ("x",), "failed", ("i", "n", "d"), 2),
            decode_round,
        ),
        (Place("9.8", 42, 1, 8, 16, 0, 8), decode_place),
        (Place(refused="taken"), decode_place),
        (Result(False, "detail", delay=2.5), decode_result),
        (Round(3, delay=0.5), decode_round),
    ):
        assert decode(encode(record)) == record  # type: ignore[operator]
        more = json.loads(encode(record)) | {"of": ["a", "later"], "version": {}}
        assert decode(json.dumps(more).encode()) == record  # type: ignore[operator]
    job = fixed(0, 1, 2)
    job.members()
    members = job.view.members
    found = json.loads(encode(members))
    found["nodes"] = [[*one, "more", 7] for one in found["nodes"]]
    assert decode_members(json.dumps(found | {"more": 1}).encode()) == members


JUNK = st.one_of(
    st.binary(max_size=30),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["info", "id", "name", "ready", "number", "stamp", "nodes", "ok", "slots", "cause"]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ).map(lambda value: __import__("json").dumps(value).encode()),
)


@given(JUNK)
def test_records_that_are_not_readable_are_skipped(value: bytes) -> None:
    for decode in (decode_node, decode_round, decode_members, decode_place, decode_result):
        decode(value)  # type: ignore[operator]
    job = Job().running("a", "b")
    for key in (
        "node/c",
        "node/a",
        "place/a",
        "result/1/a",
        "result/x",
        "members",
        "ctl/round",
        "ctl/x",
        "status",
    ):
        job.put(key, value)
        job.decide()


def test_a_list_of_members_that_is_not_readable_makes_all_re_form_and_stop_first() -> None:
    job = Job().running("a", "b")
    job.put("members", b"{")
    assert job.view.members == MemberList("", ())
    forming = job.published()
    assert forming.reason == "the list of members is not readable"
    job.ready("a", 2)
    assert "workers still stopping on b" in job.decide().reason


def test_text_of_others_cannot_control_a_terminal() -> None:
    record = decode_node(b'{"info":{"id":"x","name":"a\\u001b[2Jb\\u009b1mc\\n"},"ready":1}')
    assert record is not None
    assert record.info.name == r"a\x1b[2Jb\x9b1mc\n"
    assert printable("two\nlines\t\r", lines=True) == "two\nlines\t\\r"
