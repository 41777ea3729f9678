"""Detects hangs and stragglers among the workers of one start, from heartbeats, output and exits.

`core.diagnosis.progress` and `core.diagnosis.stragglers` decide; this module collects their input and
carries out their decisions, in the owner's thread. It imports, reads and wakes nothing while no timeout is
set and no worker sends anything.

The order of events in a hang: the verdict; the stacks of all ranks (stack_collection.py), including those of
other nodes (hang_consensus.py); one line that names the rank that differs; then the event `Hang` for the core
(restart or fail), or only the line (warn).
"""

from __future__ import annotations

import time

from phalanx.agent.supervision.rank_exits import RankExits
from phalanx.agent.supervision.step_rates import StepRates
from phalanx.core.group.events import Hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.spec import WorkerGroup
    from phalanx.agent.supervision.collective_watch import CollectiveWatch
    from phalanx.agent.supervision.expected_output import ExpectedOutput
    from phalanx.agent.supervision.hang_consensus import HangConsensus
    from phalanx.agent.supervision.incident_log import IncidentLog
    from phalanx.agent.supervision.output_activity import OutputActivity
    from phalanx.agent.supervision.stack_collection import Findings, HangIncident
    from phalanx.agent.supervision.trace_sockets import TraceSockets
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.diagnosis.progress import Beat, Verdict, View, WatchPolicy
    from phalanx.core.group.events import Event
    from phalanx.worker.board import Boards

_SKEW = 5.0  # seconds between the first and the last node that find the same hang
_RECHECK = 5.0  # seconds between checks after a hang that was only warned about


