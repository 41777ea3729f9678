"""This node's rounds, from the moment they are active: each gets a fresh place for its workers to meet.

Rank 0 opens it and publishes it under the round's number, so that processes of an older round can neither
find nor disturb it. A round is held by the agent's group from then on until its end is reported.
"""

from __future__ import annotations

from phalanx.cluster.listener import Meeting
from phalanx.core.rounds.store_commands import Delete, Put, Txn
from phalanx.job.address import listening_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.settings import Settings
    from phalanx.cluster.store_host import StoreHost
    from phalanx.core.rounds.participant_events import StartRound

KEY = "ctl/meeting/"


def shared_prefix(run_id: str, number: int) -> str:
    """Where the nodes of a round share data; outside of the prefix that the leader watches."""
    return f"shared/{run_id}/{number}/"


class Meetings:
    """`open_meeting(address)` returns (what serves there or None, port)."""

    def __init__(
        self,
        settings: Settings,
        host: StoreHost,
        open_meeting: Callable[[str], tuple[Any, int]],
        shares_port: bool,
    ) -> None:
        """`shares_port`: whether the workers of a static job use the store that node 0's agent serves."""
        self._settings, self._host, self._open_meeting = settings, host, open_meeting
        self._shares_port = shares_port
        self.address = ""  # the one of this node
        self.coming: StartRound | None = None  # a round whose place is not known yet
        self.held: Meeting | None = None
        self.last = -1  # the number of the round whose end was reported
        self.rank = -1  # in the last round
        self._known: dict[int, tuple[str, int]] = {}

    def learn(self, key: str, value: bytes) -> None:
        """A key below `ctl/`."""
        number = key.removeprefix(KEY)
        address, _, port = value.decode(errors="replace").rpartition(" ")
        if number.isdecimal() and port.isdecimal() and address.isprintable() and len(port) < 6:
            self._known[int(number)] = address, int(port)

    def open(self, start: StartRound) -> tuple[Meeting, Txn]:
        """Serve the place of a round, as its rank 0; the record of it. OSError where that is not possible."""
        port, address, served = self._host.new_round(self._shares_port), self._settings.host, None
        if port is None:
            try:
                served, port = self._open_meeting(listening_address(self.address))
            except OSError:
                # The routes may have changed since this node joined.
                address = self._settings.address()
                if address == self.address:
                    raise
                served, port = self._open_meeting(listening_address(address))
                self.address = address
            address = self.address
        number, prefix = start.round.number, self._settings.options.prefix + KEY
        # Two, because the round after the last one that ran may have ended before it was active.
        old = tuple(
            delete
            for back in (number - 1, number - 2)
            for delete in (
                Delete(shared_prefix(self._settings.run_id, back), prefix=True),
                Delete(f"{prefix}{back}"),
            )
        )
        record = Put(f"{prefix}{number}", f"{address} {port}".encode())
        return Meeting(start.round, start.place, address, port, served), Txn((), (record,), old)

    def found(self) -> Meeting | None:
        """The coming round, if it is known where its workers meet."""
        start = self.coming
        if start is None or start.place.rank == 0 or start.round.number not in self._known:
            return None
        address, port = self._known[start.round.number]
        self._known.clear()
        return Meeting(start.round, start.place, address, port, None)

    def hand(self, meeting: Meeting) -> None:
        """The group holds this round from now on."""
        self.coming, self.held, self.rank = None, meeting, meeting.place.rank

    def take_back(self) -> None:
        """The group knows that the round is over."""
        if self.held is not None:
            self.last, self.held = self.held.round.number, None
