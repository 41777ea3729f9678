"""What the owner loop (loop.py) talks to: its parts, the workers of this node, and the other nodes.

Only type checkers import this module. Every method is called by the owner thread and none may wait: what
takes time answers with an event, from `look` or through the loop's queue.

| protocol   | implementations |
|---|---|
| `LoopPart` | `NodeWorkers`, `HelperPool`, `Supervision`, `StatusSocket`, `RequestDesk`, `ProgressPart` |
| `WorkersOwner` | `Agent` |
| `NodeWorkers`  | `LocalWorkers` (processes), `StepWorkers` (a subclass of `SimpleElasticAgent` has them) |
| `Nodes`    | `HandlerNodes` (torch's interface: solo, plug-ins), `ElasticNodes` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from msgspec import Raw

    from phalanx.agent.loop import Posted
    from phalanx.agent.workers.result import RunResult
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.agent.workers.worker_store import WorkerStore
    from phalanx.cluster.handler import RendezvousInfo
    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.core.group.events import (
        CloseRendezvous,
        Event,
        RecallWorkers,
        ReportFailure,
        RequestRound,
        StartWorkers,
    )
    from phalanx.core.group.group import Ending, Phase
    from phalanx.core.group.ranks import WorkerRanks
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.records import HostRecord


class LoopPart(Protocol):
    """Something the loop waits for together with everything else."""

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        """Descriptors and what to poll them for."""

    def deadline(self, phase: Phase) -> float | None:
        """When `look` must be called at the latest; only for what it can act on in this phase."""

    def look(self, phase: Phase, now: float) -> Event | None:
        """Do what is due; called whenever the loop is awake."""


class WorkersOwner(Protocol):
    """What the workers of a node ask of their agent."""

    def place(self, info: RendezvousInfo) -> None:
        """Give the group its place in a round, and each worker its ranks."""

    def complete(self, envs: dict[int, dict[str, str]]) -> None:
        """Add to the workers' variables, before each start."""

    def settled(self) -> None:
        """The workers have run for a while: there is time for what is not urgent."""

    def post(self, event: Posted) -> None:
        """Queue an event, or a call, for the owner's thread; from any thread."""


class NodeWorkers(LoopPart, Protocol):
    """The workers of this node. Answers come from `look`."""

    result: RunResult
    """How the workers of the last start are, or ended."""
    error: BaseException | None
    """What made the last start fail."""
    context: PContext | None
    """Those of the last start."""
    store: WorkerStore | None
    """The workers' store, if this agent serves it."""
    stepped: bool
    """torch's steps ask, and `look` reports nothing."""

    @property
    def host(self) -> str:
        """This node, as people know it."""

    @property
    def idle(self) -> bool:
        """Whether nothing of the last start is alive, and its output is shown."""

    @property
    def decided(self) -> bool:
        """Whether the workers have ended, or one has failed, so that a look at them pays now."""

    def start(self, info: RendezvousInfo, command: StartWorkers) -> None:
        """Start the workers of a round: `Started` or `StartFailed`."""

    def stop(self, sig: int, grace: float) -> None:
        """Stop them, or hurry a stop or a recall that has begun: one `Stopped`."""

    def recall(self, command: RecallWorkers) -> None:
        """Have the workers that re-enter park, and stop the others: one `Stopped`."""

    def master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        """Where the workers of a round meet."""

    def open_meeting(self, address: str) -> tuple[Any, int]:
        """The same, should this node be the first of a round: (what serves there, port)."""

    def passes_interrupt(self) -> bool:
        """In a signal handler: pass a Ctrl-C on to the attached rank alone; False: it is for the job."""

    def ended_at(self, rank: int) -> float | None:
        """When a local rank succeeded, by the wall clock."""

    def explain(self) -> None:
        """Add what the system knows of the failures; takes a moment."""

    def lease_until(self, when: float) -> None:
        """Workers may run until then (CLOCK_BOOTTIME), whatever becomes of this agent, unless it is renewed.

        From any thread. The first call comes before the start of the workers that it is for; without one
        there is no limit.
        """

    def close(self) -> None:
        """Give back what is held; `closed` once that is done."""

    @property
    def closed(self) -> bool:
        """Whether nothing is left to wait for."""


