"""The job as a member knows it: its round, its leader, this node's place; what it follows.

Revisions decide what is newer: notices of different watches may overtake each other. A round that cannot be
read, or that its leader has not written, is not followed; the leader writes its own again.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.rounds.records import ACTIVE, CLOSED, Place, Round, decode_place, decode_round
from phalanx.core.rounds.store_commands import Entry

LOST_ROUNDS = 100  # that a store which went back may have had without any node that is present


class Following(NamedTuple):
    """`rounds` and `restarts` are what this node has seen of this job, whatever the store holds now."""

    rounds: int = 0
    restarts: int = 0
    round: Round | None = None
    round_mod: int = 0
    round_at: float = 0.0  # when the round was first seen in its phase
    unreadable: bool = False  # the store has a round, and this node cannot read it
    job: int = 0  # the number of this node's job among those with this id; 0: not known yet
    leader: Entry = Entry("")
    place: Place = Place()
    place_mod: int = 0
    outside: str = ""  # the stamp of a round that this node is known not to be in
    complete: bool = False  # the control keys have been read

    @property
    def foreign_leader(self) -> int:
        """The revision of a leader's key that no leader has written (not on a lease); 0: there is none."""
        return self.leader.mod if self.leader.key and not self.leader.lease else 0

    @property
    def closed(self) -> bool:
        """Whether the round is the last one of its job."""
        return self.round is not None and self.round.phase == CLOSED

    @property
    def next_ready(self) -> int:
        """The round that a node without workers is ready for."""
        return 1 if self.round is None else self.round.number + (self.round.phase == ACTIVE)

    def is_member(self, incarnation: int) -> bool:
        """Whether this node, as it is registered now, is known to be in the active round."""
        current, place = self.round, self.place
        return (
            current is not None
            and current.phase == ACTIVE
            and bool(incarnation)
            and (place.stamp, place.incarnation) == (current.stamp, incarnation)
            and current.stamp != self.outside
        )

    def read(self) -> Following:
        """The control keys have been read: the number of the job may be known now."""
        if self.round is None:
            # A leader writes a round that cannot be read again: with it comes the number of the job.
            job = 0 if self.unreadable and self.leader.lease else self.job or 1
        else:
            job = self.round.job if not self.closed and self.leader.lease else self.job
        return self._replace(complete=True, job=job)

    def learn_round(self, now: float, entry: Entry, news: bool = False) -> Following:
        """The record of the round; `news`: a change, not found."""
        current = self.round
        if entry.mod <= self.round_mod or (current is not None and self.closed and current.job == self.job):
            return self  # old, or of the next job: this node's has ended
        found = decode_round(entry.value)
        # Written since the leader was elected, and not by it: the leader writes its own again.
        foreign = found is not None and self.leader.lease and found.term != self.leader.create
        back = found is not None and current is not None and found.older_than(current)
        if found is None or back or (news and foreign and entry.mod > self.leader.mod):
            return self._replace(round_mod=entry.mod, unreadable=True)
        # A store that went back has an older count; that of a job only grows.
        known = self.restarts if found.job == self.job else 0
        begins = self.complete and found.phase != CLOSED  # a change: a leader exists
        return self._replace(
            round=found,
            round_mod=entry.mod,
            round_at=now if current is None or found.stage != current.stage else self.round_at,
            unreadable=False,
            restarts=max(known, found.restarts),
            rounds=max(self.rounds, found.number) if found.phase == ACTIVE else self.rounds,
            job=found.job if begins and not self.job else self.job,
        )

    def learn_place(self, entries: tuple[Entry, ...]) -> Following:
        """The record of this node's place."""
        known = self
        for entry in entries:
            if entry.mod > known.place_mod:
                place = decode_place(entry.value) or Place()
                known = known._replace(place_mod=entry.mod, place=place)
        return known

    def read_place(self, entries: tuple[Entry, ...], revision: int, incarnation: int) -> Following:
        """Its place as it was at this revision.

        Read after the round was seen, it is final: without a place this node is not a member."""
        known = self.learn_place(entries)
        current = known.round
        if current is None or revision < known.round_mod or known.is_member(incarnation):
            return known
        return known._replace(outside=current.stamp)

    def forgotten(self) -> Following:
        """The store went back: nothing that this node knows from it holds.

        The number of a round that is lost must not be used again."""
        return Following(self.rounds + LOST_ROUNDS, self.restarts, round_at=self.round_at, job=self.job)
