"""What a member takes from the records of its job, and what it does not."""

from __future__ import annotations

from phalanx.core.rounds.following import LOST_ROUNDS, Following
from phalanx.core.rounds.records import ACTIVE, CLOSED, FORMING, Place, Round, encode
from phalanx.core.rounds.store_commands import Entry

LEADER = Entry("ctl/leader", b"boss", 5, 5, 99)
FIRST = Round(1, FORMING, term=5)


def entry(current: Round | bytes, mod: int) -> Entry:
    return Entry("ctl/round", current if isinstance(current, bytes) else encode(current), 1, mod)


def following(*rounds: Round) -> Following:
    known = Following(leader=LEADER).read()
    for mod, one in enumerate(rounds, 10):
        known = known.learn_round(float(mod), entry(one, mod), news=True)
    return known


def test_only_newer_rounds_of_the_leader_are_followed() -> None:
    known = following(FIRST, FIRST._replace(number=2))
    assert known.round is not None
    assert (known.round.number, known.round_at, known.job) == (2, 11.0, 1)
    assert known.learn_round(20.0, entry(FIRST, 11), news=True) is known, "seen already"
    for stranger in (entry(b"{", 12), entry(FIRST, 12), entry(FIRST._replace(number=3, term=4), 12)):
        after = known.learn_round(20.0, stranger, news=True)
        assert (after.round, after.unreadable, after.round_mod) == (known.round, True, 12)
    found = known.learn_round(20.0, entry(FIRST._replace(number=3, term=4), 12))
    assert found.round is not None
    assert found.round.number == 3, "found after a reconnect: its leader may be another one by now"


def test_the_counts_of_a_job_only_grow_and_a_finished_job_is_not_left() -> None:
    known = following(FIRST._replace(restarts=2, phase=ACTIVE, stamp="5.1"), FIRST._replace(number=2))
    assert (known.restarts, known.rounds) == (2, 1)
    closed = following(FIRST, FIRST._replace(phase=CLOSED, outcome="succeeded"))
    assert closed.closed
    assert closed.learn_round(20.0, entry(Round(2, job=2, term=5), 20)) is closed


def test_a_store_that_went_back_leaves_only_the_counts_and_the_job() -> None:
    after = following(FIRST._replace(restarts=2, number=7, phase=ACTIVE, stamp="5.1")).forgotten()
    assert (after.rounds, after.restarts, after.job) == (7 + LOST_ROUNDS, 2, 1)
    assert after._replace(rounds=0, restarts=0, job=0, round_at=0.0) == Following()


def test_a_member_is_who_has_a_place_of_the_active_round_as_it_is_registered() -> None:
    known = following(FIRST._replace(phase=ACTIVE, stamp="5.1"))
    placed = known.learn_place((Entry("place/me", encode(Place("5.1", 42, 0)), 1, 30),))
    assert placed.is_member(42)
    assert not placed.is_member(43)
    assert not placed.is_member(0)
    outside = known.read_place((), 31, 42)
    late = outside.learn_place((Entry("place/me", encode(Place("5.1", 42, 0)), 1, 32),))
    assert not late.is_member(42), "it was read as final"
    assert not known.read_place((), 9, 42).outside, "read before the round was seen: it may be on its way"
