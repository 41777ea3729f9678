"""Until when a node's workers may run."""

from __future__ import annotations

from phalanx.core.rounds.lease import FENCE, NodeLease

NONE = NodeLease(ttl=10.0, linger=1.0)


def test_an_answer_proves_it_from_the_moment_of_its_request() -> None:
    held = NONE.granted(5.0, 3, sent=2.0, hung_up=None)
    assert (held.number, held.ends) == (3, 2.0 + 10.0 * FENCE)
    assert held.renewed(6.0).ends == 6.0 + 10.0 * FENCE
    assert held.renewed(1.0).ends == held.ends, "answers may overtake each other"


def test_a_connection_that_ended_shortens_it_until_the_next_answer() -> None:
    held = NONE.granted(0.0, 3, sent=0.0, hung_up=None).hung_up(4.0)
    assert held.ends == 4.0 + 1.0 * FENCE
    assert held.hung_up(8.0).ends == held.ends, "a later one does not prolong that"
    assert held.renewed(5.0).ends == 5.0 + 10.0 * FENCE
    asked_before = NONE.granted(6.0, 3, sent=1.0, hung_up=2.0)
    assert (asked_before.ends, asked_before.renew_at) == (2.0 + 1.0 * FENCE, 6.0)


def test_one_that_is_lost_is_given_back_later() -> None:
    lost = NONE.granted(0.0, 3, sent=0.0, hung_up=None).lost()
    assert (lost.number, lost.old) == (0, 3)
    assert lost.hung_up(1.0) == lost