class Nodes(Protocol):
    """The other nodes. Answers come through the loop's queue."""

    @property
    def name(self) -> str:
        """This node, as the others know it; empty where nodes have no names."""

    @property
    def has_meeting(self) -> bool:
        """Whether every round brings its own place for the workers to meet."""

    @property
    def error(self) -> BaseException | None:
        """What made the last round impossible."""

    @property
    def job_failure(self) -> tuple[str, int] | None:
        """Report and exit code of what ended the job, the same on every node."""

    @property
    def waiting(self) -> str:
        """What the nodes wait for, in words; empty where that is not known."""

    @property
    def worker_ranks(self) -> list[WorkerRanks] | None:
        """The ranks of this node's workers, where the round determines them; None: one node, or all alike."""

    on_request: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None] | None
    """Called, in the owner's thread, with what another node asks (requests.py), and how to answer it."""

    on_end: Callable[[], NodeGoodput | None] | None
    """Called once this node is about to go: its ledger, for the total of the job; None: too short for one."""

    @property
    def job_goodput(self) -> JobGoodput | None:
        """The ledger of all nodes, at the end; None where it is not known."""

    def keep_goodput(self, totals: GoodputTotals) -> None:
        """This node's ledger so far, for the total of the job, should the node be lost."""

    def place(self) -> dict[str, Any]:
        """This node among the others: id, address, lease_age and spare, where they are known."""

    def ask(self, request: dict[str, Any], timeout: float, then: Callable[[list[Raw], int], None]) -> None:
        """Ask all other nodes; `then` is called by the owner thread, with the answers and who is missing."""

    def drain(self) -> str:
        """Let this node leave the job, as another node may ask it to; what happens, in words."""

    def join(self, gone: int | None, attempt: int) -> None:
        """Be in the next round: `RoundReady` or `RoundFailed`. `gone`: the last one, if no worker is left."""

    def take(self, number: int) -> RendezvousInfo:
        """The round that is about to be started."""

    def running(self) -> None:
        """The workers run: `MembershipChanged` when nodes wait to join."""

    def count_waiting(self) -> int:
        """How many nodes wait to join, for an owner that asks; may take the time of a request."""

    def workers_gone(self, number: int) -> None:
        """Nothing of this round is alive on this node, or it is parked."""

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        """Write, or (None) delete, what the job holds against hosts; `then` gets whether that is done."""

    def unfit(self, why: str) -> None:
        """This node failed its check and is about to leave."""

    def slow_host(self, number: int, host: str, why: str) -> None:
        """A host of this round is slow, and is to be replaced where there is a spare; empty: no longer."""

    def failed(self, command: ReportFailure, report: Callable[[], tuple[str, int, bool]]) -> None:
        """A failure on this node; `report` makes text and exit code for all nodes, should it end the job, and
        whether all that happened here is that workers lost their peers."""

    def request_round(self, command: RequestRound) -> None:
        """Have all nodes form the next round, although nothing failed."""

    def fenced(self, number: int) -> None:
        """The workers of this round were killed because their lease was not renewed in time."""

    def finished(self, number: int) -> None:
        """The workers of this node succeeded; wait for the other nodes: `BarrierDone`."""

    def ending(self, ending: Ending) -> None:
        """This node stops its workers for good."""

    def leave(self, number: int, reason: str) -> None:
        """Go, and let the others go on; `closed` once that is done."""

    def close(self, number: int, command: CloseRendezvous, at_failure: Callable[[], None]) -> None:
        """The job is over; `closed` once the others know. `at_failure` reads what they found."""

    def abandon(self) -> None:
        """This node ends without a decision of the core: the others must not wait for it."""

    def release(self) -> None:
        """Give back what is open, without a word to the others; idempotent."""

    @property
    def closed(self) -> bool:
        """Whether nothing is left to wait for."""
