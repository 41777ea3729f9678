"""Shows a group's output while it runs, and knows whether all of it was shown.

A closed console (a closed pipe, a full disk) is not waited for. A slow one may take as long as it needs, as
long as it accepts some output now and then.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.logs.log_follower import LogFollower
    from phalanx.logs.specs import LogsDest

MOMENT = 0.05  # usually enough for the last lines
_HURRIED = 1.0


class Console:
    """Follows the log files that are shown; costs nothing if there are none."""

    def __init__(
        self,
        name: str,
        logs: LogsDest,
        prefixes: dict[int, str] | None,
        filters: tuple[list[str] | None, list[str] | None],
    ) -> None:
        """`filters`: substrings of stdout and of stderr lines that are copied to the combined file."""
        self._name = name
        self._prefixes = prefixes or {}
        self._follower: LogFollower | None = None
        self._follow: list[tuple[str, Any, str, list[str] | None]] = []
        streams = (
            (logs.tee_stdouts, logs.stdouts, sys.stdout, filters[0], logs.filtered_stdout),
            (logs.tee_stderrs, logs.stderrs, sys.stderr, filters[1], logs.filtered_stderr),
        )
        for shown, files, stream, wanted, combined in streams:
            for rank in sorted(shown.keys() | files.keys()):
                if shown.get(rank) and stream is not None:
                    self._follow.append((shown[rank], stream, self._prefix(rank), None))
                if wanted and combined and files.get(rank):
                    self._follow.append((files[rank], combined, self._prefix(rank), wanted))
        self.over = not self._follow  # everything is shown, or given up

    @property
    def files(self) -> int:
        """The number of followed files."""
        return len(self._follow)

    def start(self) -> None:
        if not self._follow:
            return
        from phalanx.logs.log_follower import Containing, LogFollower
        from phalanx.logs.repeated_tracebacks import RepeatedTracebacks

        self._follower = LogFollower(self._name, repeated_tracebacks=RepeatedTracebacks())
        for path, destination, prefix, wanted in self._follow:
            line_filter = Containing(wanted) if wanted else None
            self._follower.follow(path, destination, prefix, line_filter=line_filter)
        self._follower.start()

    def finish(self, patience: float = MOMENT) -> bool:
        """After the workers' exit: wait up to `patience`; whether everything is shown, or given up."""
        if not self.over:
            self.over = self._follower is None or self._follower.finish(patience)
        return self.over

    def fileno(self) -> int:
        """After a `finish` that returned False: readable when the next one returns True."""
        assert self._follower is not None
        return self._follower.fileno()

    def hurry(self) -> None:
        """Wait no more than a second for a console that accepts nothing."""
        if self._follower is not None:
            self._follower.hurry(_HURRIED)

    def stop(self) -> None:
        """Free everything; idempotent."""
        self.over = True
        if self._follower is not None:
            self._follower.stop()

    def _prefix(self, rank: int) -> str:
        return self._prefixes.get(rank, f"[{self._name}{rank}]:")
