"""The events and actions of `core.rounds.participant`.

What concerns the workers is in the language of `core.group.events`: a round that is over, with its reason."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.group.events import PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.records import Place, Round
from phalanx.core.rounds.store_commands import Command, Notice, Reply


class Begin(NamedTuple):
    """Join the job."""


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
    """None of that round's workers runs on this node."""

    round: int


class LeaseMissed(NamedTuple):
    """The workers of a round were killed, because the lease was not renewed in time."""

    round: int


class WorkersSucceeded(NamedTuple):
    """All workers of this node ended well."""

    round: int


class WorkersFailed(NamedTuple):
    """Workers of this node failed, and the others are being stopped.

    `unfit`: they could not be started, and the node leaves. `blameless`: the cause is on another node."""

    round: int
    failure: NodeFailure
    unfit: bool = False
    blameless: bool = False


class RoundRequested(NamedTuple):
    """All nodes are to form the round after this one; nothing failed. `restarts`: counted by this node."""

    round: int
    reason: str
    restarts: int


class CloseRequested(NamedTuple):
    """The job is to end, for all nodes."""

    reason: str


class LeaveRequested(NamedTuple):
    """This node is to go (a signal, a drain); the others go on. `preempted`: when all workers have saved."""

    reason: str
    preempted: bool = False


Event = (
    Begin | ClockTick | Connected | Disconnected | StoreLost | StoreWentBack | Answer | Noticed
    | WorkersStopped | LeaseMissed | WorkersSucceeded | WorkersFailed | RoundRequested | LeaveRequested
    | CloseRequested
)  # fmt: skip


class Send(NamedTuple):
    """Send a command to the store, across reconnects, until it is answered."""

    tag: int
    command: Command


class StartRound(NamedTuple):
    """Start workers at this node's place in the round."""

    round: Round
    place: Place


class End(NamedTuple):
    """The job is over for this node: succeeded, failed, closed, timeout, left, replaced, refused, store or
    port.

    `held`: the round that its group still holds, -1 for none; `finished`: its workers have succeeded."""

    outcome: str
    reason: str
    round: Round | None
    held: int = -1
    finished: bool = False


class Remark(NamedTuple):
    """A line for people, shown once; `quarantined`: the host that it says is."""

    text: str
    quarantined: str = ""


RoundEnd = RoundOver | PeerFailed | RoundFailed
"""For the group that holds the round that `StartRound` gave: its workers are to stop."""

Action = Send | StartRound | RoundEnd | End | Remark
