"""A node's requests to the store, until they are answered.

Those of a life of the node (from one lease to the next) are void in the next one; the watches stay.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from phalanx.core.rounds.participant_events import Action, Send
from phalanx.core.rounds.store_commands import Command

CONTROL, PLACE = 1, 2  # the watches of every node; a leader's own gets a new number each time


class Purpose(Enum):
    """What a request is for."""

    GRANT = auto()
    KEEP_ALIVE = auto()
    REVOKE = auto()
    WATCH_CONTROL = auto()
    WATCH_PLACE = auto()
    READ_PLACE = auto()
    COUNT_NODES = auto()
    BEGIN_AGAIN = auto()
    REGISTER = auto()
    UPDATE = auto()
    REPORT = auto()
    CAMPAIGN = auto()
    WATCH_JOB = auto()
    PUBLISH = auto()
    PUBLISH_PLACES = auto()
    NO_ANSWER = auto()


class Pending(NamedTuple):
    """A request without an answer; `hung_up`: when the first connection that it was asked on ended."""

    purpose: Purpose
    life: int
    sent: float
    hung_up: float | None = None


class StoreRequests:
    """What was asked, by tag."""

    def __init__(self, out: list[Action]) -> None:
        """`out` gets what is to be sent."""
        self._out = out
        self._pending: dict[int, Pending] = {}
        self.last = 0
        self._life = 1

    def send(self, now: float, purpose: Purpose, command: Command) -> None:
        self.last += 1
        lasting = purpose in (Purpose.WATCH_CONTROL, Purpose.WATCH_PLACE)
        self._pending[self.last] = Pending(purpose, 0 if lasting else self._life, now)
        self._out.append(Send(self.last, command))

    def answered(self, tag: int) -> Pending | None:
        """What this is the answer to; None: it is void."""
        pending = self._pending.pop(tag, None)
        return pending if pending is not None and pending.life in (0, self._life) else None

    def awaits(self, *purposes: Purpose) -> bool:
        """Whether the answer to one of these is still to come."""
        return any(p.purpose in purposes and p.life in (0, self._life) for p in self._pending.values())

    def begin_life(self) -> None:
        """The answers to what was asked so far do not count."""
        self._life += 1

    def forget(self, *purposes: Purpose) -> None:
        """The answers to these do not count."""
        for tag in [tag for tag, one in self._pending.items() if one.purpose in purposes]:
            del self._pending[tag]

    def hung_up(self, now: float) -> None:
        """The connection has ended: a lease that is being asked for may be shortened from now on."""
        for tag, pending in self._pending.items():
            if pending.purpose is Purpose.GRANT and pending.hung_up is None:
                self._pending[tag] = pending._replace(hung_up=now)
