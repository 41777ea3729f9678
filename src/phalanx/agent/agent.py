"""The agent of one node: the parts that run its workers to their end, put together.

    loop ──┬── workers       the processes of this node (workers/)
           ├── nodes         the other nodes of the job (cluster/)
           ├── supervision   hangs, preemption, health, timers
           ├── helpers       who forks the workers (warm/)
           └── desk          requests of people and of other nodes, the page, files

The loop decides nothing: `core.group` does. torch's agent classes (elastic/agent/server) drive the same parts
by torch's steps, and are the only ones that override methods of this class.
"""

from __future__ import annotations

import signal

from phalanx.agent.agent_view import AgentView
from phalanx.agent.logs.run_logs import RunLogs
from phalanx.agent.loop import OwnerLoop, signal_exception
from phalanx.agent.placement import place_group
from phalanx.agent.run_record import RunRecord
from phalanx.agent.service_desk import ServiceDesk
from phalanx.agent.spec import AgentOptions, WorkerGroup, WorkerSpec
from phalanx.agent.state.holder import StateHolder
from phalanx.agent.supervision.supervision import Supervision
from phalanx.agent.warm.helper_pool import HelperPool
from phalanx.agent.workers.local_workers import LocalWorkers
from phalanx.agent.workers.result import RunResult
from phalanx.agent.workers.signals import SignalScope, signals_to_handle
from phalanx.cluster.handler import adapted
from phalanx.cluster.handler_nodes import HandlerNodes
from phalanx.core.group import group as core
from phalanx.core.group.events import Outcome, Signal, WorkerState
from phalanx.core.group.restarts import RestartPolicy
from phalanx.errors import SignalException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.loop import Posted
    from phalanx.agent.protocols import Nodes, NodeWorkers
    from phalanx.cluster.handler import RendezvousInfo
    from phalanx.core.group.events import Finish

_DEPARTURE = 30.0  # seconds for a rendezvous to be left or closed; a plug-in may hang


