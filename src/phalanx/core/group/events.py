"""What the agent's owner loop and `core.group.group` exchange: events in, commands out.

The contract the shell keeps:
- every `Join` is answered by exactly one `RoundReady` or `RoundFailed`, unless `Leave` or
  `CloseRendezvous` came first (then an answer may still come, or not); a rendezvous that watches the
  job may post `RoundFailed` later too: the round was there, and now the job is over for this node;
- every `StartWorkers` is answered by `Started` or `StartFailed`; after `StartFailed` nothing is alive;
- a stop or a recall, however often `StopWorkers` is repeated to hurry it, is answered by exactly one
  `Stopped`, even if nothing was alive or the start had not finished; `StopWorkers` ends parked workers, too;
- round numbers only grow; `Leave`, `CloseRendezvous` and `Note` need no answer and never fail.
"""

from __future__ import annotations

import signal
from enum import Enum

from phalanx.core.record import Record
from phalanx.core.text_enum import TextEnum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias


class WorkerState(str, Enum):  # not a TextEnum: str(INIT) is "WorkerState.INIT", as in torch
    """The state of a group as the outside sees it; the values are torch's."""

    UNKNOWN = "UNKNOWN"
    INIT = "INIT"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether worker processes of a group in this state are alive."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class Outcome(TextEnum):
    """How the life of a group ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    SIGNALED = "SIGNALED"
    CLOSED = "CLOSED"
    """The rendezvous was closed before this node had a part in it: a clean return."""
    LEFT = "LEFT"
    """This node was asked to leave; the job goes on without it: a clean return."""


class GroupRound(Record):
    """A formation of nodes; `members` are names by node rank, `attempt` is the job's count of restarts.

    `counted`: the rendezvous counts for all nodes, so its `attempt` holds even where this node had more."""

    number: int
    members: tuple[str, ...] = ()
    node_rank: int = 0
    store: str = ""
    attempt: int = 0
    counted: bool = False


# ---- events: what happened ---------------------------------------------------------------------------


class Start(Record):
    """Begin."""


class RoundReady(Record):
    """The rendezvous has formed a round with this node in it."""

    round: GroupRound


class RoundFailed(Record):
    """The rendezvous gave no round; `kind` is closed, timeout, graceful or error.

    `job_failed` is that of `CloseRendezvous`, None where the backend cannot carry it."""

    kind: str
    message: str = ""
    job_failed: bool | None = None


class Started(Record):
    """All workers of this node exist."""

    pids: tuple[int, ...] = ()


class StartFailed(Record):
    """The workers could not be made; `retry` where the cause may pass by itself (memory, process limit)."""

    message: str
    retry: bool = False


class WorkerFailed(Record):
    """A worker of this node failed; `error` is its message, by default the summary.

    `kinds`: the names of the exception and of its base classes; `step`: the last one that was reported;
    `signature`: what identifies the failure, empty where another attempt may help."""

    summary: str
    exit_code: int | None = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    step: int | None = None
    signature: str = ""


class AllSucceeded(Record):
    """All workers of this node ended well."""


class Stopped(Record):
    """The stop is over; `unkillable` names what outlived SIGKILL, `parked` workers wait to re-enter."""

    unkillable: tuple[str, ...] = ()
    parked: int = 0


class MembershipChanged(Record):
    """Nodes that the round could take in are waiting, or members are lost; `round` None: the current one."""

    waiting: int = 0
    lost: tuple[str, ...] = ()
    round: int | None = None


class RoundOver(Record):
    """The rendezvous has ended this round and forms the next; nothing failed.

    `at_once`: this node may have been replaced already, so its workers must not live on. `preempted`: a node
    is taken away, and the workers of all nodes save a checkpoint first."""

    round: int
    reason: str
    at_once: bool = False
    preempted: bool = False


class PeerFailed(Record):
    """Another node's failure, with its verdict for the job: `final`, or a restart after `delay`.

    `fresh`: in new processes on every node; `ranks`: those that a hang is due to; `step` and `signature`: as
    in `WorkerFailed`."""

    node: str
    round: int
    attempt: int
    summary: str = ""
    final: bool = False
    delay: float = 0.0
    fresh: bool = False
    ranks: tuple[int, ...] = ()
    step: int | None = None
    signature: str = ""


class Signal(Record):
    """A person or a scheduler asked the agent to stop; `stray`: by a signal that workers are not sent."""

    sig: int
    stray: bool = False


class BarrierDone(Record):
    """The exit barrier is over, with or without the `missing` nodes."""

    ok: bool = True
    missing: tuple[str, ...] = ()
    round: int | None = None


class WorkersReenter(Record):
    """A worker of this node has registered for re-entry; not `can`: none is registered any more."""

    can: bool = True


class Uninterruptible(Record):
    """Workers have been in uninterruptible sleep for too long."""

    pids: tuple[int, ...]


class Hang(Record):
    """The watchdog reports a worker without progress; `final`: whatever restarts are left.

    `ranks`: those that the others wait for, by global rank, where they are known; `step`: the last one that a
    rank reported; `signature`: the collective, where it is known."""

    summary: str
    final: bool = False
    ranks: tuple[int, ...] = ()
    step: int | None = None
    signature: str = ""


class RestartRequested(Record):
    """A person, or the program that drives the agent, asked for new workers; nothing failed."""

    reason: str


class Tick(Record):
    """The time asked for with `WakeAt` has come."""


Event: TypeAlias = (
    Start
    | RoundReady
    | RoundFailed
    | Started
    | StartFailed
    | WorkerFailed
    | AllSucceeded
    | Stopped
    | MembershipChanged
    | RoundOver
    | PeerFailed
    | Signal
    | BarrierDone
    | Uninterruptible
    | WorkersReenter
    | Hang
    | RestartRequested
    | Tick
)

# ---- commands: what to do, in this order -------------------------------------------------------------


class Join(Record):
    """Enter the rendezvous; `attempt` goes with it, so that the round carries the job's highest."""

    attempt: int


