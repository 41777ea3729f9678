"""What is shown of a group's output while it runs, and whether all of it is out.

A console that is gone for good (a closed pipe, a full disk) is not waited for. One that is only slow gets all
the time it needs, as long as it takes something now and then.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.logs.specs import LogsDest
    from phalanx.logs.tee import Tee

MOMENT = 0.05  # mostly the last lines are out by then
_HURRIED = 1.0


class Console:
    """Follows the log files that are to be seen; without any it costs nothing."""

    def __init__(
        self,
        name: str,
        logs: LogsDest,
        prefixes: dict[int, str] | None,
        filters: tuple[list[str] | None, list[str] | None],
    ) -> None:
        """`filters`: the substrings whose lines go to the combined file, of stdout and of stderr."""
        self._name = name
        self._prefixes = prefixes or {}
        self._tee: Tee | None = None
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
        self.over = not self._follow  # everything is out, or given up

    @property
    def files(self) -> int:
        """How many files are followed."""
        return len(self._follow)

    def start(self) -> None:
        """Begin to follow."""
        if not self._follow:
            return
        from phalanx.logs.tee import Containing, Tee

        self._tee = Tee(self._name)
        for path, destination, prefix, wanted in self._follow:
            line_filter = Containing(wanted) if wanted else None
            self._tee.follow(path, destination, prefix, line_filter=line_filter)
        self._tee.start()

    def finish(self, patience: float = MOMENT) -> bool:
        """After the workers' end: whether everything is out, or given up; waits up to `patience` for it."""
        if not self.over:
            self.over = self._tee is None or self._tee.finish(patience)
        return self.over

    def fileno(self) -> int:
        """After a `finish` that was too early: readable when the next one succeeds."""
        assert self._tee is not None
        return self._tee.fileno()

    def hurry(self) -> None:
        """Somebody wants to leave: a console that takes nothing is not waited for much longer."""
        if self._tee is not None:
            self._tee.hurry(_HURRIED)

    def stop(self) -> None:
        """Give everything back; idempotent."""
        self.over = True
        if self._tee is not None:
            self._tee.stop()

    def _prefix(self, rank: int) -> str:
        return self._prefixes.get(rank, f"[{self._name}{rank}]:")
