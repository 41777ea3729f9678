"""The workers of this node as processes: started, watched and stopped by events.

Helpers are started once and serve every restart. A start is complete when the helpers report it; until then,
as at any time, a stop can be asked for.
"""

from __future__ import annotations

import _thread
import os
import signal
import time

from phalanx.agent.workers.environment import line_prefix, standby_environment, substitute, worker_environment
from phalanx.agent.workers.result import RunResult
from phalanx.core.group.events import (
    AllSucceeded,
    Hang,
    Signal,
    Started,
    StartFailed,
    Stopped,
    Uninterruptible,
    WorkerFailed,
    WorkersReenter,
    WorkerState,
)
from phalanx.errors import RendezvousError, StartError
from phalanx.job.environment import WORKER_COLLECTIVES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.protocols import Nodes, WorkersOwner
    from phalanx.agent.run_record import RunRecord
    from phalanx.agent.spec import AgentOptions, WorkerGroup, WorkerSpec
    from phalanx.agent.state.holder import RoundNodes, StateHolder
    from phalanx.agent.supervision.supervision import Supervision
    from phalanx.agent.warm.helper_pool import HelperPool
    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.agent.workers.worker_group import PContext, ReentryTerms
    from phalanx.agent.workers.worker_store import WorkerStore
    from phalanx.cluster.handler import RendezvousHandler, RendezvousInfo
    from phalanx.cluster.network_interface import NetworkInterface
    from phalanx.core.group.events import Event, RecallWorkers, StartWorkers
    from phalanx.core.group.group import GroupPolicy, Phase
    from phalanx.helpers.lease_timer import LeaseTimer

_LOOK_AT_STATES = 1.0  # uninterruptible sleep is not an event; it is looked for this often, when asked for
_QUIET_AFTER = 2.0  # seconds after a start: time for what a failure will need
_FENCED = 5.0  # seconds for the membership to end a round whose lease has run out; then it is a failure
_SLOW_STOP = 2.0  # seconds after which a stop says what it waits for
_START = 1.0  # seconds for the helpers' word of workers that have just begun to run
_TWICE = 2.0  # seconds within which two Ctrl-C are meant for the job, and not for the attached rank
START_ERRORS = (StartError, OSError, ValueError, TypeError, RendezvousError)


