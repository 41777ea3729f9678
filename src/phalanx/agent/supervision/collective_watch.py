"""Samples the collectives of this node's ranks for `--hang-timeout`: rarely, and in a thread.

A sample costs every worker's debug server one request and the agent a few milliseconds. There are four in the
time of the timeout, so that a hang is found at most a quarter of it late.
"""

from __future__ import annotations

import _thread
import os
import time
from collections.abc import Callable
from typing import Any

from phalanx.agent.supervision.trace_sockets import TraceSockets
from phalanx.agent.workers.worker_group import PContext
from phalanx.core.diagnosis.collective_progress import CollectiveProgress, RankPulse, observe
from phalanx.core.diagnosis.collectives import RankTrace

_SHARE = 0.25  # of the timeout
_SHORTEST, _LONGEST = 0.1, 15.0
_ANSWER_TIMEOUT = 1.0


class CollectiveWatch:
    """The progress of this node's ranks, by global rank; `changed` is called by the owner after a sample."""

    def __init__(
        self,
        context: PContext,
        global_ranks: dict[int, int],
        sockets: TraceSockets,
        timeout: float,
        post: Callable[[Any], None],
        changed: Callable[[], None],
        now: float,
    ) -> None:
        self._context, self._global_ranks, self._sockets = context, global_ranks, sockets
        self._post, self._changed = post, changed
        self._interval = min(max(timeout * _SHARE, _SHORTEST), _LONGEST)
        self._due = now + self._interval
        self._asking = self._closed = False
        self.progress: dict[int, CollectiveProgress] = {}
        self.recorded = False  # a rank has answered
        self._traces: dict[int, tuple[RankTrace, float]] = {}  # by global rank, with the time of the sample

    def look(self, now: float) -> float | None:
        """Begin a sample if it is time; returns when the next one begins, None while one is under way."""
        if self._asking:
            return None
        if now < self._due:
            return self._due
        self._asking = True
        pids = self._context.pids()
        ranks = {rank: pids[rank] for rank in self._context.running if rank in pids}
        _thread.start_new_thread(self._sample, (ranks,))
        return None

    def close(self) -> None:
        """The workers have exited, or are about to."""
        self._closed = True

    def _sample(self, pids: dict[int, int]) -> None:
        pulses: list[RankPulse] = []
        found: dict[int, RankTrace] = {}
        try:
            from phalanx.agent.supervision.collective_traces import read_traces
            from phalanx.kernel import is_stopped

            paths = {
                self._global_ranks[rank]: path
                for rank, pid in pids.items()
                if (path := self._sockets.path(rank)) and not is_stopped(pid)  # it would not answer
            }
            found = read_traces(paths, _ANSWER_TIMEOUT)
            before = {rank: trace for rank, (trace, _) in self._traces.items()}
            known = before | found  # one that does not answer this time has not moved
            for rank, pid in pids.items():
                pulses.append(pulse(self._global_ranks[rank], known.get(self._global_ranks[rank]), pid))
        finally:
            self._post(lambda: self._take(pulses, found))

    def _take(self, pulses: list[RankPulse], found: dict[int, RankTrace]) -> None:
        self._asking = False
        if self._closed:
            return
        now = time.monotonic()
        self._due = now + self._interval
        self.recorded = self.recorded or bool(found)
        self._traces = {**self._traces, **{rank: (trace, now) for rank, trace in found.items()}}
        self.progress = observe(self.progress, pulses, now)
        self._changed()

    def recent_traces(self, now: float) -> dict[int, RankTrace]:
        """What ranks had recorded at the last samples: in a hang, they have recorded nothing since."""
        since = now - 2.5 * self._interval
        return {rank: trace for rank, (trace, at) in self._traces.items() if at >= since}


def pulse(rank: int, trace: RankTrace | None, pid: int) -> RankPulse:
    """One sample of one rank; a rank without a record waits in no collective."""
    from phalanx.core.diagnosis.collective_progress import marks
    from phalanx.core.diagnosis.collectives import is_waiting

    if trace is None:
        return RankPulse(rank, (), False, *activity(pid))
    return RankPulse(rank, marks(trace), is_waiting(trace), *activity(pid))


def activity(pid: int) -> tuple[float, bool]:
    """Seconds that a process and its descendants have used so far, and whether one of them wants to run."""
    from phalanx.kernel import stat_fields

    ticks, runnable, left, seen = 0, False, [pid], 0
    while left and seen < 10000:
        seen += 1
        one = left.pop()
        fields = stat_fields(one)
        if fields is None:
            continue
        runnable = runnable or fields[0] == "R"
        ticks += sum(int(fields[index]) for index in (11, 12, 13, 14))  # utime, stime, cutime, cstime
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children") as file:
                    left += map(int, file.read().split())
        except OSError:
            continue  # it has ended, or this kernel does not list children
    return ticks / os.sysconf("SC_CLK_TCK"), runnable
