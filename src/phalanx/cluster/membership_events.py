"""What a membership reports: rounds, the end, lines for people; and a failure as it travels."""

from __future__ import annotations

from typing import Any, NamedTuple

from phalanx.core.rounds.participant_events import End
from phalanx.core.rounds.records import LONGEST_DELAY, Place, Round, printable

_LONGEST = 100 << 10
FAILED = "failed: "  # begins the reason of a job that a node closed for a failure outside of any round


class Formed(NamedTuple):
    """Run workers at this place in the round; they meet at address:port, which `served` serves on rank 0."""

    round: Round
    place: Place
    address: str
    port: int
    served: Any


class Over(NamedTuple):
    """The round that was formed is over, `now` follows. `at_once`: its workers must not live on.

    `preempted`: they save a checkpoint first."""

    was: Round
    now: Round | None
    reason: str
    at_once: bool
    drained: bool
    preempted: bool = False


class Ended(NamedTuple):
    """The job is over for this node, perhaps while a round was running."""

    end: End
    was: Round | None


class Waiting(NamedTuple):
    """What the nodes wait for, repeated while they wait."""

    text: str


class Remark(NamedTuple):
    """A line for people that is shown once; `quarantined`: the host that it says is."""

    text: str
    quarantined: str = ""


Happening = Formed | Over | Ended | Waiting | Remark


class NodeFailure(NamedTuple):
    """A node's failure as all nodes see it; `final`: why a restart cannot help, empty where it may."""

    summary: str
    final: str = ""
    report: str = ""
    exit_code: int = 1
    delay: float = 0.0  # seconds before the restart, on every node
    anew: bool = False  # no worker re-enters
    ranks: tuple[int, ...] = ()  # that a hang is due to

    def text(self) -> str:
        """For the round's record."""
        import json

        report, summary = self.report, self.summary[:4096]
        while True:
            text = json.dumps({**self._asdict(), "summary": summary, "report": report})
            if len(text) <= _LONGEST or not report:
                return text
            report = report[: len(report) * 2 // 3]

    @staticmethod
    def read(text: str) -> NodeFailure:
        """What another node wrote, fit for a terminal; a text of unknown form is taken as the summary."""
        if not text:
            return NO_FAILURE
        import json

        try:
            found = json.loads(text)
            words = {key: found.get(key, "") for key in ("summary", "final", "report")}
            code, delay = found.get("exit_code", 1), found.get("delay", 0.0)
            anew, ranks = found.get("anew", False), found.get("ranks", [])
            if not all(isinstance(one, str) for one in words.values()) or type(code) is not int:
                raise TypeError
            if type(delay) not in (int, float) or not 0 <= delay <= LONGEST_DELAY:
                raise TypeError
            if type(anew) is not bool or not all(type(rank) is int for rank in ranks[:_MOST_RANKS]):
                raise TypeError
        except (ValueError, TypeError, AttributeError, RecursionError):
            return NodeFailure(printable(text))
        cleaned = {key: printable(one, lines=key == "report") for key, one in words.items()}
        code = code if 0 < code < 256 else 1
        return NodeFailure(
            **cleaned, exit_code=code, delay=delay, anew=anew, ranks=tuple(ranks[:_MOST_RANKS])
        )


_MOST_RANKS = 64
NO_FAILURE = NodeFailure("")
