"""What the nodes wait for, in words: the leader keeps it in the job's `status` key.

Nodes read it only once they have waited for a while, and watch it from then on until they have a round.
"""

from __future__ import annotations

from phalanx.cluster.clock import clock
from phalanx.core.rounds.records import FORMING, printable
from phalanx.core.rounds.store_commands import Put, Txn, Unwatch, Watch, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.cluster.membership import Membership

WATCH = 800_000  # the number of the watch, between the participant's and the client's
_LONGEST = 4096


class SharedStatus:
    """Of one membership."""

    def __init__(self, owner: Membership) -> None:
        self._owner, self._line = owner, owner.line
        self._key = owner.options.prefix + "status"
        self._watched = False

    @property
    def show_at(self) -> float | None:
        """When to show it next."""
        waits = self._owner.meetings.held is None and not self._owner.ended.is_set()
        return self._line.show_at() if waits else None

    @property
    def write_at(self) -> float | None:
        """When the leader has to write it next."""
        participant = self._owner.participant
        if not self._owner.leading or participant is None:
            return None
        self._line.learn(participant.reason, clock())
        current = participant.round
        return self._line.write_at(current is None or current.phase == FORMING)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if (show := self.show_at) is not None and now >= show:
            self._show(now)
        if (write := self.write_at) is not None and now >= write:
            leader = When(
                self._owner.options.prefix + "ctl/leader", "value", value=self._owner.info.id.encode()
            )
            self._owner.send(Txn((leader,), (Put(self._key, self._line.write(now)),)))

    def _show(self, now: float) -> None:
        """Report what the node waits for; the first time, read the leader's line before."""
        if not self._owner.leading and not self._watched and self._owner.participant is not None:
            self._watched = True
            self._owner.send(Watch(WATCH, self._key), lambda reply: self.learn(reply.entries))
            self._line.wait(now)
        else:
            self._owner.listener.waits(self._line.show(now))

    def learn(self, entries: tuple[Any, ...]) -> None:
        """What the leader has written."""
        if entries and self._watched and not self._owner.leading:
            self._line.learn(printable(entries[0].value[:_LONGEST].decode(errors="replace")), clock())
            if not self._line.shown:
                self._owner.listener.waits(self._line.show(clock()))

    def unwatch(self) -> None:
        """The wait is over."""
        if self._watched:
            self._watched = False
            self._owner.send(Unwatch(WATCH))

    def forget(self) -> None:
        """The connection of the watch is gone."""
        self._watched = False
