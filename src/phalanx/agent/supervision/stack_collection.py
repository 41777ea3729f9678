"""One hang, from the verdict to the report: request the stacks of every worker, wait briefly, sum up.

Nothing here blocks: the owner's loop calls `answered` and `native_done` until they return True. A worker that
does not answer while it can (`core.diagnosis.patience`) is reported without a stack.
"""

from __future__ import annotations

import os

from phalanx.agent.supervision import stacks
from phalanx.agent.supervision.silent_workers import SilentWorkers
from phalanx.core.diagnosis.patience import RANK_BUSY
from phalanx.core.diagnosis.progress import Blame, Evidence, Verdict, View, WatchPolicy, blame, judge
from phalanx.job.time_budgets import NATIVE_STACKS_TIME, NCCL_ASKED, TRACES_SAVED
from phalanx.kernel import is_stopped
from phalanx.observe.log_layout import HANG, NATIVE_STACKS, NCCL, STACKS, TRACES, worker_directory
from phalanx.worker.board import STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.supervision.collective_traces import TraceCollection
    from phalanx.agent.supervision.nccl_ras import RasQuery
    from phalanx.agent.supervision.trace_sockets import TraceSockets
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.diagnosis.collective_progress import CollectiveProgress
    from phalanx.core.diagnosis.collectives import Explanation, RankTrace
    from phalanx.worker.board import Boards

RECHECK = 0.02


class Findings:
    """What is known about the ranks of a hang at time `at`, on one node or all, by global rank."""

    def __init__(self, view: View, at: float, found: dict[int, Evidence], where: dict[int, str]) -> None:
        self.view, self.at, self.found, self.where = view, at, found, where
        self.traces: dict[int, RankTrace] = {}  # of torch's collectives
        self.silent: list[str] = []  # nodes that did not answer
        self.took = 0.0  # seconds by which this node was late itself: a sign of a busy machine

    def mark_moved(self, ranks: set[int], now: float) -> None:
        """These have entered or left a collective since the hang was noticed."""
        alive = tuple(
            beat.replace(numbers_at=now) if beat.rank in ranks else beat for beat in self.view.alive
        )
        self.view = self.view.replace(alive=alive)


class StackDump:
    """The stacks of running workers, requested now; by local rank."""

    def __init__(
        self,
        context: PContext,
        boards: Boards,
        now: float,
        ranks: set[int] | None = None,
    ) -> None:
        running = context.running if ranks is None else context.running & ranks
        self.pids = {rank: pid for rank, pid in context.pids().items() if rank in running}
        self.stopped = {rank for rank, pid in self.pids.items() if is_stopped(pid)}
        self._context, self._boards = context, boards
        self._before = {rank: boards.stacks_size(rank) for rank in self.pids}
        self._sizes: dict[int, int] = {}
        self._complete: set[int] = set()
        self._asked = {
            rank
            for rank, pid in self.pids.items()
            if rank not in self.stopped and STACK_SIGNAL and stacks.catches(pid, STACK_SIGNAL)
        }
        self.took = 0.0  # seconds until the last answer so far
        self._since = now
        self._silent = SilentWorkers(self.pids, now)
        context.send_signal(STACK_SIGNAL, self._asked, alone=True)

    def answered(self, now: float) -> bool:
        """Whether all workers have answered that can."""
        asked = self._asked & self._context.running
        silent = asked - self._complete
        # Before the sizes: one that is done by now has grown by then.
        awaited = self._silent.awaited(silent, self._begun(silent), now)
        for rank in silent:
            size, before = self._boards.stacks_size(rank), self._sizes.get(rank, self._before[rank])
            self._sizes[rank] = size
            if size > before:
                awaited.add(rank)
                self.took = now - self._since
            # The end of an answer is not marked: it is complete when it has stopped growing.
            elif size > self._before[rank]:
                self._complete.add(rank)
        left = silent - self._complete
        if not left:
            return True
        if left & awaited and now < self._since + RANK_BUSY:
            return False
        self.stopped |= self._silent.stopped & left
        return True

    def _begun(self, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if self._sizes.get(rank, 0) > self._before[rank]}

    def text(self, rank: int) -> str:
        """What a worker has written; empty for one that was not asked."""
        return self._boards.stacks(rank, self._before[rank]) if rank in self._asked else ""


