"""The other nodes through a membership that reports: what happens there becomes events of the loop.

Happenings come from the membership's thread, in order, and only post; everything else here is called by the
owner thread. The job's count of restarts is the leader's: it travels with the round, and the group
takes it over.
"""

from __future__ import annotations

from phalanx.cluster.elastic import error_of
from phalanx.cluster.handler import adapted
from phalanx.cluster.membership import clock
from phalanx.cluster.membership_events import (
    FAILED,
    Ended,
    Formed,
    NodeFailure,
    Over,
    Remark,
    Waiting,
)
from phalanx.core.group import events
from phalanx.core.group.events import Outcome
from phalanx.core.rounds.records import CLOSED
from phalanx.observe.progress_line import Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.spec import WorkerSpec
    from phalanx.cluster.elastic import ElasticInfo, ElasticRendezvous
    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.cluster.membership import Membership
    from phalanx.cluster.membership_events import Happening
    from phalanx.core.group.group import Ending
    from phalanx.core.group.ranks import WorkerRanks
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.records import HostRecord, Round
    from phalanx.errors import RendezvousError

    RequestHandler = Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]

_LAST_WORD = 5.0  # for the other nodes to learn how it ended here


class ElasticNodes:
    """The other nodes of a job whose membership reports by itself."""

    has_meeting = True

    def __init__(
        self,
        handler: Any,
        membership: Membership,
        post: Callable[[Any], None],
        show: Callable[[str], None],
        note: Callable[[str], None],
        timeout: float,
        on_quarantine: Callable[[str], None],
    ) -> None:
        """`show` gets the wait in words, `note` a line to show once. `timeout`: of the exit barrier.

        `on_quarantine` gets the line that says that a host is kept out, which is also one to show."""
        self._handler: ElasticRendezvous = handler
        self._membership = membership
        self._post, self._show, self._note, self._timeout = post, show, note, timeout
        self._on_quarantine = on_quarantine
        self.name = membership.settings.name
        self.worker_ranks: list[WorkerRanks] | None = None
        self._formed: Formed | None = None
        self._finished = 0  # the round whose workers have succeeded here
        self._unfit = False  # this node could not start its workers: it leaves, and the others go on
        self._parted = False  # a farewell has begun
        self._farewells = 0
        self.failure: NodeFailure | None = None  # what ended the job, the same on every node
        self.error: RendezvousError | None = None  # what ended it here, where no worker did
        self.on_request: RequestHandler | None = None
        membership.on_request = self._requested
        self.on_end: Callable[[], NodeGoodput | None] | None = None

    @property
    def job_goodput(self) -> JobGoodput | None:
        return self._membership.job_goodput

    def keep_goodput(self, totals: GoodputTotals) -> None:
        self._membership.keep_goodput(totals)

    @property
    def waiting(self) -> str:
        return self._membership.line.words(clock())

    @property
    def job_failure(self) -> tuple[str, int] | None:
        told = self.failure
        return None if told is None else (told.report or told.summary, told.exit_code)

    # Questions from and to the other nodes

    def _requested(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        """From the membership's thread."""

        def handle() -> None:
            if self.on_request is not None:
                self.on_request(request, answer)

        self._post(handle)

    def place(self) -> dict[str, Any]:
        membership = self._membership
        return {
            "id": membership.info.id,
            "address": membership.info.addr,
            "lease_age": membership.lease_age,
            "spare": membership.is_spare,
            "operations": membership.operations,
            "quarantine": membership.quarantine(),
            "holds_store": membership.hosting,
        }

    def ask(self, request: dict[str, Any], timeout: float, then: Callable[[list[Raw], int], None]) -> None:
        import threading

        from phalanx.cluster.node_requests import ask_nodes
        from phalanx.errors import StoreError

        membership, client = self._membership, self._membership.client

        def run() -> None:
            answers: list[Raw] = []
            silent = 0
            if client is not None and membership.participant is not None:
                try:
                    run_id = membership.settings.run_id
                    found, silent = ask_nodes(client, run_id, request, timeout, membership.info.id)
                    answers = list(found.values())
                except StoreError:
                    silent = 1  # the store is away, and the others behind it
            self._post(lambda: then(answers, silent))

        threading.Thread(target=run, name="phalanx-ask", daemon=True).start()

    def drain(self) -> str:
        self._membership.drain()
        return f"{self.name} leaves the job; the others go on"

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        self._membership.change_hosts(hosts, lambda done: self._post(lambda: then(done)))

    def unfit(self, why: str) -> None:
        self._membership.unfit(why)

    def slow_host(self, number: int, host: str, why: str) -> None:
        self._membership.slow_host(number, host, why)

    # What the agent reports

    def join(self, gone: int | None, attempt: int) -> None:
        if not self._membership.started:
            self._membership.start()
        elif gone is not None:
            self._membership.workers_gone(gone)

    def workers_gone(self, number: int) -> None:
        self._membership.workers_gone(number)

    def take(self, number: int) -> ElasticInfo:
        formed, self._formed = self._formed, None
        assert formed is not None, "RoundReady comes before a start"
        assert formed.round.number == number, "no round follows before the workers of the last are gone"
        info = self._handler.info(formed)
        self.worker_ranks = info.worker_ranks
        return info

    def running(self) -> None:
        """Changes of membership are reported as they happen."""

    def count_waiting(self) -> int:
        return 0

    def failed(self, command: events.ReportFailure, report: Callable[[], tuple[str, int, bool]]) -> None:
        text, code, only_lost_peers = report()
        final = command.summary if command.final else ""
        # With the host of the store the job would lose its store: its failure is the job's.
        self._unfit = command.unfit and not self._membership.hosting
        failure = NodeFailure(
            command.summary, final, text, code, command.delay, command.anew, command.ranks[:64]
        )
        self._membership.failed(command.round, failure, self._unfit, only_lost_peers)

    def request_round(self, command: events.RequestRound) -> None:
        self._membership.request_round(command.round, command.reason, command.attempt)

    def fenced(self, number: int) -> None:
        self._membership.fenced(number)

    def finished(self, number: int) -> None:
        self._finished = number
        self._membership.finished(number, self._timeout)

    def ending(self, ending: Ending) -> None:
        """The others need not wait for the workers' end to know that this node goes."""
        if ending.outcome in (Outcome.SIGNALED, Outcome.LEFT):
            self._membership.leave(ending.message, ending.preempted)

    def leave(self, number: int, reason: str) -> None:
        self._begin_farewell(lambda: self._part(number, reason))

    def close(self, number: int, command: events.CloseRendezvous, at_failure: Callable[[], None]) -> None:
        """Only the leader declares the job over: with a failure, this node waits until it has."""

        def go() -> None:
            if command.job_failed:
                at_failure()
                if self._is_member and not self._unfit:
                    self._membership.workers_gone(number)
                    self._membership.ended.wait(_LAST_WORD)
            self._part(number, command.reason)

        self._begin_farewell(go)

    def abandon(self) -> None:
        self._begin_farewell(self._handler.shutdown)

    def release(self) -> None:
        if not self._parted:
            self._begin_farewell(self._membership.release)

    @property
    def _is_member(self) -> bool:
        return self._membership.started and not self._membership.ended.is_set()

    def _part(self, number: int, reason: str) -> None:
        if self._is_member:
            self._membership.leave(reason)
            self._membership.workers_gone(number)
            self._membership.ended.wait(_LAST_WORD)
        self._membership.release()

    def _begin_farewell(self, go: Callable[[], object]) -> None:
        """In a thread: the store may be slow, and signals are answered meanwhile."""
        import threading

        self._parted = True
        self._farewells += 1
        if self.on_end is not None:
            self._membership.shares_goodput, self._membership.goodput = True, self.on_end()

        def run() -> None:
            try:
                go()
            finally:
                self._post(self._farewell_over)

        threading.Thread(target=run, name="phalanx-farewell", daemon=True).start()

    def _farewell_over(self) -> None:
        self._farewells -= 1
        formed, self._formed = self._formed, None
        if formed is not None and formed.served is not None:
            formed.served.close()

    @property
    def closed(self) -> bool:
        return self._farewells == 0

    # What the membership tells, from its own thread

    def _hear(self, happening: Happening) -> None:
        match happening:
            case Formed(current, place):
                self._formed = happening
                ready = events.GroupRound(
                    current.number, current.all_names(), place.rank, attempt=current.restarts, counted=True
                )
                self._post(events.RoundReady(ready))
            case Over():
                self._post(self._end_of_round(happening))
            case Ended():
                self._post(self._end_of_job(happening))
            case Waiting(text):
                self._show(text)
            case Remark(text, quarantined):
                self._post(lambda: self._on_quarantine(text) if quarantined else self._note(text))

    def _end_of_round(self, over: Over) -> events.Event:
        now, number = over.now, over.was.number
        if over.drained:
            return events.RoundFailed("graceful", over.reason)
        if over.at_once or now is None:
            return events.RoundOver(number, over.reason, over.at_once)
        if over.preempted:
            return events.RoundOver(number, over.reason, preempted=True)
        failed = self._failure_of(number, now, now.outcome)
        if failed is not None:
            return failed
        if now.phase == CLOSED:
            return events.RoundFailed("closed", over.reason, job_failed=False)
        if now.restarts > over.was.restarts:
            failure = NodeFailure.read(now.cause[2])
            name = now.cause[1]
            return events.PeerFailed(
                name,
                number,
                now.restarts,
                failure.summary,
                delay=failure.delay,
                anew=failure.anew,
                ranks=failure.ranks,
            )
        return events.RoundOver(number, over.reason)

    def _failure_of(self, number: int, now: Round, outcome: str) -> events.Event | None:
        """A failure, of any node, that has ended the job: `final` beats whatever budget is left."""
        failure, name = NodeFailure.read(now.cause[2]), now.cause[1]
        if outcome == "closed" and now.reason.startswith(FAILED):
            name, _, summary = now.reason.removeprefix(FAILED).partition(": ")
            failure = NodeFailure(summary, final=summary)
        if outcome != "failed" and not failure.final:
            return None
        self.failure = failure
        return events.PeerFailed(name, number, now.restarts, failure.summary, final=True)

    def _end_of_job(self, ended: Ended) -> events.Event:
        outcome, reason, current = ended.end
        number = ended.was.number if ended.was is not None else -1
        if current is not None and outcome in ("failed", "closed"):
            failed = self._failure_of(max(number, 0), current, outcome)
            if failed is not None:
                return failed
        if self._finished == number and outcome in ("succeeded", "left"):
            # `left`: the other nodes took longer than the barrier, and will tell how it ended there.
            missing = () if outcome == "succeeded" else (f"the other nodes ({reason})",)
            return events.BarrierDone(not missing, missing, number)
        error = error_of(ended, self._membership.settings)
        if outcome in ("succeeded", "closed"):
            told = str(error)
            if self._membership.was_spare:
                end = "succeeded" if outcome == "succeeded" else "was closed"
                told = f"this node was a spare and was not needed; the job {end} ({reason})"
            return events.RoundFailed("closed", told, job_failed=False)
        if outcome == "left":
            return events.RoundFailed("graceful", reason)
        self.error = error
        return events.RoundFailed("timeout" if outcome == "timeout" else "error", str(error))


def elastic_nodes(
    spec: WorkerSpec,
    policy: RestartPolicy,
    post: Callable[[Any], None],
    show: Callable[[str], None],
    note: Callable[[str], None],
    lease_until: Callable[[float], None],
    timeout: float,
    open_meeting: Callable[[str], tuple[Any, int]],
    on_quarantine: Callable[[str], None],
) -> ElasticNodes | None:
    """The nodes of a handler that has a membership to attach to; None for any other handler."""
    # With a window only the nodes know when the failures were; the leader then merely counts them.
    limit = policy.max_restarts if policy.window is None else None
    handler = adapted(spec.rdzv_handler)
    membership = handler.attach(
        lambda happening: nodes._hear(happening),
        open_meeting,
        slots=spec.local_world_size,
        role=spec.role,
        max_restarts=limit,
        # From the membership's thread: leases are renewed although the owner is busy, and none wakes it.
        lease_until=lease_until,
    )
    if membership is None:
        return None
    nodes = ElasticNodes(handler, membership, post, show, note, timeout, on_quarantine)
    return nodes


class CountdownLine(Progress):
    """A progress line whose words may hold figures that change; that is not a new wait."""

    def limit(self, what: str, now: float, timeout: float | None) -> float | None:
        if _without_figures(what) == _without_figures(self._what):
            self._what = what
        return super().limit(what, now, timeout)


def _without_figures(text: str) -> str:
    return "".join(char for char in text if not char.isdigit())
