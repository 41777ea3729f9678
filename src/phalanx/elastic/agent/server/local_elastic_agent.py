"""torch.distributed.elastic.agent.server.local_elastic_agent: torch's agent for the workers of one host."""

from __future__ import annotations

import signal

from phalanx.agent.agent import Agent
from phalanx.agent.spec import AgentOptions, WorkerGroup, WorkerSpec
from phalanx.agent.workers.local_workers import LocalWorkers
from phalanx.agent.workers.result import RunResult
from phalanx.core.group.events import WorkerState
from phalanx.elastic.agent.server.api import SimpleElasticAgent, count_as_own
from phalanx.elastic.agent.server.torch_events import configured_metrics
from phalanx.elastic.lazy_modules import found_in
from phalanx.job import environment
from phalanx.job.environment import UNINTERRUPTIBLE_TIMEOUT as TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.protocols import Nodes, NodeWorkers
    from phalanx.agent.supervision.timers.pipe_watchdog import PipeWatchdog
    from phalanx.agent.supervision.timers.timer_pipe import FileTimerRequest
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.group.group import GroupPolicy

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


class LocalElasticAgent(SimpleElasticAgent):
    """Workers are processes: functions by `start_method`, or programs."""

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
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = environment.uninterruptible_timeout()
        self._own_context: PContext | None = None
        self._own_watchdog: PipeWatchdog | None = None
        settings = {
            "start_method": start_method,
            "log_line_prefix_template": log_line_prefix_template,
            "health_check_server": health_check_server,
            "uninterruptible_timeout": uninterruptible_state_timeout,
        }
        self._set_up(spec, logs_specs, options.replace(**settings))

    def _new_workers(self, nodes: Nodes, policy: GroupPolicy) -> NodeWorkers:
        return Agent._new_workers(self, nodes, policy)

    # -- services that a subclass may set up in its own way -------------------------------------------

    def _open_supervision(self, leave: frozenset[str] = frozenset()) -> None:
        """A subclass that has a step of its own for a service starts it there, which may call ours."""
        steps = {
            "_setup_local_watchdog": "timers",
            "_log_watchdog_event": "timers",
            "_setup_healthcheck": "health",
        }
        own = {step: getattr(LocalElasticAgent, step) for step in steps}
        super()._open_supervision(
            frozenset(name for step, name in steps.items() if getattr(type(self), step) is not own[step])
        )

    def complete(self, envs: dict[int, dict[str, str]]) -> None:
        self._setup_local_watchdog(envs)
        self._setup_healthcheck()

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        """Start the watchdog of the timers, if it is asked for and does not run, and tell the workers."""
        self.supervision.services.start_timers(self.run_id, self._log_watchdog_event)
        super().complete(envs)

    def _log_watchdog_event(self, name: str, request: FileTimerRequest | None) -> None:
        """Called with what the watchdog does; it logs that itself."""

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
    def context(self) -> PContext | None:
        return self._own_context or super().context

    @property
    def _pcontext(self) -> PContext | None:
        """The workers of the last start; a subclass that starts them itself sets its own."""
        return self.context

    @_pcontext.setter
    def _pcontext(self, context: PContext | None) -> None:
        self._own_context = context

    @property
    def _workers(self) -> LocalWorkers:
        workers = self._loop.workers
        assert isinstance(workers, LocalWorkers)
        return workers

    # -- torch's steps ------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers, loop = self._workers, self._stepped
        loop.guard(lambda: workers.begin(loop.number, self.attempt, 0.0))
        loop.pump(lambda: workers.answered)
        return workers.take_start()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        sig, grace = self._stop_terms
        if "_shutdown" in self._overridden:
            self._shutdown(sig, timeout=grace)  # type: ignore[arg-type]  # torch: an int
        else:
            self._stop_group(sig, grace)

    @property
    def _stop_terms(self) -> tuple[signal.Signals, float]:
        """Signal and grace of the stop that the core asked for, else those of the job."""
        sig, grace = self._loop.stop_terms or (self._loop.policy.stop_signal, self._loop.policy.grace)
        return signal.Signals(sig), grace

    def _stop_group(self, sig: signal.Signals, grace: float) -> None:
        workers, loop = self._workers, self._stepped
        if self._own_context is not None:
            self._own_context.close(sig, int(grace))
        workers.stop(sig, grace)
        loop.pump(lambda: workers.idle)

    def _clear(self) -> tuple[str, ...]:
        if not self._workers.idle:
            self._stop_group(*self._stop_terms)
        return self._workers.take_stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        metrics = configured_metrics()
        if metrics is None:
            return self._look(worker_group)
        name = "LocalElasticAgent._monitor_workers"
        found: RunResult = metrics.measured(self._look, metrics.DEFAULT_GROUP, name)(worker_group)
        return found

    def _look(self, worker_group: WorkerGroup) -> RunResult:
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
        if self._running and not self._ending:  # from `_stop_workers`: there are more workers to come
            self._stop_group(death_sig, min(timeout, self._stop_terms[1]))
            return
        if self._own_context is not None:
            self._own_context.close(death_sig, timeout)
        try:
            self._shut_down(death_sig, min(timeout, self._shutdown_timeout))
        finally:
            if not self._running:  # called without `run`
                self._desk.close()
                self.supervision.close()
                self._loop.close()


count_as_own(LocalElasticAgent)

__getattr__ = found_in(__name__)