class HangIncident:
    """Collects the evidence of one hang on this node; `global_ranks` maps local ranks to global ones."""

    def __init__(
        self,
        verdict: Verdict,
        view: View,
        context: PContext,
        boards: Boards,
        global_ranks: dict[int, int],
        now: float,
        trace_sockets: TraceSockets | None = None,
    ) -> None:
        self.verdict = verdict
        self.view, self._at = view, now
        self.summary = verdict.reason
        self.guilty: tuple[int, ...] = ()  # global ranks that the others wait for, once that is known
        self.report: list[str] = []
        self._context = context
        self._global_ranks = global_ranks
        self.decided_after = 0.0  # seconds since the detection
        self._dump = StackDump(context, boards, now)
        self._pids, self._stopped = self._dump.pids, self._dump.stopped
        self.explanation: Explanation | None = None
        self._deadline = now + RANK_BUSY
        self._traces = self._ask_for_traces(trace_sockets)
        self._nccl = self._ask_nccl()
        self._native: dict[int, Any] = self._start_py_spy()
        self._native_deadline = now + NATIVE_STACKS_TIME
        self._save_deadline = 0.0
        self.findings: Findings | None = None  # of this node, once its workers have answered
        # As it was when the hang was found: a sample that was under way may arrive meanwhile.
        self.progress: dict[int, CollectiveProgress] = {}

    def answered(self, now: float) -> bool:
        """Whether all workers have answered that can."""
        told = self._traces is None or self._traces.parsed or now >= self._deadline
        asks_nccl = self._nccl.asks and now < self._at + NCCL_ASKED
        return self._dump.answered(now) and told and not asks_nccl

    # -- collectives --------------------------------------------------------------------------------

    def _ask_for_traces(self, sockets: TraceSockets | None) -> TraceCollection | None:
        """Ask for the collectives of all ranks that have a server; a stopped process would not answer."""
        if sockets is None:
            return None
        paths = {
            self._global_ranks[rank]: path
            for rank in self._pids
            if rank not in self._stopped and os.path.exists(path := sockets.path(rank))
        }
        if not paths:
            return None
        from phalanx.agent.supervision.collective_traces import TraceCollection

        pids = {self._global_ranks[rank]: pid for rank, pid in self._pids.items()}
        return TraceCollection(paths, pids, self._start_path(TRACES))

    def _ask_nccl(self) -> RasQuery:
        from phalanx.agent.supervision.nccl_ras import RasQuery

        pids = [pid for rank, pid in self._pids.items() if rank not in self._stopped]
        return RasQuery(pids, self._start_path(NCCL))

    # -- native stacks ------------------------------------------------------------------------------

    def _start_py_spy(self) -> dict[int, Any]:
        """Start py-spy for every worker, if it is installed and the worker has a log directory."""
        from shutil import which

        tool = which("py-spy")
        if tool is None:
            return {}
        import subprocess

        found: dict[int, Any] = {}
        for rank, pid in self._pids.items():
            path = self._path(rank, NATIVE_STACKS)
            if path and rank not in self._stopped:
                try:
                    with open(path, "wb") as file:
                        found[rank] = subprocess.Popen(
                            [tool, "dump", "--native", "--pid", str(pid)],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                except OSError:
                    continue
        return found

    def native_done(self, now: float) -> bool:
        """Whether py-spy has ended for every worker, and the traces are saved; both have a timeout."""
        for rank, process in list(self._native.items()):
            if process.poll() is None and now >= self._native_deadline:
                process.kill()
                process.wait()
            if process.returncode is not None:
                del self._native[rank]
        self._save_deadline = self._save_deadline or now + TRACES_SAVED
        saved = self._traces is None or self._traces.saved or now >= self._save_deadline
        return not self._native and saved

    def abandon(self) -> None:
        """Stop collecting: the workers have exited."""
        self._native_deadline = 0.0
        self.native_done(1.0)

    # -- summing up ---------------------------------------------------------------------------------

    def collect(self) -> Findings:
        """The findings of this node; the stacks are written beside the logs."""
        found = {}
        for rank in self._pids:
            text = self._dump.text(rank)
            global_rank = self._global_ranks[rank]
            found[global_rank] = stacks.evidence(global_rank, text, rank in self._stopped)
            self._append(self._path(rank, STACKS), text)
        where = {self._global_ranks[rank]: f"pid {pid}" for rank, pid in self._pids.items()}
        findings = Findings(self.view, self._at, found, where)
        findings.took = self._dump.took
        if self._traces is not None:
            findings.traces.update(self._traces.traces)
        return findings

    def is_confirmed(self, findings: Findings, policy: WatchPolicy) -> bool:
        """Whether it is a hang with the findings of the other nodes, too: their ranks may progress."""
        return self.verdict.rule != "collectives" or (judge(findings.view, findings.at, policy) is not None)

    def conclude(self, findings: Findings, policy: WatchPolicy, now: float, host: str = "") -> str:
        """One line that says what hangs and which rank differs; the full report goes to the log directory."""
        self.decided_after = now - self._at
        # With the findings of other nodes, the same rule may name more ranks.
        again = judge(findings.view, findings.at, policy)
        if again is not None and again.rule == self.verdict.rule:
            self.verdict = again
        blamed = self._explain(findings)
        if len(blamed.ranks) < len(findings.view.alive):
            self.guilty = blamed.ranks
        headline = f"HANG: {self.summary}"
        self.report = stacks.in_full(headline, findings.view, blamed, findings.found, findings.where)
        if self.explanation is not None:
            self.report[1:1] = [f"  {line}" for line in self.explanation.others]
        self.report += [f"  {line}" for line in self._notes(findings)]
        self.report += [f"  {node}: no answer" for node in findings.silent]
        self.report.append(f"  decided {self.decided_after:.2f} s after the detection")
        if findings.traces and self._save_traces(findings):
            self.report.append(
                f"  flight recorder{f' on {host}' if host else ''}: {self._start_path(TRACES)}"
            )
        self.report += [f"  NCCL: {line}" for line in self._nccl.complaints]
        if self._nccl.path:
            self.report.append(f"  NCCL's own report{f' on {host}' if host else ''}: {self._nccl.path}")
        self.write_report(host)
        return self.summary

    def _notes(self, findings: Findings) -> list[str]:
        if self._traces is None and not findings.traces:
            return []
        from phalanx.core.diagnosis.collectives import notes

        asked = () if self._traces is None else self._traces.asked
        return notes(findings.traces, [rank for rank in asked if rank not in findings.traces])

    def _save_traces(self, findings: Findings) -> str:
        """Save what other nodes have sent beside the traces of this node; returns the directory."""
        directory = self._start_path(TRACES)
        own = self._traces.traces if self._traces is not None else {}
        others = [trace for rank, trace in findings.traces.items() if rank not in own]
        if directory and others:
            from phalanx.agent.supervision.collective_traces import save_condensed

            save_condensed(directory, others)
        return directory

    def _explain(self, findings: Findings) -> Blame:
        """Set the summary, by the collectives if they tell, else by the stacks."""
        reason = self.verdict.reason
        if findings.traces:
            from phalanx.core.diagnosis.collectives import explain

            stopped = {rank for rank, one in findings.found.items() if one.stopped}
            self.explanation = explain(findings.traces, stopped=stopped, exited=findings.view.finished)
        if self.explanation is None:
            blamed = blame(findings.view, self.verdict, tuple(findings.found.values()))
            who = stacks.in_one_line(blamed, findings.found)
            joint = ", " if who.startswith("at ") else ": "
            self.summary = f"{reason}{joint}{who}" if who else reason
            return blamed
        blamed = Blame(self.explanation.ranks, self.explanation.reason)
        at = stacks.place(blamed.ranks, findings.found)
        words = [self.explanation.what + (f", at {at}" if at else ""), self.explanation.then]
        self.summary = f"{'; '.join(filter(None, words))}: {reason}"
        return blamed

    def write_report(self, host: str = "") -> None:
        """Write the report beside the logs of this attempt; with several nodes, `host` names this one."""
        directory = self._start_path("")
        if directory:
            on = f" on {host}" if host else ""
            self.report.append(f"  full stacks{on}: {os.path.join(directory, '*', STACKS)}")
            self._append(os.path.join(directory, HANG), "\n".join(self.report) + "\n")

    @property
    def signature(self) -> str:
        """What identifies the hang: the collective; empty where it is not known."""
        return "" if self.explanation is None else self.explanation.signature

    def as_data(self) -> dict[str, Any]:
        """The incident for the JSON report."""
        return {
            "kind": "hang",
            "rule": self.verdict.rule,
            "ranks": list(self.verdict.ranks),
            "summary": self.summary,
            "decided_after": round(self.decided_after, 3),
            "report": self.report,
        } | ({} if self.explanation is None else {"collectives": self.explanation.as_dict()})

    def _path(self, rank: int, name: str) -> str:
        directory = worker_directory(self._context.error_files.get(rank))
        return os.path.join(directory, name) if directory else ""

    def _start_path(self, name: str) -> str:
        """A file beside the directories of the workers; empty if they have none."""
        directory = worker_directory(self._context.error_files.get(next(iter(self._pids), 0)))
        return os.path.join(os.path.dirname(directory), name) if directory else ""

    @staticmethod
    def _append(path: str, text: str) -> None:
        """Append, because one attempt may have several hangs."""
        if not path or not text:
            return
        try:
            with open(path, "a") as file:
                file.write(text)
        except OSError:
            pass  # a full disk: the summary is on the screen
