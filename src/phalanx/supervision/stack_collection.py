"""One hang, from the verdict to the report: ask every worker for its stacks, wait a moment, sum up.

Nothing here blocks: the owner loop calls `done` now and then until it is true. Who does not answer within
`PATIENCE` is reported without a stack; that is a finding too.
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

PATIENCE = 0.6
"""Seconds for all workers to answer: the answer is C code, and late only on a machine that is overloaded."""
LOOK_AGAIN = 0.02
_NATIVE_PATIENCE = 8.0


class Findings:
    """What is known about the ranks of a hang, of one node or of all, by global rank, as it was at `at`."""

    def __init__(self, view: View, at: float, found: dict[int, Evidence], where: dict[int, str]) -> None:
        self.view, self.at, self.found, self.where = view, at, found, where
        self.silent: list[str] = []  # nodes that did not answer


class HangIncident:
    """Collects what a hang looks like. `pids` and `places`: local rank → pid, and → global rank."""

    def __init__(
        self,
        verdict: Verdict,
        view: View,
        context: PContext,
        boards: Boards,
        places: dict[int, int],
        now: float,
    ) -> None:
        self.verdict = verdict
        self.view, self._at = view, now
        self.summary = verdict.reason
        self.report: list[str] = []
        self._context = context
        self._boards = boards
        self._places = places
        running = context.running
        self._pids = {rank: pid for rank, pid in context.pids().items() if rank in running}
        self._stopped = {rank for rank, pid in self._pids.items() if stacks.is_stopped(pid)}
        self._before = {rank: boards.stacks_size(rank) for rank in self._pids}
        self._sizes: dict[int, int] = {}
        self._asked = {
            rank
            for rank, pid in self._pids.items()
            if rank not in self._stopped and STACK_SIGNAL and stacks.catches(pid, STACK_SIGNAL)
        }
        self._until = now + PATIENCE
        context.send_signal(STACK_SIGNAL, self._asked, alone=True)
        self._native: dict[int, Any] = self._ask_py_spy()
        if self._native:
            self._until_native = now + _NATIVE_PATIENCE

    def answered(self, now: float) -> bool:
        """Whether everybody has answered, or has had the time to."""
        # The end of an answer is not marked: it is whole when it has stopped growing.
        sizes = {rank: self._boards.stacks_size(rank) for rank in self._asked & self._context.running}
        whole = all(
            size > self._before[rank] and size == self._sizes.get(rank) for rank, size in sizes.items()
        )
        self._sizes = sizes
        return whole or now >= self._until

    # -- native stacks ------------------------------------------------------------------------------

    def _ask_py_spy(self) -> dict[int, Any]:
        """Start py-spy for every worker, where it is installed and there is a directory for its answer."""
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
        """Whether the native stacks are there, where there are to be any, or have had their time."""
        for rank, process in list(self._native.items()):
            if process.poll() is None and now >= self._until_native:
                process.kill()
                process.wait()
            if process.returncode is not None:
                del self._native[rank]
        return not self._native

    def abandon(self) -> None:
        """The workers ended meanwhile."""
        self._until_native = 0.0
        self.native_done(1.0)

    # -- summing up ---------------------------------------------------------------------------------

    def collect(self) -> Findings:
        """What was found out on this node; the stacks are kept beside the logs."""
        found = {}
        for rank in self._pids:
            text = self._boards.stacks(rank, self._before[rank]) if rank in self._asked else ""
            found[self._places[rank]] = stacks.evidence(self._places[rank], text, rank in self._stopped)
            self._keep(self._path(rank, "stacks.txt"), text)
        where = {self._places[rank]: f"pid {pid}" for rank, pid in self._pids.items()}
        return Findings(self.view, self._at, found, where)

    def conclude(self, findings: Findings, policy: WatchPolicy, host: str = "") -> str:
        """Say in one line what hangs and who stands out, and keep the rest in the log directory."""
        # Where other nodes have answered, too, the same rule says more: whom else it is true of.
        again = judge(findings.view, findings.at, policy)
        if again is not None and again.rule == self.verdict.rule:
            self.verdict = again
        guilty = blame(findings.view, self.verdict, tuple(findings.found.values()))
        who = stacks.in_one_line(guilty, findings.found)
        joint = ", " if who.startswith("at ") else ": "
        self.summary = f"{self.verdict.reason}{joint}{who}" if who else self.verdict.reason
        headline = f"HANG: {self.summary}"
        self.report = stacks.in_full(headline, findings.view, guilty, findings.found, findings.where)
        self.report += [f"  {node}: no answer" for node in findings.silent]
        self.keep_report(host)
        return self.summary

    def keep_report(self, host: str = "") -> None:
        """The report beside the logs of this attempt; `host` where there are several."""
        directory = self.directory
        if directory:
            on = f" on {host}" if host else ""
            self.report.append(f"  stacks in full{on}: {os.path.join(directory, '*', 'stacks.txt')}")
            self._keep(os.path.join(directory, "hang.txt"), "\n".join(self.report) + "\n")

    def as_data(self) -> dict[str, Any]:
        """For the report as JSON."""
        return {
            "kind": "hang",
            "rule": self.verdict.rule,
            "ranks": list(self.verdict.ranks),
            "summary": self.summary,
            "report": self.report,
        }

    @property
    def directory(self) -> str:
        """Where this attempt's logs are; empty when there are none."""
        path = self._path(next(iter(self._pids), 0), "")
        return os.path.dirname(os.path.dirname(path)) if path else ""

    def _path(self, rank: int, name: str) -> str:
        error_file = self._context.error_files.get(rank, "")
        return os.path.join(os.path.dirname(error_file), name) if error_file else ""

    @staticmethod
    def _keep(path: str, text: str) -> None:
        """Beside the logs; a second hang of the same attempt is added below the first."""
        if not path or not text:
            return
        try:
            with open(path, "a") as file:
                file.write(text)
        except OSError:
            pass  # a full disk: what matters is on the screen
