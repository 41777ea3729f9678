"""The events and actions of `core.rounds.participant`."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.rounds.records import Place, Round
from phalanx.core.rounds.store_commands import Command, Notice, Reply


class ClockTick(NamedTuple):
    """Time has passed."""


class Connected(NamedTuple):
    """The connection to the store is up; unanswered requests are being sent again."""


class Disconnected(NamedTuple):
    """The connection to the store ended."""


class StoreLost(NamedTuple):
    """The store is back without its data, or is not coming back."""

    why: str


class StoreWentBack(NamedTuple):
    """The store came back with older data than it had: what it said since then is void."""


class Answer(NamedTuple):
    """The reply to `Send` with this tag."""

    tag: int
    reply: Reply


class Noticed(NamedTuple):
    """A watch reported changes."""

    notice: Notice


class WorkersStopped(NamedTuple):
    """`StopRound` is done: none of that round's workers runs on this node."""

    round: int


class LeaseMissed(NamedTuple):
    """The workers of a round were killed, because the lease was not renewed in time."""

    round: int


class WorkersEnded(NamedTuple):
    """The workers of this node ended by themselves; when not ok, all of them are stopped by now."""

    round: int
    ok: bool
    detail: str = ""


class LeaveRequested(NamedTuple):
    """This node is to go (a signal, a drain); the others go on. `preempted`: when all workers have saved."""

    reason: str
    preempted: bool = False


Event = (
    ClockTick | Connected | Disconnected | StoreLost | StoreWentBack | Answer | Noticed
    | WorkersStopped | LeaseMissed | WorkersEnded | LeaveRequested
)  # fmt: skip


class Send(NamedTuple):
    """Send a command to the store, across reconnects, until it is answered."""

    tag: int
    command: Command


class StartRound(NamedTuple):
    """Start workers at this node's place in the round."""

    round: Round
    place: Place


class StopRound(NamedTuple):
    """Stop the workers of a round; `at_once`: they must not live on, kill them without a grace.

    `preempted`: they save a checkpoint first."""

    number: int
    reason: str
    at_once: bool = False
    preempted: bool = False


class End(NamedTuple):
    """The job is over for this node: succeeded, failed, closed, timeout, left, replaced, refused or store."""

    outcome: str
    reason: str
    round: Round | None


class Tell(NamedTuple):
    """A line for people, shown once; `quarantined`: the host that it says is."""

    text: str
    quarantined: str = ""


Action = Send | StartRound | StopRound | End | Tell
