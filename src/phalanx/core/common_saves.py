"""Which save of a name every rank of the job has, and every copy on another node: agreed around the ring.

State is copied from each node to the next, the last one to the first. If a node is lost, its ranks resume
from their copies and the others from their own saves, so that one moment must be in all of them. Saves are
replaced all the time, and a copy may be late by any number of them. So each rank and each copy holds the
newest moment that is known to be everywhere, the *common* one, until a newer one is. A ballot for each name
goes around the ring, on the connections that carry the copies, three times for each new common moment:

    phase      what a node does when the ballot arrives                   when it passes the ballot on
    PROPOSE    takes over the common moment, and gives up the last        when each of its ranks has a save
               candidate; raises the new one to its newest save, and
               the earlier common moment to the newest that it has
    HOLD       pins the first save at or after the candidate, and         at once
               copies that one instead of the newest
    CONFIRM    the first node replaces the candidate by the save that     when its ranks have the candidate,
               it holds; every node pins the candidate                    and the next node has the copies

A moment that came around three times is the common one; the next ballot carries it to the others, and only
then do they drop the one before it. A rank that has no save of the candidate and will not make one withdraws
it (the candidate is None from there on), and so does a node that finds no copy where it should have one: the
common moment stays, and the first node tries again when its ranks have saved again. Where saves follow each
other faster than a ballot goes around, it holds one that lies further ahead.

A round may end between the news of a common moment and its arrival everywhere: some nodes have given up the
one before it, and others still hold both. Which of the two all have is known when the first PROPOSE of the
next round has gone around, so that until then a node gives up nothing and copies nothing over it. From HOLD
on, that *earlier* moment takes the place of the common one, until the round has one.

A node that connects to the next one again repeats the last ballot of each name. A node ignores a ballot that
it has seen, so that none is lost and none counts twice.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Moment = tuple[int, int]  # the step of a save, and the round in which it was kept

PROPOSE, HOLD, CONFIRM = range(3)


class Ballot(Record):
    """What goes around for one name."""

    name: str
    serial: int  # of the attempt
    phase: int
    common: Moment | None  # of this round
    candidate: Moment | None
    earlier: Moment | None = None  # the common moment of the rounds before

    @property
    def number(self) -> int:
        """Ballots of a name are numbered in the order in which the first node sends them."""
        return 3 * self.serial + self.phase

    @property
    def settles(self) -> bool:
        """Whether the earlier common moment is known: every node has been asked."""
        return self.number >= HOLD

    def stays(self, pinned: Moment | None, saves: Iterable[Moment]) -> Moment | None:
        """The moment that a file with these saves keeps as the common one; `pinned`: until now."""
        if self.common is not None:
            return self.common
        found = self.earlier if self.settles else None
        return found if found is not None and found in saves else pinned


class Turn(Record):
    """What a node does about a name: what its ranks hold, then the ballot for the next node, if it may go."""

    ballot: Ballot  # says what stays as the common moment,
    hold: Moment | None  # and the first save at or after this one stays, too
    send: Ballot | None

    def pins(
        self, common: Moment | None, hold: Moment | None, saves: Iterable[Moment]
    ) -> tuple[Moment | None, Moment | None]:
        """The pins of a rank with these saves, after those until now: both stay until more is known."""
        return self.ballot.stays(common, saves), self.hold if self.ballot.settles else hold


class RankSaves(Record):
    """The saves of one rank and name, newest first, and those that the next node has a copy of."""

    moments: tuple[Moment, ...]
    copied: frozenset[Moment] = frozenset()
    known: Moment | None = None  # `known_common` of its pins


class CommonSaves:
    """One node's part in it, for one round."""

    def __init__(self, first: bool, round_: int) -> None:
        """`first`: whether this is the node that begins."""
        self._first, self._round = first, round_
        self._held: dict[str, Ballot] = {}  # has arrived, and is not passed on
        self._seen: dict[str, int] = {}
        self._common: dict[str, Moment] = {}
        self._tried: dict[str, Moment] = {}  # the newest save when the last attempt began,
        self._held_at: dict[str, Moment] = {}  # and when its candidate was chosen
        self._lead: dict[str, int] = {}  # steps from that save to the candidate; -1: it was passed too soon
        self.sent: dict[str, Ballot] = {}  # the last of each name

    def arrive(self, ballot: Ballot) -> None:
        """A ballot from the node before."""
        name = ballot.name
        if ballot.number <= self._seen.get(name, -1):
            return
        self._seen[name] = ballot.number
        if not self._first:
            self._held[name] = ballot
        elif ballot.phase < CONFIRM:
            self._held[name] = ballot.replace(phase=ballot.phase + 1)
        elif ballot.candidate is not None:
            self._common[name] = ballot.candidate
            self._lead[name] = self._lead.get(name, 0) * 3 // 4
        else:
            self._lead[name] = -1

    def to_copy(self, name: str, moments: Sequence[Moment], known: Moment | None = None) -> Moment | None:
        """The save of a rank that is copied now: the newest, or the one that is to be the common one.

        That one alone, until the next node knows whether it is: a later one would replace it there. `known`:
        as in RankSaves; if it is of an earlier round, the next node must know first what it may replace.
        """
        if known is not None and not (name in self.sent and self.sent[name].settles):
            return None
        for ballot in (self._held.get(name), self.sent.get(name)):
            if ballot is not None and ballot.phase != PROPOSE and ballot.candidate is not None:
                return first_since(moments, ballot.candidate) or (
                    moments[0] if ballot.phase == HOLD else None
                )
        return moments[0]

    def turn(self, name: str, ranks: Sequence[RankSaves]) -> Turn | None:
        """What to do about a name now; None: nothing. Call `done` when it is done."""
        ballot = self._held.get(name) or self._next_attempt(name)
        saves = [rank.moments for rank in ranks]
        if ballot is None or not all(saves):
            return None
        if ballot.phase == PROPOSE:
            if self._has_tried(ballot, saves):
                return None
            newest = _newest([ballot.candidate, *(moments[0] for moments in saves)])
            earlier = [one for one in (ballot.earlier, *(rank.known for rank in ranks)) if one is not None]
            found = _newest(earlier) if earlier and ballot.serial == 0 else ballot.earlier
            return Turn(ballot, None, ballot.replace(candidate=newest, earlier=found))
        if ballot.phase == HOLD:
            if self._first:
                step, round_ = _newest([ballot.candidate, *(moments[0] for moments in saves)])
                ballot = ballot.replace(candidate=(step + self._lead.get(name, 0), round_))
            return Turn(ballot, ballot.candidate, ballot)
        return self._confirm(ballot, ranks)

    def done(self, turn: Turn, saves: Sequence[RankSaves]) -> None:
        """What it asks for is done, with these saves; the ballot goes now."""
        if turn.send is not None:
            name = turn.send.name
            self._held.pop(name, None)
            self.sent[name] = turn.send
            newest = _newest(rank.moments[0] for rank in saves)
            if turn.send.phase == PROPOSE:
                self._tried[name] = newest
                if self._lead.get(name) == -1:  # as far ahead as the ranks came meanwhile
                    self._lead[name] = max(1, newest[0] - self._held_at[name][0])
            elif turn.send.phase == HOLD:
                self._held_at[name] = newest

    def _next_attempt(self, name: str) -> Ballot | None:
        last = self.sent.get(name)
        if not self._first or (last is not None and last.number > self._seen.get(name, -1)):
            return None  # it is under way
        if last is None:
            return Ballot(name, 0, PROPOSE, None, None)
        return Ballot(name, last.serial + 1, PROPOSE, self._common.get(name), None, last.earlier)

    def _has_tried(self, ballot: Ballot, saves: Sequence[Sequence[Moment]]) -> bool:
        """The first node begins once for each save."""
        newest = _newest(moments[0] for moments in saves)
        return ballot.candidate is None and self._tried.get(ballot.name) == newest

    def _confirm(self, ballot: Ballot, ranks: Sequence[RankSaves]) -> Turn:
        candidate = ballot.candidate
        if candidate is None:
            return Turn(ballot, None, ballot)
        held = [first_since(rank.moments, candidate) for rank in ranks]
        if any(one is None for one in held):  # not saved yet
            send = None if candidate[1] == self._round else ballot.replace(candidate=None)
            return Turn(ballot, candidate, send)
        if self._first:
            candidate = _newest(held)
        if any(candidate not in rank.moments for rank in ranks):
            late = any(_order(rank.moments[0]) > _order(candidate) for rank in ranks)
            return Turn(ballot, candidate, ballot.replace(candidate=None) if late else None)
        copied = all(candidate in rank.copied for rank in ranks)
        return Turn(ballot, candidate, ballot.replace(candidate=candidate) if copied else None)


def known_common(common: Moment | None, hold: Moment | None, saves: Iterable[Moment]) -> Moment | None:
    """The common moment as far as a file with these pins and saves knows it.

    Without one, the save that is held may be the first: only the node that began knew, and it may be lost."""
    return common if common is not None else next((one for one in saves if one == hold), None)


def first_since(moments: Iterable[Moment], moment: Moment | None) -> Moment | None:
    """The oldest of these that is at or after a moment."""
    if moment is None:
        return None
    return min((one for one in moments if _order(one) >= _order(moment)), key=_order, default=None)


def _order(moment: Moment) -> tuple[int, int]:
    step, round_ = moment
    return round_, step


def _newest(moments: Iterable[Moment | None]) -> Moment:
    return max((moment for moment in moments if moment is not None), key=_order)