class Agent(AgentView):
    """One node's part in a job."""

    _loop_kind = OwnerLoop

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs | None, options: AgentOptions) -> None:
        self._options = options
        self._worker_group = WorkerGroup(spec)
        self._rdzv_handler = adapted(spec.rdzv_handler)
        self._running = self._ending = False
        self.outcome: Finish | None = None
        self.was_quiet = False
        self.on_quiet: Callable[[], None] = lambda: None
        """Called once, when workers have run for two seconds and there is time for what is not urgent."""
        self.restart_policy = options.restart_policy or RestartPolicy(max_restarts=spec.max_restarts)
        self.supervision = options.supervision or Supervision()
        self.helpers = options.helpers or HelperPool()
        self._record = RunRecord(self._worker_group, options, self.restart_policy, self.supervision)
        self.kept_state = options.state or StateHolder()
        self.kept_state.note, self.kept_state.post = self._record.note, self.post
        self.run_logs = RunLogs(logs, self._rdzv_handler.get_run_id)
        preemption = self.supervision.preemption
        policy = core.GroupPolicy(
            restarts=self.restart_policy,
            stop_signal=preemption.stop_signal,
            grace=options.shutdown_timeout,
            # With a preemption signal the agent alone decides: the death of one worker must not stop those
            # that save their state.
            stop_by_helpers=not preemption.signal,
            preempt_signal=preemption.signal,
            reenter_timeout=options.reenter_timeout,
        )
        nodes = self._new_nodes()
        workers = self._new_workers(nodes, policy)
        self._loop = self._loop_kind(policy, nodes, workers, self.supervision, self._record)
        self.history.ended, self.history.node = workers.ended_at, self.host
        self.supervision.slow_host, self.supervision.on_unfit = nodes.slow_host, nodes.unfit
        self._desk = ServiceDesk(self, options)
        self._loop.parts += [self.helpers, *self._desk.parts]

    # -- the parts ----------------------------------------------------------------------------------

    def _new_nodes(self, elastic: bool = True, exchanges: bool = True) -> Nodes:
        """`elastic`: rounds may be announced; else, and for a plug-in, by torch's interface only."""
        spec, barrier = self._worker_group.spec, self._options.exit_barrier_timeout
        if elastic and not self._rdzv_handler.immediate:
            from phalanx.cluster.elastic_nodes import ElasticNodes

            nodes = ElasticNodes(
                self._rdzv_handler,
                self.post,
                self._record,
                lambda when: self._loop.workers.lease_until(when),
                barrier,
            )
            if nodes.attach(spec, self.restart_policy, lambda addr: self._loop.workers.open_meeting(addr)):
                return nodes
        return HandlerNodes(spec, self.post, barrier, exchanges=exchanges)

    def _new_workers(self, nodes: Nodes, policy: core.GroupPolicy) -> NodeWorkers:
        return LocalWorkers(
            self,
            self._worker_group,
            self._rdzv_handler,
            nodes,
            self._options,
            policy,
            logs=self.run_logs.specs,
            helpers=self.helpers,
            supervision=self.supervision,
            record=self._record,
            state=self.kept_state,
        )

    # -- run ----------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Run the workers to their end. A signal is raised as SignalException once nothing is left."""
        finish = self._loop.finish
        if finish is not None:
            raise RuntimeError(f"this agent has ended ({finish.message}): make another one to run again")
        try:
            self._open_supervision()
            return self._run()
        finally:
            self.supervision.close()

    def _run(self) -> RunResult:
        sig = None
        self._running = True
        try:
            self._record.open()
            with SignalScope([*signals_to_handle(), *self._options.stray_signals], post=self._signalled):
                try:
                    return self._drive()
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

    def _open_supervision(self, leave: frozenset[str] = frozenset()) -> None:
        """Start the services, except those that a subclass starts itself."""
        self.supervision.open(
            run_id=self._rdzv_handler.get_run_id(),
            post=self.post,
            note=self._record.note,
            phase=lambda: self.state.phase.value,
            health_check_server=self._options.health_check_server,
            leave=leave,
        )

    def _drive(self) -> RunResult:
        """Have the loop run to its end."""
        return self._conclude(self._loop.run())

    def _signalled(self, sig: signal.Signals) -> None:
        """Called by the signal handler."""
        interrupts = sig == signal.SIGINT and self._loop.workers.passes_interrupt()
        if not interrupts and not self.supervision.preemption.repeats(sig):
            self._stop_by(sig)

    def _stop_by(self, sig: signal.Signals) -> None:
        self.post(Signal(int(sig), sig in self._options.stray_signals))

    def _conclude(self, finish: Finish) -> RunResult:
        """The result of a run that has ended as `finish`, or its exception."""
        workers, nodes = self._loop.workers, self._loop.nodes
        self._worker_group.state = finish.state
        if finish.outcome is Outcome.SIGNALED:
            raise signal_exception(finish.sig or signal.SIGTERM)
        if finish.outcome is Outcome.FAILED:
            workers.explain()
            result, error = workers.result, workers.error or nodes.error
            if error is not None and not result.failures:  # the rendezvous or a start
                raise error
            return RunResult(finish.state, {}, result.failures, result.stopped)
        if finish.outcome is Outcome.LEFT and self.supervision.unfit is not None:
            raise self.supervision.unfit
        # A clean end: what went wrong before it has been overcome.
        return RunResult(WorkerState.SUCCEEDED, workers.result.return_values)

    def _end(self, sig: signal.Signals | None) -> None:
        """Stop what is left, leave the other nodes, and give everything back."""
        loop = self._loop
        self._record.clear_progress()
        try:
            self._stop_rest(sig)
        finally:
            self._desk.close()
            if loop.finish is None:  # an error in a step or in the agent
                loop.nodes.abandon()
            loop.nodes.release()
            loop.drain(lambda: loop.nodes.closed, limit=_DEPARTURE)

    def _stop_rest(self, sig: signal.Signals | None) -> None:
        """At the end: stop the workers, if any are left, and give back all that they needed."""
        self._shut_down(sig or signal.SIGTERM, self._options.shutdown_timeout)

    def _shut_down(self, sig: int, grace: float) -> None:
        loop, workers = self._loop, self._loop.workers

        def kill() -> None:
            workers.stop(signal.SIGKILL, 0.0)
            self.helpers.hurry()
            self.kept_state.hurry()

        if not workers.idle:
            workers.stop(sig, grace)
            loop.drain(lambda: workers.idle, kill)
        self.kept_state.job_succeeded = loop.finish is not None and loop.finish.outcome is Outcome.SUCCEEDED
        workers.close()
        loop.drain(lambda: workers.closed, kill)

    def place(self, info: RendezvousInfo) -> None:
        """Give the group its place in a round, and each worker its ranks."""
        place_group(self._worker_group, info, self._loop.nodes)
        self._worker_group.master_addr, self._worker_group.master_port = self._loop.workers.master(info)

    def complete(self, envs: dict[int, dict[str, str]]) -> None:
        """Add to the workers' variables, before each start."""
        for env in envs.values():
            env.update(self.supervision.services.environment)

    def settled(self) -> None:
        if not self.was_quiet:
            self.was_quiet = True
            self.on_quiet()

    def post(self, event: Posted) -> None:
        """Queue an event, or a call, for the owner's thread; from any thread."""
        self._loop.post(event)
