"""The other nodes through a membership that reports: what happens there becomes events of the loop.

What a `Listener` gets comes from the membership's thread, in order, and is only posted; everything else here
is called by the owner thread. The job's count of restarts is the leader's: it travels with the round, and the
group takes it over.
"""

from __future__ import annotations

from typing import Protocol

from phalanx.cluster.clock import clock
from phalanx.cluster.elastic import error_of
from phalanx.core.group import events
from phalanx.core.group.events import Outcome
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.verdicts import job_over
from phalanx.job.time_budgets import LAST_WORD
from phalanx.observe.progress_line import Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from msgspec import Raw

    from phalanx.agent.spec import WorkerSpec
    from phalanx.cluster.elastic import ElasticInfo, ElasticRendezvous
    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.cluster.listener import Meeting
    from phalanx.cluster.membership import Membership
    from phalanx.core.group.group import Ending
    from phalanx.core.group.ranks import WorkerRanks
    from phalanx.core.group.restarts import RestartPolicy
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.participant_events import End, Remark, RoundEnd
    from phalanx.core.rounds.records import HostRecord, Round
    from phalanx.errors import RendezvousError

    RequestHandler = Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]


class JobLines(Protocol):
    """Who shows a person what happens to the job."""

    def show_waiting(self, line: str) -> None:
        """What the nodes wait for; from the membership's thread."""

    def note(self, line: str) -> None:
        """A line to show once."""

    def quarantined(self, line: str) -> None:
        """The same: a host is kept out."""


