"""The agent's side of a rendezvous that is asked: torch's interface, and what ours add to it.

`Cluster` (cluster.py) has the same methods for a rendezvous that tells by itself. The agent calls all of them
from its own thread; answers come as events through `post`. Handlers may be anybody's, so whatever they raise
becomes an event too: the agent must never hang or crash for them.
"""

from __future__ import annotations

import time

from phalanx.core import group_events as say
from phalanx.errors import RendezvousClosedError, RendezvousGracefulExitError, RendezvousTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.spec import RunResult
    from phalanx.core.group import Ending
    from phalanx.membership.handler import RendezvousHandler, RendezvousInfo


class Peers:
    """The other nodes, as far as a handler knows them."""

    name = ""  # of this node, where the nodes have names
    meets = False  # whether each round brings a place of its own for the workers to meet

    def __init__(
        self,
        handler: RendezvousHandler,
        post: Callable[[say.Event], None],
        timeout: float,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._handler: Any = handler
        self._post, self._timeout, self._show = post, timeout, show
        self._number = 0
        self._began = time.time()
        self._info: RendezvousInfo | None = None
        self.error: BaseException | None = None  # what the handler raised last

    @property
    def waiting(self) -> str:
        """What the nodes wait for, in words, where the handler can tell."""
        return str(getattr(self._handler, "waiting_for", ""))

    def join(self, gone: int | None, attempt: int) -> None:
        """Be in the next round; `gone` is the one before, if nothing of it is alive."""
        if hasattr(self._handler, "on_waiting"):
            self._handler.on_waiting = self._show
        if hasattr(self._handler, "listener"):  # one that tells of other nodes by itself
            self._handler.listener, self._handler.attempt = self._post, attempt
        if self._handler.immediate:
            self._post(self._next_round())
            return
        # A thread, because a handler may wait for minutes, and signals must be answered meanwhile.
        import threading

        threading.Thread(
            target=lambda: self._post(self._next_round()), name="phalanx-rendezvous", daemon=True
        ).start()

    def _next_round(self) -> say.Event:
        try:
            info = self._handler.next_rendezvous()
        except RendezvousGracefulExitError as error:
            return say.RoundFailed("graceful", str(error))
        except RendezvousClosedError as error:
            return say.RoundFailed("closed", str(error))
        except RendezvousTimeoutError as error:
            self.error = error
            return say.RoundFailed("timeout", str(error))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything; it must not hang us
            self.error = error
            return say.RoundFailed("error", f"{type(error).__name__}: {error}")
        self._info, self.error = info, None
        self._number = max(self._number + 1, getattr(info, "round", 0))
        members = tuple(f"node {rank}" for rank in range(info.world_size))
        attempt = getattr(info, "attempt", 0)
        return say.RoundReady(say.GroupRound(self._number, members, info.rank, attempt=attempt))

    def take(self, number: int) -> RendezvousInfo:
        """The round that is to be started."""
        assert self._info is not None, "a round is told before it is started"
        return self._info

    def workers_gone(self, number: int) -> None:
        """Nothing of this round is alive on this node."""

    def finished(self, number: int) -> None:
        """Wait for the other nodes."""
        if self._info is None or self._info.world_size == 1:
            self._post(say.BarrierDone(round=number))
            return
        import threading

        threading.Thread(
            target=lambda: self._post(self._barrier(number)), name="phalanx-barrier", daemon=True
        ).start()

    def _barrier(self, number: int) -> say.BarrierDone:
        """Never fails a job whose workers succeeded."""
        from phalanx.membership.exchange import exit_barrier

        info = self._info
        assert info is not None
        try:
            exit_barrier(info.store, info.rank, info.world_size, number, self._timeout)
        except Exception as error:  # noqa: BLE001 - a store may raise anything, and the job is done
            return say.BarrierDone(ok=False, missing=(str(error),), round=number)
        return say.BarrierDone(round=number)

    def failed(self, command: say.ReportFailure, result: RunResult, name: str, story: str) -> None:
        """Tell the others, if there is anybody to tell."""
        tell = getattr(self._handler, "report_failure", None)
        if tell is not None:
            told = for_all_screens(result, name, self._began, story or command.summary)
            tell(command.round, command.attempt, command.summary, command.final, command.delay, told)

    @property
    def job_failure(self) -> tuple[str, int] | None:
        """Report and exit code, where another node ended the job and told them."""
        found: tuple[str, int] | None = getattr(self._handler, "told", None)
        return found

    def ending(self, ending: Ending) -> None:
        """The agent stops its workers for good."""

    def leave(self, number: int, reason: str) -> None:
        """Nothing is alive here: go, and let the others go on."""
        leave = getattr(self._handler, "leave", None)
        if leave is not None:
            leave()

    def close(self, number: int, command: say.CloseRendezvous) -> None:
        """The job is over."""
        close = getattr(self._handler, "close", None)
        if close is not None:
            close(command.reason, command.job_failed)
        self._handler.shutdown()

    def give_back(self) -> None:
        """Close what is open; idempotent."""


def for_all_screens(result: RunResult, name: str, began: float, otherwise: str) -> tuple[str, int]:
    """The report that all nodes will show should this end the job, and the exit code."""
    if not result.failures:
        return otherwise, 1
    from phalanx.observe.report import diagnosis_of, format_report

    everyone = {**result.failures, **result.stopped}
    report = format_report(name, everyone, started_at=began, width=100)
    return report, diagnosis_of(everyone, began).exit_code
