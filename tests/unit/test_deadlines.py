"""Deadlines against a simple model: what is due, what is next, and that memory stays bounded."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.deadlines import Deadlines

owners = st.integers(1, 3)
scopes = st.sampled_from(["a", "b", "c"])
times = st.integers(0, 20).map(float)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), owners, scopes, times),
        st.tuples(st.just("drop"), owners, scopes),
        st.tuples(st.just("forget"), owners),
        st.tuples(st.just("due"), times),
    ),
    max_size=60,
)


@given(steps)
def test_they_do_what_a_plain_dict_would(script: list[tuple]) -> None:
    real: Deadlines[str] = Deadlines()
    model: dict[tuple[int, str], float] = {}
    for step in script:
        match step:
            case ("set", owner, scope, at):
                assert real.set(owner, scope, at, "x")
                model[owner, scope] = at
            case ("drop", owner, scope):
                assert real.drop(owner, scope) == (model.pop((owner, scope), None) is not None)
            case ("forget", owner):
                gone = [key for key in model if key[0] == owner]
                assert real.forget(owner) == len(gone)
                for key in gone:
                    del model[key]
            case ("due", now):
                found = real.due(now)
                assert [e.at for e in found] == sorted(e.at for e in found)
                late = {key: at for key, at in model.items() if at <= now}
                assert {(e.owner, e.scope): e.at for e in found} == late
                for key in late:
                    del model[key]
        assert len(real) == len(model)
        assert real.next() == min(model.values(), default=None)
        assert set(real.owners()) == {owner for owner, _ in model}


def test_the_reason_names_the_scope_and_how_late_it_is() -> None:
    deadlines: Deadlines[None] = Deadlines()
    deadlines.set(7, "load batch", 10.0, None)
    assert deadlines.due(12.5)[0].reason == (
        "scope 'load batch' was not left in time: its deadline passed 2.500 s ago"
    )


def test_an_owner_with_too_many_scopes_keeps_those_it_has() -> None:
    deadlines: Deadlines[None] = Deadlines(limit=2)
    assert deadlines.set(1, "a", 1, None)
    assert deadlines.set(1, "b", 1, None)
    assert not deadlines.set(1, "c", 1, None)
    assert deadlines.set(1, "a", 2, None), "moving one it has is no new scope"
    assert deadlines.set(2, "c", 1, None), "another owner is not affected"


def test_setting_and_dropping_for_ever_costs_no_memory() -> None:
    deadlines: Deadlines[None] = Deadlines()
    deadlines.set(1, "outer", 1e9, None)
    for number in range(100_000):
        deadlines.set(1, "inner", 1e9 + number, None)
        deadlines.drop(1, "inner")
    assert sys.getsizeof(deadlines._heap) < 10_000
    assert deadlines.next() == 1e9


def test_owners_and_contents_are_never_compared() -> None:
    deadlines: Deadlines[object] = Deadlines()
    deadlines.set("name", "a", 1.0, object())
    deadlines.set(5, "a", 1.0, object())
    assert [e.owner for e in deadlines.due(1.0)] == ["name", 5]