class LocalWorkers:
    """Starts of one agent, one after the other; `context` is the latest."""

    def __init__(
        self,
        owner: WorkersOwner,
        group: WorkerGroup,
        handler: RendezvousHandler,
        nodes: Nodes,
        options: AgentOptions,
        policy: GroupPolicy,
        *,
        logs: LogsSpecs | None,
        helpers: HelperPool,
        supervision: Supervision,
        record: RunRecord,
        state: StateHolder,
    ) -> None:
        self._owner = owner
        self._group = group
        self._handler = handler
        self._nodes = nodes
        self._logs_specs = logs
        self._options = options
        self._attach = options.attach
        self._uninterruptible_timeout = options.uninterruptible_timeout
        self._at_failure = policy.at_failure
        self._helpers = helpers
        self._supervision = supervision
        self._record = record
        self.stepped = False
        self.context: PContext | None = None
        self.store: WorkerStore | None = None
        self._meeting: WorkerStore | None = None  # what this node opened last for a round's workers
        self._has_address = False  # the round came with the address of a store
        self.result = RunResult(WorkerState.INIT)
        self.error: BaseException | None = None
        self._attempt = 0
        self._number = 0
        self._waits = False  # for the name of the network interface, before a start
        self._starting = False
        self._stopping = False
        self._swept = False  # what successful workers left behind has been signalled
        self._placed_in = 0.0
        self._begin_at = 0.0
        self._quiet_at: float | None = None
        self._interface: NetworkInterface | None = None
        self._stuck_since: dict[int, float] = {}
        self._lease: LeaseTimer | None = None
        self._lease_lock = _thread.allocate_lock()  # the membership's thread sets it
        self._lease_over = False  # there will be no more workers, though the membership may go on
        self._fenced_by: float | None = None
        self._stop_sig = 0
        self._stop_began = self._stop_by = 0.0
        self._reported_stop = False
        self._put_off: float | None = None  # until then, at most, a stop waits for word of the start
        self._interrupted_at: float | None = None  # when the attached rank last got a Ctrl-C
        self._state = state
        self._reenter_timeout = policy.reenter_timeout
        self._cause = ""  # why the next round begins, where that is known
        self._reenters = False  # as the core knows it
        self._reentry: ReentryRecord | None = None  # since a recall

    # -- the lease ----------------------------------------------------------------------------------

    def lease_until(self, when: float) -> None:
        with self._lease_lock:
            if self._lease is None and not self._lease_over:
                from phalanx.helpers.lease_timer import LeaseTimer

                self._lease = LeaseTimer()
            if self._lease is not None:
                self._lease.set(when)

    # -- starting -----------------------------------------------------------------------------------

    def joining(self) -> None:
        """A round is awaited: prepare for it."""
        if self._interface is None and not self._handler.immediate:
            from phalanx.cluster.network_interface import NetworkInterface

            self._interface = NetworkInterface(self._owner.post)
        self._describe_standbys()
        self._helpers.prepare(self._group.spec.local_world_size)

    def _describe_standbys(self) -> None:
        """Tell the helpers what is known of the workers of every round."""
        spec, helpers = self._group.spec, self._helpers
        if helpers.mode != "standby" or helpers.standby_ranks or not isinstance(spec.entrypoint, str):
            return
        from phalanx.helpers.messages import StandbyRank
        from phalanx.job.program import split_python

        ranks = []
        for rank in range(spec.local_world_size):
            split = split_python([str(arg) for arg in substitute(spec.args, rank)])
            if split is None:
                return
            _, mode, target, rest = split
            env = standby_environment(spec, rank, os.environ)
            ranks.append(StandbyRank((mode, target, rest), env))
        helpers.standby_ranks = ranks

    def start(self, info: RendezvousInfo, command: StartWorkers) -> None:
        before = time.monotonic()
        try:
            self._owner.place(info)
        except START_ERRORS as error:
            self._fail(error)
            self._starting = True
            return
        self.begin(command.round.number, command.attempt, time.monotonic() - before)

    def begin(self, number: int, attempt: int, placed_in: float) -> None:
        """Start the workers of a group that has its ranks."""
        self._number, self._attempt, self._placed_in = number, attempt, placed_in
        self._describe_standbys()
        self._starting, self._stopping = True, False
        self._swept = self._reenters = False
        self._begin_at = time.monotonic()
        self.error = self._fenced_by = self._interrupted_at = None
        group, interface = self._group, self._interface
        if (group.group_world_size or 1) > 1 and interface is not None:
            interface.find(os.environ, group.master_addr, group.spec.local_addr)
            self._waits = not interface.ready
        if not self._waits:
            self._begin()

    def _begin(self) -> None:
        try:
            context = self._new_context()
            context.begin()
        except START_ERRORS as error:
            self._fail(error)
            return
        self.context = context
        context.describe(self._helpers.standby_ranks)

    def _fail(self, error: Exception) -> None:
        known = isinstance(error, StartError | RendezvousError)
        self.error = error if known else StartError(_in_words(error))

    def _new_context(self) -> PContext:
        spec = self._group.spec
        args, envs, prefixes = {}, {}, {}
        host = os.uname().nodename
        interface = self._interface
        several = (self._group.group_world_size or 1) > 1 and interface is not None
        for worker in self._group.workers:
            rank = worker.local_rank
            envs[rank] = worker_environment(
                self._group,
                worker,
                run_id=self._handler.get_run_id(),
                attempt=self._attempt,
                use_agent_store=self._uses_agent_store(),
                environ=os.environ,
            )
            if several and interface is not None:
                envs[rank].update(interface.environment)
            traces = self._supervision.trace_sockets.path(rank) if worker.world_size > 1 else ""
            if traces or WORKER_COLLECTIVES in os.environ:  # of a worker that runs this agent
                envs[rank][WORKER_COLLECTIVES] = traces
            args[rank] = substitute(spec.args, rank)
            if self._options.log_line_prefix_template is not None:
                prefixes[rank] = line_prefix(
                    self._options.log_line_prefix_template,
                    self._group,
                    worker,
                    host=host,
                    attempt=self._attempt,
                )
        self._owner.complete(envs)
        return self._of_kind(
            spec, args, envs, prefixes if self._options.log_line_prefix_template is not None else None
        )

    def _of_kind(
        self,
        spec: WorkerSpec,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        prefixes: dict[int, str] | None,
    ) -> PContext:
        from phalanx.agent.workers.worker_group import GroupOptions
        from phalanx.agent.workers.worker_kinds import MultiprocessContext, SubprocessContext

        common: dict[str, Any] = {
            "name": spec.role,
            "args": args,
            "envs": envs,
            "logs_specs": self._logs_specs,
            "log_line_prefixes": prefixes,
            "numa_options": spec.numa_options,
            "duplicate_stdout_filters": spec.duplicate_stdout_filters,
            "duplicate_stderr_filters": spec.duplicate_stderr_filters,
            "options": GroupOptions(
                at_failure=self._at_failure,
                lease=self._lease,
                warm=self._helpers.warm,
                boards=self._supervision.boards(len(args), self._record.history.marks),
                state=self._state.assign(
                    [worker.global_rank for worker in self._group.workers],
                    self._group.workers[0].world_size,
                    self._number,
                    self._round_nodes(),
                ),
                reentry=self._terms(),
                attach=self._attach,
                output=self._options.output,
                host=self.host,
                explains=False,
                handles_signals=False,
                take_helpers=self._helpers.take,
                retire=self._helpers.retire,
            ),
        }
        if isinstance(spec.entrypoint, str):
            return SubprocessContext(entrypoint=spec.entrypoint, **common)
        assert spec.entrypoint is not None
        return MultiprocessContext(
            entrypoint=spec.entrypoint, start_method=self._options.start_method, **common
        )

    def _terms(self) -> ReentryTerms | None:
        from phalanx.agent.workers.worker_group import ReentryTerms

        if not self._reenter_timeout:
            return None
        return ReentryTerms(self._reenter_timeout, self._number, self._cause)

    def _round_nodes(self) -> RoundNodes | None:
        from phalanx.agent.state.holder import RoundNodes

        group = self._group
        if group.store is None or group.group_rank is None or group.group_world_size is None:
            return None
        return RoundNodes(group.store, group.group_rank, group.group_world_size)

    def _uses_agent_store(self) -> bool:
        """Whether an agent, this one or node 0's, serves the store that the workers connect to."""
        if self.store is not None:
            return self.store.serving
        return self._handler.use_agent_store and (self._nodes.has_meeting or self._has_address)

    def master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        """Where the workers of a round meet; on node 0 the store there is this agent's."""
        from phalanx.agent.workers.worker_store import WorkerStore

        spec = self._group.spec
        where = info.bootstrap_store_info
        self._has_address = where is not None
        if self._nodes.has_meeting:  # a fresh one for every round, and the last one's is gone
            if self.store is not None and self.store is not info.served:
                self.store.close()
            self.store = info.served
        if where is not None:
            wanted = spec.master_addr or where.master_addr, spec.master_port or where.master_port
            elsewhere = (
                spec.master_addr and spec.master_port and wanted != (where.master_addr, where.master_port)
            )
            if not elsewhere or info.served is not None:
                return wanted
        if info.rank != 0:
            return spec.master_addr, spec.master_port
        if self.store is None:
            self.store = WorkerStore(
                spec.master_addr,
                spec.master_port,
                self._handler.use_agent_store,
                only_there=not spec.master_addr,
            )
        self.store.new_round()
        return self.store.host, self.store.port

    def open_meeting(self, address: str) -> tuple[Any, int]:
        from phalanx.agent.workers.worker_store import WorkerStore

        spec, last = self._group.spec, self._meeting
        if last is not None and spec.master_port and not last.closed:
            last.new_round()  # the port is given: it is kept, and emptied
            return last, last.port
        if spec.master_addr:
            from phalanx.job.address import listening_address

            address = listening_address(spec.master_addr)
        self._meeting = store = WorkerStore(
            address, spec.master_port, self._handler.use_agent_store, only_there=not spec.master_addr
        )
        return store, store.port

    @property
    def answered(self) -> bool:
        """Whether the start is over, well or not."""
        return self.error is not None or (self.context is not None and not self._waits and self._over())

    def _over(self) -> bool:
        context = self.context
        assert context is not None
        if context.start_error is not None:
            context.abandon()
            self.error = context.start_error
            return True
        return context.started or context.done

    def take_start(self) -> dict[int, int]:
        """The start is over: the workers' pids, or its error is raised."""
        self._starting = False
        if self.error is not None:
            raise self.error
        assert self.context is not None
        now = time.monotonic()
        pids = self.context.pids()
        self.result = RunResult(WorkerState.HEALTHY)  # what failed before has been overcome
        for worker in self._group.workers:
            worker.id = pids.get(worker.local_rank)
        self._supervision.started(self.context, self._group, now, self._number, self.host)
        self._helpers.started(self.context, now)
        if self.store is not None:
            self.store.serve()  # no worker waits for its import: connections wait in the backlog
        self._quiet_at = now + _QUIET_AFTER
        reentry, self._reentry, self._cause = self._reentry, None, ""
        recovery = "" if reentry is None else reentry.in_words(pids, self._group, now)
        if recovery:
            self._record.note(recovery)
        self._record.started(self._attempt, self._placed_in, now - self._begin_at, recovery)
        return pids

    # -- the loop's view ----------------------------------------------------------------------------

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        context = self.context
        return [] if context is None or context.done else context.fds()

    def deadline(self, phase: Phase) -> float | None:
        times = [self._interface.deadline()] if self._waits and self._interface is not None else []
        if self.context is not None:
            times.append(self.context.deadline())
        if self._stopping and not self._reported_stop:
            times.append(self._stop_began + _SLOW_STOP)
        times.append(self._put_off)
        if phase == "RUNNING":
            times += [self._quiet_at, self._fenced_by]
            if self._uninterruptible_timeout > 0:
                times.append(time.monotonic() + _LOOK_AT_STATES)
        return min((when for when in times if when is not None), default=None)

    def look(self, phase: Phase, now: float) -> Event | None:
        if phase == "JOINING":
            self.joining()
        self._record.settle()
        if self._waits and self._interface is not None and self._interface.ready and not self._stopping:
            self._waits = False
            self._begin()
        if self.context is not None and not self.context.done:
            self.context.advance()
        if self._put_off is not None:
            self._stop_now(now)
        if phase == "RUNNING" and self._quiet_at is not None and now >= self._quiet_at:
            self._quiet_at = None
            # What is needed between a worker's death and the next start, while there is time for it.
            import phalanx.agent.workers.failure
            import phalanx.observe.report  # noqa: F401

            self._owner.settled()
        if self.stepped:
            return None
        if self._stopping:
            if now >= self._stop_began + _SLOW_STOP and not self._reported_stop:
                self._report_slow_stop(now)
            return self._stop_event()
        if self._starting:
            return self._start_event()
        return self._running_event() if phase == "RUNNING" else None

    def _start_event(self) -> Event | None:
        if not self.answered:
            return None
        try:
            return Started(tuple(self.take_start().values()))
        except START_ERRORS as error:
            lost = self.context is not None and self.context.start_lost
            return StartFailed(_in_words(error), retry=lost)

    def _stop_event(self) -> Event | None:
        if not self.idle:
            return None
        self._stopping = False
        unkillable = self.take_stop()
        parked = 0 if self.context is None else len(self.context.parked)
        return Stopped(unkillable, parked)

    def _running_event(self) -> Event | None:
        if self.context is not None and self.context.fenced:
            why = "the workers were stopped: the agent did not renew its lease"
            return None if self._is_fenced() else Hang(why)
        stuck = self._stuck()
        if stuck:
            return Uninterruptible(stuck)
        result = self.observe()
        reenters = self.context is not None and self.context.reenters
        if reenters != self._reenters:
            self._reenters = reenters
            return WorkersReenter(reenters)
        if result.state is WorkerState.HEALTHY:
            return None
        self.result = result
        if result.state is WorkerState.SUCCEEDED:
            self._supervision.finished(time.monotonic())
        elif self._ended_by_interrupt(result):
            return Signal(signal.SIGINT)
        return worker_event(result, self._supervision.step_of)

    def _is_fenced(self) -> bool:
        """Whether the helpers have killed the workers, and the membership is about to end the round."""
        if self.context is None or not self.context.fenced:
            return False
        if self._fenced_by is None:
            self._fenced_by = time.monotonic() + _FENCED
            self._nodes.fenced(self._number)
        return time.monotonic() < self._fenced_by

    def observe(self) -> RunResult:
        """How the workers are; begins to stop the siblings of one that failed."""
        context = self.context
        if context is None:
            return RunResult(WorkerState.INIT)
        if not context.done:
            context.advance()
        if self._is_fenced():
            return RunResult(WorkerState.HEALTHY)
        if context.any_failed:
            if not context.reenters:  # those that re-enter are recalled, if the core decides for a restart
                # They are signalled before anything is read or written.
                context.ask_stop(self._at_failure.sig, self._at_failure.grace)
            return RunResult(WorkerState.FAILED, failures=self._by_global_rank(context.failed()))
        if context.all_succeeded:
            if not self._swept:
                from phalanx.agent.workers.worker_group import STRAY_GRACE

                self._swept = True
                context.ask_stop(signal.SIGTERM, min(STRAY_GRACE, self._at_failure.grace))
            result = context.outcome()
            if result is not None:
                workers = self._group.workers
                values = {workers[rank].global_rank: value for rank, value in result.return_values.items()}
                return RunResult(WorkerState.SUCCEEDED, values)
        return RunResult(WorkerState.HEALTHY)

    def ended_at(self, rank: int) -> float | None:
        """When a local rank succeeded, by the wall clock."""
        return None if self.context is None else self.context.succeeded_at(rank)

    @property
    def decided(self) -> bool:
        """Whether `observe` has something new to tell."""
        context = self.context
        return context is not None and (context.any_failed or (context.all_succeeded and context.done))

    def _stuck(self) -> tuple[int, ...]:
        """Workers that have been in uninterruptible sleep for longer than allowed."""
        if self._uninterruptible_timeout <= 0 or self.context is None:
            return ()
        from phalanx.agent.workers.process_state import is_uninterruptible_state, read_proc_state

        now = time.monotonic()
        pids = self.context.pids().values()
        asleep = {pid for pid in pids if is_uninterruptible_state(read_proc_state(pid))}
        self._stuck_since = {pid: self._stuck_since.get(pid, now) for pid in asleep}
        return tuple(
            p for p, since in self._stuck_since.items() if now - since > self._uninterruptible_timeout
        )

    @property
    def stuck(self) -> bool:
        """Whether a worker is in uninterruptible sleep for longer than allowed."""
        return bool(self._stuck())

    # -- stopping -----------------------------------------------------------------------------------

    def recall(self, command: RecallWorkers) -> None:
        """Have the workers that re-enter park, and stop the others."""
        context = self.context
        self._cause = command.cause
        if context is None or self._waits or not context.reenters:
            self.stop(command.sig, command.grace)
            return
        now = time.monotonic()
        self._stop_sig, self._stop_began, self._stop_by = command.sig, now, now + command.timeout
        self._reported_stop = True  # it is short
        self._stopping, self._starting = True, False
        culprits = tuple(w.local_rank for w in self._group.workers if w.global_rank in command.ranks)
        self._reentry = ReentryRecord(context, self._helpers.parked, now)
        context.ask_recall(command.sig, command.grace, command.timeout, command.cause, culprits)
        if self.store is not None:
            self.store.end_round()  # workers that wait for a key are freed

    def stop(self, sig: int, grace: float) -> None:
        now = time.monotonic()
        self._reentry = None
        if not self._stopping:
            self._stop_sig, self._stop_began, self._stop_by = sig, now, now + grace
            self._reported_stop = False
        self._stop_by = min(self._stop_by, now + grace)
        self._stopping, self._starting = True, False
        self._put_off = None
        if self.context is None or self._waits:
            return
        if self._supervision.preemption.announced_by(sig) and not self.context.done:
            self.context.advance()
            if self.context.unknown:  # nothing is known of the workers that are to save their state
                self._put_off = now + _START
                return
        self._supervision.stop(self.context, sig, grace)

    def _stop_now(self, now: float) -> None:
        """Carry out a stop that was put off, once the workers are known, or it takes too long."""
        context = self.context
        if context is None or context.done:
            self._put_off = None
        elif not context.unknown or (self._put_off is not None and now >= self._put_off):
            self._put_off = None
            self._supervision.stop(context, self._stop_sig, max(0.0, self._stop_by - now))

    def _report_slow_stop(self, now: float) -> None:
        """Which workers a stop waits for: without this line, the launcher would seem to hang."""
        self._reported_stop = True
        if self.idle or now >= self._stop_by:
            return
        from phalanx.core.diagnosis.failures import ranks_text
        from phalanx.core.group.group import signal_name

        assert self.context is not None
        self._supervision.remind(self.context)
        pids = self.context.pids()
        left = {self._group.workers[rank].global_rank: pids[rank] for rank in sorted(self.context.running)}
        who = "processes that the workers started"
        if left:
            shown = ", ".join(map(str, list(left.values())[:4])) + ", ..." * (len(left) > 4)
            who = f"{ranks_text(left)} (pid {shown})"
        if self._supervision.preemption.announced_by(self._stop_sig):
            what = "to save and exit"
        else:
            what = f"to end, {now - self._stop_began:.0f} s after {signal_name(self._stop_sig)}"
        again = ", or at once with another Ctrl-C" if self._stop_sig == signal.SIGINT else ""
        self._record.note(f"waiting for {who} {what}; SIGKILL in {self._stop_by - now:.0f} s{again}")

    # -- the attached rank --------------------------------------------------------------------------

    def passes_interrupt(self) -> bool:
        """Pass a Ctrl-C on to the attached rank alone; False: it is for the whole job. In a signal handler.

        A debugger there makes something of it. Two in quick succession are for the job.
        """
        now, context = time.monotonic(), self.context
        if self._attach is None or context is None or self._stopping or self._attach not in context.running:
            return False
        before, self._interrupted_at = self._interrupted_at, now
        if before is not None and now - before < _TWICE:
            return False

        def send() -> None:
            assert self._attach is not None
            context.send_signal(signal.SIGINT, {self._attach}, alone=True)
            if before is None:
                rank = self._group.workers[self._attach].global_rank
                self._record.note(
                    f"SIGINT: passed on to rank {rank}; twice within {_TWICE:g} s stops the job"
                )

        self._owner.post(send)
        return True

    def _ended_by_interrupt(self, result: RunResult) -> bool:
        """Whether the attached rank took the Ctrl-C as its end, and nothing else has failed."""
        failures = [failure for failure in result.failures.values() if not failure.is_victim]
        return self._interrupted_at is not None and all(
            failure.local_rank == self._attach and failure.exitcode == -signal.SIGINT for failure in failures
        )

    @property
    def idle(self) -> bool:
        """Whether nothing of the last start is alive, and its output is shown."""
        return self.context is None or self._waits or self.context.done

    def take_stop(self) -> tuple[str, ...]:
        """Nothing is alive: take in how the workers ended; what could not be killed."""
        context = self.context
        self._waits = False
        if context is None or context.start_error is not None:
            return ()
        result = context.outcome()
        if result is None:
            return ()
        preemption = self._supervision.preemption
        preemption.excuse(result.failures.values())
        ended = self._by_global_rank({**result.failures, **result.stopped})
        unsaved = preemption.unsaved(ended, self._at_failure.grace)
        if unsaved:
            self._record.note(unsaved)
        # Where none failed by itself, the agent ended them (a signal, a new round): that is not a failure.
        if any(not failure.is_victim for failure in result.failures.values()):
            self.result = RunResult(
                WorkerState.FAILED,
                failures=self._by_global_rank(result.failures),
                stopped=self._by_global_rank(result.stopped),
            )
        return context.unkillable

    def explain(self) -> None:
        """Add what the system knows of the failures; takes a moment."""
        if self.context is not None:
            self.context.explain(self.result.failures)

    def close(self) -> None:
        if self.context is not None:
            if self.idle:
                self.context.outcome()
            elif self.context.spawner is not None:
                self.context.spawner.clear_now()  # the wait for its end was cut short
            self.context.abandon()
            self._helpers.learn()
        self._helpers.begin_close()
        with self._lease_lock:
            self._lease_over = True
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.close()
        self._state.begin_close()
        if self.store is not None:
            self.store.close()
            self.store = None

    @property
    def closed(self) -> bool:
        return self._helpers.closed and self._state.closed

    # -- naming -------------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """This node, as people know it."""
        return self._nodes.name or os.uname().nodename

    def _by_global_rank(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        found = {}
        for local_rank, failure in failures.items():
            failure.global_rank = self._group.workers[local_rank].global_rank
            failure.role = self._group.spec.role
            failure.host = self.host
            found[failure.global_rank] = failure
        return found


class ReentryRecord:
    """One recovery in which workers keep their processes, for the words about it."""

    def __init__(self, context: PContext, standbys: list[int], now: float) -> None:
        self._context = context
        self._standbys = set(standbys)
        self._before = context.pids()
        self._began = now

    def in_words(self, pids: dict[int, int], group: WorkerGroup, now: float) -> str:
        """What became of each worker; empty if none was kept."""
        kept = [rank for rank, pid in pids.items() if self._before.get(rank) == pid]
        if not kept:
            return ""
        names = {worker.local_rank: worker.global_rank for worker in group.workers}
        parts = [f"{len(kept)} of {len(pids)} workers kept"]
        new = {rank: pid for rank, pid in pids.items() if rank not in kept}
        ready = [names[rank] for rank, pid in new.items() if pid in self._standbys]
        others = [names[rank] for rank, pid in new.items() if pid not in self._standbys]
        for ranks, how in ((ready, "from a standby"), (others, "started anew")):
            if ranks:
                from phalanx.core.diagnosis.failures import ranks_text

                parts.append(f"{ranks_text(ranks)} {how}")
        for rank, why in sorted(self._context.unfit.items()):
            parts.append(f"rank {names[rank]} {why}")
        return f"re-entered: {', '.join(parts)}, {now - self._began:.2f} s"


def worker_event(result: RunResult, step_of: Callable[[int], int | None]) -> Event | None:
    """What a look at the workers means to the core; None while all is well."""
    match result.state:
        case WorkerState.SUCCEEDED:
            return AllSucceeded()
        case WorkerState.UNHEALTHY:
            return Hang("workers are unhealthy")
        case WorkerState.FAILED if not result.failures:
            return WorkerFailed("a worker failed")
        case WorkerState.FAILED:
            from phalanx.core.diagnosis.failures import signature
            from phalanx.observe.report import exception_names, root_cause, summary

            rank, failure = root_cause(result.failures)
            return WorkerFailed(
                summary(rank, failure),
                failure.shell_status,
                failure.message,
                exception_names(failure),
                step_of(failure.local_rank),
                signature(failure.ending(rank)),
            )
        case _:
            return None


def _in_words(error: Exception) -> str:
    """Without the number of an OSError, which adds nothing to its words."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