class ElasticNodes:
    """The other nodes of a job whose membership reports by itself."""

    has_meeting = True

    def __init__(
        self,
        handler: Any,
        post: Callable[[Any], None],
        lines: JobLines,
        lease_until: Callable[[float], None],
        timeout: float,
    ) -> None:
        """`timeout`: of the exit barrier."""
        self._handler: ElasticRendezvous = handler
        self._membership: Membership
        self._post, self._lines, self._timeout = post, lines, timeout
        self.lease_until = lease_until  # in the membership's thread, so that none wakes the owner
        self.name = handler.node_name
        self.worker_ranks: list[WorkerRanks] | None = None
        self._meeting: Meeting | None = None
        self._unfit = False  # this node could not start its workers: it leaves, and the others go on
        self._parted = False  # its departure has begun
        self._departures = 0
        self.failure: NodeFailure | None = None  # what ended the job, the same on every node
        self.error: RendezvousError | None = None  # what ended it here, where no worker did
        self.on_request: RequestHandler | None = None
        self.on_end: Callable[[], NodeGoodput | None] | None = None

    @property
    def job_goodput(self) -> JobGoodput | None:
        return self._membership.last_requests.job_goodput

    def keep_goodput(self, totals: GoodputTotals) -> None:
        self._membership.commands.keep_goodput(totals)

    @property
    def waiting(self) -> str:
        return self._membership.line.words(clock())

    @property
    def job_failure(self) -> tuple[str, int] | None:
        told = self.failure
        return None if told is None else (told.report or told.summary, told.exit_code)

    def attach(
        self, spec: WorkerSpec, policy: RestartPolicy, open_meeting: Callable[[str], tuple[Any, int]]
    ) -> bool:
        """Follow the handler's membership, if it has one; no: it is asked, through torch's interface."""
        membership = self._handler.attach(
            self,
            open_meeting,
            slots=spec.local_world_size,
            role=spec.role,
            # With a window only the nodes know when the failures were; the leader then merely counts them.
            max_restarts=policy.max_restarts if policy.window is None else None,
        )
        if membership is not None:
            self._membership = membership
        return membership is not None

    # Questions from and to the other nodes

    def asked(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
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
            "operations": membership.link.operations,
            "quarantine": membership.commands.quarantine(),
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
        self._membership.commands.drain()
        return f"{self.name} leaves the job; the others go on"

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        self._membership.commands.change_hosts(hosts, lambda done: self._post(lambda: then(done)))

    def unfit(self, why: str) -> None:
        self._membership.commands.unfit(why)

    def slow_host(self, number: int, host: str, why: str) -> None:
        self._membership.commands.slow_host(number, host, why)

    # What the agent reports

    def join(self, gone: int | None, attempt: int) -> None:
        if not self._membership.started:
            self._membership.start()
        elif gone is not None:
            self._membership.workers_gone(gone)

    def workers_gone(self, number: int) -> None:
        self._membership.workers_gone(number)

    def take(self, number: int) -> ElasticInfo:
        meeting, self._meeting = self._meeting, None
        assert meeting is not None, "RoundReady comes before a start"
        assert meeting.round.number == number, "no round follows before the workers of the last are gone"
        info = self._handler.info(meeting)
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
            command.summary,
            final,
            text,
            code,
            command.delay,
            command.fresh,
            command.ranks[:64],
            command.step,
            command.signature,
        )
        self._membership.failed(command.round, failure, self._unfit, only_lost_peers)

    def request_round(self, command: events.RequestRound) -> None:
        self._membership.request_round(command.round, command.reason, command.attempt)

    def fenced(self, number: int) -> None:
        self._membership.fenced(number)

    def finished(self, number: int) -> None:
        self._membership.finished(number, self._timeout)

    def ending(self, ending: Ending) -> None:
        """The others need not wait for the workers' end to know that this node goes."""
        if ending.outcome in (Outcome.SIGNALED, Outcome.LEFT):
            self._membership.leave(ending.message, ending.preempted)

    def leave(self, number: int, reason: str) -> None:
        self._depart(lambda: self._part(number, reason))

    def close(self, number: int, command: events.CloseRendezvous, at_failure: Callable[[], None]) -> None:
        """Only the leader declares the job over: with a failure, this node waits until it has."""

        def go() -> None:
            if command.job_failed:
                at_failure()
                if self._is_member and not self._unfit:
                    self._membership.workers_gone(number)
                    self._membership.ended.wait(LAST_WORD)
            self._part(number, command.reason)

        self._depart(go)

    def abandon(self) -> None:
        self._depart(self._handler.shutdown)

    def release(self) -> None:
        if not self._parted:
            self._depart(self._membership.release)

    @property
    def _is_member(self) -> bool:
        return self._membership.started and not self._membership.ended.is_set()

    def _part(self, number: int, reason: str) -> None:
        if self._is_member:
            self._membership.leave(reason)
            self._membership.workers_gone(number)
            self._membership.ended.wait(LAST_WORD)
        self._membership.release()

    def _depart(self, go: Callable[[], object]) -> None:
        """In a thread: the store may be slow, and signals are answered meanwhile."""
        import threading

        self._parted = True
        self._departures += 1
        if self.on_end is not None:
            last = self._membership.last_requests
            last.shares_goodput, last.goodput = True, self.on_end()

        def run() -> None:
            try:
                go()
            finally:
                self._post(self._departed)

        threading.Thread(target=run, name="phalanx-departure", daemon=True).start()

    def _departed(self) -> None:
        self._departures -= 1
        meeting, self._meeting = self._meeting, None
        if meeting is not None and meeting.served is not None:
            meeting.served.close()

    @property
    def closed(self) -> bool:
        return self._departures == 0

    # As the membership's listener

    def round_ready(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._post(meeting.ready)

    def round_over(self, event: RoundEnd, now: Round | None) -> None:
        self._learn_failure(event, now)
        self._post(event)

    def job_over(self, end: End) -> None:
        error = error_of(end, self._membership.settings)
        told = str(error)
        if end.outcome in ("succeeded", "closed") and self._membership.was_spare:
            how = "succeeded" if end.outcome == "succeeded" else "was closed"
            told = f"this node was a spare and was not needed; the job {how} ({end.reason})"
        event = job_over(end, told)
        if isinstance(event, events.RoundFailed) and event.kind in ("timeout", "error"):
            self.error = error
        self._learn_failure(event, end.round)
        self._post(event)

    def _learn_failure(self, event: events.Event, now: Round | None) -> None:
        if now is not None and isinstance(event, events.PeerFailed) and event.final:
            self.failure = NodeFailure.read(now.cause[2])

    def waits(self, text: str) -> None:
        self._lines.show_waiting(text)

    def remarks(self, remark: Remark) -> None:
        show = self._lines.quarantined if remark.quarantined else self._lines.note
        self._post(lambda: show(remark.text))


class CountdownLine(Progress):
    """A progress line whose words may hold figures that change; that is not a new wait."""

    def limit(self, what: str, now: float, timeout: float | None) -> float | None:
        if _without_figures(what) == _without_figures(self._what):
            self._what = what
        return super().limit(what, now, timeout)


def _without_figures(text: str) -> str:
    return "".join(char for char in text if not char.isdigit())
