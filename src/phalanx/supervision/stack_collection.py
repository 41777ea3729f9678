"""One hang, from the verdict to the report: request the stacks of every worker, wait briefly, sum up.

Nothing here blocks: the owner's loop calls `answered` and `native_done` until they return True. A worker that
does not answer within `TIMEOUT` is reported without a stack.
"""

from __future__ import annotations

import os

from phalanx.core.progress import Evidence, Verdict, View, WatchPolicy, blame, judge
from phalanx.supervision import stacks
from phalanx.supervision.heartbeat import STACK_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.supervision.heartbeat import Boards
    from phalanx.workers.worker_group import PContext

TIMEOUT = 0.6
"""Seconds for all workers to answer: the handler is C code, and slow only on an overloaded machine."""
RECHECK = 0.02
_NATIVE_TIMEOUT = 8.0


class Findings:
    """What is known about the ranks of a hang at time `at`, on one node or all, by global rank."""

    def __init__(self, view: View, at: float, found: dict[int, Evidence], where: dict[int, str]) -> None:
        self.view, self.at, self.found, self.where = view, at, found, where
        self.silent: list[str] = []  # nodes that did not answer


class StackDump:
    """The stacks of running workers, requested now; by local rank."""

    def __init__(self, context: PContext, boards: Boards, now: float, ranks: set[int] | None = None) -> None:
        running = context.running if ranks is None else context.running & ranks
        self.pids = {rank: pid for rank, pid in context.pids().items() if rank in running}
        self.stopped = {rank for rank, pid in self.pids.items() if stacks.is_stopped(pid)}
        self._context, self._boards = context, boards
        self._before = {rank: boards.stacks_size(rank) for rank in self.pids}
        self._sizes: dict[int, int] = {}
        self._asked = {
            rank
            for rank, pid in self.pids.items()
            if rank not in self.stopped and STACK_SIGNAL and stacks.catches(pid, STACK_SIGNAL)
        }
        self._deadline = now + TIMEOUT
        context.send_signal(STACK_SIGNAL, self._asked, alone=True)

    def answered(self, now: float) -> bool:
        """Whether all workers have answered, or the timeout is over."""
        # The end of an answer is not marked: it is complete when it has stopped growing.
        sizes = {rank: self._boards.stacks_size(rank) for rank in self._asked & self._context.running}
        complete = all(
            size > self._before[rank] and size == self._sizes.get(rank) for rank, size in sizes.items()
        )
        self._sizes = sizes
        return complete or now >= self._deadline

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
    ) -> None:
        self.verdict = verdict
        self.view, self._at = view, now
        self.summary = verdict.reason
        self.guilty: tuple[int, ...] = ()  # global ranks that the others wait for, once that is known
        self.report: list[str] = []
        self._context = context
        self._global_ranks = global_ranks
        self._dump = StackDump(context, boards, now)
        self._pids, self._stopped = self._dump.pids, self._dump.stopped
        self._native: dict[int, Any] = self._start_py_spy()
        self._native_deadline = now + _NATIVE_TIMEOUT

    def answered(self, now: float) -> bool:
        """Whether all workers have answered, or the timeout is over."""
        return self._dump.answered(now)

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
            path = self._path(rank, "native-stacks.txt")
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
        """Whether py-spy has ended for every worker; it is killed after its timeout."""
        for rank, process in list(self._native.items()):
            if process.poll() is None and now >= self._native_deadline:
                process.kill()
                process.wait()
            if process.returncode is not None:
                del self._native[rank]
        return not self._native

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
            self._append(self._path(rank, "stacks.txt"), text)
        where = {self._global_ranks[rank]: f"pid {pid}" for rank, pid in self._pids.items()}
        return Findings(self.view, self._at, found, where)

    def conclude(self, findings: Findings, policy: WatchPolicy, host: str = "") -> str:
        """One line that says what hangs and which rank differs; the full report goes to the log directory."""
        # With the findings of other nodes, the same rule may name more ranks.
        again = judge(findings.view, findings.at, policy)
        if again is not None and again.rule == self.verdict.rule:
            self.verdict = again
        blamed = blame(findings.view, self.verdict, tuple(findings.found.values()))
        if len(blamed.ranks) < len(findings.view.alive):
            self.guilty = blamed.ranks
        who = stacks.in_one_line(blamed, findings.found)
        joint = ", " if who.startswith("at ") else ": "
        self.summary = f"{self.verdict.reason}{joint}{who}" if who else self.verdict.reason
        headline = f"HANG: {self.summary}"
        self.report = stacks.in_full(headline, findings.view, blamed, findings.found, findings.where)
        self.report += [f"  {node}: no answer" for node in findings.silent]
        self.write_report(host)
        return self.summary

    def write_report(self, host: str = "") -> None:
        """Write the report beside the logs of this attempt; with several nodes, `host` names this one."""
        worker_directory = self._path(next(iter(self._pids), 0), "")
        if worker_directory:
            directory = os.path.dirname(os.path.dirname(worker_directory))
            on = f" on {host}" if host else ""
            self.report.append(f"  full stacks{on}: {os.path.join(directory, '*', 'stacks.txt')}")
            self._append(os.path.join(directory, "hang.txt"), "\n".join(self.report) + "\n")

    def as_data(self) -> dict[str, Any]:
        """The incident for the JSON report."""
        return {
            "kind": "hang",
            "rule": self.verdict.rule,
            "ranks": list(self.verdict.ranks),
            "summary": self.summary,
            "report": self.report,
        }

    def _path(self, rank: int, name: str) -> str:
        error_file = self._context.error_files.get(rank, "")
        return os.path.join(os.path.dirname(error_file), name) if error_file else ""

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
