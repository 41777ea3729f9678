"""One node's part in the rendezvous, as a table: events in, actions out; no clock, no sockets, no processes.

The shell passes `step` what happened (answers and notices of the store, changes of the connection, the
end of workers, a request to leave) and carries out the actions. A step has three parts:

1. The lease. After a sleep nothing else may be believed before it (`core.rounds.lease`).
2. MOVES has what the event means in this phase. Most events only change what is known.
3. DUTIES, the same short list after every event, has what follows from what is known. So no order of events,
   no loss and no repetition needs a case of its own.

An event that may be on its way still although it no longer matters is in LATE; one that is possible nowhere
there, or a move that the tables do not have, is a bug: `IllegalMove`, with the recent history.

What is known has one noun each: the `NodeLease`, the `Registration` of this node's key, the job that it is
`Following`, its `Work`, its `Departure`, the `StoreReach`; a leader has its `Leadership` besides.

- A node registers when it knows which job is its own, and never passes from its job into the next one.
- It starts workers only in a round that it is a member of as it is registered now.
- A lease that may be over ends its workers at once, even during a stop: a grace period that outlasts the
  lease would allow two rounds at once. The lease is given back when the workers are gone, not before: killing
  them may take a while. Then the node joins again as a new incarnation.
- The end of the job for this node does not end the promise: workers that are stopped with a grace are
  killed when the lease may run out before they are gone (ENDING).

`now` must come from a monotonic clock that also counts time asleep (CLOCK_BOOTTIME on Linux).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from phalanx.core.group.events import RoundOver
from phalanx.core.group.group import IllegalMove
from phalanx.core.rounds import participant_events as events
from phalanx.core.rounds.causes import HOSTS
from phalanx.core.rounds.following import Following
from phalanx.core.rounds.leader_view import LeaderView, Options
from phalanx.core.rounds.leadership import Leadership
from phalanx.core.rounds.lease import RENEWALS, NodeLease
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.participant_events import Action, End, Remark, StartRound
from phalanx.core.rounds.participant_state import (
    ENDED,
    ENDING,
    FENCED,
    FINISHED,
    JOINING,
    LEAVING,
    NEW,
    RUNNING,
    STOPPING,
    WAITING,
    Departure,
    NodePhase,
    Registration,
    StoreReach,
    Work,
)
from phalanx.core.rounds.quarantine import HostWatch
from phalanx.core.rounds.records import (
    ACTIVE,
    FORMAT,
    CloseRequest,
    NodeInfo,
    NodeRecord,
    Result,
    Round,
    encode,
)
from phalanx.core.rounds.requests import CONTROL, PLACE, Pending, Purpose, StoreRequests
from phalanx.core.rounds.rounds import begin_again
from phalanx.core.rounds.store_commands import (
    Change,
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
    Watch,
    When,
)
from phalanx.core.rounds.verdicts import round_over

_UNSURE = 1.5  # leases
_FEW_WORDS = 200  # of a failure, in the record of its host
_HISTORY = 12  # moves remembered for the message of an illegal one


class Participant:
    """The state of one node between events."""

    def __init__(self, info: NodeInfo, options: Options, rounds: int = 0, restarts: int = 0) -> None:
        """`rounds` and `restarts`: what this node knows from a store that was lost."""
        self.info, self.options = info, options
        self.phase = NEW
        self.reason = "joining"
        self.lease = NodeLease(options.ttl, options.linger)
        self.registration = Registration()
        self.following = Following(rounds, restarts)
        self.work = Work()
        self.departure = Departure()
        self.reach = StoreReach()
        self.hosts = HostWatch()
        self.ended: End | None = None
        self._waiting_since = 0.0
        self._close: CloseRequest | None = None  # asked for, and not written yet
        self._skipped: dict[str, None] = {}  # keys that this node has named as not readable
        self._out: list[Action] = []
        self._requests = StoreRequests(self._out)
        self._leadership = Leadership(options, self._requests, self._out)
        self._recent: deque[str] = deque(maxlen=_HISTORY)

    @property
    def round(self) -> Round | None:
        """The job's round."""
        return self.following.round

    @property
    def job(self) -> int:
        """Which of the jobs with this id this node is part of."""
        return self.following.job or 1

    @property
    def view(self) -> LeaderView | None:
        """The job as this node sees it while it decides for it."""
        return self._leadership.view

    @property
    def leading(self) -> bool:
        """Whether this node decides for the job."""
        return self.view is not None

    # Steps

    def start(self, now: float) -> list[Action]:
        """The first actions of a node."""
        return self.step(now, events.Begin())

    def step(self, now: float, event: events.Event) -> list[Action]:
        """Take in one event; return what to do."""
        kind = type(event)
        self._carry_out(now, LEASE)
        move = MOVES[self.phase].get(kind)
        if move is not None:
            handler, targets = move
            before = self.phase
            handler(self, now, event)
            self._check(now, before, kind.__name__, targets, event)
        elif kind not in LATE[self.phase]:
            raise IllegalMove(self._complaint(f"{event!r}", "is not possible"))
        for duty in DUTIES:
            self._carry_out(now, duty)
        if self.hosts.lines:
            # First: the record of what follows (a stop, a start) then knows that it is due to this.
            self._out[:0] = [Remark(line, host) for line, host in self.hosts.news()]
        out = self._out.copy()
        self._out.clear()
        return out

    def _carry_out(self, now: float, duty: Duty) -> None:
        before = self.phase
        targets = duty.phases.get(before)
        if targets is not None:
            duty.call(self, now)
            self._check(now, before, duty.name, targets)

    def _check(
        self, now: float, before: NodePhase, name: str, targets: tuple[NodePhase, ...], event: object = None
    ) -> None:
        if self.phase is before:
            return
        if self.phase not in targets:
            after, self.phase = self.phase, before
            what = f"led to {after.value}, which the table does not allow"
            raise IllegalMove(self._complaint(f"{event!r}" if event else name, what))
        self._recent.append(f"{now:.3f} {before.value} --{name}--> {self.phase.value}: {self.reason}")

    def _complaint(self, event: str, what: str) -> str:
        past = "\n  ".join(self._recent) or "(nothing)"
        return f"{event} in phase {self.phase.value} {what}; before it:\n  {past}"

    def wake_at(self) -> float | None:
        """When to send a ClockTick if nothing else happens."""
        if self.phase in (ENDING, ENDED):
            return self.lease.ends if self.phase is ENDING and self.lease.number else None
        times = [self.reach.heard + self.options.store_grace]
        if self.lease.number:
            times.append(self.lease.ends)
            if not self._requests.awaits(Purpose.KEEP_ALIVE):
                times.append(self.lease.renew_at)
        if self._leadership.wake_at is not None and self.registration.incarnation:
            times.append(self._leadership.wake_at)
        if self.phase in (JOINING, WAITING, LEAVING):
            times.append(self._give_up_at)
        return min(times)

    # ---- moves: what an event means --------------------------------------------------------------------

    def _on_begin(self, now: float, event: events.Begin) -> None:
        self.phase, self._waiting_since = JOINING, now
        self._store_answered(now)
        # Where there is no round yet, one command joins: it registers the node, and makes the first one the
        # leader. Elsewhere its conditions fail, and the node registers when it knows the round.
        round_key, leader = self._key("ctl/round"), self._key("ctl/leader")
        self.registration = Registration(ready=1)
        record = Put(self._own_key, encode(self._record()._replace(job=1)))
        first = Put(leader, self.info.id.encode(), new=True)
        unknown = When(round_key, "mod", 0), When(self._own_key, "mod", 0)
        self._ask(now, Purpose.GRANT, Grant(self.options.ttl, Txn(unknown, (record, first))))
        self._watch(now)

    def _watch(self, now: float) -> None:
        self._ask(now, Purpose.WATCH_CONTROL, Watch(CONTROL, self._key("ctl/"), prefix=True))
        self._ask(now, Purpose.WATCH_PLACE, Watch(PLACE, self._key("place/" + self.info.id)))

    def _on_tick(self, now: float, event: events.ClockTick) -> None:
        """The duties know what is due."""

    def _on_connected(self, now: float, event: events.Connected) -> None:
        self._store_answered(now)
        self.lease = self.lease._replace(renew_at=now)
        if self.reach.away:
            # A store that restarts begins all leases again: until they are over, a lost node proves nothing.
            unsure = now + _UNSURE * self.options.ttl
            self.reach = self.reach._replace(away=False, unsure_until=unsure)
            if self.view is not None:
                self.view.unsure_until = unsure

    def _on_disconnected(self, now: float, event: events.Disconnected) -> None:
        self.reach = self.reach._replace(away=True)
        self.lease = self.lease.hung_up(now)
        self._requests.hung_up(now)

    def _on_store_lost(self, now: float, event: events.StoreLost) -> None:
        self._end("store", event.why)

    def _on_store_went_back(self, now: float, event: events.StoreWentBack) -> None:
        """Nothing that this node knows from the store holds: not its lease, its place, nor the round."""
        if self.lease.number:
            self._lose_lease(now, "the store went back to an earlier state")
        self.following = self.following.forgotten()
        self.hosts.reset()
        # Nodes that the store has forgotten run workers until their own clocks stop them.
        ttl = self.options.ttl
        self.reach = self.reach._replace(quiet_until=now + ttl, unsure_until=now + _UNSURE * ttl)
        self._watch(now)

    def _on_answer(self, now: float, event: events.Answer) -> None:
        if not 0 < event.tag <= self._requests.last:
            raise IllegalMove(self._complaint(f"{event!r}", "answers nothing that was asked"))
        self._store_answered(now)
        pending = self._requests.answered(event.tag)
        if pending is not None and (handler := ANSWERS.get(pending.purpose)) is not None:
            handler(self, now, pending, event.reply)

    def _on_noticed(self, now: float, event: events.Noticed) -> None:
        self._store_answered(now)
        notice = event.notice
        if notice.watch == PLACE:
            entries = tuple(change.entry for change in notice.changes if not change.deleted)
            self.following = self.following.learn_place(entries)
            return
        if notice.watch != CONTROL:
            self._leadership.learn(now, notice)
            return
        if notice.reset and not any(c.entry.key.endswith("leader") for c in notice.changes):
            self._learn_leader(now, Entry("", mod=notice.revision))
        self._learn_hosts(now, notice)
        for entry, deleted in notice.changes:
            if entry.key == self._key("ctl/round") and not deleted:
                self._learn_round(now, entry, news=not notice.reset)
            elif entry.key == self._key("ctl/leader"):
                self._learn_leader(now, Entry("", mod=entry.mod) if deleted else entry)

    def _on_stopped(self, now: float, event: events.WorkersStopped) -> None:
        if event.round == self.work.running:
            self._rest(now)

    def _on_succeeded(self, now: float, event: events.WorkersSucceeded) -> None:
        if event.round == self.work.running:
            self.phase, self.work = FINISHED, self.work._replace(finished=event.round)
            self._report(now, Result(True))

    def _on_lease_missed(self, now: float, event: events.LeaseMissed) -> None:
        if event.round == self.work.running:
            self._lose_lease(now, "the lease was not renewed in time")

    def _on_failed(self, now: float, event: events.WorkersFailed) -> None:
        failure, name = event.failure, self.info.name
        if self._holds(event.round):
            self._report(now, _result(failure, event.blameless)._replace(unfit=event.unfit))
        elif failure.final and not event.unfit:  # its round is over, and the job ends still
            self._close = CloseRequest(failure.ending_of(name), (self.info.id, name, failure.text()))

    def _on_round_requested(self, now: float, event: events.RoundRequested) -> None:
        if self._holds(event.round):
            result = _result(NodeFailure(event.reason), blameless=True)
            self._report(now, result._replace(request=event.restarts))

    def _on_close_requested(self, now: float, event: events.CloseRequested) -> None:
        self._close = CloseRequest(event.reason)

    def _on_leave_requested(self, now: float, event: events.LeaveRequested) -> None:
        reason, preempted = self.departure
        self.departure = Departure(reason or event.reason, preempted or event.preempted)

    def _on_gone(self, now: float, event: events.WorkersStopped) -> None:
        if event.round == self.work.running:
            self.phase, self.work = ENDED, self.work._replace(running=0)

    # ---- answers: what the store says --------------------------------------------------------------------

    def _granted(self, now: float, pending: Pending, reply: Reply) -> None:
        self.lease = self.lease.granted(now, reply.number, pending.sent, pending.hung_up)
        for mine in reply.entries[1:]:
            if mine.lease == self.lease.number and self.phase is not LEAVING:
                self.following = self.following._replace(job=1)
                self._registered(mine)
                self._learn_leader(now, self.following.leader)  # it may be this node

    def _registered(self, mine: Entry) -> None:
        self.registration = self.registration._replace(incarnation=mine.create, mod=mine.mod)
        self.phase = WAITING

    def _renewed(self, now: float, pending: Pending, reply: Reply) -> None:
        if reply.ok:
            self.lease = self.lease.renewed(pending.sent)
        elif self.lease.number:
            self._lose_lease(now, "the store ended the lease of this node")

    def _revoked(self, now: float, pending: Pending, reply: Reply) -> None:
        self.lease = self.lease._replace(old=0)
        if self.phase is not LEAVING:
            self._ask(now, Purpose.GRANT, Grant(self.options.ttl))

    def _found_control(self, now: float, pending: Pending, reply: Reply) -> None:
        found = Notice(CONTROL, tuple(map(Change, reply.entries)), reply.revision, True)
        self._on_noticed(now, events.Noticed(found))
        self.following = self.following.read()

    def _found_place(self, now: float, pending: Pending, reply: Reply) -> None:
        self.following = self.following.learn_place(reply.entries)

    def _read_place(self, now: float, pending: Pending, reply: Reply) -> None:
        incarnation = self.registration.incarnation
        self.following = self.following.read_place(reply.entries, reply.revision, incarnation)

    def _counted(self, now: float, pending: Pending, reply: Reply) -> None:
        known = self.following
        if known.round is not None and not known.job and reply.revision >= known.round_mod:
            claim = begin_again(
                known.round, known.round_mod, known.foreign_leader, self.options, len(reply.entries)
            )
            self._ask(now, Purpose.BEGIN_AGAIN, claim)

    def _begun_again(self, now: float, pending: Pending, reply: Reply) -> None:
        """The round after `begin_again`: a new one, or the one that was found, which is then this node's.

        Where that one is the same and the request failed, a leader was elected meanwhile: look again."""
        entry, known = reply.entries[0], self.following
        if entry.mod > known.round_mod:
            self._learn_round(now, entry)
        elif reply.ok and entry.mod == known.round_mod and known.round is not None:
            self.following = known._replace(job=known.round.job)

    def _wrote(self, now: float, pending: Pending, reply: Reply) -> None:
        """A write that was conditional on the node's own key: a failure may mean that the lease is lost."""
        mine, lease = reply.entries[0], self.lease.number
        if not lease:
            return  # given back: this node leaves
        if reply.error == "lease" or (mine.lease != lease and pending.purpose is not Purpose.REGISTER):
            self._lose_lease(now, "the store no longer knows this node")
        elif pending.purpose is Purpose.REGISTER and mine.lease == lease:
            # Also if it failed: a repeated write that had succeeded (etcd does not remember it).
            self._registered(mine)
        elif pending.purpose is Purpose.REGISTER and mine.mod:
            # Not on a lease: another program wrote it. On another one: a store that went back has it from
            # an incarnation of this node that is long over. Either is in the way, and this node must be
            # known before the leader decides: it knows rounds that the store forgot.
            stale = When(mine.key, "mod", mine.mod)
            self._ask(now, Purpose.REGISTER, Txn((stale,), deletes=(Delete(mine.key),)))
        elif pending.purpose is Purpose.UPDATE:
            self.registration = self.registration._replace(mod=mine.mod)
            if not reply.ok:  # the known revision of the key was old: write again
                self.registration = self.registration._replace(ready=0, leaving=False)
        elif pending.purpose is Purpose.CAMPAIGN:
            self._learn_leader(now, reply.entries[1])

    def _read_job(self, now: float, pending: Pending, reply: Reply) -> None:
        self._leadership.read(now, reply.entries)

    def _published(self, now: float, pending: Pending, reply: Reply) -> None:
        another = self._leadership.published(now, pending.purpose, reply)
        if another is not None:
            self._learn_leader(now, another)

    # ---- notices -----------------------------------------------------------------------------------------

    def _learn_hosts(self, now: float, notice: Notice) -> None:
        prefix = self._key(HOSTS)
        found = [change for change in notice.changes if change.entry.key.startswith(prefix)]
        if notice.reset:
            self.hosts.only(now, {change.entry.key.removeprefix(prefix) for change in found})
        for entry, deleted in found:
            self.hosts.learn(now, entry.key.removeprefix(prefix), entry, deleted)

    def _learn_round(self, now: float, entry: Entry, news: bool = False) -> None:
        before, self.following = self.following, self.following.learn_round(now, entry, news)
        if self.following.round is not before.round and self.round is not None and not self.leading:
            self.reason = self.round.reason

    def _learn_leader(self, now: float, entry: Entry) -> None:
        known = self.following.leader
        if entry.mod and entry.mod < known.mod:
            return
        another = bool(entry.lease) and entry.create != known.create
        self.following = self.following._replace(leader=entry)
        if another and self.phase is FINISHED:
            self._report(now, Result(True))  # the new leader may not find it
        ours = entry.lease != 0 and entry.lease == self.lease.number
        if self.view is not None and (not ours or entry.create != self.view.term):
            self._leadership.end(now)
        if ours and self.view is None:
            current = self.round
            view = LeaderView(
                self.options,
                entry.create,
                round=current or Round(),
                since=now if current is None else self.following.round_at,
                quiet_until=self.reach.quiet_until,
                unsure_until=self.reach.unsure_until,
                skipped=self._skipped,
                hosts=self.hosts,
            )
            self._leadership.begin(now, view)

    # ---- duties: what follows from what is known -----------------------------------------------------------

    def _mind_lease(self, now: float) -> None:
        if self.lease.number and now >= self.lease.ends:
            silent = now - self.lease.proof
            self._lose_lease(now, f"no answer from the store for {silent:.1f} s, the lease may be over")

    def _mind_store(self, now: float) -> None:
        grace = self.options.store_grace
        if now >= self.reach.heard + grace:
            self._end("store", f"no answer from the store for {grace:.0f} s (--store-grace)")

    def _renew_lease(self, now: float) -> None:
        if self.lease.number and now >= self.lease.renew_at and not self._requests.awaits(Purpose.KEEP_ALIVE):
            self._ask(now, Purpose.KEEP_ALIVE, KeepAlive(self.lease.number))
            self.lease = self.lease._replace(renew_at=now + self.options.ttl / RENEWALS)

    def _obey_drain(self, now: float) -> None:
        if self.round is not None and self.info.id in self.round.out:
            self.departure = self.departure._replace(reason=self.departure.reason or "drained on request")

    def _ask_to_close(self, now: float) -> None:
        if self._close is not None and self.following.job:
            # Numbered: a late request must not close the next job of this id.
            key = self._key(f"close/{self.following.job}")
            self._ask(now, Purpose.NO_ANSWER, Put(key, encode(self._close)))
            self._close = None

    def _end_round(self, now: float) -> None:
        """Report the end of the round that the group holds: the job has moved on, or this node leaves."""
        current, held = self.round, self.work.held
        if current is None or held is None:
            return
        moved, closed = current.number != held.round.number, self.following.closed
        if self.departure.reason or moved or closed:
            if self.phase is RUNNING:
                self.phase = STOPPING
                self._report_end(held.round, current)
                return
            if self.phase is FINISHED:
                self._rest(now)
        if moved and not closed:  # the group has finished, or its workers have failed
            self._report_end(held.round, current)

    def _report_end(self, held: Round, current: Round) -> None:
        self.work = self.work._replace(held=None)
        drained = self.info.id in current.out
        self._out.append(round_over(held, current, self.departure.reason, drained))

    def _update(self, now: float) -> None:
        """Keep the node's own key up to date: the round it is ready for, and whether it is leaving."""
        known, incarnation, ready = self.following, self.registration.incarnation, self.registration.ready
        leaving = bool(self.departure.reason) and not self.registration.leaving
        wanted = known.next_ready if self.phase is WAITING else ready
        behind = wanted > ready and not known.is_member(incarnation)
        if self._requests.awaits(Purpose.UPDATE) or not (leaving or behind):
            return
        current = known.round
        if behind and current is not None and current.phase == ACTIVE and current.stamp != known.outside:
            # The place may be on its way: being ready for the next round would deny the workers of this one.
            if not self._requests.awaits(Purpose.READ_PLACE):
                self._ask(now, Purpose.READ_PLACE, Get(self._key("place/" + self.info.id)))
            if not leaving:
                return
            wanted = ready
        self.registration = self.registration._replace(
            ready=max(wanted, ready), leaving=bool(self.departure.reason)
        )
        record = encode(self._record())
        unchanged = When(self._own_key, "mod", self.registration.mod)
        self._ask(now, Purpose.UPDATE, Txn((unchanged,), (Put(self._own_key, record, self.lease.number),)))

    def _lead(self, now: float) -> None:
        """Stand for election when there is no leader; decide when this node is the leader."""
        known = self.following
        if self.view is not None:
            self.reason = self._leadership.decide(now) or self.reason
        elif not (
            known.leader.lease
            or not known.complete
            or known.closed
            or self.departure.reason
            or self._requests.awaits(Purpose.CAMPAIGN)
        ):
            key, foreign = self._key("ctl/leader"), known.foreign_leader
            # A foreign key goes first: one that is written over keeps its `create`, the leader's term.
            registered = When(self._own_key, "create", self.registration.incarnation)
            guards = registered, When(key, "mod", foreign)
            mine = (Put(key, self.info.id.encode(), self.lease.number),)
            wanted = Txn(guards, deletes=(Delete(key),)) if foreign else Txn(guards, mine)
            self._ask(now, Purpose.CAMPAIGN, wanted)

    def _see_end(self, now: float) -> None:
        """The job is over, or this node cannot be part of it."""
        current, job = self.round, self.following.job
        refused = self.following.place.refused
        if current is not None and job == current.job and self.following.closed:
            self._end(current.outcome, current.reason)
        elif current is not None and job not in (0, current.job):
            self._end("replaced", "its job ended while it was away, and another has its id")
        elif current is not None and current.format > FORMAT:
            newer = f"this version of phalanx reads records up to format {FORMAT}, and the job uses format"
            self._end("refused", f"{newer} {current.format}: install the same version on all nodes")
        elif refused and self.options.fixed:
            self._end("refused", refused)

    def _leave(self, now: float) -> None:
        if self.departure.reason:
            self.phase = LEAVING
            if self.view is not None:
                self._leadership.end(now)

    def _give_lease_back(self, now: float) -> None:
        if self.lease.number:
            self._ask(now, Purpose.REVOKE, Revoke(self.lease.number))
            self.lease = self.lease._replace(number=0)
            self._waiting_since = now
        # An answer is a courtesy: without one the lease runs out by itself.
        answered = not (self._requests.awaits(Purpose.REVOKE, Purpose.GRANT) or self.lease.old)
        if answered or now >= self._give_up_at:
            self._end("left", self.departure.reason)

    def _give_up(self, now: float) -> None:
        if now >= self._give_up_at:
            self._end("timeout", f"{self.reason}; gave up after {now - self._waiting_since:.0f} s")

    def _find_job(self, now: float) -> None:
        """Learn which of the jobs with this id is this node's, where that does not follow from a leader."""
        known = self.following
        if known.job:
            return
        if known.round is not None:
            if not self._requests.awaits(Purpose.COUNT_NODES, Purpose.BEGIN_AGAIN):
                self._ask(now, Purpose.COUNT_NODES, Get(self._key("node/"), prefix=True))
        elif known.complete and not known.leader.lease:
            # The round cannot be read, and no leader will write it again: this node may.
            self.following = known._replace(job=1)

    def _register(self, now: float) -> None:
        known = self.following
        ready = self.lease.number and known.complete and known.job
        if ready and not self._requests.awaits(Purpose.REGISTER):
            self.registration = self.registration._replace(ready=known.next_ready)
            absent, record = When(self._own_key, "mod", 0), encode(self._record())
            self._ask(now, Purpose.REGISTER, Txn((absent,), (Put(self._own_key, record, self.lease.number),)))

    def _start_workers(self, now: float) -> None:
        current, incarnation = self.round, self.registration.incarnation
        if current is None or not self.following.is_member(incarnation):
            return
        if self.work.started == (current.number, incarnation):
            return
        held, started = StartRound(current, self.following.place), (current.number, incarnation)
        self.phase = RUNNING
        self.work = self.work._replace(running=current.number, held=held, started=started)
        if not self.options.fixed and any(self.hosts.state.entry(n, now) for n in current.names):
            self._out.append(Remark(current.reason))  # why a quarantined host takes part
        self._out.append(held)

    def _wait_as_spare(self, now: float) -> None:
        """A spare has no time-out."""
        current = self.round
        if (
            current is None
            or current.phase != ACTIVE
            or self.following.is_member(self.registration.incarnation)
        ):
            return
        if current.nodes >= self.options.max_nodes or self.hosts.state.entry(self.info.name, now):
            self._waiting_since = now

    def _kill_in_time(self, now: float) -> None:
        """Workers that are being stopped must still be gone before the lease is."""
        if self.lease.number and now >= self.lease.ends:
            self._out.append(RoundOver(self.work.running, "the lease may be over", at_once=True))
            self.phase, self.work = ENDED, self.work._replace(running=0)

    # ---- what several of them share ------------------------------------------------------------------------

    def _store_answered(self, now: float) -> None:
        self.reach = self.reach._replace(heard=now)

    def _lose_lease(self, now: float, why: str) -> None:
        """The lease may be lost: stop at once, then join again as a new incarnation."""
        if self.view is not None:
            self._leadership.end(now)
        self.lease = self.lease.lost()
        self._requests.begin_life()
        self.registration = Registration()
        self.reason = why
        if self.phase in (RUNNING, STOPPING):
            self.phase, self.work = FENCED, self.work._replace(held=None)
            self._out.append(RoundOver(self.work.running, why, at_once=True))
        elif self.phase is FINISHED:
            self._rest(now)
        else:
            self.phase = JOINING
            self._ask(now, Purpose.REVOKE, Revoke(self.lease.old))

    def _rest(self, now: float) -> None:
        """No worker is left here."""
        self.work = self.work._replace(running=0)
        self._waiting_since = now
        self.phase = WAITING if self.registration.incarnation else JOINING
        if self.lease.old and not self._requests.awaits(Purpose.REVOKE):
            self._ask(now, Purpose.REVOKE, Revoke(self.lease.old))

    def _end(self, outcome: str, reason: str) -> None:
        held = -1 if self.work.held is None else self.work.held.round.number
        self.ended = End(outcome, reason, self.round, held, held >= 0 and held == self.work.finished)
        self.phase = ENDING if self.phase in (RUNNING, STOPPING, FENCED) else ENDED
        self.reason = reason
        self._out.append(self.ended)

    @property
    def _give_up_at(self) -> float:
        if self.phase is LEAVING:
            return self._waiting_since + self.options.ttl
        # Later than the leader, so that normally all nodes get the same reason from it.
        delay = self.round.delay if self.round is not None else 0.0
        return self._waiting_since + delay + self.options.join_timeout + 2 * self.options.ttl

    def _holds(self, number: int) -> bool:
        return self.work.held is not None and self.work.held.round.number == number

    def _report(self, now: float, result: Result) -> None:
        """Publish how the workers of the round that the group holds have ended."""
        assert self.work.held is not None
        number, incarnation = self.work.held.round.number, self.work.held.place.incarnation
        mine = When(self._own_key, "create", incarnation)
        put = Put(self._key(f"result/{number}/{self.info.id}"), encode(result))
        self._ask(now, Purpose.REPORT, Txn((mine,), (put,)))

    def _record(self) -> NodeRecord:
        known, departure = self.following, self.departure
        return NodeRecord(
            self.info,
            self.registration.ready,
            departure.reason,
            known.job,
            known.rounds,
            known.restarts,
            departure.preempted,
            FORMAT,
        )

    @property
    def _own_key(self) -> str:
        return self._key("node/" + self.info.id)

    def _key(self, name: str) -> str:
        return self.options.prefix + name

    def _ask(self, now: float, purpose: Purpose, command: Any) -> None:
        self._requests.send(now, purpose, command)


