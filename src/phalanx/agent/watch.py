"""The agent's eye on its workers' progress: boards, output, exits in; hangs, stragglers and preemption out.

`core.progress` decides what hangs and who stands out; here its questions are answered and its verdicts are
carried out. Everything runs in the owner's thread. While nothing is asked for and no worker says anything,
nothing is imported, read or woken for it.

A hang goes like this: the verdict, then the stacks of all ranks (agent/hangs.py), those of other nodes, too
(agent/world.py), then one line with who stands out, then `Hang` for the core (restart or fail), or only the
line (warn).
"""

from __future__ import annotations

import time

from phalanx.agent.preemption import Preemption
from phalanx.agent.services import NodeCheck, NodeUnfit, Services
from phalanx.core.messages import Hang, RoundFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.hangs import Findings, Incident
    from phalanx.agent.output import Output
    from phalanx.agent.spec import WorkerGroup
    from phalanx.agent.world import World
    from phalanx.config import RunConfig
    from phalanx.core.messages import Event
    from phalanx.core.pace import Pace, Standing
    from phalanx.core.progress import Verdict, View, WatchPolicy
    from phalanx.processes.context import PContext
    from phalanx.timers.heartbeat import Boards

_WARN_AGAIN = 5.0  # between looks at a hang that was only warned about


