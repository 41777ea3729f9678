"""One node's membership in a job: a thread that owns participant, connection and, on the host, the store.

Everything that happens is a call in one queue, carried out by one thread, so nothing here needs a lock. Out
come happenings, in order: `Formed` (run workers in this round), `Over` (stop them), `Ended` (the job is over
for this node), and now and then `Waiting` (a line for a person). They are told from the thread and must not
block it.

Beyond what `core.participant` decides, this shell
- gives every round a fresh place for its workers to meet: rank 0 opens it and publishes it under the round's
  number, so that what is left of an older round can neither find it nor disturb it;
- publishes a failure at once, while the node's other workers are still being stopped;
- takes a store without a journal for lost once its address has refused connections for a few seconds;
- stays, as the host of the store, until the others have heard how the job ended.
"""

from __future__ import annotations

import queue
import threading
import time

from phalanx.core import participant_events as happen
from phalanx.core.participant import Participant
from phalanx.core.participant_events import End, Send, StartRound, StopRound
from phalanx.core.rounds import CLOSED, FORMING, NodeInfo, Result, encode
from phalanx.core.store_commands import Delete, Get, Put, Revoke, Txn, Unwatch, Watch, When
from phalanx.errors import PhalanxError, StoreAuthError, StoreError
from phalanx.membership.address import listening_address
from phalanx.membership.membership_events import FAILED, Ended, Formed, NodeFailure, Over, Waiting
from phalanx.membership.settings import open_server
from phalanx.membership.waiting_line import StatusLine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.core.rounds import Options, Round
    from phalanx.core.store_commands import Command, Notice, Reply
    from phalanx.membership.membership_events import Happening
    from phalanx.membership.settings import Settings
    from phalanx.store.embedded.client import Client, State
    from phalanx.store.embedded.server import Server

STATUS = 800_000  # watch numbers of our own, between the participant's and the client's
MEETING = 800_001  # plus the number of the round
REFUSED_PATIENCE = 3.0
FAREWELL = 2.0