def _result(failure: NodeFailure, blameless: bool) -> Result:
    what = failure.summary[:_FEW_WORDS]
    return Result(False, failure.text(), False, what, failure.ranks, blameless, delay=failure.delay)


# ---- the tables ----------------------------------------------------------------------------------------

Handler: TypeAlias = Callable[[Participant, float, Any], None]
Row: TypeAlias = Mapping[type[Any], tuple[Handler, tuple[NodePhase, ...]]]
AnswerHandler: TypeAlias = Callable[[Participant, float, Pending, Reply], None]

_ANY: Row = {
    events.ClockTick: (Participant._on_tick, ()),
    events.Connected: (Participant._on_connected, ()),
    events.Disconnected: (Participant._on_disconnected, ()),
    events.Noticed: (Participant._on_noticed, ()),
    events.Answer: (Participant._on_answer, ()),
    events.StoreLost: (Participant._on_store_lost, (ENDED,)),
    events.StoreWentBack: (Participant._on_store_went_back, ()),
    events.WorkersFailed: (Participant._on_failed, ()),
    events.RoundRequested: (Participant._on_round_requested, ()),
    events.CloseRequested: (Participant._on_close_requested, ()),
    events.LeaveRequested: (Participant._on_leave_requested, ()),
}

_AT_WORK: Row = {
    **_ANY,
    events.Answer: (Participant._on_answer, (FENCED,)),
    events.StoreLost: (Participant._on_store_lost, (ENDING,)),
    events.StoreWentBack: (Participant._on_store_went_back, (FENCED,)),
    events.WorkersStopped: (Participant._on_stopped, (WAITING,)),
    events.LeaseMissed: (Participant._on_lease_missed, (FENCED,)),
}

