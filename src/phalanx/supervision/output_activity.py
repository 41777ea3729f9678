"""Whether workers write anything: looked up in their log files, when somebody wants to know."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.workers.worker_group import PContext


class OutputActivity:
    """When the workers last wrote something into their log files."""

    def __init__(self, context: PContext, started_at: float) -> None:
        paths = {*context.stdouts.values(), *context.stderrs.values()} - {""}
        self._sizes = dict.fromkeys(paths, 0)
        self._looked_at = self._last = started_at

    def last(self, now: float) -> float | None:
        """The time of the last output; None where it goes to no file."""
        if not self._sizes:
            return None
        newest = 0.0
        for path, before in self._sizes.items():
            try:
                file = os.stat(path)
            except OSError:
                continue  # not there yet
            if file.st_size != before:
                self._sizes[path] = file.st_size
                newest = max(newest, file.st_mtime)
        if newest:
            # How long ago by the clock of the files, but never before the last look: that clock may jump.
            ago = min(max(0.0, time.time() - newest), now - self._looked_at)
            self._last = now - ago
        self._looked_at = now
        return self._last
