"""When the workers last wrote output, from the sizes and times of their log files; read on demand.

Often, only one rank of a job writes. So a node asks the others shortly before its timeout ends, and those
with recent output answer.
"""

from __future__ import annotations

import os
import time

from phalanx.agent.workers.worker_group import PContext


class OutputActivity:
    """When the workers last wrote into their log files; a silence of `limit` seconds is a hang."""

    def __init__(self, context: PContext, started_at: float, limit: float) -> None:
        paths = {*context.stdouts.values(), *context.stderrs.values()} - {""}
        self._sizes = dict.fromkeys(paths, 0)
        self._checked_at = self._last = started_at
        self._limit = limit
        self._elsewhere = self._reported = (
            0.0  # the last output of other nodes; of this node that they know of
        )
        self.queried_for = 0.0  # the last output before the last question to the other nodes

    def last(self, now: float) -> float | None:
        """The time of the last output; None if no output goes to a file."""
        if not self._sizes:
            return None
        newest = 0.0
        for path, before in self._sizes.items():
            try:
                file = os.stat(path)
            except OSError:
                continue  # not created yet
            if file.st_size != before:
                self._sizes[path] = file.st_size
                newest = max(newest, file.st_mtime)
        if newest:
            # The age by the wall clock, but never before the last check: that clock may jump.
            age = min(max(0.0, time.time() - newest), now - self._checked_at)
            self._last = now - age
        self._checked_at = now
        return self._last

    def last_anywhere(self, now: float) -> float | None:
        """The same with what other nodes have reported."""
        last = self.last(now)
        return None if last is None else max(last, self._elsewhere)

    def query_due(self, last: float) -> float | None:
        """When to ask the other nodes, early enough for an answer; None: they were asked since `last`."""
        return None if last == self.queried_for else last + self._limit - min(1.0, self._limit / 4)

    def unreported(self, now: float) -> float | None:
        """The age of output that the other nodes should know of: one answer serves all that ask."""
        last = self.last(now)
        if last is None or last <= max(self._elsewhere, self._reported, now - self._limit / 2):
            return None
        self._reported = last
        return now - last

    def written_elsewhere(self, at: float) -> None:
        """Another node has answered."""
        self._elsewhere = max(self._elsewhere, at)