MOVES: Mapping[NodePhase, Row] = {
    NEW: {events.Begin: (Participant._on_begin, (JOINING,))},
    JOINING: {**_ANY, events.Answer: (Participant._on_answer, (WAITING,))},
    WAITING: {
        **_ANY,
        events.Answer: (Participant._on_answer, (JOINING,)),
        events.StoreWentBack: (Participant._on_store_went_back, (JOINING,)),
    },
    RUNNING: {**_AT_WORK, events.WorkersSucceeded: (Participant._on_succeeded, (FINISHED,))},
    FINISHED: {
        **_ANY,
        events.Answer: (Participant._on_answer, (JOINING,)),
        events.StoreWentBack: (Participant._on_store_went_back, (JOINING,)),
        events.WorkersStopped: (Participant._on_stopped, (WAITING,)),
        events.LeaseMissed: (Participant._on_lease_missed, (JOINING,)),
    },
    STOPPING: _AT_WORK,
    FENCED: {
        **_ANY,
        events.StoreLost: (Participant._on_store_lost, (ENDING,)),
        events.WorkersStopped: (Participant._on_stopped, (JOINING,)),
    },
    LEAVING: _ANY,
    ENDING: {events.WorkersStopped: (Participant._on_gone, (ENDED,))},
    ENDED: {},
}

