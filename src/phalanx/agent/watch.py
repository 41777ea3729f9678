"""The agent's eye on its workers' progress: boards, output, exits in; hangs, stragglers and preemption out.

`core.progress` decides what hangs and who stands out; here its questions are answered and its verdicts are
carried out. Everything runs in the owner's thread. While nothing is asked for and no worker says anything,
nothing is imported, read or woken for it.

A hang goes like this: the verdict, then the stacks of all ranks (agent/hangs.py), then one line with who
stands out, then `Hang` for the core (restart or fail), or only the line (warn).

Preemption: the worker's board says so, and the signal itself goes to those workers that handle it (to the
others it would mean death). Nobody else is told, for one killed rank could break the checkpoint of the rest;
when no rank listens at all there is nothing to wait for, and all are stopped as by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import time

from phalanx.agent.services import NodeCheck, NodeUnfit, Services
from phalanx.core.messages import Hang, RoundFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.hangs import Incident
    from phalanx.agent.spec import WorkerGroup
    from phalanx.config import RunConfig
    from phalanx.core.messages import Event
    from phalanx.core.progress import Pace, Verdict, View, WatchPolicy
    from phalanx.processes.context import PContext
    from phalanx.timers.heartbeat import Boards

_WARN_AGAIN = 5.0  # between looks at a hang that was only warned about


class Watch:
    """What one agent watches, over all its starts."""

    _context: PContext | None = None
    _incident: Incident | None = None
    _due: float | None
    _places: dict[int, int]
    _pace: Pace | None
    _output: Output | None

    def __init__(
        self,
        policy: WatchPolicy | None = None,
        *,
        preempt_signal: int = 0,
        health: str | None = None,
        health_check: str = "",
    ) -> None:
        self.policy = policy
        self.preempt_signal = preempt_signal
        self.services = Services(health)
        self.node_check = NodeCheck(health_check) if health_check else None
        self.unfit: NodeUnfit | None = None  # why this node stays out
        self.preempting = False
        self._announced = False
        self.findings: list[dict[str, Any]] = []  # hangs and stragglers, for the report
        self.last_hang: Incident | None = None
        self._note: Callable[[str], None] = lambda _line: None
        self._post: Callable[[Any], None] = lambda _event: None
        self._boards: Boards | None = None
        self._forget()

    # -- over the whole run -------------------------------------------------------------------------

    def open(
        self,
        *,
        run_id: str,
        post: Callable[[Any], None],
        note: Callable[[str], None],
        phase: Callable[[], str],
        health_check_server: Any = None,
    ) -> None:
        """Start the services; `post` is for events and errands of the owner's queue."""
        self._post, self._note = post, note

        def knock(answer: threading.Event) -> None:
            post(answer.set)

        self.services.open(
            run_id,
            knock,
            lambda: phase() == "STARTING",
            lambda: phase() in ("RUNNING", "BARRIER"),
            health_check_server,
        )

    def close(self) -> None:
        """Stop the services and give the boards back."""
        if self.node_check is not None:
            self.node_check.close()
        self._forget()
        if self._boards is not None:
            self._boards.close()
            self._boards = None
        self.services.close()

    def join(self, go: Callable[[], None]) -> None:
        """Enter the rendezvous with `go`, in the owner's thread, once this node is found fit."""
        if self.node_check is None:
            go()
            return

        def then(unfit: NodeUnfit | None) -> None:
            self._post(go if unfit is None else lambda: self._stay_out(unfit))

        self.node_check.begin(then)

    def _stay_out(self, unfit: NodeUnfit) -> None:
        self.unfit = unfit
        self._note(str(unfit))
        # Graceful: the others go on without this node.
        self._post(RoundFailed("graceful", str(unfit)))

    # -- one start ----------------------------------------------------------------------------------

    def begun(self) -> float | None:
        """When all workers of the last start had reached their first line; None where that is not known."""
        return self._boards.begun() if self._boards is not None else None

    def was_ready(self, rank: int) -> bool | None:
        """Whether this worker had called ready() or sent a heartbeat; None where it has no board."""
        if self._boards is None:
            return None
        slot = self._boards.read(rank)
        return bool(slot.ready_at or slot.count)

    def boards(self, count: int) -> Boards:
        """New boards for a start; those of the last one are given back."""
        from phalanx.timers.heartbeat import Boards

        if self._boards is not None:
            self._boards.close()
        self._boards = Boards(count, self.preempt_signal)
        return self._boards

    def started(self, context: PContext, group: WorkerGroup, now: float) -> None:
        """These workers run now."""
        self._forget()
        self._context = context
        self._places = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._started_at = now
        self._alive = len(self._places)
        self._due = now if self.policy is not None else None

    def _forget(self) -> None:
        if self._incident is not None:
            self._incident.abandon()
        self._context = None
        self._places = {}
        self._started_at = 0.0
        self._alive = 0
        self._first_exit = 0.0
        self._due = None
        self._incident = None
        self._warned = ""
        self._told_of_no_beats = False
        self._pace = None
        self._output = None

    # -- the loop's view ----------------------------------------------------------------------------

    def fds(self) -> list[int]:
        """What else the owner waits for."""
        return [self._boards.fileno()] if self._boards is not None and self._context is not None else []

    def limit(self, timeout: float | None, now: float) -> float | None:
        """How long the owner may sleep."""
        if self._due is None or self._context is None:
            return timeout
        left = max(0.0, self._due - now)
        return left if timeout is None else min(timeout, left)

    def look(self, now: float) -> Event | None:
        """Whether something hangs; to be called whenever the owner is awake and workers run."""
        if self._context is None or self._boards is None:
            return None
        rung = self._boards.heard()
        alive = len(self._context.running)
        left = alive != self._alive
        self._alive = alive
        if left and not self._first_exit and alive:
            self._first_exit = now
        if self._incident is not None:
            return self._proceed(self._incident, now)
        if not rung and not (left and self.policy is not None) and (self._due is None or now < self._due):
            return None
        return self._judge(now)

    def _judge(self, now: float) -> Event | None:
        from phalanx.core.progress import WatchPolicy, judge, next_look

        policy = self.policy or WatchPolicy()
        view = self._view(now, policy)
        verdict = judge(view, now, policy)
        if verdict is None:
            self._warned = ""
        elif verdict.rule != self._warned:
            self._begin(verdict, view, now)
            return None
        times = [next_look(view, policy), self._look_for_stragglers(view, now), self._miss_beats(view, now)]
        self._due = min((at for at in times if at is not None), default=None)
        if verdict is not None:
            self._due = now + _WARN_AGAIN
        return None

    def _view(self, now: float, policy: WatchPolicy) -> View:
        from phalanx.core.progress import Beat, View

        assert self._context is not None
        assert self._boards is not None
        running = self._context.running
        beats = []
        for rank in sorted(running):
            slot = self._boards.read(rank)
            beats.append(
                Beat(
                    self._places[rank],
                    slot.beat_at,
                    slot.step,
                    slot.count,
                    slot.ready_at,
                    slot.deadline,
                    slot.section,
                )
            )
        finished = tuple(self._places[rank] for rank in sorted(self._places) if rank not in running)
        output_at = None
        if policy.silence_timeout is not None:
            self._output = self._output or Output(self._context, self._started_at)
            output_at = self._output.last(now)
        return View(self._started_at, tuple(beats), finished, self._first_exit, output_at)

    def _look_for_stragglers(self, view: View, now: float) -> float | None:
        """Compare the rates, when it is time; when it is time again."""
        from phalanx.core.progress import WINDOW, Pace, compare

        if len(view.alive) < 2 or not any(beat.count for beat in view.alive):
            return None
        pace = self._pace or Pace()
        if now >= pace.at + WINDOW:
            self._pace, found = compare(pace, view, now)
            for one in found:
                self._note(one.reason)
                self.findings.append({"kind": "straggler", "rank": one.rank, "summary": one.reason})
            pace = self._pace
        return pace.at + WINDOW

    def _miss_beats(self, view: View, now: float) -> float | None:
        """Say once that nobody sends the heartbeats that are to be watched."""
        limit = self.policy.heartbeat_timeout if self.policy is not None else None
        if limit is None or self._told_of_no_beats or any(beat.count for beat in view.alive):
            return None
        due = self._started_at + max(limit, 60.0)
        if now < due:
            return due
        self._told_of_no_beats = True
        self._note(
            "no rank has called phalanx.worker.heartbeat() yet; "
            "--heartbeat-timeout watches a rank from its first one on"
        )
        return None

    def _begin(self, verdict: Verdict, view: View, now: float) -> None:
        from phalanx.agent.hangs import LOOK_AGAIN, Incident

        assert self._context is not None
        assert self._boards is not None
        self._incident = Incident(verdict, view, self._context, self._boards, self._places, now)
        self._due = now + LOOK_AGAIN

    def _proceed(self, incident: Incident, now: float) -> Event | None:
        from phalanx.agent.hangs import LOOK_AGAIN

        if not incident.done(now):
            self._due = now + LOOK_AGAIN
            return None
        self._incident, self._due = None, now
        summary = incident.conclude()
        self.last_hang = incident
        self.findings.append(incident.as_data())
        mode = self.policy.on_hang if self.policy is not None else "restart"
        if mode == "warn":
            self._warned = incident.verdict.rule
            self._note(summary)
            return None
        return Hang(summary, final=mode == "fail")

    def report(self) -> str:
        """The last hang in full; empty when there was none."""
        return "\n".join(self.last_hang.report) if self.last_hang is not None else ""

    # -- preemption ---------------------------------------------------------------------------------

    def repeats(self, sig: int) -> bool:
        """Whether this announces a preemption that was announced before: once is enough.

        Asked when the signal arrives, so that the second of two in a hurry is known for one, too.
        """
        before = self._announced
        self._announced = before or sig == self.preempt_signal
        return before and sig == self.preempt_signal

    def stop(self, context: PContext, sig: int, grace: float) -> None:
        """Stop the workers; when it is for a preemption, let them checkpoint and leave by themselves."""
        if sig != self.preempt_signal or self._boards is None or self.preempting:
            context.ask_stop(sig, grace)
            return
        from phalanx.timers.stacks import catches

        self.preempting = True
        pids = context.pids()
        running = context.running
        handlers = {rank for rank in running if catches(pids[rank], sig)}
        if not handlers and not any(self._boards.read(rank).listens for rank in running):
            self._note("no worker listens for the preemption; they are stopped")
            context.ask_stop(signal.SIGTERM, grace)
            return
        for rank in running:
            self._boards.tell(rank)
        context.send_signal(sig, handlers, alone=True)
        context.ask_stop(0, grace)


