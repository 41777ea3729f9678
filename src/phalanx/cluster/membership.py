"""One node's membership in a job: a thread that owns participant, connection and, on the host, the store.

Everything that happens is a call in one queue, carried out by one thread, so nothing here needs a lock. The
membership reports to a `Listener`, in order and from its thread.

Beyond what `core.rounds.participant` decides, this shell
- gives every round a fresh place for its workers to meet: rank 0 opens it and publishes it under the round's
  number, so that processes of an older round can neither find nor disturb it;
- publishes a failure at once, while the node's other workers are still being stopped;
- takes a store without a journal for lost once its address has refused connections for a few seconds;
- waits for a name that DNS does not know yet, and hosts the store if it proves to be this node's;
- joins again, as a new participant, when node 0 of a static job is lost and returns with an empty store;
- as the host of the store, stays until the other nodes have seen how the job ended.
"""

from __future__ import annotations

import queue
import threading
import time

from phalanx.cluster.listener import Meeting
from phalanx.cluster.mismatches import Mismatches
from phalanx.cluster.node_requests import NodeRequests, told_prefix
from phalanx.cluster.settings import open_server
from phalanx.cluster.waiting_line import StatusLine
from phalanx.core.group.events import PeerFailed, RoundFailed, RoundOver
from phalanx.core.rounds.causes import HOSTS
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
from phalanx.core.rounds.quarantine import failed_check
from phalanx.core.rounds.records import ACTIVE, CLOSED, FORMING, NodeInfo, encode, printable
from phalanx.core.rounds.requests import CONTROL
from phalanx.core.rounds.store_commands import Delete, Get, Put, Revoke, Txn, Unwatch, Watch, When
from phalanx.errors import PhalanxError, StoreAuthError, StoreError, StoreTimeoutError
from phalanx.job.address import listening_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx.cluster.job_goodput import JobGoodput, NodeGoodput
    from phalanx.cluster.listener import Listener
    from phalanx.cluster.master_port import MasterPort
    from phalanx.cluster.name_lookup import NameLookup
    from phalanx.cluster.settings import Settings
    from phalanx.cluster.shared_quarantine import QuarantinePost
    from phalanx.core.ledger.goodput import GoodputTotals
    from phalanx.core.rounds.leader_view import Options
    from phalanx.core.rounds.participant_events import Action, Event, RoundEnd
    from phalanx.core.rounds.records import HostRecord, Round
    from phalanx.core.rounds.store_commands import Command, Notice, Reply
    from phalanx.store.embedded.client import Client, State
    from phalanx.store.embedded.server import Server
    from phalanx.store.net.token import Token

STATUS = 800_000  # the number of a watch, between the participant's and the client's
REFUSED_PATIENCE = 3.0
LOOKUP_PATIENCE = 3.0  # for the first answer to a question for the host's name
HUNG_CALL = 1.0  # after the time to join: the client reports its own failures by then
SECRET_PAUSE = 1.0  # a Secret that is mounted late appears as a file
EMBEDDED_BATCH = 5_000  # places in one transaction, so that they arrive with their round; etcd allows 128
FEW = 64  # nodes: with more, all of them looking for each other as they leave would overload the store
FAREWELL = 2.0  # seconds, or a lease, for the other nodes to see how the job ended
NOT_AUTHENTICATED = (
    "control traffic of this job is not authenticated (no PHALANX_TOKEN); "
    "to authenticate it, set PHALANX_TOKEN to the same secret on every node"
)


