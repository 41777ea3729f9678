"""torch's agent classes, as adapters over the owner loop (loop.py).

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

import os
import signal
import time
from abc import ABC, abstractmethod

from phalanx import environment
from phalanx.agent.local_workers import START_ERRORS, LocalWorkers, worker_event
from phalanx.agent.loop import ProgressPart, SteppedLoop, StepWorkers, signal_exception
from phalanx.agent.run_record import RunRecord
from phalanx.agent.spec import AgentOptions, RunResult, Worker, WorkerGroup, WorkerSpec, complete
from phalanx.agent.torch_events import METHODS as EVENT_METHODS
from phalanx.agent.torch_events import TorchEvents
from phalanx.core import group as core
from phalanx.core import restarts
from phalanx.core.group import Phase
from phalanx.core.group_events import (
    AllSucceeded,
    BarrierDone,
    GroupRound,
    MembershipChanged,
    Outcome,
    RoundFailed,
    RoundOver,
    RoundReady,
    Signal,
    Start,
    Started,
    StartFailed,
    Stopped,
    WorkerState,
)
from phalanx.core.restarts import RestartPolicy
from phalanx.errors import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    SignalException,
)
from phalanx.membership.handler import adapted
from phalanx.membership.handler_nodes import HandlerNodes
from phalanx.observe.event_file import EventFile
from phalanx.state.holder import StateHolder
from phalanx.supervision.supervision import Supervision
from phalanx.warm.helper_pool import HelperPool
from phalanx.workers.signals import SignalScope, signals_to_handle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.job_history import JobHistory
    from phalanx.agent.protocols import Nodes, NodeWorkers
    from phalanx.agent.worker_store import WorkerStore
    from phalanx.core.group_events import Event, Finish
    from phalanx.core.round_records import HostRecord
    from phalanx.logs.specs import LogsSpecs
    from phalanx.membership.handler import RendezvousInfo
    from phalanx.membership.job_goodput import JobGoodput
    from phalanx.supervision.timers.file_timer import FileTimerServer
    from phalanx.workers.worker_group import PContext

DEFAULT_ROLE = "default"

_LONGEST_CAUSE = 32768  # characters of the report of a failure in an answer
_FAREWELL = 30.0  # seconds for a rendezvous to be left or closed; a plug-in may hang

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

_NOT_CALLED = {"_log_watchdog_event": "what the watchdog does is logged by phalanx.supervision.timers"}
"""torch's methods that have no counterpart here: an override would never be called."""


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


