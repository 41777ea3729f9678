"""One node's part in the rendezvous: events in, actions out; no clock, no sockets, no processes.

The shell passes `step` what happened (answers and notices of the store, changes of the connection, the
end of workers, a request to leave) and carries out the actions. `step` is level-triggered: it takes
the event into its state, then evaluates the same short list of conditions every time, so that no order
of events, loss or repetition needs a case of its own.

Fencing, on which `core.rounds.rounds` relies: this node runs workers only while its lease is certainly alive.
- An answered keep-alive proves the lease from the moment it was *sent*, for the lease's time.
- A connection that ended gives the store reason to shorten the lease to `linger`, counted from the
  end of the connection at the earliest; so the node counts from there as well.
- Nothing else counts. A refused connection was once taken as proof that the store is down, and let
  workers run on: but a firewall, a proxy or a wrong route refuses as well, while the store lives and
  gives the lease away. A job outlives a restart of its store because a store with a journal starts
  every lease again and does not shorten leases (`linger` is infinite): the restart has the lease's
  time, and a longer absence stops the workers until the store is back.
- The end of the job for this node does not end the promise: workers that are stopped with a grace are
  killed when the lease may run out before they are gone.
- A tenth of the time is kept back for killing workers and for clocks that run at different speeds.

`now` must come from a monotonic clock that also counts time asleep (CLOCK_BOOTTIME on Linux), and
the first event after a sleep is checked against the fence before anything else is believed.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.group.events import RoundOver
from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.leader_view import LeaderView, Options
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant_events import (
    Action,
    Answer,
    CloseRequested,
    Connected,
    Disconnected,
    End,
    Event,
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
from phalanx.core.rounds.quarantine import HostWatch
from phalanx.core.rounds.records import (
    ACTIVE,
    CLOSED,
    FORMAT,
    CloseRequest,
    NodeInfo,
    NodeRecord,
    Place,
    Result,
    Round,
    decode_place,
    decode_round,
    encode,
)
from phalanx.core.rounds.rounds import begin_again, decide
from phalanx.core.rounds.store_commands import (
    Change,
    Command,
    Delete,
    Entry,
    Get,
    Grant,
    KeepAlive,
    Notice,
    Put,
    Reply,
    Revoke,
    Txn,
    Unwatch,
    Watch,
    When,
)
from phalanx.core.rounds.verdicts import round_over

CONTROL, PLACE = 1, 2  # the watches of every node; a leader's own gets a new number each time
FENCE = 0.9
QUIET = 0.005  # a leader of thousands decides at most this often
_UNSURE = 1.5  # leases
_FEW_WORDS = 200  # of a failure, in the record of its host
LOST_ROUNDS = 100  # that a store which went back may have had without any node that is present


def _result(failure: NodeFailure, blameless: bool) -> Result:
    what = failure.summary[:_FEW_WORDS]
    return Result(False, failure.text(), False, what, failure.ranks, blameless, delay=failure.delay)


class _Pending(NamedTuple):
    kind: str
    generation: int
    sent: float
    hung_up: float | None = None  # when the first connection that it was asked on ended


class Participant:
    """The state of one node between events."""

    def __init__(self, info: NodeInfo, options: Options, rounds: int = 0, restarts: int = 0) -> None:
        """`rounds` and `restarts`: what this node knows from a store that was lost."""
        self.info, self.options = info, options
        self.rounds, self.restarts = rounds, restarts
        self.round: Round | None = None
        self.reason = "joining"
        self.running: int | None = None  # the round whose workers this node has
        self.rank = -1
        self.ended: End | None = None
        self._round_mod, self._round_at = 0, 0.0  # its revision, and when it was first seen in its phase
        self._job = 0  # the number of this node's job among those with this id; 0: not known yet
        self.place, self._place_mod = Place(), 0
        self._outside = ""  # the stamp of a round that this node is known not to be in
        self._leader = Entry("")
        self._control = False  # whether the control keys are known
        self._held: StartRound | None = None  # what the group was given, until its end is reported
        self._succeeded = False  # the workers of this node
        self._finished = -1  # the round in which they have
        self._close: CloseRequest | None = None
        self._stopping = False
        self._started = (0, 0)
        self._leaving = ""
        self._preempted = False
        self._unreadable = False  # the store has a round, and this node cannot read it
        self._skipped: dict[str, None] = {}  # keys that this node has named as not readable
        self.lease = self._old_lease = 0
        self._generation = 1
        self._incarnation = self._node_mod = self._ready = 0
        self._told_leaving = False
        self._proof = self._heard = self._waiting_since = 0.0
        self._cap: float | None = None
        self._away = False  # the connection to the store has ended
        self._unsure_until = 0.0  # until when nodes may be lost because the store was away
        self._quiet_until = 0.0  # until when nodes may run on leases that the store has forgotten
        self._next_beat = 0.0
        self.hosts = HostWatch()
        self._view: LeaderView | None = None
        self._everything, self._view_complete, self._dirty = PLACE, False, False
        self._decided = self._status_at = float("-inf")
        self._lead_wake: float | None = None
        self._unsent: Txn | None = None  # the round, until all its places are written
        self._published_txn = Txn(())
        self._pending: dict[int, _Pending] = {}
        self._tags = 0
        self._out: list[Action] = []

    @property
    def job(self) -> int:
        """Which of the jobs with this id this node is part of."""
        return self._job or 1

    @property
    def knows_job(self) -> bool:
        """Whether it is known which of the jobs with this id this node is part of."""
        return bool(self._job)

    @property
    def leaving(self) -> bool:
        """Whether this node goes."""
        return bool(self._leaving)

    @property
    def leading(self) -> bool:
        """Whether this node decides for the job."""
        return self._view is not None

    def start(self, now: float) -> list[Action]:
        """The first actions of a node."""
        self._heard = self._waiting_since = now
        # Where there is no round yet, one command joins: it registers the node, and makes the first one the
        # leader. Elsewhere its conditions fail, and the node registers when it knows the round.
        round_key, node, leader = map(self._key, ("ctl/round", "node/" + self.info.id, "ctl/leader"))
        self._ready = 1
        record = Put(node, encode(self._record()._replace(job=1)))
        first = Put(leader, self.info.id.encode(), new=True)
        unknown = When(round_key, "mod", 0), When(node, "mod", 0)
        self._send(now, "grant", Grant(self.options.ttl, Txn(unknown, (record, first))))
        self._ask_watches(now)
        return self._drain()

    def step(self, now: float, event: Event) -> list[Action]:
        """Take in one event; return what to do."""
        if self.ended is None:
            # The fence comes first: after a sleep nothing else may be believed before it.
            self._check_fence(now)
            self._take_in(now, event)
            self._go_on(now)
        else:
            self._after_the_end(now, event)
        return self._drain()

    def _after_the_end(self, now: float, event: Event) -> None:
        """Workers that are being stopped must still be gone before the lease is."""
        if isinstance(event, WorkersStopped) and event.round == self.running:
            self.running = None
        elif self.running is not None and self.lease and now >= self.fence_at:
            self._out.append(RoundOver(self.running, "the lease may be over", at_once=True))
            self.running = None

    def wake_at(self) -> float | None:
        """When to send a Tick if nothing else happens."""
        if self.ended is not None:
            return self.fence_at if self.running is not None and self.lease else None
        times = [self._heard + self.options.store_grace]
        if self.lease:
            times.append(self.fence_at)
            if not self._asking("beat"):
                times.append(self._next_beat)
        # Not while an answer is awaited before anything can be decided: it would wake this node all the time.
        if self._lead_wake is not None and self._incarnation and self._view_complete and not self._publishing:
            times.append(self._lead_wake)
        if self.running is None:
            times.append(self._give_up_at())
        return min(times)

    # Taking in

    def _take_in(self, now: float, event: Event) -> None:
        match event:
            case Answer(tag, reply):
                self._heard = now
                pending = self._pending.pop(tag, None)
                if pending is not None and pending.generation in (0, self._generation):
                    self._answered(now, pending, reply)
            case Noticed(notice):
                self._heard = now
                self._noticed(now, notice)
            case Connected():
                self._heard = now
                self._next_beat = now
                self._reached_again(now)
            case Disconnected():
                self._hung_up(now)
            case StoreLost(why):
                self._quit(End("store", why, self.round))
            case StoreWentBack():
                self._begin_anew(now)
            case WorkersStopped(number) if number == self.running:
                self._idle(now)
            case LeaseMissed(number) if number == self.running and self.lease:
                self._fence(now, "the lease was not renewed in time")
            case WorkersSucceeded(number) if number == self.running and not self._stopping:
                self._succeeded, self._finished = True, number
                self._report(now, Result(True))
            case WorkersFailed():
                self._failed(now, event)
            case RoundRequested(number, reason, restarts) if self._holds(number):
                result = _result(NodeFailure(reason), blameless=True)
                self._report(now, result._replace(request=restarts))
            case CloseRequested(reason):
                self._close = CloseRequest(reason)
            case LeaveRequested(reason, preempted):
                self._leaving, self._preempted = self._leaving or reason, self._preempted or preempted

    def _holds(self, number: int) -> bool:
        return self._held is not None and self._held.round.number == number

    def _failed(self, now: float, event: WorkersFailed) -> None:
        failure = event.failure
        if self._holds(event.round):
            self._report(now, _result(failure, event.blameless)._replace(unfit=event.unfit))
        elif failure.final and not event.unfit:  # its round is over, and the job ends still
            cause = (self.info.id, self.info.name, failure.text())
            self._close = CloseRequest(failure.ending_of(self.info.name), cause)

    def _reached_again(self, now: float) -> None:
        """A store that restarts begins all leases anew: until they are over, a lost node proves nothing."""
        if self._away:
            self._away, self._unsure_until = False, now + _UNSURE * self.options.ttl
            if self._view is not None:
                self._view.unsure_until = self._unsure_until

    def _hung_up(self, now: float) -> None:
        """The store may shorten the lease from now on; a later connection that ends does not prolong that."""
        self._away = True
        if self.lease and self._cap is None:
            self._cap = now + self.options.linger * FENCE
        for tag, pending in self._pending.items():
            if pending.kind == "grant" and pending.hung_up is None:
                self._pending[tag] = pending._replace(hung_up=now)

    def _answered(self, now: float, pending: _Pending, reply: Reply) -> None:
        kind = pending.kind
        if kind == "control":
            self._noticed(now, Notice(CONTROL, tuple(map(Change, reply.entries)), reply.revision, True))
            self._control = True
            if self.round is None:
                # A leader writes a round that cannot be read again: with it comes the number of the job.
                self._job = 0 if self._unreadable and self._leader.lease else self._job or 1
            elif self.round.phase != CLOSED and self._leader.lease:
                self._job = self.round.job
        elif kind == "placed":
            self._learn_place(reply.entries)
        elif kind == "place":
            self._learn_place(reply.entries)
            # Read after the round was seen, so it is final: without a place this node is not a member.
            if self.round is not None and reply.revision >= self._round_mod and not self._is_member():
                self._outside = self.round.stamp
        elif kind == "remaining":
            if self.round is not None and not self._job and reply.revision >= self._round_mod:
                claim = begin_again(
                    self.round, self._round_mod, self._foreign_leader, self.options, len(reply.entries)
                )
                self._send(now, "again", claim)
        elif kind == "again":
            self._learn_again(now, reply)
        elif kind == "everything" and self._view is not None:
            self._view_complete = self._dirty = True
            self._view.learn(now, tuple(map(Change, reply.entries)), reset=True)
            self._remark()
        elif kind == "grant":
            self.lease, self._proof, self._cap = reply.number, pending.sent, None
            self._next_beat = pending.sent + self.options.ttl / 3
            for mine in reply.entries[1:]:
                if mine.lease == self.lease:
                    self._job, self._incarnation, self._node_mod = 1, mine.create, mine.mod
                    self._learn_leader(now, self._leader)  # it may be this node
            if pending.hung_up is not None:
                # It may have been granted before the connection ended, and shortened then.
                self._cap, self._next_beat = pending.hung_up + self.options.linger * FENCE, now
        elif kind == "revoke":
            self._old_lease = 0
            if not self._leaving:
                self._send(now, "grant", Grant(self.options.ttl))
        elif kind == "beat":
            self._beaten(now, pending.sent, reply)
        elif kind in ("publish", "batch"):
            self._published(now, kind, reply)
        elif kind in ("register", "update", "campaign", "report"):
            self._wrote(now, kind, reply)

    def _beaten(self, now: float, sent: float, reply: Reply) -> None:
        if not reply.ok:
            self._fence(now, "the store ended the lease of this node")
            return
        self._proof, self._cap = max(self._proof, sent), None
        self._next_beat = max(self._next_beat, sent + self.options.ttl / 3)

    def _wrote(self, now: float, kind: str, reply: Reply) -> None:
        """A write that was conditional on the node's own key: a failure may mean that the lease is lost."""
        mine = reply.entries[0]
        if reply.error == "lease" or (mine.lease != self.lease and kind != "register"):
            self._fence(now, "the store no longer knows this node")
        elif kind == "register":
            # Not ok but on this lease: a repeated write that had succeeded (etcd does not remember it).
            if mine.lease == self.lease:
                self._incarnation = mine.create
                self._node_mod = mine.mod
            elif mine.mod:
                # Not on a lease: another program wrote it. On another one: a store that went back has it from
                # an incarnation of this node that is long over. Either is in the way, and this node must be
                # known before the leader decides: it knows rounds that the store forgot.
                stale = When(mine.key, "mod", mine.mod)
                self._send(now, "register", Txn((stale,), deletes=(Delete(mine.key),)))
        elif kind == "update":
            self._node_mod = mine.mod
            if not reply.ok:  # the known revision of the key was old: write again
                self._ready, self._told_leaving = 0, False
        elif kind == "campaign":
            self._learn_leader(now, reply.entries[1])

    def _noticed(self, now: float, notice: Notice) -> None:
        if notice.watch == PLACE:
            self._learn_place(tuple(change.entry for change in notice.changes if not change.deleted))
            return
        if notice.watch != CONTROL:
            if self._view is not None and self._view_complete and notice.watch == self._everything:
                self._view.learn(now, notice.changes, notice.reset)
                self._remark()
                self._dirty = True
            return
        if notice.reset and not any(c.entry.key.endswith("leader") for c in notice.changes):
            self._learn_leader(now, Entry("", mod=notice.revision))
        self._learn_hosts(now, notice)
        for entry, deleted in notice.changes:
            if entry.key == self._key("ctl/round") and not deleted and entry.mod > self._round_mod:
                self._learn_round(now, entry, news=not notice.reset)
            elif entry.key == self._key("ctl/leader"):
                self._learn_leader(now, Entry("", mod=entry.mod) if deleted else entry)

    def _learn_hosts(self, now: float, notice: Notice) -> None:
        prefix = self._key(HOSTS)
        found = [change for change in notice.changes if change.entry.key.startswith(prefix)]
        if notice.reset:
            self.hosts.only(now, {change.entry.key.removeprefix(prefix) for change in found})
        for entry, deleted in found:
            self.hosts.learn(now, entry.key.removeprefix(prefix), entry, deleted)

    def _learn_round(self, now: float, entry: Entry, news: bool = False) -> None:
        if self.round is not None and self.round.phase == CLOSED and self.round.job == self._job:
            return  # this node's job has ended; the round belongs to the next one
        found = decode_round(entry.value)
        self._round_mod = entry.mod
        # Written since the leader was elected, and not by it: the leader writes its own again.
        foreign = found is not None and self._leader.lease and found.term != self._leader.create
        back = found is not None and self.round is not None and found.older_than(self.round)
        self._unreadable = found is None or back or bool(news and foreign and entry.mod > self._leader.mod)
        if found is None or self._unreadable:
            return
        # A store that went back has an older count; that of a job only grows.
        known = self.restarts if found.job == self._job else 0
        if self.round is None or found.stage != self.round.stage:
            self._round_at = now
        self.round, self.restarts = found, max(known, found.restarts)
        if found.phase == ACTIVE:
            self.rounds = max(self.rounds, found.number)
        if not self._job and self._control and self.round.phase != CLOSED:  # a change: a leader exists
            self._job = self.round.job
        if self._view is None:
            self.reason = self.round.reason

    def _learn_place(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            if entry.mod > self._place_mod:
                self._place_mod = entry.mod
                self.place = decode_place(entry.value) or Place()

    def _learn_again(self, now: float, reply: Reply) -> None:
        """The round after `begin_again`: a new one, or the one that was found, which is then this node's.

        Where that one is the same and the request failed, a leader was elected meanwhile: look again."""
        entry = reply.entries[0]
        if entry.mod > self._round_mod:
            self._learn_round(now, entry)
        elif reply.ok and entry.mod == self._round_mod and self.round is not None:
            self._job = self.round.job

    def _learn_leader(self, now: float, entry: Entry) -> None:
        if entry.mod and entry.mod < self._leader.mod:
            return
        another = bool(entry.lease) and entry.create != self._leader.create
        self._leader = entry
        if another and self._succeeded and self._incarnation:
            self._report(now, Result(True))  # the new leader may not find it
        ours = entry.lease != 0 and entry.lease == self.lease
        if self._view is not None and (not ours or entry.create != self._view.term):
            self._step_down(now)
        if ours and self._view is None:
            self._view = LeaderView(
                self.options,
                entry.create,
                round=self.round or Round(),
                since=now if self.round is None else self._round_at,
                quiet_until=self._quiet_until,
                unsure_until=self._unsure_until,
                skipped=self._skipped,
                hosts=self.hosts,
            )
            self._read_everything(now)

    def _remark(self) -> None:
        assert self._view is not None
        self._out += [Remark(line) for line in self._view.remarks]
        self._view.remarks.clear()

    def _begin_anew(self, now: float) -> None:
        """Nothing that this node knows from the store holds: not its lease, its place, nor the round."""
        if self.lease:
            self._fence(now, "the store went back to an earlier state")
        self.rounds += LOST_ROUNDS  # the number of a round that is lost must not be used again
        self._round_mod = self._place_mod = 0
        self.round, self.place, self._outside, self._leader = None, Place(), "", Entry("")
        self._control, self._unreadable = False, False
        self.hosts.begin_anew()
        # Nodes that the store has forgotten run workers until their own clocks stop them.
        self._quiet_until = now + self.options.ttl
        self._unsure_until = now + _UNSURE * self.options.ttl
        self._ask_watches(now)

    def _ask_watches(self, now: float) -> None:
        self._send(now, "control", Watch(CONTROL, self._key("ctl/"), prefix=True))
        self._send(now, "placed", Watch(PLACE, self._key("place/" + self.info.id)))

    def _step_down(self, now: float) -> None:
        self._view, self._view_complete, self._lead_wake, self._unsent = None, False, None, None
        for tag in [t for t, p in self._pending.items() if p.kind in ("publish", "batch", "everything")]:
            del self._pending[tag]
        self._send(now, "unwatch", Unwatch(self._everything))

    def _read_everything(self, now: float) -> None:
        # A fresh number, so that nothing said about an older watch can be taken for this one.
        if self._view_complete:
            self._send(now, "unwatch", Unwatch(self._everything))
        self._view_complete = False
        self._everything += 1
        self._send(now, "everything", Watch(self._everything, self.options.prefix, prefix=True))

    # Fencing

    @property
    def fence_at(self) -> float:
        """When the lease may be over: no worker may run on this node from then on."""
        surely = self._proof + self.options.ttl * FENCE
        return surely if self._cap is None else min(surely, self._cap)

    @property
    def confirmed_at(self) -> float:
        """When the last keep-alive was sent that the store has answered."""
        return self._proof

    def _check_fence(self, now: float) -> None:
        if self.lease and now >= self.fence_at:
            self._fence(now, f"no answer from the store for {now - self._proof:.1f} s, the lease may be over")

    def _fence(self, now: float, why: str) -> None:
        """The lease may be lost: stop at once, then rejoin as a new incarnation.

        The lease is given back when the workers are gone, not before: killing them may take a while."""
        if self._view is not None:
            self._step_down(now)
        self._old_lease, self.lease = self.lease, 0
        self._generation += 1
        self._incarnation = self._node_mod = self._ready = 0
        self._told_leaving = False
        self.reason = why
        if self._succeeded:
            self._idle(now)
        if self.running is not None:
            # Even during a stop: a grace period that outlasts the lease would allow two rounds at once.
            self._stopping, self._held = True, None
            self._out.append(RoundOver(self.running, why, at_once=True))
        elif not self._asking("revoke"):
            self._send(now, "revoke", Revoke(self._old_lease))

    # Going on

    def _go_on(self, now: float) -> None:
        """The questions that are asked after every event."""
        if self.ended is not None:
            return
        if now >= self._heard + self.options.store_grace:
            silent = f"no answer from the store for {self.options.store_grace:.0f} s (--store-grace)"
            self._quit(End("store", silent, self.round))
            return
        current = self.round
        if self.lease and now >= self._next_beat and not self._asking("beat"):
            self._send(now, "beat", KeepAlive(self.lease))
            self._next_beat = now + self.options.ttl / 3
        if current is not None and self.info.id in current.out:
            self._leaving = self._leaving or "drained on request"
        if self._close is not None and self._job:
            # Numbered: a late request must not close the next job of this id.
            self._send(now, "close", Put(self._key(f"close/{self._job}"), encode(self._close)))
            self._close = None
        self._end_round(now)
        if self._incarnation:
            self._update(now)
            self._lead(now)
        if self.running is None:
            self._while_idle(now)

    def _while_idle(self, now: float) -> None:
        current = self.round
        if current is not None and self._job == current.job and current.phase == CLOSED:
            self._quit(End(current.outcome, current.reason, current))
        elif current is not None and self._job not in (0, current.job):
            self._quit(End("replaced", "its job ended while it was away, and another has its id", current))
        elif current is not None and current.format > FORMAT:
            newer = f"this version of phalanx reads records up to format {FORMAT}, and the job uses format"
            self._quit(
                End("refused", f"{newer} {current.format}: install the same version on all nodes", current)
            )
        elif self.place.refused and self.options.fixed:
            self._quit(End("refused", self.place.refused, current))
        elif self._leaving:
            if self.lease:
                self._send(now, "revoke", Revoke(self.lease))
                self.lease = 0
                self._waiting_since = now
            # An answer is a courtesy: without one the lease runs out by itself.
            answered = not (self._asking("revoke") or self._asking("grant") or self._old_lease)
            if answered or now >= self._give_up_at():
                self._quit(End("left", self._leaving, current))
        elif now >= self._give_up_at():
            waited = f"{self.reason}; gave up after {now - self._waiting_since:.0f} s"
            self._quit(End("timeout", waited, current))
        elif current is not None and not self._job:
            if not (self._asking("remaining") or self._asking("again")):
                self._send(now, "remaining", Get(self._key("node/"), prefix=True))
        elif not self._job and self._control and not self._leader.lease:
            self._job = 1  # the round cannot be read, and no leader will write it again: this node may
            self._while_idle(now)
        elif self.lease and self._control and self._job and not self._incarnation:
            self._register(now)
        elif current is not None and current.phase == ACTIVE:
            if self._is_member() and self._started != (current.number, self._incarnation):
                self._started = (current.number, self._incarnation)
                self.running, self.rank, self._succeeded = current.number, self.place.rank, False
                if not self.options.fixed and any(self.hosts.state.entry(n, now) for n in current.names):
                    self._out.append(Remark(current.reason))  # why a quarantined host takes part
                self._held = StartRound(current, self.place)
                self._out.append(self._held)
            elif current.nodes >= self.options.max_nodes or self.hosts.state.entry(self.info.name, now):
                self._waiting_since = now  # a spare has no time-out

    def _end_round(self, now: float) -> None:
        """Report the end of the round that the group holds: the job has moved on, or this node leaves."""
        current, held = self.round, self._held
        if current is None or held is None:
            return
        moved, closed = current.number != held.round.number, current.phase == CLOSED
        if self.running is not None and (self._leaving or moved or closed):
            if self._succeeded:
                self._idle(now)
            else:
                self._stopping = True
                self._report_end(held, current)
                return
        if moved and not closed:  # the group has finished, or its workers have failed
            self._report_end(held, current)

    def _report_end(self, held: StartRound, current: Round) -> None:
        self._held = None
        drained = self.info.id in current.out
        self._out.append(round_over(held.round, current, self._leaving, drained))

    def _idle(self, now: float) -> None:
        self.running, self.rank, self._stopping, self._succeeded = None, -1, False, False
        self._waiting_since = now
        if self._old_lease and not self._asking("revoke"):
            self._send(now, "revoke", Revoke(self._old_lease))

    def _is_member(self) -> bool:
        """Whether this node, as it is registered now, is known to be in the active round."""
        current, place = self.round, self.place
        return (
            current is not None
            and current.phase == ACTIVE
            and bool(self._incarnation)
            and (place.stamp, place.incarnation) == (current.stamp, self._incarnation)
            and current.stamp != self._outside
        )

    def _wanted_ready(self) -> int:
        if self.round is None:
            return 1
        return self.round.number + (self.round.phase == ACTIVE)

    def _register(self, now: float) -> None:
        if self._asking("register"):
            return
        self._ready = self._wanted_ready()
        key = self._key("node/" + self.info.id)
        record = encode(self._record())
        self._send(now, "register", Txn((When(key, "mod", 0),), (Put(key, record, self.lease),)))

    def _update(self, now: float) -> None:
        """Keep the node's own key up to date: the round it is ready for, and whether it is leaving."""
        leaving = bool(self._leaving) and not self._told_leaving
        wanted = self._wanted_ready() if self.running is None else self._ready
        behind = wanted > self._ready and not self._is_member()
        if self._asking("update") or not (leaving or behind):
            return
        current = self.round
        if behind and current is not None and current.phase == ACTIVE and current.stamp != self._outside:
            # The place may be on its way: being ready for the next round would deny the workers of this one.
            if not self._asking("place"):
                self._send(now, "place", Get(self._key("place/" + self.info.id)))
            if not leaving:
                return
            wanted = self._ready
        self._ready, self._told_leaving = max(wanted, self._ready), bool(self._leaving)
        key = self._key("node/" + self.info.id)
        record = encode(self._record())
        self._send(now, "update", Txn((When(key, "mod", self._node_mod),), (Put(key, record, self.lease),)))

    def _record(self) -> NodeRecord:
        return NodeRecord(
            self.info,
            self._ready,
            self._leaving,
            self._job,
            self.rounds,
            self.restarts,
            self._preempted,
            FORMAT,
        )

    def _report(self, now: float, result: Result) -> None:
        """Publish how the workers of the round that the group holds have ended."""
        assert self._held is not None
        number, incarnation = self._held.round.number, self._held.place.incarnation
        mine = When(self._key("node/" + self.info.id), "create", incarnation)
        put = Put(self._key(f"result/{number}/{self.info.id}"), encode(result))
        self._send(now, "report", Txn((mine,), (put,)))

    def _lead(self, now: float) -> None:
        """Stand for election when there is no leader; decide when this node is the leader."""
        if self._view is None:
            closed = self.round is not None and self.round.phase == CLOSED
            known = self._leader.lease or not self._control
            if not (known or self._leaving or closed or self._asking("campaign")):
                node, key = self._key("node/" + self.info.id), self._key("ctl/leader")
                # A foreign key goes first: one that is written over keeps its `create`, the leader's term.
                foreign = self._foreign_leader
                guards = (When(node, "create", self._incarnation), When(key, "mod", foreign))
                mine = (Put(key, self.info.id.encode(), self.lease),)
                self._send(
                    now, "campaign", Txn(guards, deletes=(Delete(key),)) if foreign else Txn(guards, mine)
                )
            return
        due = self._dirty or (self._lead_wake is not None and now >= self._lead_wake)
        if not due or not self._view_complete or self._publishing:
            return
        if now < self._decided + QUIET:
            self._lead_wake = self._decided + QUIET
            return
        self._decided, self._dirty = now, False
        decision = decide(now, self._view, self.options)
        self.reason, self._lead_wake = decision.reason, decision.wake_at
        if decision.commands:
            *batches, main = decision.commands
            assert isinstance(main, Txn)
            self._unsent = main
            for batch in batches:
                self._send(now, "batch", batch)
            self._publish(now)
        elif now >= self._status_at + 1.0:
            self._status_at = now
            guard = When(self._key("ctl/leader"), "create", self._view.term)
            self._send(now, "status", Txn((guard,), (Put(self._key("status"), self.reason.encode()),)))

    @property
    def _foreign_leader(self) -> int:
        """The revision of a leader's key that no leader has written (not on a lease); 0: there is none."""
        return self._leader.mod if self._leader.key and not self._leader.lease else 0

    @property
    def _publishing(self) -> bool:
        return self._asking("publish") or self._asking("batch")

    def _publish(self, now: float) -> None:
        """Send the round, once the places that belong to it are written."""
        if self._unsent is not None and not self._asking("batch"):
            self._published_txn, self._unsent = self._unsent, None
            self._send(now, "publish", self._published_txn)

    def _published(self, now: float, kind: str, reply: Reply) -> None:
        if self._view is None:
            return
        if reply.ok and kind == "batch":
            self._publish(now)
            return
        self._dirty, self._unsent = True, None
        if reply.ok:
            made = [p for p in self._published_txn.puts if not p.lease]
            changes = [Change(Entry(p.key, p.value, mod=reply.revision)) for p in made]
            swept = [d.key for d in self._published_txn.deletes if not d.prefix]
            changes += [Change(Entry(key, mod=reply.revision), deleted=True) for key in swept]
            self._view.learn(now, tuple(changes))
            return
        self._view.failed_writes += 1
        given_back = [p.key for p in self._published_txn.puts if p.key.startswith(self._key("node/"))]
        if reply.error == "lease" and given_back and kind == "publish":  # the node is gone: so is its key
            gone = tuple(map(Delete, given_back))
            self._send(now, "publish", Txn(self._published_txn.when, deletes=gone))
            self._published_txn = Txn(())
        elif reply.entries and reply.entries[0].create != self._view.term:
            self._learn_leader(now, reply.entries[0])
        else:  # decided upon an old view: read everything again
            self._read_everything(now)

    # Small things

    def _give_up_at(self) -> float:
        if self._leaving:
            return self._waiting_since + self.options.ttl
        # Later than the leader, so that normally all nodes get the same reason from it.
        delay = self.round.delay if self.round is not None else 0.0
        return self._waiting_since + delay + self.options.join_timeout + 2 * self.options.ttl

    def _quit(self, end: End) -> None:
        if self._succeeded:
            self.running = None
        held = -1 if self._held is None else self._held.round.number
        self.ended = end._replace(held=held, finished=held >= 0 and held == self._finished)
        self.reason = end.reason
        self._out.append(self.ended)

    def _asking(self, kind: str) -> bool:
        return any(p.kind == kind and p.generation in (0, self._generation) for p in self._pending.values())

    def _key(self, name: str) -> str:
        return self.options.prefix + name

    def _send(self, now: float, kind: str, command: Command) -> None:
        self._tags += 1
        # Requests of an incarnation are void in the next one; the watches stay.
        generation = 0 if kind in ("control", "placed") else self._generation
        self._pending[self._tags] = _Pending(kind, generation, now)
        self._out.append(Send(self._tags, command))

    def _drain(self) -> list[Action]:
        if self.hosts.lines:
            # First: the record of what follows (a stop, a start) then knows that it is due to this.
            self._out[:0] = [Remark(line, host) for line, host in self.hosts.news()]
        out, self._out = self._out, []
        return out
