"""The book of incidents: what opens one, what prolongs it, and the durations of its stages."""

from __future__ import annotations

import pytest

from phalanx.core.group import group
from phalanx.core.group.events import (
    AllSucceeded,
    Event,
    GroupRound,
    Hang,
    MembershipChanged,
    PeerFailed,
    RoundFailed,
    RoundOver,
    RoundReady,
    Start,
    Started,
    Stopped,
    WorkerFailed,
)
from phalanx.core.group.restarts import RestartPolicy
from phalanx.core.ledger.incidents import KEPT, Culprit, GroupStep, Incident, IncidentBook, observe, reached

WALL = 1_000_000.0


class Life:
    """A group driven by events, and the book of its incidents."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.state = group.GroupState()
        self.book = IncidentBook()
        self.policy = group.GroupPolicy(RestartPolicy(max_restarts=max_restarts))

    def __call__(
        self, now: float, event: Event, culprit: Culprit | None = None, beats: int = 0, how: str = ""
    ) -> None:
        made = group.step(self.state, event, now, self.policy)
        self.state = made.state
        step = GroupStep(
            event, self.state, bool(made.commands), made.reason, now, WALL + now, "here", culprit, beats
        )
        self.book = observe(self.book, step.replace(how=how))

    def up(self, number: int = 1, now: float = 0.0) -> Life:
        if self.state.phase is group.Phase.NEW:
            self(now, Start())
        self(now, RoundReady(GroupRound(number)))
        self(now, Started())
        return self


def test_a_failure_with_all_its_stages() -> None:
    life = Life().up()
    culprit = Culprit(3, 70, 1, WALL + 9.998, "node-b")
    life(10.0, WorkerFailed("rank 3 failed"), culprit, beats=1)
    life(10.008, RoundReady(GroupRound(2)))
    life(10.048, Stopped())
    life(10.058, Started())
    life.book = reached(life.book, None)
    life.book = reached(life.book, 10.098)
    assert life.book.current is not None, "the first step is awaited"
    life.book = reached(life.book, 10.098, (10.5,))
    (incident,) = life.book.closed
    assert incident == Incident(
        1,
        "rank 3 failed; restart 1 of 3",
        "failure",
        "restart",
        1,
        1,
        WALL + 9.998,
        "node-b",
        3,
        70,
        1,
        detect=0.002,
        stop=0.048,
        reform=0.008,
        start=0.01,
        first_line=0.04,
        first_step=0.402,
        total=0.1,
        over=True,
    )
    assert life.book.current is None


@pytest.mark.parametrize(
    ("event", "trigger", "recovery", "phase"),
    [
        (Hang("stuck"), "hang", "restart", "REFORMING"),
        (Hang("stuck", final=True), "hang", "end", "ENDING"),
        (PeerFailed("node-b", 1, 1, "rank 9"), "peer failure", "restart", "REFORMING"),
        (PeerFailed("node-b", 1, 1, "rank 9", final=True), "peer failure", "end", "ENDING"),
        (MembershipChanged(waiting=1), "membership", "membership", "REFORMING"),
        (RoundOver(1, "lost node-c"), "membership", "membership", "REFORMING"),
        (RoundOver(1, "node-c goes", preempted=True), "preemption", "membership", "REFORMING"),
    ],
)
def test_what_opens_an_incident(event: Event, trigger: str, recovery: str, phase: str) -> None:
    life = Life().up()
    life(5.0, event)
    (incident,) = life.book.incidents()
    assert (incident.trigger, incident.recovery, life.state.phase) == (trigger, recovery, phase)
    assert incident.node == ("node-b" if isinstance(event, PeerFailed) else "here")
    assert not incident.over


def test_old_news_open_nothing() -> None:
    life = Life(max_restarts=0)
    life(0.0, Start())
    life(0.0, RoundReady(GroupRound(1, ("a", "b"))))
    life(0.0, Started())
    life(5.0, MembershipChanged(waiting=1, round=7))
    life(6.0, MembershipChanged())
    life(7.0, AllSucceeded())
    assert life.book == IncidentBook()


def test_a_change_of_members_prolongs_a_recovery_and_a_failure_begins_another() -> None:
    life = Life().up()
    life(5.0, WorkerFailed("first"))
    life(5.1, RoundReady(GroupRound(2)))
    life(5.2, RoundOver(2, "lost node-c"))
    life(5.3, Stopped())
    life(5.4, RoundReady(GroupRound(3)))
    assert life.book.count == 1
    life(5.5, WorkerFailed("second"))
    assert [one.reason.partition(";")[0] for one in life.book.incidents()] == ["first", "second"]
    assert [one.over for one in life.book.incidents()] == [True, False]


def test_workers_that_kept_their_process_are_a_recovery_of_their_own_kind() -> None:
    life = Life().up()
    life(5.0, WorkerFailed("first"))
    life(5.1, Stopped())
    life(5.2, RoundReady(GroupRound(2)))
    life(5.3, Started(), how="re-entered: 7 of 8 workers kept")
    (incident,) = life.book.incidents()
    assert (incident.recovery, incident.how) == ("re-entry", "re-entered: 7 of 8 workers kept")


def test_a_recovery_that_fails_is_the_end() -> None:
    life = Life().up()
    life(5.0, WorkerFailed("first"))
    life(5.1, Stopped())
    life(6.0, RoundFailed("timeout"))
    (incident,) = life.book.incidents()
    assert (incident.recovery, incident.stop, incident.start) == ("end", 0.1, None)


def test_without_heartbeats_the_first_line_ends_an_incident() -> None:
    life = Life().up()
    life(5.0, Hang("stuck"))
    life(5.1, Stopped())
    life(5.2, RoundReady(GroupRound(2)))
    assert reached(life.book, 5.3) is life.book, "of the workers before"
    life(5.4, Started())
    life.book = reached(life.book, 5.5)
    assert life.book.closed[0].total == 0.5


def test_the_book_keeps_the_last_ones_and_counts_all() -> None:
    life = Life(max_restarts=1000).up()
    for turn in range(KEPT + 20):
        life(turn + 1.0, MembershipChanged(waiting=1))
        life(turn + 1.1, Stopped())
        life.up(turn + 2, turn + 1.2)
    assert life.book.count == KEPT + 20
    assert len(life.book.incidents()) == KEPT + 1
    assert life.book.incidents()[-1].number == KEPT + 20