_OF_WORKERS = frozenset[type[Any]]({events.WorkersStopped, events.WorkersSucceeded, events.LeaseMissed})
"""Of an earlier round, or of workers that have been given up."""
LATE: Mapping[NodePhase, frozenset[type[Any]]] = {
    NEW: frozenset(),
    JOINING: _OF_WORKERS,
    WAITING: _OF_WORKERS,
    RUNNING: frozenset(),
    FINISHED: frozenset({events.WorkersSucceeded}),
    STOPPING: frozenset({events.WorkersSucceeded}),
    FENCED: frozenset({events.WorkersSucceeded, events.LeaseMissed}),
    LEAVING: _OF_WORKERS,
    ENDING: frozenset({*_ANY, events.WorkersSucceeded, events.LeaseMissed}),
    ENDED: frozenset({*_ANY, *_OF_WORKERS}),
}

ANSWERS: Mapping[Purpose, AnswerHandler] = {
    Purpose.GRANT: Participant._granted,
    Purpose.KEEP_ALIVE: Participant._renewed,
    Purpose.REVOKE: Participant._revoked,
    Purpose.WATCH_CONTROL: Participant._found_control,
    Purpose.WATCH_PLACE: Participant._found_place,
    Purpose.READ_PLACE: Participant._read_place,
    Purpose.COUNT_NODES: Participant._counted,
    Purpose.BEGIN_AGAIN: Participant._begun_again,
    Purpose.REGISTER: Participant._wrote,
    Purpose.UPDATE: Participant._wrote,
    Purpose.REPORT: Participant._wrote,
    Purpose.CAMPAIGN: Participant._wrote,
    Purpose.WATCH_JOB: Participant._read_job,
    Purpose.PUBLISH: Participant._published,
    Purpose.PUBLISH_PLACES: Participant._published,
}


