"""The agent that runs its workers as processes on this host, woken by their events.

Helpers are started once and serve every restart. The workers' store (torch's protocol) is bound before
the first worker starts, so that MASTER_PORT is never chosen and released, and is emptied for every round.
"""

from __future__ import annotations

import os
import signal
import time

from phalanx.agent.agent import DEFAULT_ROLE, SimpleElasticAgent
from phalanx.agent.environment import line_prefix, substitute, worker_environment
from phalanx.agent.spec import AgentOptions, RunResult, WorkerGroup, WorkerSpec
from phalanx.core import group as core
from phalanx.core.group_events import (
    AllSucceeded,
    CloseRendezvous,
    Outcome,
    Signal,
    Uninterruptible,
    WorkerState,
)
from phalanx.zygote.spawner import Spawner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.status import StatusSocket
    from phalanx.core.group_events import Command, Event, Finish
    from phalanx.logs.specs import LogsSpecs
    from phalanx.membership.handler import RendezvousInfo
    from phalanx.membership.network_interface import NetworkInterface
    from phalanx.workers.failure import ProcessFailure
    from phalanx.workers.worker_group import PContext

UNINTERRUPTIBLE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"

_LOOK_AT_STATES = 1.0  # uninterruptible sleep is no event; it is looked for this often, when asked for


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
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, options=options)
        self._start_method = start_method
        self._logs_specs = logs_specs
        self._prefix_template = log_line_prefix_template
        self._health_check_server = health_check_server
        if uninterruptible_state_timeout is None:
            uninterruptible_state_timeout = float(os.environ.get(UNINTERRUPTIBLE_TIMEOUT) or 0)
        self._uninterruptible_timeout = uninterruptible_state_timeout
        self._stuck_since: dict[int, float] = {}
        self._context: PContext | None = None
        self._swept: PContext | None = None  # whose strays have been told to go; once is enough
        self.spawner: Spawner | None = None  # may be given before `run`, so that it starts early
        self.store: WorkerStore | None = None
        self.helpers = options.helpers
        self.supervision = options.supervision
        self.status: StatusSocket | None = None  # answers `phalanx status`
        self._interface: NetworkInterface | None = None
        self._since = time.time()
        self.attach = options.attach

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """As `SimpleElasticAgent.run`, with a watch over the workers' progress."""
        if self.supervision is None:
            from phalanx.supervision.supervision import Supervision

            self.supervision = Supervision()
        try:
            self.supervision.open(
                run_id=self._rdzv_handler.get_run_id(),
                post=self._post,
                note=self._note,
                phase=lambda: self._state.phase.value,
                health_check_server=self._health_check_server,
            )
            return super().run(role)
        finally:
            self.supervision.close()

    @property
    def run_dir(self) -> str | None:
        """The directory of this run's logs, once workers have started."""
        if self._context is None or not self._context.error_files:
            return None
        from phalanx.logs.specs import DefaultLogsSpecs

        if not isinstance(self._logs_specs, DefaultLogsSpecs):
            return self._logs_specs.root_log_dir  # how a plug-in lays out its files is its own affair
        rank_dir = os.path.dirname(next(iter(self._context.error_files.values())))
        return os.path.dirname(os.path.dirname(rank_dir))

    def remove_empty_logs(self) -> None:
        """Remove the temporary directories of this run that nobody wrote into; given ones stay."""
        from phalanx.logs.specs import DefaultLogsSpecs

        if isinstance(self._logs_specs, DefaultLogsSpecs):
            self._logs_specs.remove_empty()

    def exception_of(self, global_rank: int) -> BaseException | None:
        """The exception that ended a function worker, where it could be pickled."""
        from phalanx.workers.worker_kinds import MultiprocessContext

        if isinstance(self._context, MultiprocessContext):
            for worker in self._worker_group.workers:
                if worker.global_rank == global_rank:
                    return self._context.error(worker.local_rank)
        return None

    # -- hooks --------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec, attempt = worker_group.spec, self._state.attempt
        args, envs, prefixes = {}, {}, {}
        host = os.uname().nodename
        several = self._of_several_nodes(worker_group)
        for worker in worker_group.workers:
            local_rank = worker.local_rank
            envs[local_rank] = worker_environment(
                worker_group,
                worker,
                run_id=spec.rdzv_handler.get_run_id(),
                attempt=attempt,
                use_agent_store=self._uses_agent_store(),
                environ=os.environ,
            )
            envs[local_rank].update(several)
            if self.supervision is not None:
                envs[local_rank].update(self.supervision.services.environment)
            args[local_rank] = substitute(spec.args, local_rank)
            if self._prefix_template is not None:
                prefixes[local_rank] = line_prefix(
                    self._prefix_template, worker_group, worker, host=host, attempt=attempt
                )
        context = self._new_context(spec, args, envs, prefixes if self._prefix_template is not None else None)
        context.handles_signals = False
        context.explains = False
        context.stop_timeout = self._shutdown_timeout
        # With a preemption signal the agent alone decides: who dies of it must not stop who saves.
        context.stops_at_failure = self.supervision is None or not self.supervision.preemption.signal
        context.attach = self.attach
        if self.supervision is not None:
            context.boards = self.supervision.boards(context.nprocs)
        context.start()
        self._context = context
        if self.supervision is not None:
            self.supervision.started(context, worker_group, time.monotonic(), self._number, self._host)
        if self.helpers is not None:
            self.helpers.started(time.monotonic())
        if self.store is not None:
            self.store.serve()
        return context.pids()

    def _of_several_nodes(self, group: WorkerGroup) -> dict[str, str]:
        """What only workers that have to find those of other nodes need to be told."""
        if (group.group_world_size or 1) == 1 or self._interface is None:
            return {}
        return self._interface.environment(os.environ, group.master_addr, group.spec.local_addr)

    def _uses_agent_store(self) -> bool:
        """Whether an agent, this one or node 0's, serves the store that the workers are sent to."""
        served = self._info is not None and self._info.bootstrap_store_info is not None
        return self._shares_store or (served and self._rdzv_handler.use_agent_store)

    def _new_context(
        self,
        spec: WorkerSpec,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        prefixes: dict[int, str] | None,
    ) -> PContext:
        from phalanx.workers.worker_kinds import MultiprocessContext, SubprocessContext

        context: PContext
        common: dict[str, Any] = {
            "name": spec.role,
            "args": args,
            "envs": envs,
            "logs_specs": self._logs_specs,
            "log_line_prefixes": prefixes,
            "numa_options": spec.numa_options,
            "duplicate_stdout_filters": spec.duplicate_stdout_filters,
            "duplicate_stderr_filters": spec.duplicate_stderr_filters,
        }
        if isinstance(spec.entrypoint, str):
            context = SubprocessContext(entrypoint=spec.entrypoint, **common)
            context.warm = self.helpers is not None and self.helpers.mode != "off"
        else:
            assert spec.entrypoint is not None
            context = MultiprocessContext(
                entrypoint=spec.entrypoint, start_method=self._start_method, **common
            )
            context.warm = self.helpers is not None and self.helpers.mode != "off"
        context.spawner = self._helpers(context)
        return context

    def _helpers(self, context: PContext) -> Spawner | None:
        """The helpers this agent keeps; None for `fork`, whose helpers are forks made for one start."""
        kind = context.spawner_kind
        if self.helpers is not None:
            return self.helpers.take(kind)
        if kind is None:
            return None
        if self.spawner is not None and (self.spawner.lost or self.spawner.how != kind):
            self.spawner.close()
            self.spawner = None
        if self.spawner is None:
            self.spawner = Spawner(kind)
        return self.spawner

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._context is not None:
            if self.supervision is None:
                self._context.ask_stop(self._stop_signal, self._stop_grace)
            else:
                self.supervision.stop(self._context, self._stop_signal, self._stop_grace)

    def _hurry(self) -> None:
        self._stop_workers(self._worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._context
        if context is None:
            return RunResult(WorkerState.INIT)
        context.advance()
        if context.any_failed:
            # A failure ends the others in any case; they are told before anything is read or written.
            context.ask_stop(signal.SIGTERM, self._shutdown_timeout)
            failed = context.failed()
            return RunResult(WorkerState.FAILED, failures=self._by_global_rank(failed))
        if context.all_succeeded:
            if self._swept is not context:
                from phalanx.workers.worker_group import STRAY_GRACE

                self._swept = context
                context.ask_stop(signal.SIGTERM, min(STRAY_GRACE, self._shutdown_timeout))
            result = context.outcome(patience=1.0)
            if result is not None:
                values = {worker_group.workers[r].global_rank: v for r, v in result.return_values.items()}
                return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        try:
            if self._context is not None:
                self._context.close(death_sig, min(timeout, self._shutdown_timeout))
        finally:
            if self.status is not None:
                self.status.close()
            if self.helpers is not None:
                if self._context is not None:
                    self.helpers.learn(self._context)
                self.helpers.close()
            if self.spawner is not None:
                self.spawner.close()
            if self.store is not None:
                self.store.close()

    # -- the loop's view ----------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> None:
        context = self._context
        due = self.helpers.due() if self.helpers is not None else None
        if due is not None:
            left = max(0.0, due - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        busy = context is not None and not context.done
        if busy and self._state.phase is core.Phase.RUNNING:
            if not self._rdzv_handler.watches:
                limit = self._worker_group.spec.monitor_interval
                timeout = limit if timeout is None else min(timeout, limit)
            if self._uninterruptible_timeout > 0:
                timeout = _LOOK_AT_STATES if timeout is None else min(timeout, _LOOK_AT_STATES)
        fds = [context.fileno()] if context is not None and busy else []
        if busy and self.supervision is not None and self._state.phase is core.Phase.RUNNING:
            timeout = self.supervision.limit(timeout, time.monotonic())
            fds += self.supervision.fds()
        if self.status is None:  # at the first pause: nobody is kept waiting for it
            from phalanx.agent.status import StatusSocket, snapshot

            self.status = StatusSocket(lambda: snapshot(self, self._since))
        self._sleep([*fds, *self.status.fds()], timeout)
        self.status.answer()

    def _look(self) -> Event | None:
        if self.helpers is not None and self._state.phase is core.Phase.JOINING:
            self.helpers.idle(self._worker_group.spec.local_world_size)
        if self._log is not None and self.supervision is not None:
            self._log.first_line = self.supervision.begun
            self._log.settle()
        due = self.helpers.due() if self.helpers is not None else None
        if due is not None and self.helpers is not None and self._context is not None:
            now = time.monotonic()
            if now >= due and self._state.phase is core.Phase.RUNNING:
                self.helpers.look(self._context, now)
                _prepare_for_a_failure()
        if self._uninterruptible_timeout > 0 and self._state.phase is core.Phase.RUNNING:
            stuck = self._stuck()
            if stuck:
                return Uninterruptible(stuck)
        event = super()._look()
        if isinstance(event, AllSucceeded) and self.supervision is not None:
            self.supervision.finished(time.monotonic())
        if event is None and self.supervision is not None and self._state.phase is core.Phase.RUNNING:
            event = self.supervision.look(time.monotonic())
        return event

    def _post(self, event: Event | Callable[[], None]) -> None:
        if (
            isinstance(event, Signal)
            and self.supervision is not None
            and self.supervision.preemption.repeats(event.sig)
        ):
            return
        super()._post(event)

    def _do(self, command: Command) -> None:
        if self.supervision is not None and isinstance(command, CloseRendezvous) and command.job_failed:
            self.supervision.job_failed()
        super()._do(command)

    def _join(self) -> None:
        if self._interface is None and not self._rdzv_handler.immediate:
            from phalanx.membership.network_interface import NetworkInterface

            self._interface = NetworkInterface()
        if self.supervision is None:
            super()._join()
        else:
            self.supervision.join(super()._join)

    def _stuck(self) -> tuple[int, ...]:
        """Workers that have been in uninterruptible sleep for longer than allowed."""
        from phalanx.workers.process_state import is_uninterruptible_state, read_proc_state

        now = time.monotonic()
        pids = self._context.pids().values() if self._context is not None else ()
        asleep = {pid for pid in pids if is_uninterruptible_state(read_proc_state(pid))}
        self._stuck_since = {pid: self._stuck_since.get(pid, now) for pid in asleep}
        return tuple(
            p for p, since in self._stuck_since.items() if now - since > self._uninterruptible_timeout
        )

    def _story(self, summary: str) -> str:
        return self.supervision.report(summary) if self.supervision is not None else ""

    def _was_ready(self, local_rank: int) -> bool | None:
        return self.supervision.was_ready(local_rank) if self.supervision is not None else None

    def _stop_finished(self) -> tuple[str, ...] | None:
        context = self._context
        if context is None:
            return ()
        context.advance()
        if not context.done:
            return None
        result = context.outcome(patience=1.0)
        if result is None:
            return None
        if self.supervision is not None:
            self.supervision.preemption.excuse(result.failures.values())
        # Without one that failed by itself it was we who ended them (a signal, a new round): no failure.
        if any(not failure.is_victim for failure in result.failures.values()):
            self._last = RunResult(
                WorkerState.FAILED,
                failures=self._by_global_rank(result.failures),
                stopped=self._by_global_rank(result.stopped),
            )
        return context.unkillable

    def _conclude(self, finish: Finish) -> RunResult:
        if finish.outcome is Outcome.FAILED and self._context is not None:
            self._context.explain(self._last.failures)
        result = super()._conclude(finish)
        if (
            self.supervision is not None
            and self.supervision.unfit is not None
            and finish.outcome is Outcome.LEFT
        ):
            raise self.supervision.unfit
        return result

    @property
    def _host(self) -> str:
        """This node, as people know it."""
        return self._peers.name or os.uname().nodename

    def _by_global_rank(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        group = self._worker_group
        found = {}
        for local_rank, failure in failures.items():
            failure.global_rank = group.workers[local_rank].global_rank
            failure.role = group.spec.role
            failure.host = self._host
            found[failure.global_rank] = failure
        return found

    # -- the workers' store -------------------------------------------------------------------------

    @property
    def _shares_store(self) -> bool:
        """Whether an agent, here or on node 0, serves the workers' store."""
        if self.store is not None:
            return self.store.serving
        return self._peers.meets and self._rdzv_handler.use_agent_store

    def open_meeting(self, address: str) -> tuple[Any, int]:
        store = WorkerStore(address, None, self._rdzv_handler.use_agent_store)
        return store, store.port

    def _master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        if self._peers.meets:  # a fresh one for every round, and the last one's is gone
            if self.store is not None:
                self.store.close()
            self.store = getattr(info, "served", None)
        if info.bootstrap_store_info is not None or info.rank != 0:
            return super()._master(info)
        if self.store is None:
            spec = self._worker_group.spec
            self.store = WorkerStore(spec.master_addr, spec.master_port, self._rdzv_handler.use_agent_store)
        self.store.new_round()
        return self.store.host, self.store.port


def _prepare_for_a_failure() -> None:
    """Import what is needed between a worker's death and the next start, while there is time for it."""
    import phalanx.observe.report
    import phalanx.workers.failure  # noqa: F401 - for its being there


class WorkerStore:
    """The store at MASTER_ADDR:MASTER_PORT: bound first, served once the workers are on their way."""

    def __init__(self, host: str | None, port: int | None, served: bool) -> None:
        import socket

        self.host = host or "localhost"
        self.serving = served
        self._server: Any = None
        self._socket: socket.socket | None = None
        if not served:
            from phalanx.membership.address import free_port

            # Rank 0 binds it itself, as the user asked; nobody can hold it for him meanwhile.
            self.port = port or free_port()
            return
        # As bytes: a str would be taken through the codec for international names, which has to be loaded.
        name = self.host.encode() if self.host.isascii() else self.host
        try:
            address = socket.getaddrinfo(name, port or 0, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise OSError(
                error.errno, f"{self.host}: no such host, for the workers' store ({error.strerror})"
            ) from None
        self._socket = socket.socket(address[0], address[1])
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address[4])
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise OSError(
                error.errno, f"{self.host}:{port}: cannot serve the workers' store there ({error.strerror})"
            ) from None
        self.port = int(self._socket.getsockname()[1])

    def new_round(self) -> None:
        """Every round begins with an empty store."""
        if self._server is not None:
            self._server.reset()

    def serve(self) -> None:
        """Answer; connections made since the bind have been waiting in the backlog."""
        if self._server is None and self._socket is not None:
            from phalanx.store.torch.server import TorchStoreServer

            self._server = TorchStoreServer(sock=self._socket)
            self._socket = None
            self._server.start()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._socket is not None:
            self._socket.close()
