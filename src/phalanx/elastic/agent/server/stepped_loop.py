"""The owner loop under torch's steps.

Once `stepped` is set, it leaves joining, starting, stopping and the exit barrier to the steps; they run one
after the other and call `pump` while they wait.
"""

from __future__ import annotations

import os
import signal
import time

from phalanx.agent.loop import OwnerLoop, signal_exception
from phalanx.agent.workers.result import RunResult
from phalanx.core.group import events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.protocols import Nodes
    from phalanx.agent.spec import WorkerSpec
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.agent.workers.worker_store import WorkerStore
    from phalanx.cluster.handler import RendezvousInfo
    from phalanx.core.group.events import Command, Event, RecallWorkers, StartWorkers
    from phalanx.core.group.group import Phase


class SteppedLoop(OwnerLoop):
    """The loop of an agent whose steps may be called in torch's order.

    Joining, starting, stopping and the exit barrier are then the steps' work; the core decides all the same.
    """

    stop_terms: tuple[int, float] | None = None
    """Signal and grace of the stop that the core asked for; None: it asked for none."""

    guarded = False
    """Whether a signal is posted; in a subclass's step, which does not look at the queue, it is raised."""

    wants_join = False
    """The core asked for (another) round while a step joins."""

    @property
    def stepped(self) -> bool:
        """Whether torch's steps are called; else it is an owner loop like any other."""
        return self.workers.stepped

    @stepped.setter
    def stepped(self, stepped: bool) -> None:
        self.workers.stepped = stepped

    def step(self, event: Event) -> None:
        self.guard(lambda: super(SteppedLoop, self).step(event))

    def guard(self, call: Callable[[], None]) -> None:
        """Call something that a signal must not interrupt."""
        before, self.guarded = self.guarded, True
        try:
            call()
        finally:
            self.guarded = before

    def _carry_out(self, command: Command) -> None:
        if not self.stepped:
            super()._carry_out(command)
            return
        match command:
            case events.StopWorkers() | events.RecallWorkers():
                self._announce_ending()
                self.stop_terms = command.sig or signal.SIGTERM, command.grace
            case events.Join():
                self.wants_join = True
            case events.StartWorkers() | events.EnterBarrier():
                pass
            case _:
                super()._carry_out(command)

    def pump(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until `done`, at most `timeout` seconds; the core decides about what happens meanwhile.

        A signal is raised as SignalException, once the core knows of it.
        """
        until = None if timeout is None else time.monotonic() + timeout

        def wait() -> None:
            while not done():
                event = self._next_event(done, until)
                if event is None:
                    return
                self.step(event)
                if isinstance(event, events.Signal):
                    raise signal_exception(event.sig)

        self.guard(wait)


class StepWorkers:
    """The workers of a subclass that has its own steps for them; only their result is kept here."""

    closed = idle = True
    decided = False

    def __init__(self, spec: WorkerSpec, nodes: Nodes) -> None:
        self.result = RunResult(events.WorkerState.INIT)
        self.error: BaseException | None = None
        self.context: PContext | None = None
        self.store: WorkerStore | None = None
        self.stepped = False
        self.host = nodes.name or os.uname().nodename
        self._spec = spec

    def start(self, info: RendezvousInfo, command: StartWorkers) -> None:
        raise NotImplementedError("`_start_workers` starts them")

    def stop(self, sig: int, grace: float) -> None:
        raise NotImplementedError("`_stop_workers` stops them")

    def recall(self, command: RecallWorkers) -> None:
        raise NotImplementedError("`_stop_workers` stops them")

    def lease_until(self, when: float) -> None:
        """The subclass's processes cannot be reached; `_stop_workers` stops them when the agent is awake."""

    def master(self, info: RendezvousInfo) -> tuple[str | None, int | None]:
        spec, where = self._spec, info.bootstrap_store_info
        if where is None:
            return spec.master_addr, spec.master_port
        return spec.master_addr or where.master_addr, spec.master_port or where.master_port

    def open_meeting(self, address: str) -> tuple[Any, int]:
        from phalanx.job.address import free_port

        return None, free_port()

    def passes_interrupt(self) -> bool:
        return False

    def ended_at(self, rank: int) -> float | None:
        return None

    def explain(self) -> None:
        """What ended them is known to the subclass only."""

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        return []

    def deadline(self, phase: Phase) -> float | None:
        return None

    def look(self, phase: Phase, now: float) -> Event | None:
        return None

    def close(self) -> None:
        """`_shutdown` does it."""
