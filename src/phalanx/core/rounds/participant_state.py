"""What a participant knows and does, one record per noun, and its phases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from phalanx.core.rounds.participant_events import StartRound
from phalanx.core.text_enum import TextEnum


class NodePhase(TextEnum):
    """Where a node stands."""

    NEW = "NEW"
    JOINING = "JOINING"
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    STOPPING = "STOPPING"
    FENCED = "FENCED"
    LEAVING = "LEAVING"
    ENDING = "ENDING"
    ENDED = "ENDED"


NEW, JOINING, WAITING, RUNNING, FINISHED, STOPPING, FENCED, LEAVING, ENDING, ENDED = NodePhase

MEANINGS: Mapping[NodePhase, str] = {
    NEW: "nothing has happened yet",
    JOINING: "no lease, or not registered; no workers",
    WAITING: "registered, no workers",
    RUNNING: "workers of a round run, or were stopped by the group",
    FINISHED: "the workers have succeeded, the round goes on",
    STOPPING: "the round is over, its workers are being stopped",
    FENCED: "the lease may be lost, the workers are being killed",
    LEAVING: "no workers, the lease is being given back",
    ENDING: "the job is over for this node, its workers are being stopped",
    ENDED: "the end",
}


class Registration(NamedTuple):
    """This node's own key, as the store has it."""

    incarnation: int = 0  # the revision that created it; 0: it is not registered
    mod: int = 0
    ready: int = 0  # the round that it is ready for
    leaving: bool = False  # whether it says that this node leaves


class Work(NamedTuple):
    """What this node's workers do."""

    running: int = 0  # the round whose workers this node has; 0: none
    held: StartRound | None = None  # what the group was given, until its end is reported
    started: tuple[int, int] = (0, 0)  # the last round, and the incarnation that started it
    finished: int = -1  # the round in which they have succeeded


class Departure(NamedTuple):
    """Why this node goes, and whether because it is taken away; empty: it does not go."""

    reason: str = ""
    preempted: bool = False


class StoreReach(NamedTuple):
    """When the store was heard last, and what follows from its absence."""

    heard: float = 0.0
    away: bool = False  # the connection has ended
    unsure_until: float = 0.0  # until when nodes may be lost because the store was away
    quiet_until: float = 0.0  # until when nodes may run on leases that the store has forgotten
