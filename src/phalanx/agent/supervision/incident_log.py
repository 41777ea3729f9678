"""The hangs and stragglers of a run, kept for the report and for `phalanx status`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LIMIT = 100  # findings; each may have a long report


class IncidentLog:
    """What was found over all starts; `note` prints a line at once."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda _line: None
        self.on_warning: Callable[[str], None] = lambda _line: None  # a hang that is only warned about
        self.findings: list[dict[str, Any]] = []
        self.last_hang: list[str] = []  # its report

    def add_straggler(self, straggler: dict[str, Any]) -> None:
        """Print and keep a straggler, given as the fields of `core.diagnosis.stragglers.Straggler`."""
        ranks, host, reason = list(straggler["ranks"]), straggler["host"], str(straggler["reason"])
        self.note(reason)
        self._add({"kind": "straggler", "ranks": ranks, "host": host, "summary": reason})

    def add_hang(self, data: dict[str, Any]) -> None:
        """Keep a hang, given as `HangIncident.as_data` returns it."""
        self.last_hang = [str(line) for line in data["report"]]
        self._add({**data, "kind": "hang", "summary": str(data["summary"])})

    def warn_of_hang(self, summary: str) -> None:
        """A hang about which nothing is done (`--on-hang warn`)."""
        self.note(summary)
        self.on_warning(summary)

    def _add(self, finding: dict[str, Any]) -> None:
        self.findings.append(finding)
        del self.findings[:-_LIMIT]
