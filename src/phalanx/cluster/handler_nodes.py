"""The other nodes through a rendezvous that is asked: torch's interface.

A handler may wait for minutes in any call, so each call runs in a thread and its end is an event; a handler
that never waits (`immediate`, a job of one node) is called without one. Handlers may be plug-ins: whatever
they raise becomes an event, too.
"""

from __future__ import annotations

from phalanx.cluster.handler import adapted
from phalanx.core.group import events
from phalanx.errors import RendezvousClosedError, RendezvousGracefulExitError, RendezvousTimeoutError
from phalanx.job.environment import workers_are_identical

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.spec import WorkerSpec
    from phalanx.cluster.handler import RendezvousHandler, RendezvousInfo
    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.core.group.group import Ending
    from phalanx.core.group.ranks import WorkerRanks
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.records import HostRecord

    RequestHandler = Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]


class HandlerNodes:
    """The other nodes, as far as a handler knows them."""

    has_meeting = False
    waiting = ""
    job_failure: tuple[str, int] | None = None
    job_goodput: JobGoodput | None = None
    on_end: Callable[[], NodeGoodput | None] | None = None

    def __init__(
        self,
        spec: WorkerSpec,
        post: Callable[[Any], None],
        timeout: float,
        *,
        exchanges: bool = True,
    ) -> None:
        """`timeout`: of the exit barrier. `exchanges`: nodes tell each other their role and size."""
        self._spec = spec
        self._handler: RendezvousHandler = adapted(spec.rdzv_handler)
        self.name = self._handler.node_name
        self._post, self._timeout = post, timeout
        self._exchanges = exchanges and not workers_are_identical()
        self._number = 0
        self._info: RendezvousInfo | None = None
        self.worker_ranks: list[WorkerRanks] | None = None
        self.error: BaseException | None = None  # what the handler raised last
        self.on_request: RequestHandler | None = None  # there is no way for others to ask
        self._asking: threading.Event | None = None  # set: the thread that asks for waiting nodes ends
        self._departures = 0

    def _call(self, name: str, function: Callable[[], events.Event | Callable[[], None] | None]) -> Any:
        """Call in a thread, unless the handler never waits; what it returns is posted."""

        def run() -> None:
            answer = function()
            if answer is not None:
                self._post(answer)

        if self._handler.immediate:
            run()
            return None
        import threading

        thread = threading.Thread(target=run, name=f"phalanx-{name}", daemon=True)
        thread.start()
        return thread

    # -- questions ----------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        return {}

    def ask(self, request: dict[str, Any], timeout: float, then: Callable[[list[Raw], int], None]) -> None:
        then([], 0)

    def keep_goodput(self, totals: GoodputTotals) -> None:
        """There is no place for it."""

    def drain(self) -> str:
        self._post(events.RoundFailed("graceful", "drained on request"))
        return "this node leaves the job"

    # -- rounds -------------------------------------------------------------------------------------

    def join(self, gone: int | None, attempt: int) -> None:
        self._stop_asking()
        self._handler.restarts = attempt
        self._call("rendezvous", self._next_round)

    def _next_round(self) -> events.Event:
        try:
            info = self._handler.next_rendezvous()
            number = max(self._number + 1, info.round)
            ranks = info.worker_ranks
            if ranks is None and info.world_size > 1 and self._exchanges:
                from phalanx.cluster.exchange import exchange_ranks

                ranks = exchange_ranks(info.store, info.rank, info.world_size, self._spec)
        except RendezvousGracefulExitError as error:
            return events.RoundFailed("graceful", str(error))
        except RendezvousClosedError as error:
            return events.RoundFailed("closed", str(error))
        except RendezvousTimeoutError as error:
            self.error = error
            return events.RoundFailed("timeout", str(error))
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and the loop waits for an answer
            self.error = error
            return events.RoundFailed("error", f"{type(error).__name__}: {error}")
        self._info, self._number, self.worker_ranks, self.error = info, number, ranks, None
        members = tuple(f"node {rank}" for rank in range(info.world_size))
        return events.RoundReady(events.GroupRound(number, members, info.rank, attempt=info.attempt))

    def take(self, number: int) -> RendezvousInfo:
        assert self._info is not None, "RoundReady comes before a start"
        return self._info

    def running(self) -> None:
        if self._handler.watches:
            return
        import threading

        self._asking = asking = threading.Event()

        def ask() -> None:
            while not asking.wait(self._spec.monitor_interval):
                try:
                    waiting = self.count_waiting()
                except Exception as error:  # noqa: BLE001 - of a plug-in; without an answer no round is kept
                    self.error = error
                    self._post(events.RoundFailed("error", f"{type(error).__name__}: {error}"))
                    return
                if waiting > 0 and not asking.is_set():
                    self._post(events.MembershipChanged(waiting=waiting))
                    return

        threading.Thread(target=ask, name="phalanx-waiting-nodes", daemon=True).start()

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.set()
            self._asking = None

    def count_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def workers_gone(self, number: int) -> None:
        """Handlers do not need to know."""

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        then(False)

    def unfit(self, why: str) -> None:
        """torch's interface has no place for it."""

    def slow_host(self, number: int, host: str, why: str) -> None:
        """torch's interface knows no spares."""

    def failed(self, command: events.ReportFailure, report: Callable[[], tuple[str, int, bool]]) -> None:
        """torch's interface has no word for it: the next rendezvous brings the nodes together."""

    def request_round(self, command: events.RequestRound) -> None:
        """The next call of `next_rendezvous` does."""

    # -- the end ------------------------------------------------------------------------------------

    def fenced(self, number: int) -> None:
        """torch's interface knows no leases."""

    def finished(self, number: int) -> None:
        self._stop_asking()
        info = self._info
        if info is None or info.world_size == 1:
            self._post(events.BarrierDone(round=number))
            return
        self._call("barrier", lambda: self._barrier(info, number))

    def _barrier(self, info: RendezvousInfo, number: int) -> events.BarrierDone:
        """Never fails a job whose workers succeeded."""
        from phalanx.cluster.exchange import exit_barrier

        try:
            exit_barrier(info.store, info.rank, info.world_size, number, self._timeout)
        except Exception as error:  # noqa: BLE001 - a store may raise anything, and the job is done
            return events.BarrierDone(ok=False, missing=(str(error),), round=number)
        return events.BarrierDone(round=number)

    def ending(self, ending: Ending) -> None:
        """Handlers learn of it when the workers are gone."""

    def leave(self, number: int, reason: str) -> None:
        self._depart(self._handler.leave)

    def close(self, number: int, command: events.CloseRendezvous, at_failure: Callable[[], None]) -> None:
        self._depart(
            *([at_failure] if command.job_failed else []),
            self._handler.shutdown,
        )

    def abandon(self) -> None:
        self._depart(self._handler.shutdown)

    def release(self) -> None:
        self._stop_asking()

    def _depart(self, *calls: Callable[[], object]) -> None:
        self._stop_asking()
        self._departures += 1

        def go() -> Callable[[], None]:
            try:
                for call in calls:
                    call()
            except Exception as error:  # noqa: BLE001 - of a plug-in; the outcome of the job stands
                from phalanx.log import warn

                warn(f"the rendezvous could not be closed: {type(error).__name__}: {error}")
            return self._departed

        self._call("departure", go)

    def _departed(self) -> None:
        self._departures -= 1

    @property
    def closed(self) -> bool:
        return self._departures == 0
