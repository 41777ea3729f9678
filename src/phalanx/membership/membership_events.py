"""What a membership tells: rounds formed and over, the end, a line while waiting; a failure as it travels."""

from __future__ import annotations

from typing import Any, NamedTuple

from phalanx.core.participant_events import End
from phalanx.core.rounds import Round

_LONGEST_REPORT = 64 << 10
FAILED = "failed: "  # begins the reason of a job that a node closed for a failure outside of any round


class Formed(NamedTuple):
    """Run workers as the node of this rank; they meet at address:port, where rank 0's `served` answers."""

    round: Round
    rank: int
    address: str
    port: int
    served: Any


class Over(NamedTuple):
    """The round that was formed is over, `now` follows. `at_once`: its workers must not live on."""

    was: Round
    now: Round | None
    reason: str
    at_once: bool
    drained: bool


class Ended(NamedTuple):
    """The job is over for this node, perhaps while a round was running."""

    end: End
    was: Round | None


class Waiting(NamedTuple):
    """What the nodes wait for, every now and then."""

    text: str


Happening = Formed | Over | Ended | Waiting


class NodeFailure(NamedTuple):
    """A node's failure as all nodes hear it; `final`: why a restart cannot help, empty where it may."""

    summary: str
    final: str = ""
    report: str = ""
    exit_code: int = 1

    def text(self) -> str:
        """For the round's record."""
        import json

        return json.dumps(self._replace(report=self.report[:_LONGEST_REPORT])._asdict(), ensure_ascii=False)

    @staticmethod
    def read(text: str) -> NodeFailure:
        """What another node wrote; a text of unknown form is taken as the summary."""
        if not text:
            return NO_FAILURE
        import json

        try:
            found = json.loads(text)
            return NodeFailure(**{key: found[key] for key in NodeFailure._fields if key in found})
        except (ValueError, TypeError, KeyError):
            return NodeFailure(text)


NO_FAILURE = NodeFailure("")
