"""How a group of workers ended, and how the run ended on this node."""

from __future__ import annotations

from phalanx.core.group.events import WorkerState
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.agent.workers.failure import ProcessFailure

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14


class RunProcsResult(Record, frozen=False):
    """How a group ended, by local rank. `stopped`: workers that were ended because of the failures."""

    def __init__(
        self,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
        stdouts: dict[int, str] | None = None,
        stderrs: dict[int, str] | None = None,
        *,
        stopped: dict[int, ProcessFailure] | None = None,
    ) -> None:
        self.return_values = return_values if return_values is not None else {}
        self.failures = failures if failures is not None else {}
        self.stdouts = stdouts if stdouts is not None else {}
        self.stderrs = stderrs if stderrs is not None else {}
        self.stopped = stopped if stopped is not None else {}

    def is_failed(self) -> bool:
        return len(self.failures) > 0


class RunResult(Record, frozen=False):
    """How the run ended on this node, by global rank."""

    def __init__(
        self,
        state: WorkerState,
        return_values: dict[int, Any] | None = None,
        failures: dict[int, ProcessFailure] | None = None,
        stopped: dict[int, ProcessFailure] | None = None,
    ) -> None:
        self.state = state
        self.return_values = return_values if return_values is not None else {}
        self.failures = failures if failures is not None else {}
        self.stopped = stopped if stopped is not None else {}  # ended because of the failures

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED


def tail_of(path: str) -> str:
    """The last lines of a log file, for the report."""
    from phalanx.observe.log_layout import tail

    return "\n".join(tail(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])
