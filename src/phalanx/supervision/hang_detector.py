"""The eye on one start of the workers: boards, output and exits in; hangs and stragglers out.

`core.progress` and `core.pace` decide what hangs, who stands out and who is slow; here their questions are
answered and their verdicts are carried out. Everything runs in the owner's thread. While nothing is asked for
and no worker says anything, nothing is imported, read or woken for it.

The order of events in a hang: the verdict; the stacks of all ranks (stack_collection.py), including those of
other nodes (hang_consensus.py); one line that names the rank that differs; then `Hang` for the core (restart
or fail), or only the line (warn).
"""

from __future__ import annotations

import time

from phalanx.core.group_events import Hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.spec import WorkerGroup
    from phalanx.core.group_events import Event
    from phalanx.core.progress import Beat, Verdict, View, WatchPolicy
    from phalanx.core.stragglers import Pace, Standing
    from phalanx.supervision.hang_consensus import HangConsensus
    from phalanx.supervision.heartbeat import Boards
    from phalanx.supervision.output_activity import OutputActivity
    from phalanx.supervision.stack_collection import Findings, HangIncident
    from phalanx.workers.worker_group import PContext

_WARN_AGAIN = 5.0  # between looks at a hang that was only warned about
_KEPT = 100  # findings, of which each may have a long report


