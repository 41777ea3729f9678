"""torch.distributed.elastic.agent.server.api: torch's agent classes, as adapters over the owner loop.

`run` calls `_invoke_run`. A class that overrides none of torch's steps is driven by events alone: the stop of
the old workers and the next rendezvous overlap, and nothing is polled. A class that overrides any step gets
all of them called, in torch's order:

    _invoke_run
        _initialize_workers ── _rendezvous ── _assign_worker_ranks
                            └─ _start_workers
        _monitor_workers                          every monitor_interval
        _restart_workers ── _stop_workers         after a failure, or when nodes wait
                         └─ _initialize_workers …
        _exit_barrier                             after success
        _stop_workers                             when no restart is left
    _shutdown

The core decides in both cases. Each step of this class is a function that returns when its work is done and
answers signals, status requests and health probes meanwhile, so a subclass may call it by itself, from an
`_invoke_run` of its own, say. A signal is raised as SignalException out of the step that waits.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod

from phalanx.agent.agent import Agent
from phalanx.agent.loop import signal_exception
from phalanx.agent.placement import assign_ranks
from phalanx.agent.spec import AgentOptions, Worker, WorkerGroup, WorkerSpec, complete
from phalanx.agent.workers.local_workers import START_ERRORS, worker_event
from phalanx.agent.workers.result import RunResult
from phalanx.core.group import restarts
from phalanx.core.group.events import (
    AllSucceeded,
    BarrierDone,
    GroupRound,
    MembershipChanged,
    Outcome,
    RestartRequested,
    RoundFailed,
    RoundReady,
    Signal,
    Start,
    Started,
    StartFailed,
    Stopped,
    WorkerState,
)
from phalanx.core.group.group import Phase
from phalanx.elastic.agent.server.stepped_loop import SteppedLoop, StepWorkers
from phalanx.elastic.agent.server.torch_events import METHODS as EVENT_METHODS
from phalanx.elastic.agent.server.torch_events import TorchEvents
from phalanx.elastic.internals import RoleInstanceInfo as _RoleInstanceInfo  # noqa: F401
from phalanx.elastic.internals import fq_hostname as _get_fq_hostname  # noqa: F401
from phalanx.elastic.lazy_modules import found_in
from phalanx.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.protocols import Nodes, NodeWorkers
    from phalanx.cluster.handler import RendezvousInfo
    from phalanx.core.group import group as core
    from phalanx.core.group.events import Finish

__all__ = [
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"

STEPS = (
    "_invoke_run",
    "_initialize_workers",
    "_rendezvous",
    "_assign_worker_ranks",
    "_start_workers",
    "_monitor_workers",
    "_stop_workers",
    "_restart_workers",
    "_exit_barrier",
    "_shutdown",
)
_OF_NODES = frozenset({"_invoke_run", "_rendezvous", "_exit_barrier"})
"""Steps that may call the handler themselves: such a class has torch's interface only, on every node."""

_SERVICES = frozenset({"timers", "health"})
"""What `SimpleElasticAgent` leaves to its subclasses, as torch's does."""


def _is_coroutine(step: Any) -> bool:
    code = getattr(step, "__code__", None)
    return code is not None and bool(code.co_flags & 0x80)  # inspect.CO_COROUTINE, without inspect


class ElasticAgent(ABC):
    """Runs worker groups."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the group to its end; a failure of workers is in the result, not an exception."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group as it is now; not to be changed by the caller."""


