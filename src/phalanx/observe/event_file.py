"""`events.jsonl` beside the logs of a run: one JSON object per note and per incident, as they come.

    {"time": ..., "host": ..., "kind": "note", "text": ...}
    {"time": ..., "host": ..., "kind": "incident", ...}       the fields of `core.ledger.incidents.Incident`

A run to which nothing happens has no such file. Lines wait in memory while a recovery is under way, so that
no disk is in the way of a restart; they are written when the workers run again, and at the end.
"""

from __future__ import annotations

import os
import time

from phalanx.observe.log_layout import EVENTS
from phalanx.observe.stream import IncidentChanged, NoteWritten, RunEnded, Settled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.observe.stream import Happened

_MOST = 1000  # lines in memory, where there is no directory yet
_LARGEST = 64 << 20  # bytes of the file; a job that says more than this says nothing new


class EventFile:
    """The events of one run; `directory` tells where its logs are, None while there are none."""

    def __init__(self, directory: Callable[[], str | None], host: Callable[[], str]) -> None:
        self._directory, self._host = directory, host
        self._lines: list[dict[str, Any]] = []

    def take(self, happened: Happened) -> None:
        match happened:
            case NoteWritten():
                self._add({"kind": "note", "text": happened.line})
            case IncidentChanged() if happened.incident.over:
                self._add({"kind": "incident", **happened.incident.as_dict()})
            case Settled() | RunEnded():
                self._flush()

    def _add(self, event: dict[str, Any]) -> None:
        if len(self._lines) < _MOST:
            self._lines.append({"time": time.time(), "host": self._host(), **event})

    def _flush(self) -> None:
        """Write what has gathered; a full disk costs the lines and nothing else."""
        if not self._lines:
            return
        directory = self._directory()
        if directory is None:
            return
        import json

        lines, self._lines = self._lines, []
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(os.path.join(directory, EVENTS), flags, 0o600)
        except OSError:
            return
        try:
            if os.fstat(fd).st_size < _LARGEST:
                os.write(fd, "".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError:
            pass
        finally:
            os.close(fd)