class IncidentLog:
    """What was found over all starts, for the report and the status; `note` is for a person, at once."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda _line: None
        self.findings: list[dict[str, Any]] = []
        self.last_hang: list[str] = []  # its report

    def slow(self, straggler: dict[str, Any]) -> None:
        """Name who is slow."""
        ranks, host, reason = list(straggler["ranks"]), straggler["host"], str(straggler["reason"])
        self.note(reason)
        self._keep({"kind": "straggler", "ranks": ranks, "host": host, "summary": reason})

    def hang(self, data: dict[str, Any]) -> None:
        """Keep a hang, as `Incident.as_data` has it."""
        self.last_hang = [str(line) for line in data["report"]]
        self._keep({**data, "kind": "hang", "summary": str(data["summary"])})

    def _keep(self, finding: dict[str, Any]) -> None:
        self.findings.append(finding)
        del self.findings[:-_KEPT]


class HangDetector:
    """Watches the workers of one start, in round `number`; `host` is this node's name among the others."""

    def __init__(
        self,
        context: PContext,
        boards: Boards,
        group: WorkerGroup,
        policy: WatchPolicy | None,
        incidents: IncidentLog,
        post: Callable[[Any], None],
        *,
        number: int,
        host: str,
        now: float,
    ) -> None:
        self.policy = policy
        self._context, self._boards, self._group = context, boards, group
        self._casebook, self._post = incidents, post
        self._number, self._host = number, host
        self._places = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._started_at = now
        self._alive = len(self._places)
        self._due: float | None = None if policy is None else now
        self._first_exit = 0.0
        self._finished_elsewhere: tuple[int, ...] = ()
        self._incident: HangIncident | None = None
        self._findings: Findings | None = None
        self._warned = ""  # the rule of a hang that was only told
        self._told_of_no_beats = False
        self._pace: Pace | None = None
        self._standing: Standing | None = None
        self.rates: dict[int, float] = {}  # of the last window, by global rank
        self._output: OutputActivity | None = None
        self._output_elsewhere = self._asked_for_output = self._told_of_output = 0.0
        self._world: HangConsensus | None = None
        if policy is not None:
            self._meet_others()

    def close(self) -> None:
        """The workers are gone, or about to be."""
        if self._incident is not None:
            self._incident.abandon()
        if self._world is not None:
            self._world.close()

    def hear_last_word(self) -> None:
        """The job ends: if it is over a hang that another node sums up, what came of it?"""
        verdict = self._world.last_word() if self._world is not None else None
        if verdict is not None:
            self._hear({"kind": "verdict", "node": -1, "hang": verdict})

    def _meet_others(self) -> HangConsensus | None:
        """The other nodes, once there is something to compare with them."""
        if self._world is None and (self._group.group_world_size or 1) > 1:
            from phalanx.supervision.hang_consensus import consensus_of

            self._world = consensus_of(self._group, self._number, self._host, self._post, self._hear)
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

    # -- the loop's view ----------------------------------------------------------------------------

    def limit(self, timeout: float | None, now: float) -> float | None:
        """How long the owner may sleep."""
        if self._due is None:
            return timeout
        left = max(0.0, self._due - now)
        return left if timeout is None else min(timeout, left)

    def look(self, now: float) -> Event | None:
        """Whether something hangs; to be called whenever the owner is awake and workers run."""
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

    def beats(self) -> list[Beat]:
        """What the boards of the workers that run say now."""
        from phalanx.core.progress import Beat

        found = []
        for rank in sorted(self._context.running):
            slot = self._boards.read(rank)
            found.append(
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
        return found

    def _view(self, now: float, policy: WatchPolicy) -> View:
        from phalanx.core.progress import View

        beats = self.beats()
        finished = tuple(sorted({*self._finished(), *self._finished_elsewhere}))
        output_at = None
        if policy.silence_timeout is not None:
            from phalanx.supervision.output_activity import OutputActivity

            self._output = self._output or OutputActivity(self._context, self._started_at)
            output_at = self._output.last(now)
            if output_at is not None:
                output_at = max(output_at, self._output_elsewhere)
        return View(self._started_at, tuple(beats), finished, self._first_exit, output_at)

    def _finished(self) -> tuple[int, ...]:
        """The ranks of this node that have ended well."""
        running = self._context.running
        return tuple(self._places[rank] for rank in sorted(self._places) if rank not in running)

    def _look_for_stragglers(self, view: View, now: float) -> float | None:
        """Compare the rates, when it is time; when it is time again."""
        if not any(beat.count for beat in view.alive):
            return None
        from phalanx.core import stragglers as core

        world = self._meet_others()
        if world is None and len(view.alive) < 2:
            return None
        before = self._pace or core.Pace()
        if now < before.at + core.WINDOW:
            return before.at + core.WINDOW
        self._pace, rates = core.measure(before, view, now)
        self.rates = rates
        if rates and world is not None:
            world.rates(rates, now - before.at)
        elif rates:
            standing = self._standing or core.Standing()
            self._standing, found = core.compare(standing, rates, now - before.at, {})
            for one in found:
                self._casebook.slow(vars(one))
        return now + core.WINDOW

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
        self._casebook.note(
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
        from phalanx.supervision.stack_collection import LOOK_AGAIN, HangIncident

        self._incident = HangIncident(verdict, view, self._context, self._boards, self._places, now)
        self._findings = None
        self._due = now + LOOK_AGAIN

    def _proceed(self, incident: HangIncident, now: float) -> Event | None:
        from phalanx.core.progress import WatchPolicy
        from phalanx.supervision.stack_collection import LOOK_AGAIN

        self._due = now + LOOK_AGAIN
        if self._findings is None:
            if not incident.answered(now):
                return None
            self._findings = incident.collect()
        native = incident.native_done(now)  # they take longer, and the workers have to live for so long
        if self._world is None and not native:
            return None
        if self._world is not None:
            what = self._world.proceed(self._findings, now, native)
            if what == "wait":
                return None
            if what == "drop":
                self._world.settled()
                self._incident, self._due = None, now
                return None
        policy = self.policy or WatchPolicy()
        summary = incident.conclude(self._findings, policy, self._host if self._world is not None else "")
        self._incident, self._due = None, now
        if self._world is not None:
            self._world.concluded(incident.as_data())
        return self._judged(incident, policy.on_hang, summary)

    def _judged(self, incident: HangIncident, mode: str, summary: str) -> Event | None:
        self._casebook.hang(incident.as_data())
        if mode == "warn":
            self._warned = incident.verdict.rule
            self._casebook.note(summary)
            return None
        return Hang(summary, final=mode == "fail")

    # -- what the other nodes say -------------------------------------------------------------------

    def _hear(self, news: dict[str, Any]) -> None:
        if self._world is None:
            return
        from phalanx.supervision.hang_consensus import NOT_OURS

        try:
            self._take_in(self._world, news, time.monotonic())
        except NOT_OURS:
            pass  # no news of ours: the store of a static round is open to the workers, too

    def _take_in(self, world: HangConsensus, news: dict[str, Any], now: float) -> None:
        match news.get("kind"):
            case "slow":
                self._casebook.slow(news)
            case "exit" if not self._first_exit:
                self._first_exit, self._finished_elsewhere = now, tuple(news["ranks"])
                self._due = now
            case "quiet" if news["node"] != world.node:
                self._answer_quiet(world, now)
            case "output":
                self._output_elsewhere = max(self._output_elsewhere, now - max(0.0, float(news["age"])))
            case "hang" if world.opened(news, now) and self._incident is None:
                self._look_into(world, news, now)
            case "verdict":
                world.settled(verdict=True)
                if news["node"] != world.node:
                    self._take_verdict(news["hang"], now)

    def _answer_quiet(self, world: HangConsensus, now: float) -> None:
        limit = self.policy.silence_timeout if self.policy is not None else None
        last = self._output.last(now) if self._output is not None else None
        if limit is None or last is None:
            return
        # Old output is no answer, what is known to be newer has been told, and all who ask hear one answer.
        if last > max(self._output_elsewhere, self._told_of_output, now - limit / 2):
            self._told_of_output = last
            world.tell_of_output(now - last)

    def _look_into(self, world: HangConsensus, news: dict[str, Any], now: float) -> None:
        """Another node found something that hangs: what do ours do?"""
        from phalanx.core.progress import Verdict, View, WatchPolicy
        from phalanx.supervision.stack_collection import Findings

        verdict = Verdict(news["rule"], tuple(news["ranks"]), news["reason"])
        if self._context.running:
            self._collect(verdict, self._view(now, self.policy or WatchPolicy()), now)
        else:  # nothing, they have finished
            world.proceed(Findings(View(self._started_at, (), self._finished()), now, {}, {}), now)
            world.settled()

    def _take_verdict(self, hang: dict[str, Any], now: float) -> None:
        """What another node made of a hang, from what all have said."""
        self._warned = hang["rule"]
        self._casebook.hang(hang)
        if self._incident is not None:
            self._incident.report = list(self._casebook.last_hang)
            self._incident.keep_report(self._host)
            self._incident, self._due = None, now
        if self.policy is not None and self.policy.on_hang == "warn":
            self._casebook.note(str(hang["summary"]))
