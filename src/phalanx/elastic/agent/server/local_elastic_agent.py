"""torch.distributed.elastic.agent.server.local_elastic_agent: torch's agent for the workers of one host."""

from __future__ import annotations

import signal
import time

from phalanx.agent.spec import AgentOptions, RunResult, WorkerGroup, WorkerSpec
from phalanx.agent.state.holder import StateHolder
from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.workers.local_workers import LocalWorkers
from phalanx.core.group import group as core
from phalanx.core.group.events import Outcome, WorkerState
from phalanx.elastic.agent.server.api import DEFAULT_ROLE, SimpleElasticAgent, count_as_own
from phalanx.job import environment
from phalanx.job.environment import UNINTERRUPTIBLE_TIMEOUT as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT
from phalanx.observe.event_file import EventFile
from phalanx.observe.log_layout import run_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.protocols import Nodes
    from phalanx.agent.supervision.timers.pipe_watchdog import PipeWatchdog
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.agent.workers.worker_store import WorkerStore
    from phalanx.cluster.handler import RendezvousInfo
    from phalanx.core.group.events import Event, Finish
    from phalanx.core.rounds.records import HostRecord


__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"

_LONGEST_CAUSE = 32768  # characters of the report of a failure in an answer


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
        self._own_watchdog: PipeWatchdog | None = None
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
        self.history.ended, self.history.node = self._workers.ended_at, self.host
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
        self._record.stream.subscribers.append(EventFile(lambda: self.run_dir, lambda: self.host))
        self.was_quiet = False
        self.on_quiet: Callable[[], None] = lambda: None
        """Called once, when workers have run for two seconds and there is time for what is not urgent."""
        self._workers.on_quiet = self._settled
        if options.metrics:
            from phalanx.agent.metrics_view import MetricsView

            self.supervision.services.pages["/metrics"] = MetricsView(self, self._record.stream).page().answer

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
    def _worker_watchdog(self) -> PipeWatchdog | None:
        """The watchdog of the timers, while it runs; a subclass that makes its own sets it."""
        return self._own_watchdog or self.supervision.services.timers

    @_worker_watchdog.setter
    def _worker_watchdog(self, watchdog: PipeWatchdog | None) -> None:
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
        from phalanx.agent.logs.specs import DefaultLogsSpecs

        if not isinstance(self._logs_specs, DefaultLogsSpecs):
            return self._logs_specs.root_log_dir  # a plug-in has its own layout of files
        return run_directory(next(iter(context.error_files.values())))

    def make_run_dir(self) -> None:
        """Make that directory, where it was named, for a node that ends before its workers start."""
        from phalanx.agent.logs.specs import DefaultLogsSpecs

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
        from phalanx.agent.logs.specs import DefaultLogsSpecs

        if isinstance(self._logs_specs, DefaultLogsSpecs):
            self._logs_specs.remove_empty()

    def clean_up_logs(self, succeeded: bool) -> None:
        """The same, and what is of no use after a success; old directories of this user, too."""
        from phalanx.agent.logs.specs import DefaultLogsSpecs

        if isinstance(self._logs_specs, DefaultLogsSpecs):
            self._logs_specs.clean_up(succeeded)

    def exception_of(self, global_rank: int) -> BaseException | None:
        """The exception that ended a function worker, where it could be pickled."""
        from phalanx.agent.workers.worker_kinds import MultiprocessContext

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
        sig, grace = loop.stop_terms or (loop.policy.stop_signal, loop.policy.grace)
        if self._own_context is not None:
            self._own_context.close(signal.Signals(sig), int(self._shutdown_timeout))
        workers.stop(sig, grace)
        loop.pump(lambda: workers.idle)

    def _clear(self) -> tuple[str, ...]:
        if not self._workers.idle:
            LocalElasticAgent._stop_workers(self, self._worker_group)
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
        from phalanx.agent.workers.worker_store import WorkerStore

        spec, last = self._worker_group.spec, self._meeting
        if last is not None and spec.master_port and not last.closed:
            last.new_round()  # the port is given: it is kept, and emptied
            return last, last.port
        if spec.master_addr:
            from phalanx.job.address import listening_address

            address = listening_address(spec.master_addr)
        store = WorkerStore(address, spec.master_port, self._rdzv_handler.use_agent_store)
        self._meeting = store
        return store, store.port

    def _master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        return self._workers.master(info)


count_as_own(LocalElasticAgent)
