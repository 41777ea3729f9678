"""What workers do that were asked and have not answered, by /proc: whether they can still answer."""

from __future__ import annotations

import os

from phalanx.core.patience import RANK, SilentRank, is_rank_awaited
from phalanx.kernel import read_text, stat_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_INTERVAL = 0.1
"""Seconds between two looks: a rank may have hundreds of threads."""


class SilentWorkers:
    """Looks at workers that were asked at `since`; `pids` by rank. For one thread.

    `courier`: the process that passes the question on. A worker sleeps until it has.
    """

    def __init__(self, pids: Mapping[int, int], since: float, courier: int = 0) -> None:
        self._pids, self._since, self._courier = pids, since, courier
        self._due = since
        self._awaited = set(pids)  # also at a look that began before the question was asked
        self.stopped: set[int] = set()  # since they were asked
        self._ran: dict[str, float] = {}  # seconds on a processor at the last look, by thread
        self._looked_at = since

    def awaited(self, silent: Collection[int], begun: Collection[int], now: float) -> set[int]:
        """Those of the silent ranks that may still answer; `begun`: a part of their answer has arrived."""
        if now >= self._due:
            waited = now - self._since
            # What threads do matters only at the end; the look before it is what theirs is compared with.
            late = waited >= RANK - 2 * _INTERVAL
            courier = self._threads(self._courier, now) if late and self._courier else ()
            self._awaited = set()
            for rank in silent:
                seen = self._look(rank, now, late)
                if is_rank_awaited(waited, seen.replace(begun=rank in begun, threads=seen.threads + courier)):
                    self._awaited.add(rank)
            self._looked_at, self._due = now, now + _INTERVAL
        return self._awaited & set(silent)

    def _look(self, rank: int, now: float, late: bool) -> SilentRank:
        pid = self._pids[rank]
        fields = stat_fields(pid)
        if fields is None:
            return SilentRank("")
        if fields[0] == "T":
            self.stopped.add(rank)
        return SilentRank(fields[0], threads=self._threads(pid, now) if late else ())

    def _threads(self, pid: int, now: float) -> tuple[tuple[str, float | None], ...]:
        span, found = now - self._looked_at, []
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return ()
        for thread in threads:
            place = f"/proc/{pid}/task/{thread}"
            fields = stat_fields(f"{pid}/task/{thread}")
            if fields is None:
                continue
            ran = read_text(f"{place}/schedstat").split()  # not on all kernels
            before = self._ran.get(thread)
            share = None
            if ran:
                self._ran[thread] = int(ran[0]) / 1e9
                if before is not None and span > 0:
                    share = (self._ran[thread] - before) / span
            found.append((fields[0], share))
        return tuple(found)
