"""The model by the common contract, and what only the model shows: time, repetition, keeping."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.rounds.store_commands import (
    Add,
    Change,
    Command,
    Delete,
    Get,
    Grant,
    KeepAlive,
    Put,
    Reply,
    Txn,
    Watch,
    When,
)
from phalanx.store.model import Model, Notices
from tests.support.store_contract import StoreContract


class InMemory:
    """The model as a store with one client per session; waiting makes time pass."""

    def __init__(self, model: Model | None = None, session: str = "one") -> None:
        self.model, self.session = model or Model(), session
        self.now, self.number = 0.0, 0
        self.seen: dict[int, list[Change]] = {}

    def request(self, command: Command) -> Reply:
        self.number += 1
        reply, notices = self.model.apply(self.session, self.number, self.number, command, self.now)
        if isinstance(command, Watch) and (missed := self.model.replay(self.session, command)):
            notices = [(self.session, missed), *notices]
        self._note(notices)
        return reply

    def changes(self, watch: int, count: int) -> list[Change]:
        while len(self.seen.get(watch, [])) < count:
            due = self.model.next_expiry(self.now)
            assert due is not None, f"only {self.seen} and nothing more to come"
            self.now = due
            self._note(self.model.expire(self.now))
        return self.seen.pop(watch, [])

    def second(self) -> InMemory:
        other = InMemory(self.model, "two")
        other._note = self._note  # type: ignore[method-assign] # one listener for both
        return other

    def _note(self, notices: Notices) -> None:
        for session, notice in notices:
            if session == "one":
                self.seen.setdefault(notice.watch, []).extend(notice.changes)


class TestModel(StoreContract):
    @pytest.fixture
    def store(self) -> InMemory:
        return InMemory()


def test_a_repeated_request_has_one_effect_and_the_same_answer() -> None:
    model = Model()
    first, _ = model.apply("s", 1, 1, Add("n", 1), 0.0)
    again, notices = model.apply("s", 1, 1, Add("n", 1), 0.0)
    assert (again, notices) == (first, [])
    assert model.apply("s", 2, 2, Add("n", 1), 0.0)[0].number == 2
    late, _ = model.apply("s", 1, 1, Add("n", 1), 0.0)
    assert late.error == "stale"
    assert model.apply("other", 1, 1, Add("n", 1), 0.0)[0].number == 3


def test_keep_alive_and_hanging_up_move_the_end_of_a_lease() -> None:
    model = Model()
    lease = model.apply("s", 1, 1, Grant(10.0), 0.0)[0].number
    model.apply("s", 2, 2, KeepAlive(lease), 6.0)
    assert model.expired(15.9) == []
    model.shorten("s", 8.0)
    assert model.expired(8.0) == [lease]
    model.apply("s", 3, 3, KeepAlive(lease), 7.9)
    assert model.expired(17.8) == []
    model.renew_all(100.0)
    assert model.expired(109.0) == []
    assert model.next_expiry(109.0) == 110.0


def test_history_is_bounded_by_number_and_by_bytes() -> None:
    model = Model(history=5, history_bytes=100)
    for number in range(1, 21):
        model.apply("s", number, number, Put("k", b"x" * 30), 0.0)
    refused, _ = model.apply("s", 21, 21, Watch(1, "k", start=17), 0.0)
    assert refused.error == "compacted"
    assert refused.number == 18
    assert model.apply("s", 22, 22, Watch(1, "k", start=18), 0.0)[0].ok
    missed = model.replay("s", Watch(1, "k", start=18))
    assert missed is not None
    assert [c.entry.mod for c in missed.changes] == [18, 19, 20]


def test_a_watch_that_hung_up_costs_nothing_and_hears_nothing() -> None:
    model = Model()
    model.apply("s", 1, 1, Watch(1, "k"), 0.0)
    model.hang_up("s")
    assert model.apply("t", 1, 1, Put("k", b""), 0.0)[1] == []


keys = st.sampled_from(["a", "b", "c/1", "c/2"])
values = st.binary(max_size=3)
commands = st.one_of(
    st.builds(Put, keys, values, st.sampled_from([0, 0, 1, 2])),
    st.builds(Delete, keys),
    st.builds(Delete, st.just("c/"), st.just(True)),
    st.builds(Add, keys, st.integers(-3, 3)),
    st.builds(Grant, st.just(5.0)),
    st.builds(lambda k, n, v: Txn((When(k, "mod", n),), (Put(k, v),)), keys, st.integers(0, 5), values),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(commands, st.floats(0, 2)), max_size=25), st.integers(0, 25))
def test_any_history_replays_survives_a_dump_and_is_deterministic(
    script: list[tuple[Command, float]], cut: int
) -> None:
    def play(dumps: bool) -> tuple[dict[str, object], list[Change]]:
        model, now, seen = Model(), 0.0, list[Change]()
        model.apply("w", 1, 1, Watch(1, "", prefix=True), now)
        for number, (command, passed) in enumerate(script, 1):
            now += passed
            notices = model.expire(now)
            notices += model.apply("s", number, number, command, now)[1]
            seen += [change for _, notice in notices for change in notice.changes]
            if number == cut and dumps:
                packed = msgspec.msgpack.encode(model.dump())
                model = Model()
                model.load(msgspec.msgpack.decode(packed), now)
                model.apply("w", 1, 1, Watch(1, "", prefix=True, start=model.revision + 1), now)
            elif number == cut:
                model.renew_all(now)  # a load starts the leases again
        return model.dump(), seen

    whole, seen = play(dumps=False)
    assert play(dumps=True) == (whole, seen)
    # What the watch told, played back, is the map itself.
    mirror = {}
    for change in seen:
        if change.deleted:
            del mirror[change.entry.key]
        else:
            mirror[change.entry.key] = change.entry
    model = Model()
    model.load(msgspec.msgpack.decode(msgspec.msgpack.encode(whole)), 0.0)
    reply, _ = model.apply("r", 1, 1, Get("", prefix=True), 0.0)
    assert {e.key: e for e in reply.entries} == mirror
