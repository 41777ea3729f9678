"""One node's membership in a job: a thread that owns the participant, its store and its rounds.

Everything that happens is a call in one queue, carried out by one thread, so nothing here needs a lock. The
membership reports to a `Listener`, in order and from its thread. Its parts have one noun each: `StoreLink` is
the connection, `StoreHost` the store where this node serves it, `Meetings` where the workers of a round meet;
`JobCommands`, `SharedStatus` and `LastRequests` write and read what has its own keys.

Beyond what `core.rounds.participant` decides, this shell
- publishes a failure at once, while the node's other workers are still being stopped;
- takes a store without a journal for lost once its address has refused connections for a few seconds;
- joins again, as a new participant, when node 0 of a static job is lost and returns with an empty store.
"""

from __future__ import annotations

import errno
import queue
import threading
from typing import NamedTuple

from phalanx.cluster.clock import clock
from phalanx.cluster.job_commands import JobCommands
from phalanx.cluster.last_requests import LastRequests
from phalanx.cluster.meetings import Meetings
from phalanx.cluster.mismatches import Mismatches
from phalanx.cluster.node_requests import NodeRequests
from phalanx.cluster.shared_status import WATCH, SharedStatus
from phalanx.cluster.store_host import StoreHost
from phalanx.cluster.store_link import StoreLink
from phalanx.cluster.waiting_line import StatusLine
from phalanx.core.group.events import PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant import Participant
from phalanx.core.rounds.participant_events import (
    Answer,
    ClockTick,
    CloseRequested,
    Connected,
    Disconnected,
    End,
    LeaseMissed,
    LeaveRequested,
    Noticed,
    Remark,
    RoundRequested,
    Send,
    StartRound,
    StoreLost,
    StoreWentBack,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from phalanx.core.rounds.records import ACTIVE, CLOSED, NodeInfo
from phalanx.core.rounds.requests import CONTROL
from phalanx.core.rounds.store_commands import Get, Watch
from phalanx.errors import PhalanxError, StoreAuthError, StoreTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.cluster.listener import Listener, Meeting
    from phalanx.cluster.settings import Settings
    from phalanx.core.rounds.leader_view import Options
    from phalanx.core.rounds.participant_events import Action, Event, RoundEnd
    from phalanx.core.rounds.records import Round
    from phalanx.core.rounds.store_commands import Command, Notice, Reply
    from phalanx.store.client import State, StoreClient

EMBEDDED_BATCH = 5_000  # places in one transaction, so that they arrive with their round; etcd allows 128


class Return(NamedTuple):
    """What a node brings along when it joins again, at a store that is empty.

    `clearing`: the round whose workers must be gone before; they are killed at `kill_at`, because the lease
    may run out."""

    rounds: int = 0
    restarts: int = 0
    clearing: int | None = None
    kill_at: float | None = None


class Membership:
    """This node in the job."""

    def __init__(
        self,
        settings: Settings,
        options: Options,
        listener: Listener,
        open_meeting: Callable[[str], tuple[Any, int]],
        slots: int = 1,
        role: str = "default",
        shares_port: bool = True,
    ) -> None:
        """`open_meeting` and `shares_port`: see `Meetings`."""
        self.settings, self.options, self.listener = settings, options, listener
        self._workers = slots, role
        self.info = NodeInfo("", settings.name)  # complete once the thread has looked up the address
        self.participant: Participant | None = None
        self.ended = threading.Event()
        self.line = StatusLine(f"connecting to {settings.host_name}", clock())
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="phalanx-membership", daemon=True)
        self._mismatches = Mismatches(options, settings.name, listener.remarks)
        self.link = StoreLink(settings, self.post, self._on_state, self._on_notice)
        self.host = StoreHost(settings, self.post, self._mismatches, self.line, self._lose)
        self.meetings = Meetings(settings, self.host, open_meeting, shares_port)
        self.commands = JobCommands(self)
        self.last_requests = LastRequests(settings)
        self._status = SharedStatus(self)
        self._questions = NodeRequests(
            lambda: self.info.id, lambda: self.host.shows_token, self._asked, self.commands.answer
        )
        self._return = Return()
        self._early: list[Event] = []  # requested before this node was a participant
        self._leased = 0.0  # until when workers may run, as it was reported
        self._finished_by: float | None = None
        self._unfit = ""  # why this node cannot be part of any round
        self._released = False

    # Calls from any thread

    def post(self, call: Callable[[], None]) -> None:
        """Have this carried out."""
        self._calls.put(call)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def workers_gone(self, number: int) -> None:
        """None of this round's workers is alive on this node."""
        self.post(lambda: self._gone(number))

    def failed(self, number: int, failure: NodeFailure, unfit: bool = False, blameless: bool = False) -> None:
        """Workers of this node failed; published while its other workers are still being stopped.

        `unfit`: they could not be started, and this node leaves. `blameless`: the cause is not on this node.
        """
        # With the host of the store the job would lose its store: its failure is the job's.
        event = WorkersFailed(number, failure, unfit and not self.hosting, blameless)
        self.post(lambda: self._request(event))

    def request_round(self, number: int, reason: str, restarts: int) -> None:
        """Have all nodes form the round after this one; `restarts`: how many this node has counted."""
        self.post(lambda: self.step(RoundRequested(number, reason, restarts)))

    def fenced(self, number: int) -> None:
        """The workers of this round were killed when the time of `lease_until` had come."""
        self.post(lambda: self.step(LeaseMissed(number)))

    def finished(self, number: int, timeout: float) -> None:
        """All workers of this node succeeded; wait for the other nodes at most this long."""
        self.post(lambda: self._finish(number, timeout))

    def leave(self, reason: str, preempted: bool = False) -> None:
        """Leave, once the workers are gone; the others go on. `preempted`: once all workers have saved."""
        self.post(lambda: self._leave(reason, preempted))

    def close(self, reason: str) -> None:
        """Request the end of the job, for all nodes."""
        self.post(lambda: self._request(CloseRequested(reason)))

    def release(self) -> None:
        """Close everything; a membership that has not ended is abandoned. Idempotent."""
        if self.started and not self._released:
            self._released = True
            self.post(lambda: None)
            self._thread.join()

    # What others may read at any time

    @property
    def client(self) -> StoreClient | None:
        return self.link.client

    @property
    def hosting(self) -> bool:
        """Whether this node serves the store."""
        return self.host.hosting

    @property
    def leading(self) -> bool:
        """Whether this node decides for the job."""
        return self.participant is not None and self.participant.leading and not self.ended.is_set()

    @property
    def lease_age(self) -> float | None:
        """Seconds since the store last confirmed this node's lease; None without one."""
        participant = self.participant
        if participant is None or not participant.lease.number:
            return None
        return max(0.0, clock() - participant.lease.proof)

    @property
    def is_spare(self) -> bool:
        """Whether a round is active without this node."""
        current = self._round
        idle = self.meetings.held is None and self.meetings.coming is None
        return idle and current is not None and current.phase == ACTIVE

    @property
    def was_spare(self) -> bool:
        """Whether rounds were active, and this node was in none of them."""
        participant = self.participant
        return self.meetings.rank < 0 and participant is not None and participant.following.rounds > 0

    # The thread

    def _run(self) -> None:
        try:
            self._open(self.host.open())
            while not self._released:
                self._turn()
        except PhalanxError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            self._end(End("port" if taken else "error", str(error), None))
        except Exception as error:  # noqa: BLE001 - without an end the agent would wait for ever
            self._end(End("error", f"the rendezvous failed: {type(error).__name__}: {error}", None))
        try:
            while not self._released:
                self._calls.get()
            if self.link.client is not None and self.participant is not None:
                self.last_requests.send(self.link.client, self.participant, self.meetings.rank, self.hosting)
        finally:
            self.host.stop_looking()
            self.link.hang_up()
            self.host.close()
            self.commands.close()

    def _turn(self) -> None:
        now, participant = clock(), self.participant
        hung_at = self.link.hung_at if participant is None and not self.ended.is_set() else None
        times = (
            participant.wake_at() if participant is not None else None,
            *self.host.due,
            self._finished_by,
            self._return.kill_at,
            hung_at,
            self._status.show_at,
            self._status.write_at,
        )
        wake = min((time for time in times if time is not None), default=None)
        try:
            call = self._calls.get(timeout=None if wake is None else max(0.0, wake - now))
        except queue.Empty:
            self._tick(hung_at)
        else:
            call()
        self._open("")

    def _tick(self, hung_at: float | None) -> None:
        now = clock()
        self._open(self.host.tick(now))
        if self._finished_by is not None and now >= self._finished_by:
            self._finished_by = None
            self._leave("the other nodes did not finish in time")
        if self._return.kill_at is not None and now >= self._return.kill_at:
            self._return = self._return._replace(kill_at=None)
            self._report_over(RoundOver(self.meetings.last, "the lease may be over", at_once=True))
        self._status.tick(now)
        if hung_at is not None and now >= hung_at:
            self._end(End("timeout", f"no answer from {self.settings.host_name}", None))
        self.step(ClockTick())

    def _open(self, impossible: str) -> None:
        """Connect, where the host of the store is known."""
        if impossible:
            self._end(End("token", impossible, None))
        elif (patience := self.host.dialled()) is not None:
            self._dial(patience)

    def _dial(self, patience: float) -> None:
        """What joins then is a new incarnation of this node."""
        self.link.dial(self.host.token, patience, self.host.address)

    def send(self, command: Command, answered: Callable[[Reply], None] = lambda reply: None) -> None:
        """Send a command to the store; in this thread."""
        self.link.send(command, answered)

    def step(self, event: Event) -> None:
        """Pass an event to the participant; in this thread."""
        participant = self.participant
        if participant is None:
            return
        actions = participant.step(clock(), event)
        if participant.lease.number and participant.lease.ends != self._leased:
            self._leased = participant.lease.ends
            self.listener.lease_until(self._leased)
        for action in actions:
            self._act(action)
        if self.ended.is_set():
            return
        if (command := self._mismatches.publish(participant)) is not None:
            self.send(command)
        if participant.ended is not None:
            self._end(participant.ended)

    def _act(self, action: Action) -> None:
        match action:
            case Send(tag, command):
                self.send(command, lambda reply: self._on_answer(tag, command, reply))
            case StartRound():
                self._prepare(action)
            case RoundOver() | PeerFailed() | RoundFailed():
                self._round_over(action)
            case Remark(quarantined=quarantined):
                self.listener.remarks(action)
                if quarantined and self.leading:
                    self.commands.publish_quarantine(quarantined)

    # The store

    def _on_answer(self, tag: int, command: Command, reply: Reply) -> None:
        self.step(Answer(tag, reply))
        if isinstance(command, Watch) and command.watch == CONTROL:
            self._learn_news(reply.entries)
        self._meet()  # the first answer can have the round and where its workers meet

    def _on_notice(self, notice: Notice) -> None:
        entries = tuple(change.entry for change in notice.changes if not change.deleted)
        if notice.watch == WATCH:
            self._status.learn(entries)
            return
        if notice.watch == CONTROL:
            self._learn_news(entries, news=not notice.reset)
        self.step(Noticed(notice))
        self._meet()

    def _learn_news(self, entries: tuple[Any, ...], news: bool = False) -> None:
        for entry in entries:
            key = entry.key.removeprefix(self.options.prefix)
            self.meetings.learn(key, entry.value)
            self._mismatches.learn(key, entry.value)
            self._questions.learn(key, entry.value, news)

    def _on_state(self, state: State) -> None:
        if state.what == "connected" and self.participant is None:
            self._begin()
        elif state.what == "lost" and not self._closed:
            self._lose(state.why)
        elif state.what in ("refused", "failed"):
            self._unreached(state)
        elif state.what == "connected":
            self.link.reached()
            self.step(Connected())
        elif state.what == "disconnected":
            self.step(Disconnected())
        elif state.what == "reset":  # it has lost changes that it had answered
            self.step(StoreWentBack())

    def _begin(self) -> None:
        if self.settings.fixed:
            from phalanx.cluster.master_port import JOB

            self.send(Get(JOB), lambda reply: self._check_job(reply.entries))
        else:
            self._join()

    def _check_job(self, entries: tuple[Any, ...]) -> None:
        from phalanx.cluster.master_port import mismatch

        wrong = mismatch(entries[0].value if entries else b"", self.settings)
        if wrong:
            self._end(End("mismatch", wrong, None))
        elif not self.ended.is_set():
            self._join()

    def _join(self) -> None:
        client = self.link.client
        if client is None or self.participant is not None:
            return
        from dataclasses import replace

        welcome = client.welcome
        client.grace = self.options.store_grace
        embedded = self.settings.store == "embedded" and self.settings.blob is None
        batch = EMBEDDED_BATCH if embedded else self.options.batch
        linger = self.options.linger if welcome is None else welcome.linger
        options = replace(self.options, linger=linger, batch=batch)
        self.info = self.settings.node(*self._workers)
        self.meetings.address = self.info.addr
        self.participant = Participant(self.info, options, self._return.rounds, self._return.restarts)
        self.line.learn("joining", clock())
        self.line.wait(clock())  # for the other nodes: what was shown of the way to the store is over
        self.commands.bring_quarantine()
        for action in self.participant.start(clock()):
            self._act(action)
        early, self._early = self._early, []
        for event in early:
            self.step(event)

    def _unreached(self, state: State) -> None:
        if self.participant is None:
            what = "waiting for the return of" if self._return.rounds else "connecting to"
            why = "" if self.settings.fixed and state.what == "refused" else f" ({state.why})"
            left = max(0.0, self.link.dialling_until - clock())
            self.line.learn(f"{what} {self.settings.host_name}{why}, {left:.0f} s left", clock())
        if state.what == "refused" and not self._closed and self.link.refused(state.at):
            self._lose(
                f"the store at {self.settings.where} has ended, and its data with it: it kept no journal "
                "(a separate phalanx store --journal FILE lets jobs outlive their store)"
            )

    def _lose(self, why: str) -> None:
        participant, client = self.participant, self.link.client
        if participant is None:
            refused = client is not None and isinstance(client.lost, StoreAuthError)
            if self._return.rounds and not refused:
                why = f"node 0 at {self.settings.where} is gone and did not return: see its output"
            late = client is not None and isinstance(client.lost, StoreTimeoutError)
            self._end(End("denied" if refused else "timeout" if late else "connect", why, None))
        elif (
            self.settings.fixed
            and not (self.hosting or self._closed or self.ended.is_set())
            and not participant.departure.reason
        ):
            self._rejoin(participant, f"lost node 0 at {self.settings.where}")
        else:
            self.step(StoreLost(why))

    def _rejoin(self, participant: Participant, why: str) -> None:
        """The store of a static job is lost: stop, and join as a new participant once it is back."""
        running = participant.work.running or None if self.meetings.coming is None else None
        kill_at = participant.lease.ends if running is not None else None
        known = participant.following
        self._return = Return(max(1, known.rounds), known.restarts, running, kill_at)
        self.participant, self.meetings.coming = None, None
        self._status.forget()
        self.link.hang_up()
        self.line.learn(f"waiting for the return of {self.settings.host_name}", clock())
        if self.meetings.held is not None:
            self._report_over(RoundOver(self.meetings.held.round.number, why))
        if running is None:
            self._dial_again()

    def _dial_again(self) -> None:
        self._dial(min(self.settings.return_timeout, self.options.join_timeout))

    # Rounds

    @property
    def _round(self) -> Round | None:
        return self.participant.round if self.participant is not None else None

    @property
    def _closed(self) -> bool:
        return self._round is not None and self._round.phase == CLOSED

    def _prepare(self, start: StartRound) -> None:
        """A round is active with this node in it: find or make the place where its workers meet."""
        number, self.meetings.coming = start.round.number, start
        if start.place.rank:
            self._meet()
            return
        try:
            meeting, record = self.meetings.open(start)
        except OSError as error:
            where = self.settings.host if self.host.address is not None else self.meetings.address
            text = f"cannot serve the workers' store on {where}: {error}; name another with --local-addr"
            failure = NodeFailure(text, final="a wrong address stays wrong")
            self.step(WorkersFailed(number, failure, unfit=not self.hosting))
            if not self.hosting:
                self._unfit = text
                self.step(LeaveRequested(text))
            self.post(lambda: self._gone(number))
            return
        self.info = self.info._replace(addr=self.meetings.address)
        self.send(record)
        self._hand(meeting)

    def _meet(self) -> None:
        """Hand the coming round over, if it is known where its workers meet."""
        if (found := self.meetings.found()) is not None:
            self._hand(found)

    def _hand(self, meeting: Meeting) -> None:
        self.meetings.hand(meeting)
        self._finished_by = None
        self._status.unwatch()
        self.listener.round_ready(meeting)

    def _round_over(self, event: RoundEnd) -> None:
        if self.meetings.coming is None:
            self._report_over(event)
        else:  # not reported yet: no worker has been started
            number, self.meetings.coming = self.meetings.coming.round.number, None
            self.post(lambda: self._gone(number))

    def _report_over(self, event: RoundEnd) -> None:
        if self.meetings.held is not None:
            self.meetings.take_back()
            self._finished_by = None
            self.line.wait(clock())
        self.listener.round_over(event, self._round)

    def _gone(self, number: int) -> None:
        if self._return.clearing == number:
            self._return = self._return._replace(clearing=None, kill_at=None)
            self._dial_again()
        else:
            self.step(WorkersStopped(number))

    # Requests of the agent

    def _finish(self, number: int, timeout: float) -> None:
        # The host stays as long as it takes: the other nodes cannot finish without their store.
        self._finished_by = None if self.hosting else clock() + timeout
        self.step(WorkersSucceeded(number))

    def _leave(self, reason: str, preempted: bool = False) -> None:
        if self.participant is None:
            self._end(End("left", reason, None))
        else:
            self.step(LeaveRequested(reason, preempted))

    def _request(self, event: WorkersFailed | CloseRequested) -> None:
        """Of any time: what ends the job is kept until this node has joined."""
        if self.participant is None:
            self._early.append(event)
        else:
            self.step(event)

    def _asked(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        if not self.ended.is_set():
            self.listener.asked(request, answer)

    def _end(self, end: End) -> None:
        if not self.ended.is_set():
            self.host.stop_looking()
            if self._unfit and end.outcome == "left":
                end = end._replace(outcome="refused", reason=self._unfit)
            self.ended.set()
            self.listener.job_over(end)