def clock() -> float:
    """A clock that counts the time this machine was asleep: leases do not stop meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Membership:
    """This node in the job. `open_meeting(address)` returns (what serves there or None, port).

    `shares_port`: whether the workers of a static job use the store that node 0's agent serves."""

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
        self.settings, self.options = settings, options
        self._shares_port = shares_port
        self.listener, self.open_meeting = listener, open_meeting
        self._slots, self._role = slots, role
        self.info = NodeInfo("", settings.name)  # complete once the thread has looked up the address
        self.participant: Participant | None = None
        self.client: Client | None = None
        self.line = StatusLine(f"connecting to {settings.host_name}", clock())
        self.ended = threading.Event()
        self.hosting = False
        self._server: Server | MasterPort | None = None
        self._master: MasterPort | None = None
        self._lookup: NameLookup | None = None
        self._quarantine_post: QuarantinePost | None = None
        self._opened = clock()
        self._open_at: float | None = None  # when to look for a token again
        self._unnamed_at: float | None = None  # when a name that is being looked up counts as not known yet
        self._token: Token | None = None
        self._connections = 0  # made so far; what an earlier one reports is out of date
        self._rounds = self._restarts = 0  # what this node knows from a store that was lost
        self._clearing: int | None = None  # the round whose workers must be gone before this node rejoins
        self._kill_at: float | None = None  # when they are killed, because the lease may run out
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="phalanx-membership", daemon=True)
        self._coming: StartRound | None = None  # a round whose meeting place is not known yet
        self._meetings: dict[int, tuple[str, int]] = {}  # round -> address and port
        self._handed: StartRound | None = None  # the round that was reported as ready
        self._last = -1  # the number of the round that was reported as over
        self._leased = 0.0  # until when workers may run, as it was reported
        self._finished_by: float | None = None
        self._refused_since: float | None = None
        self._dialling_until = 0.0
        self.operations = 0  # commands sent to the store
        self._unfit = ""  # why this node cannot be part of any round
        self._mismatches = Mismatches(options, settings.name, self._remark)
        self._requests = NodeRequests(
            lambda: self.info.id,
            lambda: self._token is not None or settings.store != "embedded",
            self._asked,
            lambda value: self._calls.put(lambda: self._answer(value)),
        )
        self.goodput: NodeGoodput | None = None
        """This node's ledger at its end; set before `release`, by an agent that has one."""
        self.shares_goodput = False
        self.job_goodput: JobGoodput | None = None
        """That of the whole job, where it is known, once released."""
        self._rank = -1  # in the last round
        self._early: list[Event] = []  # requested before this node was a participant
        self._released = False
        self._status_watched = False

    # Calls from any thread

    def start(self) -> None:
        """Join."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def workers_gone(self, number: int) -> None:
        """None of this round's workers is alive on this node."""
        self._calls.put(lambda: self._gone(number))

    def failed(self, number: int, failure: NodeFailure, unfit: bool = False, blameless: bool = False) -> None:
        """Workers of this node failed; published while its other workers are still being stopped.

        `unfit`: they could not be started, and this node leaves. `blameless`: the cause is not on this node.
        """
        # With the host of the store the job would lose its store: its failure is the job's.
        event = WorkersFailed(number, failure, unfit and not self.hosting, blameless)
        self._calls.put(lambda: self._request(event))

    def request_round(self, number: int, reason: str, restarts: int) -> None:
        """Have all nodes form the round after this one; `restarts`: how many this node has counted."""
        self._calls.put(lambda: self._step(RoundRequested(number, reason, restarts)))

    def fenced(self, number: int) -> None:
        """The workers of this round were killed when the time of `lease_until` had come."""
        self._calls.put(lambda: self._step(LeaseMissed(number)))

    def finished(self, number: int, timeout: float) -> None:
        """All workers of this node succeeded; wait for the other nodes at most this long."""
        self._calls.put(lambda: self._finish(number, timeout))

    def leave(self, reason: str, preempted: bool = False) -> None:
        """Leave, once the workers are gone; the others go on. `preempted`: once all workers have saved."""
        self._calls.put(lambda: self._leave(reason, preempted))

    def close(self, reason: str) -> None:
        """Request the end of the job, for all nodes."""
        self._calls.put(lambda: self._request(CloseRequested(reason)))

    def drain(self) -> None:
        """Ask for this node to leave, as `phalanx drain` does."""
        self._calls.put(lambda: self._send(Put(f"{self.options.prefix}drain/{self.info.id}", b"")))

    def change_hosts(self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None]) -> None:
        """Write, or (None) delete, what is held against hosts; `then` gets whether the store has it."""
        self._calls.put(lambda: self._change_hosts(hosts, then))

    def unfit(self, why: str) -> None:
        """This node failed its check and leaves: hold it against its host, as the leader would."""
        policy = self.options.quarantine
        if policy is not None and self.started:
            self._calls.put(lambda: self._change_hosts({self.info.name: failed_check(why, policy)}))

    def quarantine(self) -> list[dict[str, Any]]:
        """The hosts that are quarantined: host, reason and, unless a person removes it, the seconds left."""
        participant, now = self.participant, clock()
        entries = participant.hosts.state.entries if participant is not None else ()
        return [
            {"host": one.node, "reason": one.reason, "left": None if one.until is None else one.until - now}
            for one in entries
            if one.until is None or now < one.until
        ]

    def slow_host(self, number: int, host: str, why: str) -> None:
        """A host of a round is slow, and is to be replaced where there is a spare; empty: no longer."""
        key = f"{self.options.prefix}slow/{number}/{host}"
        self._calls.put(lambda: self._send(Put(key, why.encode()) if why else Delete(key)))

    def keep_goodput(self, totals: GoodputTotals) -> None:
        """This node's ledger so far, for the total of the job, should the node be lost."""
        self._calls.put(lambda: self._keep_goodput(totals))

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
        return (
            self._handed is None and self._coming is None and current is not None and current.phase == ACTIVE
        )

    @property
    def was_spare(self) -> bool:
        """Whether rounds were active, and this node was in none of them."""
        return self._rank < 0 and self.participant is not None and self.participant.following.rounds > 0

    def release(self) -> None:
        """Close everything; a membership that has not ended is abandoned. Idempotent."""
        if self.started and not self._released:
            self._released = True
            self._calls.put(lambda: None)
            self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            self._open()
            while not self._released:
                self._turn()
        except PhalanxError as error:
            self._end(End("error", str(error), None))
        except Exception as error:  # noqa: BLE001 - without an end the agent would wait for ever
            self._end(End("error", f"the rendezvous failed: {type(error).__name__}: {error}", None))
        try:
            while not self._released:
                self._calls.get()
            self._say_goodbye()
        finally:
            if self._lookup is not None:
                self._lookup.stop()
            if self.client is not None:
                self.client.close()
            if self._server is not None:
                self._server.close()
            if self._quarantine_post is not None:
                self._quarantine_post.close()

    def _open(self) -> None:
        from phalanx.cluster.store_connection import NO_SECRET, awaits_secret, find_secret

        self._open_at = None
        if awaits_secret(self.settings):
            left = self._opened + self.options.join_timeout - clock()
            if left <= 0:
                self._end(End("token", NO_SECRET, None))
            else:
                self._open_at = clock() + min(left, SECRET_PAUSE)
                self.line.learn(f"{NO_SECRET}, {left:.0f} s left", clock())
            return
        self._token = find_secret(self.settings)
        if self.settings.store == "embedded" and self.settings.is_host is not False:
            from phalanx.cluster.name_lookup import NameLookup, needs_lookup

            if needs_lookup(self.settings.host):
                self._lookup = NameLookup(
                    self.settings.host, lambda known: self._calls.put(lambda: self._looked_up(known))
                )
                self._unnamed_at = clock() + LOOKUP_PATIENCE
                self.line.learn(f"looking up {self.settings.host}", clock())
                return
            self._serve()
        self._dial(self.options.join_timeout)

    def _looked_up(self, known: bool) -> None:
        """The host's name has an address, or does not have one yet: it is looked up until it has."""
        if self.ended.is_set():
            return
        self.settings.name_known, self._unnamed_at = known, None
        if known or self.settings.is_host:
            if self._lookup is not None:
                self._lookup.stop()
            if self._server is None:
                self._serve()
        if self.client is None:
            self._dial(max(1.0, self._opened + self.options.join_timeout - clock()))

    def _serve(self) -> None:
        """Host the store, if this node is the one to."""
        self._server = self._host()
        if self._server is not None:
            self._server.start()
            self.hosting = True
            self.settings.port = self._server.address[1]  # where 0 was asked for

    def _host(self) -> Server | MasterPort | None:
        def failed(why: str) -> None:
            self._calls.put(lambda: self._lose(why))

        def refused(host: str, why: str) -> None:
            self._calls.put(lambda: self._mismatches.refused(host, why))

        if not self.settings.fixed:
            return open_server(self.settings, self._token, failed, refused)
        if not self.settings.is_host:
            return None
        from phalanx.cluster.master_port import MasterPort

        def visited(host: str) -> None:
            self._calls.put(lambda: self._mismatches.visited(host))

        self._master = MasterPort(self.settings, self._token, failed, refused, visited)
        self.settings.port = self._master.address[1]
        if self._token is None:
            self._remark(Remark(NOT_AUTHENTICATED))
        return self._master

    def _dial(self, grace: float) -> None:
        """Connect in the background; what joins then is a new incarnation of this node."""
        from phalanx.cluster.store_connection import connect

        self._connections += 1
        number = self._connections

        def post(call: Callable[[], None]) -> None:
            self._calls.put(lambda: call() if number == self._connections else None)

        self._dialling_until, self._refused_since = clock() + grace, None
        self.client = connect(
            self.settings,
            self._token,
            on_state=lambda state: post(lambda: self._state(state)),
            on_notice=lambda notice: post(lambda: self._notice(notice)),
            clock=clock,
            address=self._master.address if self._master is not None else None,
            grace=grace,
        )

    def _turn(self) -> None:
        now, times = clock(), []
        participant = self.participant
        if participant is not None and (wake := participant.wake_at()) is not None:
            times.append(wake)
        own = self._finished_by, self._kill_at, self._open_at, self._unnamed_at, self._hung_at
        times += [due for due in (*own, self._show_at, self._write_at()) if due is not None]
        try:
            call = self._calls.get(timeout=max(0.0, min(times) - now) if times else None)
        except queue.Empty:
            call = self._tick
        call()

    def _tick(self) -> None:
        now = clock()
        if self._open_at is not None and now >= self._open_at:
            self._open()
        if self._unnamed_at is not None and now >= self._unnamed_at:
            self._looked_up(False)
        if self._finished_by is not None and now >= self._finished_by:
            self._finished_by = None
            self._leave("the other nodes did not finish in time")
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._report_over(RoundOver(self._last, "the lease may be over", at_once=True))
        if (show := self._show_at) is not None and now >= show:
            self._show(now)
        if (write := self._write_at()) is not None and now >= write:
            leader = When(self.options.prefix + "ctl/leader", "value", value=self.info.id.encode())
            self._send(Txn((leader,), (Put(self.options.prefix + "status", self.line.write(now)),)))
        if self._hung_at is not None and now >= self._hung_at:
            self._end(End("timeout", f"no answer from {self.settings.host_name}", None))
        self._step(ClockTick())

    @property
    def _hung_at(self) -> float | None:
        """When a plug-in's call that does not return is given up; every other failure the client reports."""
        joins = self.settings.blob is not None and self.participant is None and not self.ended.is_set()
        return self._dialling_until + HUNG_CALL if joins else None

    def _gone(self, number: int) -> None:
        if self._clearing == number:
            self._clearing = self._kill_at = None
            self._dial(self._return_patience)
        else:
            self._step(WorkersStopped(number))

    def _step(self, event: Event) -> None:
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
            self._send(command)
        if participant.ended is not None:
            self._end(participant.ended)

    def _act(self, action: Action) -> None:
        match action:
            case Send(tag, command):
                self._send(command, lambda reply: self._answered(tag, command, reply))
            case StartRound():
                self._prepare(action)
            case RoundOver() | PeerFailed() | RoundFailed():
                self._round_over(action)
            case Remark(quarantined=quarantined):
                self._remark(action)
                if quarantined and self._leading:
                    self._publish_quarantine(quarantined)

    def _answered(self, tag: int, command: Command, reply: Reply) -> None:
        self._step(Answer(tag, reply))
        if isinstance(command, Watch) and command.watch == CONTROL:
            self._learn_news(reply.entries)
        self._meet()  # the first answer can have the round and where its workers meet

    def _learn_news(self, entries: tuple[Any, ...], news: bool = False) -> None:
        for entry in entries:
            key = entry.key.removeprefix(self.options.prefix)
            self._learn_meeting(key, entry.value)
            self._mismatches.learn(key, entry.value)
            self._requests.learn(key, entry.value, news)

    def _send(self, command: Command, answered: Callable[[Reply], None] = lambda reply: None) -> None:
        if self.client is None:
            return
        number = self._connections

        def deliver(reply: Reply) -> None:
            self._calls.put(lambda: answered(reply) if number == self._connections else None)

        try:
            self.operations += 1
            self.client.send(command, deliver)
        except StoreError:
            pass  # the connection has ended for good, and `lost` is in the queue

    # The connection

    def _state(self, state: State) -> None:
        if state.what == "connected" and self.participant is None:
            self._begin()
            return
        closed = self._round is not None and self._round.phase == CLOSED
        if state.what == "lost" and not closed:
            self._lose(state.why)
        elif state.what in ("refused", "failed"):
            self._unreached(state)
        elif state.what == "connected":
            self._refused_since = None
            self._step(Connected())
        elif state.what == "disconnected":
            self._step(Disconnected())
        elif state.what == "reset":  # it has lost changes that it had answered
            self._step(StoreWentBack())

    def _begin(self) -> None:
        if self.settings.fixed:
            from phalanx.cluster.master_port import JOB

            self._send(Get(JOB), lambda reply: self._check_job(reply.entries))
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
        if self.client is None or self.participant is not None:
            return
        from dataclasses import replace

        welcome = self.client.welcome
        self.client.grace = self.options.store_grace
        embedded = self.settings.store == "embedded" and self.settings.blob is None
        batch = EMBEDDED_BATCH if embedded else self.options.batch
        linger = self.options.linger if welcome is None else welcome.linger
        options = replace(self.options, linger=linger, batch=batch)
        self.info = self.settings.node(self._slots, self._role)
        self.participant = Participant(self.info, options, self._rounds, self._restarts)
        self.line.learn("joining", clock())
        self.line.wait(clock())  # for the other nodes: what was shown of the way to the store is over
        self._bring_quarantine()
        for action in self.participant.start(clock()):
            self._act(action)
        early, self._early = self._early, []
        for event in early:
            self._step(event)

    def _unreached(self, state: State) -> None:
        if self.participant is None:
            what = "waiting for the return of" if self._rounds else "connecting to"
            why = "" if self.settings.fixed and state.what == "refused" else f" ({state.why})"
            left = max(0.0, self._dialling_until - clock())
            self.line.learn(f"{what} {self.settings.host_name}{why}, {left:.0f} s left", clock())
        if state.what == "refused":
            self._refused(state.at)

    def _refused(self, at: float) -> None:
        welcome = self.client.welcome if self.client is not None else None
        closed = self._round is not None and self._round.phase == CLOSED
        if welcome is None or welcome.durable or closed:
            return
        self._refused_since = self._refused_since or at
        # Node 0 of a static job is gone with its workers: waiting for it would only delay the restart.
        patience = 0.0 if self.settings.fixed else min(REFUSED_PATIENCE, self.options.store_grace)
        if at - self._refused_since >= patience:
            self._lose(
                f"the store at {self.settings.where} has ended, and its data with it: it kept no journal "
                "(a separate phalanx store --journal FILE lets jobs outlive their store)"
            )

    def _lose(self, why: str) -> None:
        closed = self._round is not None and self._round.phase == CLOSED
        if self.participant is None:
            refused = self.client is not None and isinstance(self.client.lost, StoreAuthError)
            if self._rounds and not refused:
                why = f"node 0 at {self.settings.where} is gone and did not return: see its output"
            late = self.client is not None and isinstance(self.client.lost, StoreTimeoutError)
            self._end(End("denied" if refused else "timeout" if late else "connect", why, None))
        elif self.settings.fixed and not (
            self.hosting or closed or bool(self.participant.departure.reason) or self.ended.is_set()
        ):
            self._rejoin(f"lost node 0 at {self.settings.where}")
        else:
            self._step(StoreLost(why))

    @property
    def _return_patience(self) -> float:
        return min(self.settings.return_timeout, self.options.join_timeout)

    def _rejoin(self, why: str) -> None:
        """The store of a static job is lost: stop, and join as a new participant once it is back."""
        participant, client = self.participant, self.client
        assert participant is not None
        assert client is not None
        self._rounds, self._restarts = max(1, participant.following.rounds), participant.following.restarts
        self._clearing = participant.work.running or None if self._coming is None else None
        self._kill_at = participant.lease.ends if self._clearing is not None else None
        self.participant, self._coming, self._status_watched = None, None, False
        self._connections += 1
        self.client = None
        client.close()
        self.line.learn(f"waiting for the return of {self.settings.host_name}", clock())
        if self._handed is not None:
            self._report_over(RoundOver(self._handed.round.number, why))
        if self._clearing is None:
            self._dial(self._return_patience)

    def _notice(self, notice: Notice) -> None:
        entries = tuple(change.entry for change in notice.changes if not change.deleted)
        if notice.watch == STATUS:
            self._learn_status(entries)
            return
        if notice.watch == CONTROL:
            self._learn_news(entries, news=not notice.reset)
        self._step(Noticed(notice))
        self._meet()

    # Rounds

    @property
    def _round(self) -> Round | None:
        return self.participant.round if self.participant is not None else None

    def _shared(self, number: int) -> str:
        return shared_prefix(self.settings.run_id, number)

    def _prepare(self, start: StartRound) -> None:
        """A round is active with this node in it: find or make the place where its workers meet."""
        number = start.round.number
        self._coming = start
        if start.place.rank:
            self._meet()
            return
        try:
            address, port, served = self._open_place()
        except OSError as error:
            where = self.settings.host if self._master is not None else self.info.addr
            text = f"cannot serve the workers' store on {where}: {error}; name another with --local-addr"
            failure = NodeFailure(text, final="a wrong address stays wrong")
            self._step(WorkersFailed(number, failure, unfit=not self.hosting))
            if not self.hosting:
                self._unfit = text
                self._step(LeaveRequested(text))
            self._calls.put(lambda: self._gone(number))
            return
        # Two, because the round after the last one that ran may have ended before it was active.
        old = tuple(
            delete
            for back in (number - 1, number - 2)
            for delete in (Delete(self._shared(back), prefix=True), Delete(self._meeting(back)))
        )
        self._send(Txn((), (Put(self._meeting(number), f"{address} {port}".encode()),), old))
        self._hand(start, address, port, served)

    def _open_place(self) -> tuple[str, int, Any]:
        """Serve the place where the workers of a round meet: its address, its port and what serves it."""
        if self._master is not None:
            return self.settings.host, self._master.new_round(self._shares_port), None
        try:
            served, port = self.open_meeting(listening_address(self.info.addr))
        except OSError:
            # The routes may have changed since this node joined.
            address = self.settings.address()
            if address == self.info.addr:
                raise
            served, port = self.open_meeting(listening_address(address))
            self.info = self.info._replace(addr=address)
        return self.info.addr, port, served

    def _meeting(self, number: int) -> str:
        return f"{self.options.prefix}ctl/meeting/{number}"

    def _learn_meeting(self, key: str, value: bytes) -> None:
        number = key.removeprefix("ctl/meeting/")
        address, _, port = value.decode(errors="replace").rpartition(" ")
        if number.isdecimal() and port.isdecimal() and address.isprintable() and len(port) < 6:
            self._meetings[int(number)] = address, int(port)

    def _meet(self) -> None:
        """Hand the coming round over, if it is known where its workers meet."""
        start = self._coming
        if start is not None and start.place.rank and (found := self._meetings.get(start.round.number)):
            self._meetings.clear()
            self._hand(start, *found, None)

    def _hand(self, start: StartRound, address: str, port: int, served: Any) -> None:
        self._coming, self._handed, self._rank = None, start, start.place.rank
        self._finished_by = None
        if self._status_watched:
            self._status_watched = False
            self._send(Unwatch(STATUS))
        self.listener.round_ready(Meeting(start.round, start.place, address, port, served))

    def _round_over(self, event: RoundEnd) -> None:
        if self._coming is None:
            self._report_over(event)
        else:  # not reported yet: no worker has been started
            number, self._coming = self._coming.round.number, None
            self._calls.put(lambda: self._gone(number))

    def _report_over(self, event: RoundEnd) -> None:
        if self._handed is not None:
            self._last, self._handed = self._handed.round.number, None
            self._finished_by = None
            self.line.wait(clock())
        self.listener.round_over(event, self._round)

    def _change_hosts(
        self, hosts: Mapping[str, HostRecord | None], then: Callable[[bool], None] = lambda done: None
    ) -> None:
        keys = {f"{self.options.prefix}{HOSTS}{host}": found for host, found in hosts.items()}
        puts = tuple(Put(key, encode(found)) for key, found in keys.items() if found is not None)
        deletes = tuple(Delete(key) for key, found in keys.items() if found is None)
        if self.participant is None or self.ended.is_set():
            then(False)
        else:
            self._send(Txn((), puts, deletes), lambda reply: then(reply.ok))

    def _bring_quarantine(self) -> None:
        """What other jobs hold against this host counts here, unless this job knows more about it."""
        if not self.settings.quarantine_dir or self.options.quarantine is None:
            return
        from phalanx.cluster.shared_quarantine import read_host

        found = read_host(self.settings.quarantine_dir, self.info.name)
        if found is not None:
            key = f"{self.options.prefix}{HOSTS}{self.info.name}"
            self._send(Txn((When(key, "create", 0),), (Put(key, encode(found)),)))

    def _publish_quarantine(self, host: str) -> None:
        """Tell other jobs, and the hook, of a host that is kept out; the leader does."""
        settings = self.settings
        entry = next((one for one in self.quarantine() if one["host"] == host), None)
        if entry is None or not (settings.quarantine_dir or settings.quarantine_hook):
            return
        if self._quarantine_post is None:
            from phalanx.cluster.shared_quarantine import QuarantinePost

            self._quarantine_post = QuarantinePost(
                settings.quarantine_dir, settings.quarantine_hook, settings.run_id
            )
        self._quarantine_post.tell(entry)

    def _finish(self, number: int, timeout: float) -> None:
        # The host stays as long as it takes: the other nodes cannot finish without their store.
        self._finished_by = None if self.hosting else clock() + timeout
        self._step(WorkersSucceeded(number))

    def _leave(self, reason: str, preempted: bool = False) -> None:
        if self.participant is None:
            self._end(End("left", reason, None))
        else:
            self._step(LeaveRequested(reason, preempted))

    def _request(self, event: WorkersFailed | CloseRequested) -> None:
        """Of any time: what ends the job is kept until this node has joined."""
        if self.participant is None:
            self._early.append(event)
        else:
            self._step(event)

    # Questions of other nodes

    def _asked(self, request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        if not self.ended.is_set():
            self.listener.asked(request, answer)

    def _answer(self, value: bytes) -> None:
        if self.participant is not None and self.participant.lease.number:
            key = told_prefix(self.settings.run_id) + self.info.id
            self._send(Put(key, value, self.participant.lease.number))

    # The goodput of the job

    def _keep_goodput(self, totals: GoodputTotals) -> None:
        from phalanx.cluster.job_goodput import encode_ledger, ledgers_prefix

        if self.participant is not None and not self.ended.is_set():
            value = encode_ledger(self.participant.job, totals, final=False)
            self._send(Put(ledgers_prefix(self.settings.run_id) + self.info.id, value))

    def _exchange_goodput(self, client: Client, participant: Participant) -> None:
        """Give this node's ledger and learn that of the job, while all nodes are there.

        The host of a store that leaves takes the job with it: it adds up what the others leave behind."""
        end = participant.ended
        over = end is not None and end.outcome in ("succeeded", "failed", "closed")
        own = self.goodput
        if self._rank < 0 or (own is None and self._rank):
            return
        from phalanx.cluster.job_goodput import GoodputExchange, exchange

        here = GoodputExchange(client, self.settings.run_id, self.info.id, participant.job)
        if over and self._rank == 0:
            self.job_goodput = exchange(lambda: here.collect(own, self.options.prefix + "node/"))
        elif own is not None and over:
            self.job_goodput = exchange(lambda: here.receive(own))
        elif own is not None and self.hosting:
            self.job_goodput = exchange(lambda: here.collect(own))
        elif own is not None:
            exchange(lambda: here.part(own))

    # Reporting

    @property
    def _leading(self) -> bool:
        return self.participant is not None and self.participant.leading and not self.ended.is_set()

    @property
    def _show_at(self) -> float | None:
        return self.line.show_at() if self._handed is None and not self.ended.is_set() else None

    def _show(self, now: float) -> None:
        """Report what the node waits for; the first time, read the leader's line before."""
        if not self._leading and not self._status_watched and self.participant is not None:
            self._status_watched = True
            key = self.options.prefix + "status"
            self._send(Watch(STATUS, key), lambda reply: self._learn_status(reply.entries))
            self.line.wait(now)
        else:
            self.listener.waits(self.line.show(now))

    def _learn_status(self, entries: tuple[Any, ...]) -> None:
        if entries and self._status_watched and not self._leading:
            self.line.learn(printable(entries[0].value[:4096].decode(errors="replace")), clock())
            if not self.line.shown:
                self.listener.waits(self.line.show(clock()))

    def _write_at(self) -> float | None:
        if not self._leading or self.participant is None:
            return None
        self.line.learn(self.participant.reason, clock())
        return self.line.write_at(self._round is None or self._round.phase == FORMING)

    def _end(self, end: End) -> None:
        if not self.ended.is_set():
            if self._unfit and end.outcome == "left":
                end = end._replace(outcome="refused", reason=self._unfit)
            self.ended.set()
            self.listener.job_over(end)

    def _remark(self, remark: Remark) -> None:
        self.listener.remarks(remark)

    def _say_goodbye(self) -> None:
        """Revoke the lease, so that no node waits for it; the host does so when all other nodes have."""
        client, participant = self.client, self.participant
        if client is None or client.lost is not None or participant is None:
            return
        if participant.ended is not None and participant.ended.outcome == "store":
            return  # it has been silent for long enough
        if self.shares_goodput and self.options.max_nodes > 1:
            self._exchange_goodput(client, participant)
        if self.hosting:
            # With its key the host is still part of the ending job: a newcomer sees the end, and does not
            # begin a new job at a store that is about to close.
            self._wait_for_the_others(client, participant, max(FAREWELL, self.options.ttl))
        left = self._round if self.settings.store == "etcd" else None  # in a store that outlives the job
        over = left is not None and left.phase == CLOSED and participant.leading
        if over:
            self._wait_for_the_others(client, participant, FAREWELL)  # they may still write
        try:
            if left is None:
                self._revoke(client, participant)
                return
            from phalanx.cluster.leftovers import let_expire, round_of

            last = round_of(client, self.options.prefix, FAREWELL)
            self._revoke(client, participant)
            if over or left.nodes <= FEW:
                shared = f"shared/{self.settings.run_id}/"
                let_expire(client, (self.options.prefix, shared), last, over, FAREWELL)
        except StoreError:
            pass  # the lease runs out by itself; other keys are few, and the next job with this id uses them

    def _revoke(self, client: Client, participant: Participant) -> None:
        # Answered, not only sent: the store may have taken up another connection of this session, and who
        # begins this job again would find a node of the last one.
        if participant.lease.number:
            client.request(Revoke(participant.lease.number), FAREWELL)

    def _wait_for_the_others(self, client: Client, participant: Participant, patience: float) -> None:
        end = clock() + patience  # a node that is gone loses its key within a lease
        nodes = self.options.prefix + "node/"
        changed = threading.Event()
        try:
            client.watch(nodes, lambda notice: changed.set(), prefix=True)
            while clock() < end:
                here = client.request(Get(nodes, prefix=True), FAREWELL).entries
                if all(entry.lease == participant.lease.number for entry in here):
                    return
                changed.wait(max(0.0, end - clock()))
                changed.clear()
        except StoreError:
            pass  # the other nodes see the closed connection


def shared_prefix(run_id: str, number: int) -> str:
    """Where the nodes of a round share data; outside of the prefix that the leader watches."""
    return f"shared/{run_id}/{number}/"