class StartWorkers(Record):
    """Start the workers of this round."""

    round: GroupRound
    attempt: int


class StopWorkers(Record):
    """Send `sig` to all workers and what they started; SIGKILL to what is left after `grace` seconds.

    Repeated during a stop: send this signal too, and bring the deadline forward (never back)."""

    sig: int
    grace: float


class RecallWorkers(Record):
    """Have the workers that re-enter unwind and park; stop the others with `sig` and `grace`.

    A worker that is not parked after `timeout` seconds is killed; those of `ranks` (global) at once. The
    workers are told `cause`."""

    sig: int
    grace: float
    timeout: float
    cause: str
    ranks: tuple[int, ...] = ()


class SiblingStop(Record):
    """How the other workers of a node end when one fails: the policy that agent and helpers carry out.

    `by_helpers`: the helper process begins the stop when it sees the exit, and the agent learns of both; else
    the agent begins it. What follows is the agent's decision in both cases."""

    sig: int = signal.SIGTERM
    grace: float = 30.0
    by_helpers: bool = False


class ReportFailure(Record):
    """Tell the other nodes at once (they get `PeerFailed`).

    `unfit`: the failure is this node's own, and it leaves; where the job can go on without it, it does.
    `fresh`: no worker re-enters."""

    round: int
    attempt: int
    summary: str
    final: bool
    delay: float = 0.0
    unfit: bool = False
    fresh: bool = False
    ranks: tuple[int, ...] = ()
    code: int = 1
    """The job's exit code, should this failure end it and no worker have one; 93 in any case."""
    step: int | None = None
    signature: str = ""


class RequestRound(Record):
    """Ask for the round after `round`, which uses no restart; `attempt`: those that this node has counted."""

    round: int
    attempt: int
    reason: str


class EnterBarrier(Record):
    """Wait for the other nodes to finish too."""

    round: int


class Leave(Record):
    """Take this node out of the rendezvous; the others may go on."""


class CloseRendezvous(Record):
    """The job is over, for all nodes."""

    reason: str
    job_failed: bool


class WakeAt(Record):
    """Post `Tick` at this time; a later `WakeAt` replaces it."""

    time: float


class Note(Record):
    """One line for the console: one per incident."""

    line: str


class Finish(Record):
    """The end: nothing follows."""

    outcome: Outcome
    state: WorkerState
    message: str = ""
    sig: int | None = None
    code: int = 1
    """The exit code of a failure without one of a worker; 93 in any case."""


Command: TypeAlias = (
    Join
    | StartWorkers
    | StopWorkers
    | RecallWorkers
    | ReportFailure
    | RequestRound
    | EnterBarrier
    | Leave
    | CloseRendezvous
    | WakeAt
    | Note
    | Finish
)