class SimpleElasticAgent(TorchEvents, ElasticAgent):
    """One group; subclasses start, watch and stop its workers."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, why in _NOT_CALLED.items():
            if name in cls.__dict__:
                raise TypeError(f"{cls.__qualname__}.{name} would never be called: {why}")
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
        spec = complete(spec)
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._rdzv_handler = adapted(spec.rdzv_handler)
        self._store: Any = None
        self._total_execution_time = 0
        self._stray_signals = options.stray_signals
        self._in_exit_barrier = False
        self.restart_policy = options.restart_policy or RestartPolicy(max_restarts=spec.max_restarts)
        self.supervision = options.supervision or Supervision()
        self.outcome: Finish | None = None
        self._record = RunRecord(self._worker_group, options, self.restart_policy, self.supervision)
        self._overridden = frozenset(name for name in STEPS if not _is_own(getattr(type(self), name)))
        self._running = self._ending = False
        policy = core.GroupPolicy(
            restarts=self.restart_policy,
            stop_signal=self.supervision.preemption.stop_signal,
            grace=shutdown_timeout,
            # With a preemption signal the agent alone decides: the death of one worker must not stop those
            # that save their state.
            stop_by_helpers=not self.supervision.preemption.signal,
            preempt_signal=self.supervision.preemption.signal,
            reenter_timeout=options.reenter_timeout,
        )
        nodes = self._new_nodes()
        workers = self._new_workers(nodes, policy)
        self._loop = SteppedLoop(policy, nodes, workers, self.supervision, self._record)
        self._loop.stepped = bool(self._overridden)
        self.supervision.slow_host, self.supervision.on_unfit = nodes.slow_host, nodes.unfit
        if options.progress is not None:
            self._loop.parts.append(ProgressPart(options.progress, lambda: self.waiting_for))

    def _new_nodes(self) -> Nodes:
        spec = self._worker_group.spec
        if not (self._rdzv_handler.immediate or self._overridden & _OF_NODES):
            from phalanx.membership.elastic_nodes import elastic_nodes

            nodes = elastic_nodes(
                spec,
                self.restart_policy,
                self._post,
                self._record.show_waiting,
                self._record.note,
                lambda when: self._loop.workers.lease_until(when),
                self._exit_barrier_timeout,
                self.open_meeting,
                self._record.quarantined,
            )
            if nodes is not None:
                return nodes
        exchanges = not self._overridden & {"_rendezvous", "_assign_worker_ranks"}
        return HandlerNodes(spec, self._post, self._exit_barrier_timeout, exchanges=exchanges)

    def _new_workers(self, nodes: Nodes, policy: core.GroupPolicy) -> NodeWorkers:
        return StepWorkers()

    # -- what the outside reads ---------------------------------------------------------------------

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    @property
    def state(self) -> core.GroupState:
        """The group's state, as the core has it."""
        return self._loop.state

    @property
    def attempt(self) -> int:
        """Restarts used by the job so far."""
        return self.state.attempt

    @property
    def job_name(self) -> str:
        """As the failure report calls the job."""
        return self._record.job_name

    @property
    def history(self) -> JobHistory:
        """The incidents of this agent, and its goodput ledger."""
        return self._record.history

    @property
    def notes(self) -> list[tuple[float, str]]:
        """The latest incidents, with the time."""
        return list(self._record.notes)

    @property
    def job_failure(self) -> tuple[str, int] | None:
        """The report and exit code of what ended a job of several nodes: the same on all of them."""
        return self._loop.nodes.job_failure

    @property
    def job_goodput(self) -> JobGoodput | None:
        """The ledger of all nodes of a job of several, at its end; None where it is not known."""
        return self._loop.nodes.job_goodput

    @property
    def waiting_for(self) -> str:
        """What the agent waits for, in words; empty while that is as it should be."""
        phase = self.state.phase
        return (self._loop.nodes.waiting if phase is Phase.JOINING else "") or core.WORDS[phase][1]

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
        began = time.monotonic()
        sig: signal.Signals | None = None
        self._running = True
        try:
            self._record.open()
            with SignalScope([*signals_to_handle(), *self._stray_signals], post=self._signalled):
                try:
                    return self._told(self._invoke_run(role))
                except RendezvousError as error:
                    return self._without_round(error)
                except SignalException as error:
                    sig = error.sigval
                    raise
                finally:
                    self._ending = True
                    self._end(sig)
        finally:
            self._loop.close()
            self._record.end(self._loop.finish, self._loop.workers.result, self.attempt)
            self._running = False
            self.outcome = self._loop.finish
            self._total_execution_time = int(time.monotonic() - began)

    def _told(self, result: RunResult) -> RunResult:
        """The result, after torch's methods for events and metrics, where the class has its own."""
        if any(getattr(type(self), name) is not getattr(TorchEvents, name) for name in EVENT_METHODS):
            self._record_metrics(result)
            self._record_worker_events(result)
            self._record.workers_recorded = True
        return result

    def _post(self, event: Any) -> None:
        self._loop.post(event)

    def _signalled(self, sig: signal.Signals) -> None:
        """Called by the signal handler."""
        if self.supervision.preemption.repeats(sig):
            return
        loop = self._loop
        if loop.stepped and not (loop.guarded or self._ending):
            raise signal_exception(sig)  # into a step of the subclass, which does not look at the queue
        loop.post(Signal(int(sig), sig in self._stray_signals))

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

    def _end(self, sig: signal.Signals | None) -> None:
        """Stop what is left, say goodbye to the other nodes, and give everything back."""
        loop = self._loop
        if self._record.progress is not None:
            self._record.progress.clear()
        try:
            if sig is None:
                self._shutdown(timeout=self._shutdown_timeout)  # type: ignore[arg-type]  # torch: an int
            else:
                self._shutdown(sig, timeout=self._shutdown_timeout)  # type: ignore[arg-type]
                self._leave(sig)
        finally:
            if loop.finish is None:  # an error in a step or in the agent
                loop.nodes.abandon()
            loop.nodes.release()
            loop.drain(lambda: loop.nodes.closed, limit=_FAREWELL)

    def _leave(self, sig: signal.Signals) -> None:
        """The workers are stopped because of a signal: have the core end it."""
        if self._loop.finish is None and not self.state.signals:
            self._loop.step(Signal(int(sig)))
        if self._loop.finish is None and self.state.phase is Phase.ENDING:
            self._loop.step(Stopped())

    def _conclude(self, finish: Finish) -> RunResult:
        self._worker_group.state = finish.state
        result = self._loop.workers.result
        if finish.outcome is Outcome.SIGNALED:
            raise signal_exception(finish.sig or signal.SIGTERM)
        if finish.outcome is Outcome.FAILED:
            error = self._loop.workers.error or self._loop.nodes.error
            if error is not None and not result.failures:  # the rendezvous or a start
                raise error
            return RunResult(finish.state, {}, result.failures, result.stopped)
        # A clean end: what went wrong before it has been overcome.
        return RunResult(WorkerState.SUCCEEDED, result.return_values)

    # -- torch's steps ------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The life of the group, from the first rendezvous to the exit barrier."""
        loop = self._loop
        if not loop.stepped:
            return self._conclude(loop.run())
        group = self._worker_group
        loop.step(Start())
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
                    self._take_result(self._monitor_workers(group))
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
        if result.state is WorkerState.HEALTHY:
            waiting = loop.nodes.count_waiting()
            if waiting > 0:
                loop.step(MembershipChanged(waiting=waiting))
            return
        loop.workers.result = result
        event = worker_event(result, self.supervision.progress_of)
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
        self._back_off()

    def _leave_round(self) -> None:
        """The workers of the last round are gone, by torch's contract; bring the core to JOINING."""
        loop = self._stepped
        if self.state.phase is Phase.NEW:
            loop.step(Start())
        if self.state.phase in (Phase.STARTING, Phase.RUNNING, Phase.BARRIER):
            loop.step(RoundOver(loop.number, "a new round was asked for"))
        self._stopped()

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
        while self.state.phase is Phase.JOINING:
            loop.wants_join = False
            loop.enter_rendezvous()
            loop.pump(lambda: self.state.phase is not Phase.JOINING or loop.wants_join)
            self._back_off()
        if loop.finish is not None:
            raise self._round_error(loop.finish)
        self._place_workers(loop.nodes.take(loop.number))

    def _round_error(self, finish: Finish) -> BaseException:
        if finish.outcome is Outcome.LEFT:
            return RendezvousGracefulExitError(finish.message)
        if finish.outcome is Outcome.CLOSED:
            return RendezvousClosedError(finish.message)
        return self._loop.nodes.error or RendezvousClosedError(finish.message)

    def _place_workers(self, info: RendezvousInfo) -> None:
        """Give the group its place in the round, and each worker its ranks."""
        group = self._worker_group
        self._store = group.store = info.store
        group.group_rank = info.rank
        group.group_world_size = info.world_size
        group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, group.spec)
        group.master_addr, group.master_port = self._master(info)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks from role and worker count of every node, which the nodes exchange while they join."""
        from phalanx.core.ranks import assign_identical

        places = self._loop.nodes.worker_ranks
        if places is None and group_world_size > 1 and not environment.workers_are_identical():
            from phalanx.membership.exchange import exchange_ranks

            places = exchange_ranks(store, group_rank, group_world_size, spec)
        if places is None:
            places = assign_identical(group_rank, group_world_size, spec.local_world_size)
        return [
            Worker(p.local_rank, p.global_rank, p.role_rank, p.world_size, p.role_world_size) for p in places
        ]

    def _master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        """Where the workers' own store is."""
        spec, where = self._worker_group.spec, info.bootstrap_store_info
        if where is None:
            return spec.master_addr, spec.master_port
        return spec.master_addr or where.master_addr, spec.master_port or where.master_port

    def open_meeting(self, address: str) -> tuple[Any, int]:
        """Where the workers of a round meet, should this node be its first: (what serves there, port)."""
        from phalanx.membership.address import free_port

        return None, free_port()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, join the next round, and start again."""
        loop = self._stepped
        if self.state.phase in (Phase.RUNNING, Phase.STARTING):  # the decision was the subclass's own
            loop.step(RoundOver(loop.number, "a restart was asked for"))
        self._stop_workers(worker_group)
        self._stopped()
        if self._loop.finish is not None:
            return  # something could not be killed
        worker_group.state = WorkerState.STOPPED
        left = self.state.not_before - time.monotonic()
        if left > 0:
            self._stepped.pump(lambda: False, left)
        self._initialize_workers(worker_group)

    def _stopped(self) -> None:
        """The workers are stopped: tell core and nodes."""
        if self.state.phase in (Phase.REFORMING, Phase.CLEARING, Phase.ENDING):
            self._loop.nodes.workers_gone(self._loop.number)
            self._loop.step(Stopped(self._unkillable()))

    def _unkillable(self) -> tuple[str, ...]:
        return ()

    def _exit_barrier(self) -> None:
        """Wait until the workers of all nodes have ended; never fails a job whose workers succeeded."""
        loop = self._stepped
        if self.state.phase is Phase.RUNNING:
            loop.step(AllSucceeded())
        self._in_exit_barrier = True
        try:
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


class LocalElasticAgent(SimpleElasticAgent):
    """NodeWorkers are processes: functions by `start_method`, or programs."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        options: AgentOptions = AgentOptions(),  # noqa: B008 - immutable
    ) -> None:
        self._start_method = start_method
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = environment.uninterruptible_timeout()
        self._uninterruptible_timeout = uninterruptible_state_timeout
        self._own_context: PContext | None = None
        self._own_watchdog: FileTimerServer | None = None
        self._attach = options.attach
        self._output = options.output
        self._meeting: WorkerStore | None = None  # what this node opened last for a round's workers
        self.helpers = options.helpers or HelperPool()
        self.kept_state = options.state or StateHolder()
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, options=options)
        from phalanx.agent.node_view import NodeView
        from phalanx.agent.requests import RequestDesk
        from phalanx.agent.status import StatusSocket

        self.kept_state.note, self.kept_state.post = self._record.note, self._post
        self.desk = RequestDesk(self, NodeView(self, time.time()))
        self.status = StatusSocket(self.desk.handle)
        self._loop.nodes.on_request = self.desk.answer
        self._loop.parts += [self.helpers, self.status, self.desk]
        if not self._rdzv_handler.immediate:
            from phalanx.agent.goodput_report import GoodputReport

            self._loop.parts.append(GoodputReport(self.history, self._loop.nodes))
        self.history.ended = self._workers.ended_at
        self.dashboard = options.dashboard
        if self.dashboard is not None:
            self.dashboard.attach(
                lambda: self.status.name,
                lambda: self.state.round is not None and self.state.round.node_rank == 0,
                self._rdzv_handler.get_run_id,
                self._record.clear_progress,
            )
            self._loop.parts.append(self.dashboard)
        self._early_run_dir: str | None = None
        self._record.events = EventFile(lambda: self.run_dir, lambda: self.host)
        self.history.listeners.append(self._record.events.incident)
        self.was_quiet = False
        self.on_quiet: Callable[[], None] = lambda: None
        """Called once, when workers have run for two seconds and there is time for what is not urgent."""
        self._workers.on_quiet = self._settled
        if options.metrics:
            from phalanx.agent.metrics_view import MetricsView

            self.supervision.services.pages["/metrics"] = MetricsView(self).page().answer

    def _new_workers(self, nodes: Nodes, policy: core.GroupPolicy) -> LocalWorkers:
        self._workers = LocalWorkers(
            self._worker_group,
            self._rdzv_handler,
            nodes,
            logs_specs=self._logs_specs,
            start_method=self._start_method,
            prefix_template=self._log_line_prefix_template,
            attach=self._attach,
            output=self._output,
            uninterruptible_timeout=self._uninterruptible_timeout,
            at_failure=policy.at_failure,
            helpers=self.helpers,
            supervision=self.supervision,
            record=self._record,
            place=self._place_workers,
            setup=self._set_up,
            post=self._post,
            stepped=lambda: self._loop.stepped,
            state=self.kept_state,
            reenter_timeout=policy.reenter_timeout,
        )
        return self._workers

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """As `SimpleElasticAgent.run`, with a watch over the workers' progress."""
        try:
            self.supervision.open(
                run_id=self._rdzv_handler.get_run_id(),
                post=self._post,
                note=self._record.note,
                phase=lambda: self.state.phase.value,
                health_check_server=self._health_check_server,
                leave=self._of_subclass,
            )
            return super().run(role)
        finally:
            self.supervision.close()

    def _signalled(self, sig: signal.Signals) -> None:
        if sig != signal.SIGINT or not self._workers.passes_interrupt():
            super()._signalled(sig)

    # -- services that a subclass may set up in its own way -------------------------------------------

    @property
    def _of_subclass(self) -> frozenset[str]:
        """The services that wait for the steps below: a subclass has its own, which may call ours."""
        steps = {"timers": "_setup_local_watchdog", "health": "_setup_healthcheck"}
        own = {name: getattr(LocalElasticAgent, step) for name, step in steps.items()}
        return frozenset(name for name, step in steps.items() if getattr(type(self), step) is not own[name])

    def _set_up(self, envs: dict[int, dict[str, str]]) -> None:
        """Before each start, with the environment of every worker."""
        self._setup_local_watchdog(envs)
        self._setup_healthcheck()

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Start the watchdog of the timers, if it is asked for and does not run, and tell the workers."""
        services = self.supervision.services
        services.start_timers(self._rdzv_handler.get_run_id())
        for environ in envs.values():
            environ.update(services.environment)

    def _setup_healthcheck(self) -> None:
        """Start the health endpoint, if it is asked for and does not run."""
        self.supervision.services.start_health()

    # -- what the outside reads ---------------------------------------------------------------------

    @property
    def _worker_watchdog(self) -> FileTimerServer | None:
        """The watchdog of the timers, while it runs; a subclass that makes its own sets it."""
        return self._own_watchdog or self.supervision.services.timers

    @_worker_watchdog.setter
    def _worker_watchdog(self, watchdog: FileTimerServer | None) -> None:
        self._own_watchdog = watchdog

    @property
    def _pcontext(self) -> PContext | None:
        """The workers of the last start; a subclass that starts them itself sets its own."""
        return self._own_context or self._workers.context

    @_pcontext.setter
    def _pcontext(self, context: PContext | None) -> None:
        self._own_context = context

    @property
    def host(self) -> str:
        """This node, as people know it."""
        return self._workers.host

    @property
    def run_dir(self) -> str | None:
        """The directory of this run's logs, once workers have started."""
        context = self._pcontext
        if context is None or not context.error_files:
            return self._early_run_dir
        from phalanx.logs.specs import DefaultLogsSpecs

        if not isinstance(self._logs_specs, DefaultLogsSpecs):
            return self._logs_specs.root_log_dir  # a plug-in has its own layout of files
        rank_dir = os.path.dirname(next(iter(context.error_files.values())))
        return os.path.dirname(os.path.dirname(rank_dir))

    def make_run_dir(self) -> None:
        """Make that directory, where it was named, for a node that ends before its workers start."""
        from phalanx.logs.specs import DefaultLogsSpecs

        specs = self._logs_specs
        if self.run_dir is None and isinstance(specs, DefaultLogsSpecs) and not specs.is_temporary:
            try:
                self._early_run_dir = specs.run_dir(self._rdzv_handler.get_run_id())
            except OSError:
                pass  # it may be what this node ends for

    def _settled(self) -> None:
        if not self.was_quiet:
            self.was_quiet = True
            self.on_quiet()

    def post(self, event: Event) -> None:
        """Queue an event for the owner's thread; from any thread."""
        self._post(event)

    def cause(self) -> dict[str, Any]:
        """The report of the last failure or hang that this node saw, and when."""
        text, when = self._record.cause()
        return {"cause": text[:_LONGEST_CAUSE], "cause_at": when}

    @property
    def worker_store(self) -> WorkerStore | None:
        """The workers' store, if this agent serves it."""
        return self._workers.store

    def place(self) -> dict[str, Any]:
        """This node among the others: id, address, lease_age, and whether it is a spare, where known."""
        return self._loop.nodes.place()

    def ask_nodes(
        self, request: dict[str, Any], timeout: float, then: Callable[[list[Raw], int], None]
    ) -> None:
        """Ask all other nodes; `then` gets their answers, and how many did not answer, in this thread."""
        self._loop.nodes.ask(request, timeout, then)

    def drain(self) -> str:
        """Let this node leave the job; what will happen, in words."""
        return self._loop.nodes.drain()

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        """Write, or (None) delete, what the job holds against hosts; `then` gets whether that is done."""
        self._loop.nodes.change_hosts(hosts, then)

    def remove_empty_logs(self) -> None:
        """Remove the temporary directories of this run that hold no output; given ones stay."""
        from phalanx.logs.specs import DefaultLogsSpecs

        if isinstance(self._logs_specs, DefaultLogsSpecs):
            self._logs_specs.remove_empty()

    def clean_up_logs(self, succeeded: bool) -> None:
        """The same, and what is of no use after a success; old directories of this user, too."""
        from phalanx.logs.specs import DefaultLogsSpecs

        if isinstance(self._logs_specs, DefaultLogsSpecs):
            self._logs_specs.clean_up(succeeded)

    def exception_of(self, global_rank: int) -> BaseException | None:
        """The exception that ended a function worker, where it could be pickled."""
        from phalanx.workers.worker_kinds import MultiprocessContext

        context = self._pcontext
        if isinstance(context, MultiprocessContext):
            for worker in self._worker_group.workers:
                if worker.global_rank == global_rank:
                    return context.error(worker.local_rank)
        return None

    # -- torch's steps ------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers, loop = self._workers, self._stepped
        loop.guard(lambda: workers.begin(loop.number, self.attempt, 0.0))
        loop.pump(lambda: workers.answered)
        return workers.take_start()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        workers, loop = self._workers, self._stepped
        if self._own_context is not None:
            self._own_context.close(signal.Signals(loop.stop_signal), int(self._shutdown_timeout))
        workers.stop(loop.stop_signal, loop.stop_grace)
        loop.pump(lambda: workers.idle)

    def _unkillable(self) -> tuple[str, ...]:
        return self._workers.take_stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._own_context is not None:
            return self._observe(self._own_context, worker_group)
        return RunResult(WorkerState.UNHEALTHY) if self._workers.stuck else self._workers.observe()

    def _observe(self, context: PContext, group: WorkerGroup) -> RunResult:
        """The same for workers that the subclass has started itself."""
        if {worker.id for worker in group.workers} != set(context.pids().values()):
            return RunResult(WorkerState.UNKNOWN)
        result = context.wait(0)
        if result is None:
            return RunResult(WorkerState.HEALTHY)
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        if result.is_failed():
            failures = {ranks[local]: failure for local, failure in result.failures.items()}
            return RunResult(WorkerState.FAILED, failures=failures)
        values = {ranks[local]: value for local, value in result.return_values.items()}
        return RunResult(WorkerState.SUCCEEDED, return_values=values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        workers = self._workers

        def kill() -> None:
            workers.stop(signal.SIGKILL, 0.0)
            self.helpers.hurry()
            self.kept_state.hurry()

        if self._own_context is not None:
            self._own_context.close(death_sig, timeout)
        if not workers.idle:
            workers.stop(death_sig, min(timeout, self._shutdown_timeout))
            self._loop.drain(lambda: workers.idle, kill)
        finish = self._loop.finish
        self.kept_state.job_succeeded = finish is not None and finish.outcome is Outcome.SUCCEEDED
        try:
            workers.close()
            self._loop.drain(lambda: workers.closed, kill)
        finally:
            self.status.close()
            self.desk.close()
            if not self._running:  # called without `run`
                self.supervision.close()
                self._loop.close()

    def _conclude(self, finish: Finish) -> RunResult:
        if finish.outcome is Outcome.FAILED:
            self._workers.explain()
        result = super()._conclude(finish)
        if self.supervision.unfit is not None and finish.outcome is Outcome.LEFT:
            raise self.supervision.unfit
        return result

    # -- the workers' store -------------------------------------------------------------------------

    def open_meeting(self, address: str) -> tuple[Any, int]:
        from phalanx.agent.worker_store import WorkerStore

        spec, last = self._worker_group.spec, self._meeting
        if last is not None and spec.master_port and not last.closed:
            last.new_round()  # the port is given: it is kept, and emptied
            return last, last.port
        if spec.master_addr:
            from phalanx.membership.address import listening_address

            address = listening_address(spec.master_addr)
        store = WorkerStore(address, spec.master_port, self._rdzv_handler.use_agent_store)
        self._meeting = store
        return store, store.port

    def _master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        return self._workers.master(info)


_OWN = frozenset(getattr(kind, name) for kind in (SimpleElasticAgent, LocalElasticAgent) for name in STEPS)


def _is_own(step: Any) -> bool:
    return step in _OWN
