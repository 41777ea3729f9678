"""What workers do that were asked and have not answered, by /proc: whether they can still answer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from phalanx.core.diagnosis.patience import RANK, SilentRank, is_rank_awaited
from phalanx.kernel import read_text, stat_fields

_INTERVAL = 0.1
"""Seconds between two looks: a rank may have hundreds of threads."""
_EVER = float("inf")
_MOST = 1.5 * _INTERVAL
"""What counts of the time between two looks: if it was more, this process got no processor itself."""


class SilentWorkers:
    """Looks at workers that were asked at `since`; `pids` by rank. For one thread."""

    def __init__(self, pids: Mapping[int, int], since: float) -> None:
        self._pids = pids
        self._due = -_EVER  # the owner's time may be a moment older than the request
        self._waited = 0.0
        self._awaited: set[int] = set()
        self.stopped: set[int] = set()  # since they were asked
        self._ran: dict[str, float] = {}  # seconds on a processor at this look, by thread
        self._ran_before: dict[str, float] = {}  # and at the last one
        self._looked_at = since

    def awaited(self, silent: Collection[int], begun: Collection[int], now: float) -> set[int]:
        """Those of the silent ranks that may still answer; `begun`: a part of their answer has arrived."""
        if now >= self._due:
            self._waited += min(max(0.0, now - self._looked_at), _MOST)
            self._ran_before, self._ran = self._ran, {}
            looks = {rank: self._look(rank, rank in begun, now) for rank in silent}
            self._awaited = {rank for rank, seen in looks.items() if is_rank_awaited(self._waited, seen)}
            self._looked_at, self._due = now, now + _INTERVAL
        return self._awaited & set(silent)

    def _look(self, rank: int, begun: bool, now: float) -> SilentRank:
        pid = self._pids[rank]
        fields = stat_fields(pid)
        if fields is None:
            return SilentRank("")
        if fields[0] == "T":
            self.stopped.add(rank)
        # What the threads do matters only at the end; the look before it is what theirs is compared with.
        threads: list[tuple[str, float | None]] = []
        if self._waited >= RANK - 2 * _MOST:
            parent = int(fields[1])  # the zygote, which passes signals on
            for one in (pid, parent) if parent not in (0, 1, os.getpid()) else (pid,):
                threads += self._threads(one, now)
        return SilentRank(fields[0], begun, tuple(threads))

    def _threads(self, pid: int, now: float) -> list[tuple[str, float | None]]:
        span, found = now - self._looked_at, []
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return []
        for thread in threads:
            place = f"/proc/{pid}/task/{thread}"
            fields = stat_fields(f"{pid}/task/{thread}")
            if fields is None:
                continue
            ran = read_text(f"{place}/schedstat").split()  # not on all kernels
            before = self._ran_before.get(thread)
            share = None
            if ran:
                self._ran[thread] = int(ran[0]) / 1e9
                if before is not None and span > 0:
                    share = (self._ran[thread] - before) / span
            found.append((fields[0], share))
        return found