def clock() -> float:
    """A clock that also counts the time this machine was asleep: a lease does not stop for that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Membership:
    """This node in the job. `open_meeting(address)` gives (what serves there or None, port)."""

    def __init__(
        self,
        settings: Settings,
        options: Options,
        tell: Callable[[Happening], None],
        open_meeting: Callable[[str], tuple[Any, int]],
        slots: int = 1,
        role: str = "default",
    ) -> None:
        self.settings, self.options = settings, options
        self.tell, self.open_meeting = tell, open_meeting
        self._slots, self._role = slots, role
        self.info = NodeInfo("", settings.name)  # complete once the thread has looked up our address
        self.participant: Participant | None = None
        self.client: Client | None = None
        self.line = StatusLine(f"connecting to the store at {settings.where}", clock())
        self.ended = threading.Event()
        self.hosting = False
        self._server: Server | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="phalanx-membership", daemon=True)
        self._coming: StartRound | None = None  # a round whose meeting place is not known yet
        self._handed: StartRound | None = None  # the round that has been told
        self._last: Round | None = None  # the round that was told to be over
        self._finished_by: float | None = None
        self._refused_since: float | None = None
        self._dialling_since: float | None = None
        self._leaving = ""
        self._closing = False
        self._released = False
        self._status_watched = False

    # What others ask, from any thread

    def start(self) -> None:
        """Join."""
        self._thread.start()

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def workers_gone(self, number: int) -> None:
        """Nothing of this round's workers is alive here (any more)."""
        self._calls.put(lambda: self._step(happen.WorkersStopped(number)))

    def failed(self, number: int, failure: NodeFailure) -> None:
        """Workers of this node failed; the others hear of it while ours are still being stopped."""
        self._calls.put(lambda: self._report(number, failure))

    def finished(self, number: int, timeout: float) -> None:
        """All workers of this node succeeded; wait for the others at most this long."""
        self._calls.put(lambda: self._finish(number, timeout))

    def leave(self, reason: str) -> None:
        """Go, once the workers are gone; the others go on."""
        self._calls.put(lambda: self._leave(reason))

    def close(self, reason: str) -> None:
        """Ask for the end of the job, for all nodes."""
        self._calls.put(lambda: self._close(reason))

    def release(self) -> None:
        """Give everything back; a membership that has not ended is abandoned. Idempotent."""
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
        except Exception as error:  # noqa: BLE001 - the agent must hear of it, or it would wait for ever
            self._end(End("error", f"the rendezvous failed: {type(error).__name__}: {error}", None))
        try:
            while not self._released:
                self._calls.get()
            self._say_goodbye()
        finally:
            if self.client is not None:
                self.client.close()
            if self._server is not None:
                self._server.close()

    def _open(self) -> None:
        from phalanx.membership.store_connection import connect, find_secret

        token = find_secret(self.settings)
        self.info = self.settings.node(self._slots, self._role)
        if self.settings.backend != "etcd":
            self._server = open_server(
                self.settings, token, lambda why: self._calls.put(lambda: self._lose(why))
            )
            if self._server is not None:
                self._server.start()
                self.hosting = True
        self._dialling_since = clock()
        self.client = connect(
            self.settings,
            token,
            on_state=lambda state: self._calls.put(lambda: self._state(state)),
            on_notice=lambda notice: self._calls.put(lambda: self._notice(notice)),
            clock=clock,
        )

    def _turn(self) -> None:
        now, times = clock(), []
        participant = self.participant
        if participant is not None and (wake := participant.wake_at()) is not None:
            times.append(wake)
        if self._finished_by is not None:
            times.append(self._finished_by)
        if self._handed is None and not self.ended.is_set():
            times.append(self.line.show_at())
        if (write := self._write_at()) is not None:
            times.append(write)
        try:
            call = self._calls.get(timeout=max(0.0, min(times) - now) if times else None)
        except queue.Empty:
            call = self._tick
        call()

    def _tick(self) -> None:
        now = clock()
        if self._finished_by is not None and now >= self._finished_by:
            self._finished_by = None
            self._leave("the other nodes did not finish in time")
        if self._handed is None and not self.ended.is_set() and now >= self.line.show_at():
            self._show(now)
        if (write := self._write_at()) is not None and now >= write:
            leader = When(self.options.prefix + "ctl/leader", "value", value=self.info.id.encode())
            self._send(Txn((leader,), (Put(self.options.prefix + "status", self.line.write(now)),)))
        self._step(happen.ClockTick())

    def _step(self, event: happen.Event) -> None:
        participant = self.participant
        if participant is None or self.ended.is_set():
            return
        for action in participant.step(clock(), event):
            self._act(action)
        self._look_at_round()
        if participant.ended is not None:
            self._end(participant.ended)

    def _act(self, action: happen.Action) -> None:
        match action:
            case Send(tag, command):
                self._send(command, lambda reply: self._step(happen.Answer(tag, reply)))
            case StartRound():
                self._prepare(action)
            case StopRound():
                self._stop(action)

    def _send(self, command: Command, answered: Callable[[Reply], None] = lambda reply: None) -> None:
        if self.client is None:
            return
        try:
            self.client.send(command, lambda reply: self._calls.put(lambda: answered(reply)))
        except StoreError:
            pass  # the connection is over for good, and `lost` is in the queue

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
            self._step(happen.Connected())
        elif state.what == "disconnected":
            self._step(happen.Disconnected())

    def _begin(self) -> None:
        assert self.client is not None
        welcome = self.client.welcome
        self.client.grace = self.options.store_grace
        options = self.options if welcome is None else _with_linger(self.options, welcome.linger)
        self.participant = Participant(self.info, options)
        self.line.learn("joining", clock())
        for action in self.participant.start(clock()):
            self._act(action)
        if self._leaving:
            self._step(happen.LeaveRequested(self._leaving))

    def _unreached(self, state: State) -> None:
        if self.participant is None and self._dialling_since is not None:
            left = self._dialling_since + self.options.join_timeout - clock()
            where = f"connecting to the store at {self.settings.where}"
            self.line.learn(f"{where} ({state.why}), {max(0.0, left):.0f} s left", clock())
        if state.what == "refused":
            self._refused(state.at)

    def _refused(self, at: float) -> None:
        self._step(happen.Refused(at))
        welcome = self.client.welcome if self.client is not None else None
        closed = self._round is not None and self._round.phase == CLOSED
        if welcome is None or welcome.durable or closed:
            return
        self._refused_since = self._refused_since or at
        if at - self._refused_since >= min(REFUSED_PATIENCE, self.options.store_grace):
            self._lose(
                f"the store at {self.settings.where} has ended, and what it held with it: it kept no journal "
                "(a separate phalanx store --journal FILE lets jobs outlive their store)"
            )

    def _lose(self, why: str) -> None:
        if self.participant is None:
            refused = self.client is not None and isinstance(self.client.lost, StoreAuthError)
            self._end(End("error" if refused else "connect", why, None))
        else:
            self._step(happen.StoreLost(why))

    def _notice(self, notice: Notice) -> None:
        entries = [change.entry for change in notice.changes if not change.deleted]
        if notice.watch == STATUS:
            self._learn_status(tuple(entries))
        elif notice.watch >= MEETING:
            self._meet(notice.watch - MEETING, tuple(entries))
        else:
            self._step(happen.Noticed(notice))

    # Rounds

    @property
    def _round(self) -> Round | None:
        return self.participant.round if self.participant is not None else None

    def _shared(self, number: int) -> str:
        return shared_prefix(self.settings.run_id, number)

    def _prepare(self, start: StartRound) -> None:
        """A round is active with this node in it: find or make the place where its workers meet."""
        number = start.round.number
        if NodeFailure.read(
            start.round.cause[2]
        ).final:  # the job is being closed for it; nobody starts again
            self._calls.put(lambda: self._step(happen.WorkersStopped(number)))
            return
        self._coming = start
        key = self._shared(number) + "meeting"
        if start.rank:
            self._send(Watch(MEETING + number, key), lambda reply: self._meet(number, reply.entries))
            return
        address = self.info.addr
        try:
            served, port = self.open_meeting(listening_address(address))
        except OSError as error:
            text = f"cannot serve the workers' store on {address}: {error}; name another with --local-addr"
            self._report(number, NodeFailure(text, final="a wrong address stays wrong"), start)
            self._calls.put(lambda: self._step(happen.WorkersStopped(number)))
            return
        # Two, because the round after the last one that ran may have ended before it was active.
        old = tuple(Delete(self._shared(number - back), prefix=True) for back in (1, 2))
        self._send(Txn((), (Put(key, f"{address} {port}".encode()),), old))
        self._hand(start, address, port, served)

    def _meet(self, number: int, entries: tuple[Any, ...]) -> None:
        start = self._coming
        if start is not None and start.round.number == number and entries:
            address, _, port = entries[0].value.decode().rpartition(" ")
            self._send(Unwatch(MEETING + number))
            self._hand(start, address, int(port), None)

    def _hand(self, start: StartRound, address: str, port: int, served: Any) -> None:
        self._coming, self._handed = None, start
        self._finished_by = None
        if self._status_watched:
            self._status_watched = False
            self._send(Unwatch(STATUS))
        self.tell(Formed(start.round, start.rank, address, port, served))

    def _stop(self, stop: StopRound) -> None:
        if self.participant is not None and self.participant.ended is not None:
            return  # the end of the job is about to be told, which says more
        if self._handed is not None and self._handed.round.number == stop.number:
            self._tell_over(stop.reason, stop.at_once)
        elif self._last is not None and self._last.number == stop.number:
            if stop.at_once:  # a stop is under way, with a grace that there is no time for any more
                self.tell(Over(self._last, self._round, stop.reason, True, False))
        else:  # nobody has heard of this round yet
            self._coming = None
            self._calls.put(lambda: self._step(happen.WorkersStopped(stop.number)))

    def _look_at_round(self) -> None:
        """A node that has finished is not told to stop, but has to know when the others start again."""
        handed, current = self._handed, self._round
        if current is None or current.phase == CLOSED:
            return
        if handed is not None and current.number != handed.round.number:
            self._tell_over(current.reason, at_once=False)
        if current.cause[2] and not self._closing and (final := NodeFailure.read(current.cause[2]).final):
            self._closing = True
            self.close(f"workers on {current.cause[1]} failed; not restarted: {final}")

    def _tell_over(self, reason: str, at_once: bool) -> None:
        assert self._handed is not None
        self._last, self._handed = self._handed.round, None
        self._finished_by = None
        self.line.wait(clock())
        drained = self._round is not None and self.info.id in self._round.out
        self.tell(Over(self._last, self._round, reason, at_once, drained))

    def _report(self, number: int, failure: NodeFailure, start: StartRound | None = None) -> None:
        start = start or self._handed
        if start is None or start.round.number != number:
            # Of a round that everybody knows to be over; but what ends the job does so whenever it comes.
            if failure.final:
                self.close(f"{FAILED}{self.info.name}: {failure.summary}")
            return
        prefix, node = self.options.prefix, self.info.id
        mine = When(f"{prefix}node/{node}", "create", start.round.members[start.rank].incarnation)
        result = Put(f"{prefix}result/{number}/{node}", encode(Result(False, failure.text())))
        self._send(Txn((mine,), (result,)))

    def _finish(self, number: int, timeout: float) -> None:
        # The host stays as long as it takes: the others could not finish without their store.
        self._finished_by = None if self.hosting else clock() + timeout
        self._step(happen.WorkersEnded(number, True))

    def _leave(self, reason: str) -> None:
        self._leaving = reason
        if self.participant is None:
            self._end(End("left", reason, None))
        else:
            self._step(happen.LeaveRequested(reason))

    def _close(self, reason: str) -> None:
        if self.participant is not None:
            # Numbered: what arrives late must not close the next job of this id.
            key = f"{self.options.prefix}close/{self.participant.job}"
            self._send(Put(key, reason.encode()))

    # Telling

    @property
    def _leading(self) -> bool:
        return self.participant is not None and self.participant.leading and not self.ended.is_set()

    def _show(self, now: float) -> None:
        """Tell what we wait for; the first time ask the leader for it, and tell when the answer is there."""
        if not self._leading and not self._status_watched and self.participant is not None:
            self._status_watched = True
            key = self.options.prefix + "status"
            self._send(Watch(STATUS, key), lambda reply: self._learn_status(reply.entries))
            self.line.wait(now)
        else:
            self.tell(Waiting(self.line.show(now)))

    def _learn_status(self, entries: tuple[Any, ...]) -> None:
        if entries and self._status_watched and not self._leading:
            self.line.learn(entries[0].value.decode(errors="replace"), clock())
            if not self.line.shown:
                self.tell(Waiting(self.line.show(clock())))

    def _write_at(self) -> float | None:
        if not self._leading or self.participant is None:
            return None
        self.line.learn(self.participant.reason, clock())
        return self.line.write_at(self._round is None or self._round.phase == FORMING)

    def _end(self, end: End) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self.tell(Ended(end, self._handed.round if self._handed else None))

    def _say_goodbye(self) -> None:
        """Take our key away, so that nobody waits for our lease; the host does so when all others have."""
        client, participant = self.client, self.participant
        if client is None or client.lost is not None or participant is None:
            return
        if self.hosting:
            # With its key the host is still part of a job that is ending: who comes now is told its end, and
            # begins no new job at a store that is about to go.
            self._wait_for_the_others(client, participant)
        if participant.lease:
            self._send(Revoke(participant.lease))

    def _wait_for_the_others(self, client: Client, participant: Participant) -> None:
        end = clock() + FAREWELL
        nodes = self.options.prefix + "node/"
        changed = threading.Event()
        try:
            client.watch(nodes, lambda notice: changed.set(), prefix=True)
            while clock() < end:
                here = client.request(Get(nodes, prefix=True), FAREWELL).entries
                if all(entry.lease == participant.lease for entry in here):
                    return
                changed.wait(max(0.0, end - clock()))
                changed.clear()
        except StoreError:
            pass  # a courtesy


def shared_prefix(run_id: str, number: int) -> str:
    """Where the nodes of a round tell each other what is only theirs; apart from what the leader watches."""
    return f"shared/{run_id}/{number}/"


def _with_linger(options: Options, linger: float) -> Options:
    from dataclasses import replace

    return replace(options, linger=linger)
