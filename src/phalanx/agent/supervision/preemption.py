"""Preemption: the machine will be taken away, and the workers get time to save a checkpoint.

The agent sets a flag on every worker's board and sends the signal to the workers that have a handler for it.
It would kill the others, and one killed rank could break the checkpoint of the rest. If no rank watches for a
preemption, there is nothing to wait for, and all workers are stopped as by SIGTERM.

Schedulers often send the signal to every process of the job (`scancel`, Slurm's --signal, `kill -- -PGID`).
Workers that only poll `should_checkpoint` must outlive that: in Python workers the signal is ignored until
the program installs a handler (worker/bootstrap.py), or, where it is also a signal that stops programs, from
the first call on (worker.py). The shield would hold off a stop by that signal too, so that the agent stops
workers by another one (`stop_signal`).

A preemption is the job's: the round carries it to all nodes (core.rounds), and their agents stop their
workers in the same way, once, whichever comes first: the announcement of another node or their own signal.

Each agent then reports how far its ranks are, through the round's store; the first one collects the reports,
picks the step at which all ranks save (core.checkpoint_step) and publishes it. A node that does not report in
time is not waited for.
"""

from __future__ import annotations

import signal
import time

from phalanx.job.units import format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from phalanx.agent.spec import WorkerGroup
    from phalanx.agent.supervision.round_broadcast import RoundBroadcast
    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.checkpoint_step import RankPace
    from phalanx.worker.board import Boards


def stop_signal(preempt_signal: int) -> int:
    """What stops workers for any other reason than a preemption: a signal that does not announce one."""
    if preempt_signal != signal.SIGTERM:
        return signal.SIGTERM
    return signal.SIGINT if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else signal.SIGHUP


REPORTS = 3.0
"""Seconds for the other nodes to learn of the preemption and to report how far their ranks are."""


class StepAgreement:
    """One node's part in agreeing on the step at which all ranks save; used in the owner's thread."""

    def __init__(
        self,
        boards: Boards,
        group: WorkerGroup,
        number: int,
        post: Callable[[Callable[[], None]], None],
        note: Callable[[str], None],
    ) -> None:
        """Begins at once; `number`: of the round."""
        self._boards, self._group, self._note = boards, group, note
        self._post: Callable[[Callable[[], None]], None] = lambda call: post(lambda: self._safely(call))
        self._since = time.monotonic()
        self._broadcast: RoundBroadcast | None = None
        self._leader: int | None = None
        self._closed = False
        own = {rank: boards.asked(rank) for rank in range(boards.count)}
        asked = [one for one in own.values() if one is not None]
        self._node, self._nodes = group.group_rank or 0, group.group_world_size or 1
        if self._nodes > 1:
            from phalanx.agent.supervision.round_broadcast import RoundBroadcast, supports_broadcast

            if supports_broadcast(group.store):
                self._broadcast = RoundBroadcast(
                    group.store,
                    f"phalanx/preemption/{number}/",
                    lambda message: self._post(lambda: self._receive(message)),
                )
        if self._broadcast is None:
            self._decide(asked)
        else:
            self._broadcast.put(f"asked/{self._node}", {"asked": [[one.step, one.pace] for one in asked]})
            self._broadcast.publish({"node": self._node})

    def close(self) -> None:
        """The workers are gone."""
        self._closed = True
        if self._broadcast is not None:
            self._broadcast.close()

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            if not self._closed:
                call()
        except (KeyError, TypeError, ValueError, OverflowError):
            pass  # not from a node: the workers can write to the store of a static round, too

    def _receive(self, message: dict[str, Any]) -> None:
        assert self._broadcast is not None
        if "step" in message:
            self._apply(int(message["step"]))
        elif self._leader is None:  # the first report in the log, which is the same for all nodes
            self._leader = int(message["node"])
            if self._leader == self._node:
                names = [f"asked/{node}" for node in range(self._nodes)]
                self._broadcast.fetch(
                    names, REPORTS, lambda found: self._post(lambda: self._collect(list(found.values())))
                )

    def _collect(self, reports: list[dict[str, Any]]) -> None:
        from phalanx.core.checkpoint_step import RankPace

        found = [(int(step), float(pace)) for report in reports for step, pace in report["asked"]]
        self._decide([RankPace(step, pace) for step, pace in found])

    def _decide(self, asked: list[RankPace]) -> None:
        from phalanx.core.checkpoint_step import checkpoint_step

        step = checkpoint_step(asked, time.monotonic() - self._since)
        if self._broadcast is None:
            self._apply(step)
        else:
            self._broadcast.publish({"step": step})

    def _apply(self, step: int) -> None:
        late = []
        for rank in range(self._boards.count):
            self._boards.set_checkpoint_step(rank, step)
            asked = self._boards.asked(rank)
            if asked is not None and asked.step >= step:
                late.append(self._group.workers[rank].global_rank)
        if late:
            from phalanx.core.diagnosis.failures import ranks_text

            self._note(f"preemption: {ranks_text(late)} had passed step {step}, at which the others save")


