"""When the workers last wrote output, from the sizes and times of their log files; read on demand."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.workers.worker_group import PContext


class OutputActivity:
    """When the workers last wrote into their log files."""

    def __init__(self, context: PContext, started_at: float) -> None:
        paths = {*context.stdouts.values(), *context.stderrs.values()} - {""}
        self._sizes = dict.fromkeys(paths, 0)
        self._checked_at = self._last = started_at

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