class Watch:
    """What one agent watches, over all its starts."""

    _context: PContext | None = None
    _incident: Incident | None = None
    _findings: Findings | None
    _group: WorkerGroup | None
    _world: World | None = None
    _due: float | None
    _first_exit: float
    _places: dict[int, int]
    _pace: Pace | None
    _standing: Standing | None
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
        self.preemption = Preemption(preempt_signal)
        self.services = Services(health)
        self.node_check = NodeCheck(health_check) if health_check else None
        self.unfit: NodeUnfit | None = None  # why this node stays out
        self.findings: list[dict[str, Any]] = []  # hangs and stragglers, for the report
        self.last_hang: list[str] = []  # the report
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
        self._boards = Boards(count, self.preemption.signal)
        return self._boards

    def started(self, context: PContext, group: WorkerGroup, now: float, number: int, host: str) -> None:
        """These workers run now, in this round; `host` is this node's name among the others."""
        self._forget()
        self._context = context
        self._group, self._number, self._host = group, number, host
        self._places = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._started_at = now
        self._alive = len(self._places)
        self._due = now if self.policy is not None else None
        if self.policy is not None:
            self._meet_others()

    def _meet_others(self) -> World | None:
        """The other nodes, once there is something to compare with them."""
        group = self._group
        if self._world is None and group is not None and (group.group_world_size or 1) > 1:
            from phalanx.agent.world import world_of

            self._world = world_of(group, self._number, self._host, self._post, self._hear)
        return self._world

    def finished(self, now: float) -> None:
        """All workers of this node have ended well."""
        self._exit(now, tuple(sorted(self._places.values())))
        if self._world is not None:
            self._world.no_rates()

    def _exit(self, now: float, ranks: tuple[int, ...]) -> None:
        if self._first_exit:
            return
        self._first_exit = now
        limit = self.policy.partial_exit_timeout if self.policy is not None else None
        if self._world is not None and limit is not None:
            self._world.exited(ranks)

    def _forget(self) -> None:
        if self._incident is not None:
            self._incident.abandon()
        if self._world is not None:
            self._world.close()
            self._world = None
        self._context = None
        self._group = None
        self._number, self._host = 0, ""
        self._places = {}
        self._started_at = 0.0
        self._alive = 0
        self._first_exit = 0.0
        self._due = None
        self._incident = self._findings = None
        self._warned = ""
        self._told_of_no_beats = False
        self._pace = self._standing = None
        self._output = None
        self._output_elsewhere = self._asked_for_output = 0.0
        self._finished_elsewhere: tuple[int, ...] = ()

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
        if left and alive:
            self._exit(now, self._finished())
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
        times = [
            next_look(view, policy),
            self._look_for_stragglers(view, now),
            self._miss_beats(view, now),
            self._ask_for_output(view, now),
        ]
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
        finished = tuple(sorted({*self._finished(), *self._finished_elsewhere}))
        output_at = None
        if policy.silence_timeout is not None:
            from phalanx.agent.output import Output

            self._output = self._output or Output(self._context, self._started_at)
            output_at = self._output.last(now)
            if output_at is not None:
                output_at = max(output_at, self._output_elsewhere)
        return View(self._started_at, tuple(beats), finished, self._first_exit, output_at)

    def _finished(self) -> tuple[int, ...]:
        """The ranks of this node that have ended well."""
        running = self._context.running if self._context is not None else set()
        return tuple(self._places[rank] for rank in sorted(self._places) if rank not in running)

    def _look_for_stragglers(self, view: View, now: float) -> float | None:
        """Compare the rates, when it is time; when it is time again."""
        if not any(beat.count for beat in view.alive):
            return None
        from phalanx.core import pace as core

        world = self._meet_others()
        if world is None and len(view.alive) < 2:
            return None
        before = self._pace or core.Pace()
        if now < before.at + core.WINDOW:
            return before.at + core.WINDOW
        self._pace, rates = core.measure(before, view, now)
        if rates and world is not None:
            world.rates(rates, now - before.at)
        elif rates:
            standing = self._standing or core.Standing()
            self._standing, found = core.compare(standing, rates, now - before.at, {})
            for one in found:
                self._name_slow(vars(one))
        return now + core.WINDOW

    def _name_slow(self, straggler: dict[str, Any]) -> None:
        self._note(straggler["reason"])
        self.findings.append(
            {
                "kind": "straggler",
                "ranks": list(straggler["ranks"]),
                "host": straggler["host"],
                "summary": straggler["reason"],
            }
        )

    def _ask_for_output(self, view: View, now: float) -> float | None:
        """Ask the other nodes for output of theirs, in time for the answer; when to do so."""
        limit = self.policy.silence_timeout if self.policy is not None else None
        if self._world is None or limit is None or view.output_at in (None, self._asked_for_output):
            return None
        assert view.output_at is not None
        due = view.output_at + limit - min(1.0, limit / 4)
        if now < due:
            return due
        self._asked_for_output = view.output_at
        self._world.ask_for_output()
        return None

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

    # -- a hang -------------------------------------------------------------------------------------

    def _begin(self, verdict: Verdict, view: View, now: float) -> None:
        if self._world is not None:
            self._world.suspect(verdict, now)
        self._collect(verdict, view, now)

    def _collect(self, verdict: Verdict, view: View, now: float) -> None:
        from phalanx.agent.hangs import LOOK_AGAIN, Incident

        assert self._context is not None
        assert self._boards is not None
        self._incident = Incident(verdict, view, self._context, self._boards, self._places, now)
        self._findings = None
        self._due = now + LOOK_AGAIN

    def _proceed(self, incident: Incident, now: float) -> Event | None:
        from phalanx.agent.hangs import LOOK_AGAIN
        from phalanx.core.progress import WatchPolicy

        self._due = now + LOOK_AGAIN
        if self._findings is None:
            if not incident.done(now):
                return None
            self._findings = incident.collect()
        if self._world is not None:
            what = self._world.proceed(self._findings, now)
            if what == "wait":
                return None
            if what == "drop":
                self._world.settled()
                self._incident, self._due = None, now
                return None
        policy = self.policy or WatchPolicy()
        summary = incident.conclude(
            self._findings, policy, now, self._host if self._world is not None else ""
        )
        self._incident, self._due = None, now
        if self._world is not None:
            self._world.concluded(incident.as_data())
        return self._judged(incident, policy.on_hang, summary)

    def _judged(self, incident: Incident, mode: str, summary: str) -> Event | None:
        self.last_hang = incident.report
        self.findings.append(incident.as_data())
        if mode == "warn":
            self._warned = incident.verdict.rule
            self._note(summary)
            return None
        return Hang(summary, final=mode == "fail")

    # -- what the other nodes say -------------------------------------------------------------------

    def _hear(self, news: dict[str, Any]) -> None:
        world, now = self._world, time.monotonic()
        if world is None:
            return  # of a round that is over
        match news.get("kind"):
            case "slow":
                self._name_slow(news)
            case "exit" if not self._first_exit:
                self._first_exit, self._finished_elsewhere = now, tuple(news["ranks"])
                self._due = now
            case "quiet" if news["node"] != world.node:
                self._answer_quiet(world, now)
            case "output":
                self._output_elsewhere = max(self._output_elsewhere, now - news["age"])
            case "hang" if world.opened(news, now) and self._incident is None:
                self._look_into(world, news, now)
            case "verdict" if news["node"] != world.node:
                self._take_verdict(world, news["hang"], now)

    def _answer_quiet(self, world: World, now: float) -> None:
        limit = self.policy.silence_timeout if self.policy is not None else None
        last = self._output.last(now) if self._output is not None else None
        if limit is None or last is None:
            return
        # Old output is no answer, and what is known to be newer has been told.
        if last > max(self._output_elsewhere, now - limit / 2):
            world.tell_of_output(now - last)

    def _look_into(self, world: World, news: dict[str, Any], now: float) -> None:
        """Another node found something that hangs: what do ours do?"""
        from phalanx.agent.hangs import Findings
        from phalanx.core.progress import Verdict, View, WatchPolicy

        verdict = Verdict(news["rule"], tuple(news["ranks"]), news["reason"])
        if self._context is not None and self._boards is not None and self._context.running:
            self._collect(verdict, self._view(now, self.policy or WatchPolicy()), now)
        else:  # nothing, they have finished
            world.proceed(Findings(View(self._started_at, (), self._finished()), {}, {}), now)
            world.settled()

    def _take_verdict(self, world: World, hang: dict[str, Any], now: float) -> None:
        """What another node made of a hang, from what all have said."""
        world.settled()
        self._warned = hang["rule"]
        self.last_hang = hang["report"]
        self.findings.append(hang)
        if self._incident is not None:
            self._incident.report = list(hang["report"])
            self._incident.keep_report(self._host)
            self._incident, self._due = None, now
        if self.policy is not None and self.policy.on_hang == "warn":
            self._note(hang["summary"])

    def report(self, summary: str = "") -> str:
        """The last hang in full, if it was this one; empty when there was none."""
        return "\n".join(self.last_hang) if self.last_hang and summary in self.last_hang[0] else ""

    # -- stopping -----------------------------------------------------------------------------------

    def stop(self, context: PContext, sig: int, grace: float) -> None:
        """Stop the workers; when it is for a preemption, let them checkpoint and leave by themselves."""
        if self._boards is not None and self.preemption.begins(sig):
            self.preemption.stop(context, self._boards, grace, self._note)
        else:
            context.ask_stop(sig, grace)


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