class Preemption:
    """The signal that announces a preemption, and whether one is under way."""

    def __init__(self, sig: int = 0) -> None:
        self.signal = sig
        self.stop_signal = stop_signal(sig)
        self.under_way = False
        self._announced = False
        self._told: set[int] = set()  # local ranks that listen
        self._since = 0.0  # wall clock, like exit times

    def repeats(self, sig: int) -> bool:
        """Whether this signal announces the preemption a second time, so that it can be ignored.

        Call this when the signal arrives: the second may arrive before the first has been handled.
        """
        before = self._announced
        self._announced = before or sig == self.signal
        return before and sig == self.signal

    def announced_by(self, sig: int) -> bool:
        """Whether a stop with this signal is for a preemption."""
        return sig == self.signal

    def over(self) -> None:
        """New workers start: nothing of an earlier preemption holds for them."""
        self.under_way = False
        self._told = set()

    def stop(
        self,
        context: PContext,
        boards: Boards,
        grace: float,
        note: Callable[[str], None],
        agree: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the workers save a checkpoint and exit; stop them after the grace period.

        `agree` begins to agree with the other nodes on the step at which they save."""
        from phalanx.agent.supervision.stacks import catches

        if self.under_way:  # they know; another signal could end a worker that saves
            context.ask_stop(0, grace)
            return
        # Before anything else: a worker may exit before its parent knows that this is a stop.
        self.under_way, self._since = True, time.time()
        pids, running = context.pids(), context.running
        handlers = {rank for rank in running if self.signal and catches(pids[rank], self.signal)}
        self._told = handlers | {rank for rank in running if boards.read(rank).listens}
        if not self._told:
            note("preemption: no worker handles it (phalanx.worker.should_checkpoint), so all are stopped")
            context.ask_stop(signal.SIGTERM, grace)
            return
        for rank in running:
            boards.set_preempted(rank)
        agree()
        if handlers:
            context.send_signal(self.signal, handlers, alone=True)
        context.ask_stop(0, grace)

    def remind(self, context: PContext, boards: Boards) -> None:
        """Send the signal again to workers whose callbacks have not been called yet.

        One that comes just before a program blocks is seen by Python when it no longer does, which may be
        never. Called twice, the callbacks run once; a handler of the program's own gets the signal once.
        """
        if self.under_way and self.signal:
            waiting = {rank for rank in context.running & self._told if boards.read(rank).awaits_signal}
            if waiting:
                context.send_signal(self.signal, waiting, alone=True)

    def excuse(self, failures: Iterable[ProcessFailure]) -> None:
        """Mark workers that exited after the announcement as stopped, whatever their exit code."""
        for failure in failures:
            when = failure.exited_at
            if self.under_way and failure.stopped_at is None and when is not None and when >= self._since:
                failure.stopped_at = self._since

    def unsaved(self, ended: Mapping[int, ProcessFailure], grace: float) -> str:
        """One line about the workers, by global rank, that did not exit by themselves when told; or empty."""
        if not self.under_way or not self._told:
            return ""
        from phalanx.core.diagnosis.failures import ranks_text

        # The announcement again, at the end of a program that had learned of it, is no news.
        late = {(rank, -self.signal) for rank in self._told}
        ended = {rank: one for rank, one in ended.items() if (one.local_rank, one.exitcode) not in late}
        killed = [rank for rank, failure in ended.items() if failure.exitcode == -signal.SIGKILL]
        others = {rank: one for rank, one in ended.items() if one.exitcode < 0 and rank not in killed}
        raised = {rank: one for rank, one in ended.items() if one.exitcode > 0 and one.error is not None}
        parts = [f"{ranks_text(killed)} still ran after --grace {format_duration(grace)}"] if killed else []
        parts += [f"rank {rank} was ended by {one.signal_name()}" for rank, one in others.items()]
        parts += [f"rank {rank} failed ({one.message.splitlines()[0][:100]})" for rank, one in raised.items()]
        return f"preemption: not saved as far as is known: {'; '.join(parts)}" if parts else ""
