"""What a membership reports, in order and from its thread: events of `core.group`, and lines for people."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from phalanx.core.group.events import GroupRound, RoundReady
from phalanx.core.rounds.records import Place, Round

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.core.rounds.participant_events import End, Remark, RoundEnd


class Meeting(NamedTuple):
    """This node's place in a round, and where its workers meet; `served` serves that address on rank 0."""

    round: Round
    place: Place
    address: str
    port: int
    served: Any

    @property
    def ready(self) -> RoundReady:
        """The round for the group of this node."""
        current = self.round
        return RoundReady(
            GroupRound(
                current.number,
                current.all_names(),
                self.place.rank,
                attempt=current.restarts,
                counted=True,
            )
        )


class Listener(Protocol):
    """Who follows a membership; no call may block."""

    def round_ready(self, meeting: Meeting) -> None:
        """Run the workers of this round."""

    def round_over(self, event: RoundEnd, now: Round | None) -> None:
        """Stop the workers of the round, which is over; `now`: the job's, where it is known."""

    def job_over(self, end: End) -> None:
        """The job is over for this node, perhaps while workers run; nothing but `round_over` follows."""

    def waits(self, text: str) -> None:
        """What the nodes wait for, repeated while they wait."""

    def remarks(self, remark: Remark) -> None:
        """A line for people, shown once."""

    def lease_until(self, when: float) -> None:
        """Until when workers may run, by `cluster.clock`: before `round_ready`, and when it changes."""

    def asked(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        """Another node asks."""