class HangDetector:
    """Watches the workers of one start, in round `number`; `host` names this node to the others."""

    def __init__(
        self,
        context: PContext,
        boards: Boards,
        group: WorkerGroup,
        policy: WatchPolicy | None,
        incidents: IncidentLog,
        post: Callable[[Any], None],
        *,
        trace_sockets: TraceSockets | None = None,
        on_slow: Callable[[str, str], None] | None = None,
        number: int,
        host: str,
        now: float,
    ) -> None:
        self.policy = policy
        self._context, self._boards, self._group = context, boards, group
        self._incidents, self._post = incidents, post
        self._number, self._host = number, host
        self._trace_sockets, self._on_slow = trace_sockets, on_slow
        self._global_ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        self._started_at = now
        self._exits = RankExits(context, self._global_ranks)
        self._due: float | None = None if policy is None else now
        self._incident: HangIncident | None = None
        self._warned_rule = ""  # of a hang that was only warned about
        self._warned_elsewhere = 0.0  # when another node found it: this one may find it a moment later
        self._warned_no_beats = False
        self._step_rates = StepRates(incidents)
        self._output: OutputActivity | None = None
        self._collectives: CollectiveWatch | None = None
        self._progress_elsewhere = 0.0
        self._said_why_not = False  # in this stall
        self._consensus: HangConsensus | None = None
        self._expected: ExpectedOutput | None = None
        if policy is not None and policy.hang_timeout is not None and trace_sockets is not None:
            from phalanx.agent.supervision.collective_watch import CollectiveWatch

            self._collectives = CollectiveWatch(
                context, self._global_ranks, trace_sockets, policy.hang_timeout, post, self._judge_soon, now
            )
        if policy is not None:
            self._connect()
            if policy.silence_timeout is not None:
                from phalanx.agent.supervision.output_activity import OutputActivity

                self._output = OutputActivity(context, now, policy.silence_timeout)
            if policy.expect:
                self._expected = self._search(policy)

    def _search(self, policy: WatchPolicy) -> ExpectedOutput:
        """Begin to search the output for the expected pattern."""
        from phalanx.agent.supervision.expected_output import ExpectedOutput

        logs = (self._context.stdouts, self._context.stderrs)
        found = [(self._global_ranks[rank], path) for files in logs for rank, path in files.items()]
        files = [(rank, path) for rank, path in found if path not in ("", "/dev/null")]
        return ExpectedOutput(policy.expect, policy.expect_finite, files, self._incidents.note)

    @property
    def rates(self) -> dict[int, float]:
        """Steps per second in the last window, by global rank."""
        return self._step_rates.current

    def fds(self) -> list[int]:
        """Descriptors that become readable when `look` has something to take in."""
        fds = [self._boards.fileno()]
        if self._expected is not None and self._expected.works:
            fds.append(self._expected.fileno())
        return fds

    def close(self) -> None:
        """Stop detecting: the workers have exited or are about to."""
        if self._collectives is not None:
            self._collectives.close()
        if self._incident is not None:
            self._incident.abandon()
        if self._consensus is not None:
            self._consensus.close()
        if self._expected is not None:
            self._expected.close()

    def wait_for_verdict(self) -> None:
        """If the job ends because of a hang that another node reports, fetch that report."""
        verdict = self._consensus.wait_for_verdict() if self._consensus is not None else None
        if verdict is not None:
            self._receive({"kind": "verdict", "node": -1, "hang": verdict})

    def _connect(self) -> HangConsensus | None:
        """The connection to the other nodes, made once there is something to compare."""
        if self._consensus is None and (self._group.group_world_size or 1) > 1:
            from phalanx.agent.supervision.hang_consensus import HangConsensus
            from phalanx.agent.supervision.round_broadcast import supports_broadcast

            if supports_broadcast(self._group.store):
                self._consensus = HangConsensus(
                    self._group, self._number, self._host, self._post, self._receive, self._on_slow
                )
        return self._consensus

    def finished(self, now: float) -> None:
        """All workers of this node have succeeded."""
        self._publish_exit(self._exits.all_finished(now))
        if self._consensus is not None:
            self._consensus.withdraw_rates()

    def _publish_exit(self, ranks: tuple[int, ...]) -> None:
        """The first ranks that succeed start the timeout of every node."""
        limit = self.policy.partial_exit_timeout if self.policy is not None else None
        if ranks and self._consensus is not None and limit is not None:
            self._consensus.publish_exit(ranks)

    # -- called by the owner's loop -----------------------------------------------------------------

    def limit(self, timeout: float | None, now: float) -> float | None:
        """How long the owner may sleep."""
        if self._due is None:
            return timeout
        left = max(0.0, self._due - now)
        return left if timeout is None else min(timeout, left)

    def look(self, now: float) -> Event | None:
        """Check for a hang; the owner calls this whenever it is awake and workers run."""
        woken = self._boards.clear_bell()
        if self._expected is not None and self._expected.look():
            woken = True
        exited = self._exits.look()
        if exited and self._context.running:
            self._publish_exit(self._exits.first(now))
        if self._incident is not None:
            return self._proceed(self._incident, now)
        if woken or (exited and self.policy is not None) or (self._due is not None and now >= self._due):
            self._judge(now)
        return None

    def _judge(self, now: float) -> None:
        from phalanx.core.diagnosis.progress import WatchPolicy, judge, next_look

        policy = self.policy or WatchPolicy()
        view = self._view(now, policy)
        verdict = judge(view, now, policy)
        if verdict is None:
            if now >= self._warned_elsewhere + _SKEW:
                self._warned_rule = ""
        elif verdict.rule != self._warned_rule:
            if self._consensus is not None:
                self._consensus.publish_hang(verdict, now)
            self._collect(verdict, view, now)
            return
        times = [
            next_look(view, policy),
            self._compare_rates(view, now),
            self._warn_of_missing_heartbeats(view, now),
            self._query_output(view, now),
            self._watch_collectives(view, now),
        ]
        if policy.expect_every is not None and self._expected is not None and view.matched_at is None:
            times.append(now + policy.expect_every)  # for the first match
        self._due = min((at for at in times if at is not None), default=None)
        if verdict is not None:
            self._due = now + _RECHECK

    def quiet_since(self, now: float) -> float | None:
        """When any rank last wrote output, where that is watched."""
        return None if self._output is None else self._output.last_anywhere(now)

    def beats(self) -> list[Beat]:
        """The current state of every running worker."""
        from phalanx.core.diagnosis.progress import Beat

        found = []
        for rank in sorted(self._context.running):
            board, global_rank = self._boards.read(rank), self._global_ranks[rank]
            beat = Beat(
                global_rank,
                board.beat_at,
                board.step,
                board.count,
                board.ready_at,
                board.deadline,
                board.section,
            )
            moved = self._collectives.progress.get(global_rank) if self._collectives is not None else None
            if moved is not None:
                beat = beat.replace(waits=moved.pulse.waits, numbers_at=moved.numbers_at, ran_at=moved.ran_at)
            found.append(beat)
        return found

    def _view(self, now: float, policy: WatchPolicy) -> View:
        from phalanx.core.diagnosis.progress import View

        matched_at = bad_value = None
        if self._expected is not None and self._expected.works:
            bad_value, matched_at = self._expected.take_bad(), self._last_match(self._expected, now, policy)
        return View(
            self._started_at,
            tuple(self.beats()),
            self._exits.finished_anywhere(),
            self._exits.first_at,
            self.quiet_since(now),
            matched_at,
            bad_value,
            self._progress_elsewhere,
        )

    def _last_match(self, expected: ExpectedOutput, now: float, policy: WatchPolicy) -> float | None:
        """When the output of this node last matched; None: the pattern is not expected here yet.

        With several nodes it is expected from the first match on: often, only one rank prints it.
        """
        if not expected.matched() and (self._group.group_world_size or 1) > 1:
            return None
        return expected.last_match(now, self._started_at, policy.expect_every)

    def _compare_rates(self, view: View, now: float) -> float | None:
        """Compare the step rates if a window has ended; returns when the next one ends."""
        if not any(beat.count for beat in view.alive):
            return None
        consensus = self._connect()
        return (
            None if consensus is None and len(view.alive) < 2 else self._step_rates.look(view, now, consensus)
        )

    def _query_output(self, view: View, now: float) -> float | None:
        """Ask the other nodes whether their ranks write, early enough for an answer; returns when to."""
        if self._consensus is None or self._output is None or view.output_at is None:
            return None
        due = self._output.query_due(view.output_at)
        if due is not None and now >= due:
            self._output.queried_for = view.output_at
            self._consensus.query_output()
            return None
        return due

    def _warn_of_missing_heartbeats(self, view: View, now: float) -> float | None:
        """Warn once if a heartbeat timeout is set and no rank sends heartbeats; returns when to."""
        limit = self.policy.heartbeat_timeout if self.policy is not None else None
        if limit is None or self._warned_no_beats or any(beat.count for beat in view.alive):
            return None
        due = self._started_at + max(limit, 60.0)
        if now < due:
            return due
        self._warned_no_beats = True
        self._incidents.note(
            "no rank has called phalanx.worker.heartbeat() yet; "
            "--heartbeat-timeout watches a rank from its first one on"
        )
        return None

    def _watch_collectives(self, view: View, now: float) -> float | None:
        """Sample the collectives, and say once why a stall is not a hang; returns when to look again."""
        watch, policy = self._collectives, self.policy
        if watch is None or policy is None:
            return None
        from phalanx.core.diagnosis.progress import why_not_hung

        why_not = why_not_hung(view, now, policy)
        if not watch.recorded:
            why_not = self._why_nothing_is_watched(now)
        if why_not and not self._said_why_not:
            self._incidents.note(why_not)
        self._said_why_not = bool(why_not)
        return watch.look(now)

    def _why_nothing_is_watched(self, now: float) -> str:
        assert self.policy is not None
        assert self.policy.hang_timeout is not None
        if now < self._started_at + max(self.policy.hang_timeout, 60.0):
            return ""
        return (
            "no rank has called torch.distributed.init_process_group() yet; "
            "--hang-timeout watches the collectives of torch's process groups"
        )

    def _judge_soon(self) -> None:
        if self._incident is None:
            self._due = time.monotonic()

    # -- a hang -------------------------------------------------------------------------------------

    def _collect(self, verdict: Verdict, view: View, now: float) -> None:
        from phalanx.agent.supervision.stack_collection import RECHECK, HangIncident

        self._incident = HangIncident(
            verdict,
            view,
            self._context,
            self._boards,
            self._global_ranks,
            now,
            self._trace_sockets,
        )
        if self._collectives is not None:
            self._incident.progress = self._collectives.progress
        self._due = now + RECHECK

    def _proceed(self, incident: HangIncident, now: float) -> Event | None:
        from phalanx.agent.supervision.stack_collection import RECHECK
        from phalanx.core.diagnosis.collective_progress import moved
        from phalanx.core.diagnosis.progress import WatchPolicy

        late, self._due = now - (self._due or now), now + RECHECK
        findings = incident.findings
        if findings is None:
            if not incident.answered(now):
                return None
            findings = incident.findings = incident.collect()
            if self._collectives is not None:
                findings.mark_moved(moved(incident.progress, findings.traces), now)
                # Of ranks that have not answered now, on a machine that is busy.
                stopped = {rank for rank, one in findings.found.items() if one.stopped}
                for rank, trace in self._collectives.recent_traces(now).items():
                    if rank not in stopped:
                        findings.traces.setdefault(rank, trace)
        findings.took = max(findings.took, late)
        native = incident.native_done(now)  # takes longer, and needs the workers alive
        if self._consensus is None and not native:
            return None
        if self._consensus is not None:
            step = self._consensus.proceed(findings, now, native)
            if step == "wait":
                return None
            if step == "drop":
                self._consensus.close_case()
                self._incident, self._due = None, now
                return None
        policy = self.policy or WatchPolicy()
        if not incident.is_confirmed(findings, policy):
            self._withdraw(findings, now)
            return None
        host = self._host if self._consensus is not None else ""
        summary = incident.conclude(findings, policy, now, host)
        self._incident, self._due = None, now
        if self._consensus is not None:
            self._consensus.publish_verdict(incident.as_data())
        self._incidents.add_hang(incident.as_data())
        if policy.on_hang == "warn":
            self._warned_rule = incident.verdict.rule
            self._incidents.warn_of_hang(summary)
            return None
        reached = max((beat.step for beat in findings.view.alive if beat.step is not None), default=None)
        return Hang(summary, policy.on_hang == "fail", incident.guilty, reached, incident.signature)

    def _withdraw(self, findings: Findings, now: float) -> None:
        """Ranks of other nodes progress, so those of this node wait for a reason."""
        from phalanx.core.diagnosis.progress import last_progress

        self._incident, self._due = None, now
        self._progress_elsewhere = last_progress(findings.view)
        if self._consensus is not None:
            self._consensus.publish_no_hang(now - self._progress_elsewhere)

    # -- messages of the nodes ----------------------------------------------------------------------

    def _receive(self, message: dict[str, Any]) -> None:
        if self._consensus is None:
            return
        from phalanx.agent.supervision.hang_consensus import MALFORMED

        try:
            self._handle(self._consensus, message, time.monotonic())
        except MALFORMED:
            pass  # not from a node: the workers can write to the store of a static round, too

    def _handle(self, consensus: HangConsensus, message: dict[str, Any], now: float) -> None:
        match message.get("kind"):
            case "straggler":
                self._incidents.add_straggler(message)
            case "exit" if not self._exits.first_at:
                self._exits.elsewhere(now, tuple(message["ranks"]))
                self._due = now
            case "output?" if message["node"] != consensus.node and self._output is not None:
                age = self._output.unreported(now)
                if age is not None:
                    consensus.publish_output(age)
            case "output" if self._output is not None:
                self._output.written_elsewhere(now - max(0.0, float(message["age"])))
            case "hang" if consensus.open_case(message, now) and self._incident is None:
                self._investigate(consensus, message, now)
            case "no hang":
                consensus.close_case(verdict=True)
                self._progress_elsewhere = max(
                    self._progress_elsewhere, now - max(0.0, float(message["age"]))
                )
                if message["node"] != consensus.node and self._incident is not None:
                    self._incident.abandon()
                    self._incident, self._due = None, now
            case "verdict":
                consensus.close_case(verdict=True)
                if message["node"] != consensus.node:
                    self._accept_verdict(message["hang"], now)

    def _investigate(self, consensus: HangConsensus, message: dict[str, Any], now: float) -> None:
        """Another node has found a hang: collect what the workers of this node do."""
        from phalanx.agent.supervision.stack_collection import Findings
        from phalanx.core.diagnosis.progress import Verdict, View, WatchPolicy

        verdict = Verdict(message["rule"], tuple(message["ranks"]), message["reason"])
        if self._context.running:
            self._collect(verdict, self._view(now, self.policy or WatchPolicy()), now)
        else:  # all workers of this node have finished
            consensus.proceed(Findings(View(self._started_at, (), self._exits.finished()), now, {}, {}), now)
            consensus.close_case()

    def _accept_verdict(self, hang: dict[str, Any], now: float) -> None:
        """Keep the verdict that another node reached from the findings of all nodes."""
        self._warned_rule, self._warned_elsewhere = hang["rule"], now
        self._incidents.add_hang(hang)
        if self._incident is not None:
            self._incident.report = list(self._incidents.last_hang)
            self._incident.write_report(self._host)
            self._incident, self._due = None, now
        if self.policy is not None and self.policy.on_hang == "warn":
            self._incidents.note(str(hang["summary"]))