class Output:
    """When the workers last wrote something into their log files."""

    def __init__(self, context: PContext, started_at: float) -> None:
        paths = {*context.stdouts.values(), *context.stderrs.values()} - {""}
        self._sizes = dict.fromkeys(paths, 0)
        self._looked_at = self._last = started_at

    def last(self, now: float) -> float | None:
        """The time of the last output; None where it goes to no file."""
        if not self._sizes:
            return None
        newest = 0.0
        for path, before in self._sizes.items():
            try:
                file = os.stat(path)
            except OSError:
                continue  # not there yet
            if file.st_size != before:
                self._sizes[path] = file.st_size
                newest = max(newest, file.st_mtime)
        if newest:
            # How long ago by the clock of the files, but never before the last look: that clock may jump.
            ago = min(max(0.0, time.time() - newest), now - self._looked_at)
            self._last = now - ago
        self._looked_at = now
        return self._last


def watch_for(config: RunConfig) -> Watch:
    """The watch that a command line asks for."""
    timeouts = (
        config.heartbeat_timeout,
        config.silence_timeout,
        config.startup_timeout,
        config.partial_exit_timeout,
    )
    policy = None
    if any(timeout is not None for timeout in timeouts) or config.on_hang != "restart":
        from phalanx.core.progress import WatchPolicy

        policy = WatchPolicy(*timeouts, config.on_hang)
    return Watch(
        policy,
        preempt_signal=config.preempt_signal or 0,
        health=config.health_port,
        health_check=config.health_check,
    )
