"""The agent: it turns the world into events for `core.group`, and carries out the commands it gets back.

One thread owns everything: the one that called `run`. Signal handlers, the rendezvous and the barrier
only post events to its queue and wake it. What to do is never decided here.

`SimpleElasticAgent` is for subclasses that bring their own workers through four hooks, and is polled at
`monitor_interval`; `LocalElasticAgent` (local.py) runs processes and is woken by their events.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque

from phalanx.agent.spec import AgentOptions, RunResult, Worker, WorkerGroup, WorkerSpec
from phalanx.core import group as core
from phalanx.core import group_events as say
from phalanx.core.group_events import Outcome, WorkerState
from phalanx.core.restarts import RestartPolicy
from phalanx.errors import RendezvousError, SignalException
from phalanx.membership.peers import Peers
from phalanx.workers.signals import SignalScope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.membership.cluster import Cluster
    from phalanx.membership.handler import RendezvousInfo
    from phalanx.observe.run_log import RunLog

DEFAULT_ROLE = "default"

_WAITS = {
    core.Phase.JOINING: "waiting for the rendezvous",
    core.Phase.REFORMING: "waiting for the workers to end",
    core.Phase.CLEARING: "waiting for the workers to end",
    core.Phase.WAITING: "waiting before the next start",
    core.Phase.BARRIER: "waiting for the other nodes to finish",
    core.Phase.ENDING: "waiting for the workers to end",
}
"""What a person at a terminal is told when a phase lasts."""


def _in_words(error: Exception) -> str:
    """Without the number of an OSError, which says nothing that its words do not."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


class ElasticAgent(ABC):
    """Runs worker groups."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the group to its end; how the workers fared is in the result, not in an exception."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The group as it is now; not to be changed by the caller."""


