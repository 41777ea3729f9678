"""A node's failure as all nodes see it, and how a round carries it: as text, with the rest of its cause."""

from __future__ import annotations

import json
from typing import NamedTuple

from phalanx.core.rounds.records import LONGEST_DELAY, printable

_LONGEST = 100 << 10
_MOST_RANKS = 64


class NodeFailure(NamedTuple):
    """`final`: why a restart cannot help, empty where it may. `delay`: seconds before the restart, on every
    node. `anew`: no worker re-enters. `ranks`: those that a hang is due to. `step` and `signature`: as the
    restart policy of every node compares them."""

    summary: str
    final: str = ""
    report: str = ""
    exit_code: int = 1
    delay: float = 0.0
    anew: bool = False
    ranks: tuple[int, ...] = ()
    step: int | None = None
    signature: str = ""

    def ending_of(self, name: str) -> str:
        """Why a final failure on the node of this name ends the job."""
        return f"workers on {name} failed; not restarted: {self.final}"

    def text(self) -> str:
        """For the round's record."""
        report, summary = self.report, self.summary[:4096]
        while True:
            short = {"summary": summary, "report": report, "signature": self.signature[:4096]}
            text = json.dumps({**self._asdict(), **short})
            if len(text) <= _LONGEST or not report:
                return text
            report = report[: len(report) * 2 // 3]

    @staticmethod
    def read(text: str) -> NodeFailure:
        """What another node wrote, fit for a terminal; a text of unknown form is taken as the summary."""
        if not text:
            return NO_FAILURE
        try:
            found = json.loads(text)
            words = {key: found.get(key, "") for key in ("summary", "final", "report", "signature")}
            code, delay = found.get("exit_code", 1), found.get("delay", 0.0)
            anew, ranks, step = found.get("anew", False), found.get("ranks", []), found.get("step")
            if not all(isinstance(one, str) for one in words.values()) or type(code) is not int:
                raise TypeError
            if type(delay) not in (int, float) or not 0 <= delay <= LONGEST_DELAY:
                raise TypeError
            if type(anew) is not bool or type(step) not in (int, type(None)):
                raise TypeError
            if not all(type(rank) is int for rank in ranks[:_MOST_RANKS]):
                raise TypeError
        except (ValueError, TypeError, AttributeError, RecursionError):
            return NodeFailure(printable(text))
        cleaned = {key: printable(one, lines=key == "report") for key, one in words.items()}
        code = code if 0 < code < 256 else 1
        return NodeFailure(
            **cleaned, exit_code=code, delay=delay, anew=anew, ranks=tuple(ranks[:_MOST_RANKS]), step=step
        )


NO_FAILURE = NodeFailure("")