class SimpleElasticAgent(TorchEvents, Agent, ElasticAgent):
    """One group; subclasses start, watch and stop its workers."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in STEPS:
            step = cls.__dict__.get(name)
            if isinstance(step, staticmethod | classmethod) or (step is not None and not callable(step)):
                raise TypeError(f"{cls.__qualname__}.{name} must be a method: it is called on the agent")
            if step is not None and _is_coroutine(step):
                raise TypeError(
                    f"{cls.__qualname__}.{name} must not be a coroutine: its result is used at once"
                )

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
        *,
        options: AgentOptions = AgentOptions(),  # noqa: B008 - immutable
    ) -> None:
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._set_up(spec, None, options)

    def _set_up(self, spec: WorkerSpec, logs: LogsSpecs | None, options: AgentOptions) -> None:
        self._store: Any = None
        self._total_execution_time = 0
        self._role = DEFAULT_ROLE
        self._in_exit_barrier = False
        self._placed = 0  # the round that the workers have their ranks from
        self._overridden = frozenset(name for name in STEPS if not _is_own(getattr(type(self), name)))
        timeouts = {
            "exit_barrier_timeout": self._exit_barrier_timeout,
            "shutdown_timeout": self._shutdown_timeout,
        }
        Agent.__init__(self, complete(spec), logs, options.replace(**timeouts))
        self._loop.stepped = bool(self._overridden)

    _loop: SteppedLoop
    _loop_kind = SteppedLoop

    def _new_nodes(self, elastic: bool = True, exchanges: bool = True) -> Nodes:
        own = self._overridden
        return super()._new_nodes(not own & _OF_NODES, not own & {"_rendezvous", "_assign_worker_ranks"})

    def _new_workers(self, nodes: Nodes, policy: core.GroupPolicy) -> NodeWorkers:
        return StepWorkers(self._worker_group.spec, nodes)

    def _open_supervision(self, leave: frozenset[str] = _SERVICES) -> None:
        super()._open_supervision(leave)

    # -- what the outside reads ---------------------------------------------------------------------

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @property
    def _remaining_restarts(self) -> int:
        """How many restarts are left; may be set by a subclass that counts for itself."""
        return restarts.remaining(self.state.history, time.monotonic(), self.restart_policy)

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        state = self.state
        history = state.history.replace(attempt=max(0, self.restart_policy.max_restarts - left))
        self._loop.state = state.replace(history=history)

    # -- run ----------------------------------------------------------------------------------------

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the group to its end. A signal is raised as SignalException once nothing is left."""
        self._role = role
        began = time.monotonic()
        try:
            return super().run()
        finally:
            self._total_execution_time = int(time.monotonic() - began)

    def _drive(self) -> RunResult:
        try:
            return self._told(self._invoke_run(self._role))
        except RendezvousError as error:
            return self._without_round(error)

    def _told(self, result: RunResult) -> RunResult:
        """The result, after torch's methods for events and metrics, where the class has its own."""
        if any(getattr(type(self), name) is not getattr(TorchEvents, name) for name in EVENT_METHODS):
            self._record_metrics(result)
            self._record_worker_events(result)
            self._record.workers_recorded = True
        return result

    def _stop_by(self, sig: signal.Signals) -> None:
        loop = self._loop
        if loop.stepped and not (loop.guarded or self._ending):
            raise signal_exception(sig)  # into a step of the subclass, which does not look at the queue
        super()._stop_by(sig)

    def _without_round(self, error: RendezvousError) -> RunResult:
        """No round, and none to come: a clean end, unless the job or the rendezvous failed."""
        loop = self._loop
        if loop.finish is None and self.state.phase is Phase.JOINING:
            if isinstance(error, RendezvousGracefulExitError):
                loop.step(RoundFailed("graceful", str(error)))
            elif isinstance(error, RendezvousClosedError):
                loop.step(RoundFailed("closed", str(error)))
        if loop.finish is None or error in (loop.nodes.error, loop.workers.error):
            raise error
        return self._conclude(loop.finish)

    def _stop_rest(self, sig: signal.Signals | None) -> None:
        if sig is None:
            self._shutdown(timeout=self._shutdown_timeout)  # type: ignore[arg-type]  # torch: an int
            return
        self._shutdown(sig, timeout=self._shutdown_timeout)  # type: ignore[arg-type]
        # The workers are stopped because of a signal: have the core end it.
        if self._loop.finish is None and not self.state.signals:
            self._loop.step(Signal(int(sig)))
        if self._loop.finish is None and self.state.phase is Phase.ENDING:
            self._loop.step(Stopped())

    # -- torch's steps ------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The life of the group, from the first rendezvous to the exit barrier."""
        loop = self._loop
        if not loop.stepped:
            return self._conclude(loop.run())
        group = self._worker_group
        self._leave_round()  # a step may have been called before `run`
        try:
            while loop.finish is None:
                self._take_turn(loop, group)
        except START_ERRORS as error:
            if self.state.phase is Phase.STARTING:
                loop.step(StartFailed(str(error)))
            raise
        return self._conclude(loop.finish)

    def _take_turn(self, loop: SteppedLoop, group: WorkerGroup) -> None:
        """One step, or a look at the workers after `monitor_interval`."""
        match self.state.phase:
            case Phase.RUNNING:
                loop.pump(
                    lambda: self.state.phase is not Phase.RUNNING or loop.workers.decided,
                    group.spec.monitor_interval,
                )
                if self.state.phase is Phase.RUNNING:
                    watched = self.state.round
                    result = self._monitor_workers(group)
                    self._settle_start()
                    if self.state.phase is Phase.RUNNING and self.state.round is watched:
                        self._take_result(result)
            case Phase.BARRIER:
                self._exit_barrier()
                if self.state.phase is Phase.BARRIER:  # the step is the subclass's own
                    loop.step(BarrierDone(round=loop.number))
            case Phase.ENDING:
                self._stop_workers(group)
                self._stopped()
            case Phase.JOINING:  # at the begin, or when the others need a node that has finished
                before = self.state
                self._initialize_workers(group)
                self._settle(before)
            case _:
                before = self.state
                self._restart_workers(group)
                self._settle(before)

    def _take_result(self, result: RunResult) -> None:
        """Tell the core what `_monitor_workers` found."""
        loop, spec = self._loop, self._worker_group.spec
        self._worker_group.state = result.state  # also where the agent ends because of it
        event = worker_event(result, self.supervision.step_of)
        if event is None:
            self._observed(result.state)
        if result.state is WorkerState.HEALTHY:
            waiting = loop.nodes.count_waiting()
            if waiting > 0:
                loop.step(MembershipChanged(waiting=waiting))
            return
        loop.workers.result = result
        if event is None:
            states = "HEALTHY, SUCCEEDED, FAILED or UNHEALTHY"
            raise RuntimeError(
                f"role {spec.role}: _monitor_workers returned {result.state!s}: it must return {states}"
            )
        if result.state is WorkerState.SUCCEEDED:
            self.supervision.finished(time.monotonic())
        loop.step(event)

    def _settle(self, before: core.GroupState) -> None:
        """After a step that may be the subclass's own: the core learns what it was not told.

        `before`: the state at the begin of the step; unchanged where the step told the core nothing.
        """
        if self.state is before:
            self._settle_round()
        self._settle_start()

    def _settle_start(self) -> None:
        if self.state.phase is Phase.STARTING:
            pids = (worker.id for worker in self._worker_group.workers)
            self._loop.step(Started(tuple(pid for pid in pids if isinstance(pid, int))))

    def _settle_round(self) -> None:
        """The group has its place in a round: the core starts it, unless it knows of it."""
        loop, group = self._stepped, self._worker_group
        if self.state.phase in (Phase.STARTING, Phase.WAITING):
            self._back_off()
            return
        self._leave_round()
        if self.state.phase is Phase.JOINING:
            members = tuple(f"node {rank}" for rank in range(group.group_world_size or 1))
            loop.step(RoundReady(GroupRound(loop.number + 1, members, group.group_rank or 0)))
            self._placed = loop.number
        self._back_off()

    def _leave_round(self) -> None:
        """Bring the core to JOINING, or to a round that formed meanwhile and whose workers have no ranks yet.

        By torch's contract the workers of the last round are gone."""
        self._request_round("a new round was asked for")
        self._stopped()

    def _request_round(self, reason: str) -> None:
        """The subclass decides to leave the round that it is in: have all nodes form the next one."""
        loop = self._stepped
        if self.state.phase is Phase.NEW:
            loop.step(Start())
        if self._placed == loop.number and self.state.phase in (Phase.STARTING, Phase.RUNNING, Phase.BARRIER):
            loop.step(RestartRequested(reason))

    @property
    def _stepped(self) -> SteppedLoop:
        """The loop, for a step: one that is called by itself makes the agent a stepped one."""
        self._loop.stepped = True
        return self._loop

    def _back_off(self) -> None:
        """Wait until the next start is allowed."""
        if self.state.phase is Phase.WAITING:
            self._stepped.pump(lambda: self.state.phase is not Phase.WAITING)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Join a round, then start its workers."""
        before = self.state
        self._rendezvous(worker_group)
        if self.state is before:
            self._settle_round()
        ids = self._start_workers(worker_group)
        for worker in worker_group.workers:
            worker.id = ids.get(worker.local_rank)
        self._settle(before)
        worker_group.state = WorkerState.HEALTHY

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the next round; give the group its place in it, and the workers their ranks."""
        loop = self._stepped
        self._leave_round()
        self._back_off()
        while self.state.phase is Phase.JOINING:
            loop.wants_join = False
            loop.enter_rendezvous()
            loop.pump(lambda: self.state.phase is not Phase.JOINING or loop.wants_join)
            self._back_off()
        if loop.finish is not None:
            raise self._round_error(loop.finish)
        self.place(loop.nodes.take(loop.number))

    def _round_error(self, finish: Finish) -> BaseException:
        if finish.outcome is Outcome.LEFT:
            return RendezvousGracefulExitError(finish.message)
        if finish.outcome is Outcome.CLOSED:
            return RendezvousClosedError(finish.message)
        return self._loop.nodes.error or RendezvousClosedError(finish.message)

    def place(self, info: RendezvousInfo) -> None:
        """Give the group its place in the round, and each worker its ranks."""
        group = self._worker_group
        self._placed = self._loop.number
        self._store = group.store = info.store
        group.group_rank, group.group_world_size = info.rank, info.world_size
        group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, group.spec)
        group.master_addr, group.master_port = self._loop.workers.master(info)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks from role and worker count of every node, which the nodes exchange while they join."""
        return assign_ranks(self._loop.nodes, store, group_rank, group_world_size, spec)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, join the next round, and start again."""
        self._request_round("a restart was asked for")
        self._stop_workers(worker_group)
        self._stopped()
        if self._loop.finish is not None:
            return  # something could not be killed
        worker_group.state = WorkerState.STOPPED
        # Before the rendezvous: a subclass's own step may do without `_rendezvous`. A round that forms
        # meanwhile is kept.
        self._stepped.pump(lambda: False, self.state.not_before - time.monotonic())
        self._initialize_workers(worker_group)

    def _stopped(self) -> None:
        """The workers are stopped: tell core and nodes."""
        loop = self._loop
        if self.state.phase in (Phase.REFORMING, Phase.CLEARING, Phase.ENDING):
            unkillable = self._clear()
            loop.nodes.workers_gone(loop.number)
            loop.step(Stopped(unkillable))
        loop.stop_terms = None

    def _clear(self) -> tuple[str, ...]:
        """Stop what `_stop_workers` has left, if it was called at all; what could not be killed."""
        return ()

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes have ended; never fails a job whose workers succeeded."""
        loop = self._stepped
        if self.state.phase in (Phase.STARTING, Phase.RUNNING):
            loop.step(AllSucceeded())
        self._in_exit_barrier = True
        try:
            if self.state.phase is Phase.BARRIER:
                loop.nodes.finished(loop.number)
            loop.pump(lambda: self.state.phase is not Phase.BARRIER)
        finally:
            self._in_exit_barrier = False

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers; local rank → an id of your own (a pid, say)."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, whatever state they are in."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are; must not block."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Clean up at the end of the agent."""


_OWN: set[Any] = set()


def count_as_own(kind: type) -> None:
    """The steps of this class are the package's: they are not overridden."""
    _OWN.update(getattr(kind, name) for name in STEPS)


def _is_own(step: Any) -> bool:
    return step in _OWN


count_as_own(SimpleElasticAgent)

__getattr__ = found_in(__name__)