class SimpleElasticAgent(ElasticAgent):
    """One group; subclasses start, watch and stop its workers."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: float = 30,
        *,
        options: AgentOptions = AgentOptions(),  # noqa: B008 - immutable
    ) -> None:
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._rdzv_handler = spec.rdzv_handler
        self.restart_policy = options.restart_policy or RestartPolicy(max_restarts=spec.max_restarts)
        self.on_note = options.note
        self.on_reason = options.reason
        self.notes: deque[tuple[float, str]] = deque(maxlen=20)  # the last ones, with the time
        self.progress = options.progress
        self.job_name = options.job_name or spec.get_entrypoint_name()
        self._peers: Peers | Cluster = Peers(
            spec.rdzv_handler, self._post, exit_barrier_timeout, self.show_waiting
        )
        self._log: RunLog | None = None  # events and metrics; None where nobody listens
        self._state = core.GroupState()
        self._info: RendezvousInfo | None = None
        self._stopping = False
        self._stop_signal: int = signal.SIGTERM
        self._stop_grace: float = shutdown_timeout
        self._wake_at: float | None = None
        self._posted: deque[say.Event | Callable[[], None]] = deque()
        self._wake_read, self._wake_write = -1, -1
        self._asleep = False
        self._last = RunResult(WorkerState.INIT)
        self._error: BaseException | None = None  # of a start that failed
        self.outcome: say.Finish | None = None

    # -- hooks for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers; local rank → an id of your own (a pid, say)."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How the workers are; must not block."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Clean up at the end of the agent."""

    # -- the public part ----------------------------------------------------------------------------

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the group to its end. A signal is raised as SignalException once nothing is left."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        scope = SignalScope(post=lambda sig: self._post(say.Signal(int(sig))))
        self._log = self._listen()
        self._find_cluster()
        finish: say.Finish | None = None
        signalled: SignalException | None = None
        try:
            with scope:
                finish = self._loop()
            return self._conclude(finish)
        except SignalException as error:
            signalled = error
            raise
        finally:
            if self.progress is not None:
                self.progress.clear()
            if finish is not None:
                self._shutdown()
            elif signalled is not None:  # raised by a hook: the others may go on
                self._shutdown(signalled.sigval)
                self._peers.leave(self._number, f"stopped by {signalled.sigval.name}")
            else:  # an error of ours or of a hook: the others must not wait for this node
                self._shutdown()
                self._rdzv_handler.shutdown()
            self._peers.give_back()
            read, write = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1  # first, for a thread that still has something to post
            os.close(read)
            os.close(write)
            if self._log:
                self._log.end(self._worker_group, finish, self._last, self._state.attempt)

    def open_meeting(self, address: str) -> tuple[Any, int]:
        """Where the workers of a round meet, should this node be its first: (what serves there, port)."""
        from phalanx.membership.address import free_port

        return None, free_port()

    def _find_cluster(self) -> None:
        """Talk to a rendezvous that tells by itself what happens to the job, where it is one."""
        handler: Any = self._rdzv_handler
        if hasattr(handler, "attach"):
            from phalanx.membership.cluster import Cluster

            self._peers = Cluster(self, handler, self._exit_barrier_timeout)

    def _listen(self) -> RunLog | None:
        """The log of this run, or None where nobody can hear it.

        Metrics have a listener only in a process that imported them to configure one, so that otherwise
        nothing needs to be imported for them here either.
        """
        destination = self._worker_group.spec.event_log_handler
        if destination == "null" and "phalanx.observe.metrics" not in sys.modules:
            return None
        from phalanx.observe.run_log import RunLog

        log = RunLog(destination)
        log.begin(self._worker_group)
        return log

    def _conclude(self, finish: say.Finish) -> RunResult:
        self._worker_group.state = finish.state
        self.outcome = finish
        if finish.outcome is Outcome.SIGNALED:
            sig = signal.Signals(finish.sig or signal.SIGTERM)
            raise SignalException(f"process {os.getpid()} got {sig.name}", sig)
        if finish.outcome is Outcome.FAILED:
            error = self._error or self._peers.error
            if error is not None and not self._last.failures:  # the rendezvous or a start
                raise error
            return RunResult(finish.state, {}, self._last.failures, self._last.stopped)
        # A clean end: what went wrong before it has been overcome.
        return RunResult(WorkerState.SUCCEEDED, self._last.return_values)

    @property
    def job_failure(self) -> tuple[str, int] | None:
        """The report and exit code of what ended a job of several nodes: the same on all of them."""
        return self._peers.job_failure

    @property
    def attempt(self) -> int:
        """Restarts used by the job so far."""
        return self._state.attempt

    # -- the loop -----------------------------------------------------------------------------------

    def _policy(self) -> core.GroupPolicy:
        return core.GroupPolicy(restarts=self.restart_policy, grace=self._shutdown_timeout)

    def _loop(self) -> say.Finish:
        policy = self._policy()
        self._post(say.Start())
        while True:
            event = self._next_event()
            state, commands, reason = core.step(self._state, event, time.monotonic(), policy)
            self._state = state
            self._worker_group.state = state.worker_state
            if self.on_reason is not None:
                self.on_reason(f"{type(event).__name__}: {reason}")
            if self._log:
                self._log.step(event, state, commands, reason, self._last)
            for command in commands:
                if isinstance(command, say.Finish):
                    return command
                self._do(command)

    def _do(self, command: say.Command) -> None:
        match command:
            case say.Join():
                self._join()
            case say.StartWorkers():
                self._start(command)
            case say.StopWorkers():
                self._stop(command)
            case say.EnterBarrier():
                self._peers.finished(command.round)
            case say.ReportFailure():
                self._peers.failed(command, self._last, self.job_name, self._story(command.summary))
            case say.Leave():
                self._peers.leave(self._number, self._state.ending.message if self._state.ending else "left")
            case say.CloseRendezvous():
                self._peers.close(self._number, command)
            case say.WakeAt():
                self._wake_at = command.time
            case say.Note():
                self._note(command.line)

    def _post(self, event: say.Event | Callable[[], None]) -> None:
        """From any thread and from signal handlers."""
        self._posted.append(event)
        if not self._asleep:
            return  # the owner looks at the queue before it sleeps
        try:
            os.write(self._wake_write, b"x")
        except (BlockingIOError, OSError):
            pass  # it is full, so it wakes; or the loop is over

    def _next_event(self) -> say.Event:
        while True:
            if self._posted:
                event = self._posted.popleft()
                if not callable(event):
                    return event
                event()  # an errand of another thread, for the owner to run
                continue
            now = time.monotonic()
            if self._wake_at is not None and now >= self._wake_at:
                self._wake_at = None
                return say.Tick()
            seen = self._look()
            if seen is not None:
                return seen
            timeout = None if self._wake_at is None else self._wake_at - now
            if self.progress is not None:
                timeout = self.progress.limit(self._waiting_for(), now, timeout)
            self._wait(timeout)
            if self.progress is not None:
                self.progress.show(time.monotonic())

    def _waiting_for(self) -> str:
        """What a person is told while nothing happens; empty while that is as it should be."""
        told = self._peers.waiting if self._state.phase is core.Phase.JOINING else ""
        return told or _WAITS.get(self._state.phase, "")

    def show_waiting(self, line: str) -> None:
        """What the nodes wait for, where there is no terminal to draw it on; from another thread."""
        if self.progress is None:
            self._note(line)

    def _look(self) -> say.Event | None:
        """What is new about the workers and about who waits to join."""
        if self._stopping:
            unkillable = self._stop_finished()
            if unkillable is None:
                return None
            self._stopping = False
            if not unkillable:
                self._peers.workers_gone(self._number)
            return say.Stopped(unkillable)
        if self._state.phase is not core.Phase.RUNNING:
            return None
        result = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.SUCCEEDED:
            self._last = result
            return say.AllSucceeded()
        if result.state is WorkerState.FAILED:
            self._last = result
            return self._describe(result)
        if result.state is WorkerState.UNHEALTHY:
            self._last = result
            return say.Hang("workers are unhealthy")
        if result.state is not WorkerState.HEALTHY:  # or it would be asked again for ever
            role, states = self._worker_group.spec.role, "HEALTHY, SUCCEEDED, FAILED or UNHEALTHY"
            raise RuntimeError(f"role {role}: _monitor_workers says {result.state}: it must say {states}")
        if not self._rdzv_handler.watches:
            waiting = self._rdzv_handler.num_nodes_waiting()
            if waiting > 0:
                return say.MembershipChanged(waiting=waiting)
        return None

    def _describe(self, result: RunResult) -> say.WorkerFailed:
        from phalanx.observe.report import root_cause, summary

        if not result.failures:
            return say.WorkerFailed("a worker failed")
        rank, failure = root_cause(result.failures)
        ready = self._was_ready(failure.local_rank)
        return say.WorkerFailed(summary(rank, failure), failure.shell_status, failure.message, ready)

    def _story(self, summary: str) -> str:
        """What there is to tell of a failure in which no worker failed; empty where that is its summary."""
        return ""

    def _was_ready(self, local_rank: int) -> bool | None:
        """Whether a worker had said that it was set up; None where workers cannot say so."""
        return None

    def _wait(self, timeout: float | None) -> None:
        """Sleep until something may have happened. Here: until the next poll of the workers."""
        limit = self._worker_group.spec.monitor_interval
        if self._state.phase is core.Phase.RUNNING or self._stopping:
            timeout = limit if timeout is None else min(timeout, limit)
        self._sleep([], timeout)

    def _sleep(self, fds: list[int], timeout: float | None) -> None:
        poll = select.poll()
        for fd in (self._wake_read, *fds):
            poll.register(fd, select.POLLIN)
        self._asleep = True  # first, then the look at the queue: whoever posts does it the other way round
        try:
            if self._posted:
                return
            ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        finally:
            self._asleep = False
        if any(fd == self._wake_read for fd, _ in ready):
            os.read(self._wake_read, 4096)

    def _note(self, line: str) -> None:
        self.notes.append((time.time(), line))
        if self.progress is not None:
            self.progress.clear()
        if self.on_note is not None:
            self.on_note(line)
            return
        import logging

        logging.getLogger("phalanx").info(line)

    # -- carrying out -------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The round at hand; 0 before the first."""
        return 0 if self._state.round is None else self._state.round.number

    def _join(self) -> None:
        self._error = None
        self._peers.join(None if self._stopping else self._number, self._state.attempt)

    def _start(self, command: say.StartWorkers) -> None:
        from phalanx.errors import StartError

        begin = time.monotonic()
        try:
            self._info = self._peers.take(command.round.number)
            self._place_workers()
            placed = time.monotonic()
            ids = self._start_workers(self._worker_group)
        except (StartError, OSError, ValueError, TypeError, RendezvousError) as error:
            known = isinstance(error, StartError | RendezvousError)
            self._error = error if known else StartError(_in_words(error))
            self._post(say.StartFailed(_in_words(error)))
            return
        self._last = RunResult(WorkerState.HEALTHY)  # what failed before has been overcome
        for worker in self._worker_group.workers:
            worker.id = ids.get(worker.local_rank)
        if self._log:
            took = time.monotonic() - placed
            self._log.started(self._worker_group, command.attempt, placed - begin, took)
        self._post(say.Started(tuple(pid for pid in ids.values() if isinstance(pid, int))))

    def _place_workers(self) -> None:
        """Give the group its place in the round, and each worker its ranks."""
        info, group = self._info, self._worker_group
        assert info is not None
        group.store = info.store
        group.group_rank = info.rank
        group.group_world_size = info.world_size
        group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, group.spec)
        group.master_addr, group.master_port = self._master(info)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks from everybody's role and worker count, exchanged through the store."""
        from phalanx.core.ranks import assign_identical, assign_to

        same = os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1"
        placed = getattr(self._info, "worker_ranks", None)  # by a rendezvous that knows
        if placed is not None:
            places = placed
        elif group_world_size == 1 or same:
            places = assign_identical(group_rank, group_world_size, spec.local_world_size)
        else:
            from phalanx.membership.exchange import node_infos

            nodes = node_infos(store, group_rank, group_world_size, spec, self._number)
            places = assign_to(nodes, group_rank)
        return [
            Worker(p.local_rank, p.global_rank, p.role_rank, p.world_size, p.role_world_size) for p in places
        ]

    def _master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        """Where the workers' own store is."""
        spec = self._worker_group.spec
        where = info.bootstrap_store_info
        if where is not None:
            return where.master_addr, where.master_port
        return spec.master_addr, spec.master_port

    def _stop(self, command: say.StopWorkers) -> None:
        if self._state.ending is not None:
            self._peers.ending(self._state.ending)
        self._stop_signal, self._stop_grace = command.sig, command.grace
        again, self._stopping = self._stopping, True
        if again:
            self._hurry()
        else:
            self._stop_workers(self._worker_group)

    def _hurry(self) -> None:
        """A stop is under way and was asked for again. Here: hooks stop before they return."""

    def _stop_finished(self) -> tuple[str, ...] | None:
        """None while the stop goes on; else what could not be killed."""
        return ()
