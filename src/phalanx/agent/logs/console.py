"""Shows a group's output while it runs, and knows whether all of it was shown; rotates its files.

A closed console (a closed pipe, a full disk) is not waited for. A slow one may take as long as it needs, as
long as it accepts some output now and then.
"""

from __future__ import annotations

import os
import sys

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.logs.log_follower import LogFollower
    from phalanx.agent.logs.rotation import LogRotation, Rotation
    from phalanx.agent.logs.specs import LogsDest
    from phalanx.observe.json_lines import JsonLines

MOMENT = 0.05  # usually enough for the last lines
_HURRIED = 1.0


class OutputOptions(Record):
    """What an agent does with the output of its workers beyond torch's arguments."""

    json: bool = False  # lines are shown as JSON objects
    rotate: Rotation | None = None


class JsonNames(Record):
    """What the objects of JSON lines call this node and its workers."""

    host: str
    ranks: tuple[int, ...]  # the global rank by local rank


class Console:
    """Follows the log files that are shown; costs nothing if there are none."""

    def __init__(
        self,
        name: str,
        logs: LogsDest,
        prefixes: dict[int, str] | None,
        filters: tuple[list[str] | None, list[str] | None],
        json: JsonNames | None = None,
        rotate: Rotation | None = None,
    ) -> None:
        """`filters`: substrings of stdout and of stderr lines that are copied to the combined file.

        `json`: lines are shown as objects."""
        self._name = name
        self._json = json
        self._rotate = rotate
        self._rotation: LogRotation | None = None
        paths = {*logs.stdouts.values(), *logs.stderrs.values()} - {"", os.devnull}
        self._rotated = sorted(paths) if rotate is not None else []
        self._prefixes = prefixes or {}
        self._follower: LogFollower | None = None
        self._follow: list[tuple[str, Any, str, list[str] | None, JsonLines | None]] = []
        streams = (
            (logs.tee_stdouts, logs.stdouts, sys.stdout, filters[0], logs.filtered_stdout, "stdout"),
            (logs.tee_stderrs, logs.stderrs, sys.stderr, filters[1], logs.filtered_stderr, "stderr"),
        )
        for shown, files, stream, wanted, combined, what in streams:
            for rank in sorted(shown.keys() | files.keys()):
                if shown.get(rank) and stream is not None:
                    objects = self._objects(rank, what)
                    prefix = self._prefix(rank) if objects is None else ""
                    self._follow.append((shown[rank], stream, prefix, None, objects))
                if wanted and combined and files.get(rank):
                    self._follow.append((files[rank], combined, self._prefix(rank), wanted, None))
        self.over = not self._follow  # everything is shown, or given up

    @property
    def files(self) -> int:
        """The number of files that it opens."""
        return len(self._follow) + len(self._rotated)

    def start(self) -> None:
        if self._follow:
            self._start_follower()
        if self._rotate is not None and self._rotated:
            from phalanx.agent.logs.rotation import LogRotation

            follower = self._follower
            shown = (lambda _path: None) if follower is None else follower.position
            self._rotation = LogRotation(self._rotated, self._rotate, shown)
            self._rotation.start()

    def _start_follower(self) -> None:
        from phalanx.agent.logs.log_follower import Containing, LogFollower
        from phalanx.agent.logs.repeated_tracebacks import RepeatedTracebacks

        # As JSON, every line of every rank is shown: no reader is to miss one.
        repeated = None if self._json is not None else RepeatedTracebacks()
        self._follower = LogFollower(self._name, repeated_tracebacks=repeated)
        for path, destination, prefix, wanted, objects in self._follow:
            line_filter = Containing(wanted) if wanted else None
            self._follower.follow(path, destination, prefix, line_filter=line_filter, json=objects)
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

    def stop(self, ended: bool = True) -> None:
        """Free everything; idempotent. `ended`: no worker is left that could write."""
        self.over = True
        if self._follower is not None:
            self._follower.stop()
        if self._rotation is not None:
            self._rotation.stop(ended)

    def _objects(self, rank: int, stream: str) -> JsonLines | None:
        if self._json is None:
            return None
        from phalanx.observe.json_lines import JsonLines

        return JsonLines(self._json.host, self._json.ranks[rank], stream)

    def _prefix(self, rank: int) -> str:
        return self._prefixes.get(rank, f"[{self._name}{rank}]:")