class Duty(NamedTuple):
    """What is done in some phases whenever it is due, and the phases that it may lead to."""

    call: Callable[[Participant, float], None]
    phases: Mapping[NodePhase, tuple[NodePhase, ...]]

    @property
    def name(self) -> str:
        return self.call.__name__.strip("_").replace("_", " ")


_REGISTERED = (WAITING, RUNNING, FINISHED, STOPPING)
_ALIVE = (JOINING, *_REGISTERED, FENCED, LEAVING)

LEASE = Duty(
    Participant._mind_lease,
    {
        JOINING: (),
        WAITING: (JOINING,),
        RUNNING: (FENCED,),
        FINISHED: (JOINING,),
        STOPPING: (FENCED,),
    },
)
DUTIES = (
    Duty(
        Participant._mind_store,
        {phase: (ENDING if phase in (RUNNING, STOPPING, FENCED) else ENDED,) for phase in _ALIVE},
    ),
    Duty(Participant._renew_lease, dict.fromkeys(_ALIVE, ())),
    Duty(Participant._obey_drain, dict.fromkeys(_ALIVE, ())),
    Duty(Participant._ask_to_close, dict.fromkeys(_ALIVE, ())),
    Duty(
        Participant._end_round,
        {JOINING: (), WAITING: (), RUNNING: (STOPPING,), FINISHED: (WAITING,), LEAVING: ()},
    ),
    Duty(Participant._update, dict.fromkeys(_REGISTERED, ())),
    Duty(Participant._lead, dict.fromkeys(_REGISTERED, ())),
    Duty(Participant._see_end, {JOINING: (ENDED,), WAITING: (ENDED,), LEAVING: (ENDED,)}),
    Duty(Participant._leave, {JOINING: (LEAVING,), WAITING: (LEAVING,)}),
    Duty(Participant._give_lease_back, {LEAVING: (ENDED,)}),
    Duty(Participant._give_up, {JOINING: (ENDED,), WAITING: (ENDED,)}),
    Duty(Participant._find_job, {JOINING: ()}),
    Duty(Participant._register, {JOINING: ()}),
    Duty(Participant._start_workers, {WAITING: (RUNNING,)}),
    Duty(Participant._wait_as_spare, {JOINING: (), WAITING: ()}),
    Duty(Participant._kill_in_time, {ENDING: (ENDED,)}),
)
"""In the order in which they are carried out."""
