"""What a node does while it is the job's leader: it keeps a view of all keys, decides, publishes.

A round goes out when all places that belong to it are written. A write that fails was decided upon an old
view: everything is read again, unless another node leads.
"""

from __future__ import annotations

from phalanx.core.rounds.leader_view import LeaderView, Options
from phalanx.core.rounds.participant_events import Action, Remark
from phalanx.core.rounds.requests import PLACE, Purpose, StoreRequests
from phalanx.core.rounds.rounds import decide
from phalanx.core.rounds.store_commands import (
    Change,
    Delete,
    Entry,
    Notice,
    Put,
    Reply,
    Txn,
    Unwatch,
    Watch,
    When,
)

QUIET = 0.005  # a leader of thousands decides at most this often
_STATUS = 1.0  # the leader's reason is written at most this often


class Leadership:
    """One node's, whenever it leads."""

    def __init__(self, options: Options, requests: StoreRequests, out: list[Action]) -> None:
        self._options, self._requests, self._out = options, requests, out
        self.view: LeaderView | None = None
        self._watch = PLACE  # a new number each time, so that no notice of an older watch counts
        self._complete = self._dirty = False
        self._decided = self._status_at = float("-inf")
        self._wake: float | None = None
        self._unsent: Txn | None = None  # the round, until all its places are written
        self._published = Txn(())

    def begin(self, now: float, view: LeaderView) -> None:
        """This node leads from now on."""
        self.view = view
        self._read_everything(now)

    def end(self, now: float) -> None:
        """Another node leads, or none."""
        self.view, self._complete, self._wake, self._unsent = None, False, None, None
        self._requests.forget(Purpose.PUBLISH, Purpose.PUBLISH_PLACES, Purpose.WATCH_JOB)
        self._requests.send(now, Purpose.NO_ANSWER, Unwatch(self._watch))

    def _read_everything(self, now: float) -> None:
        if self._complete:
            self._requests.send(now, Purpose.NO_ANSWER, Unwatch(self._watch))
        self._complete = False
        self._watch += 1
        self._requests.send(now, Purpose.WATCH_JOB, Watch(self._watch, self._options.prefix, prefix=True))

    def read(self, now: float, entries: tuple[Entry, ...]) -> None:
        """All keys of the job."""
        if self.view is not None:
            self._complete = self._dirty = True
            self.view.learn(now, tuple(map(Change, entries)), reset=True)
            self._remark()

    def learn(self, now: float, notice: Notice) -> None:
        """What the watch over all keys reports."""
        if self.view is not None and self._complete and notice.watch == self._watch:
            self.view.learn(now, notice.changes, notice.reset)
            self._remark()
            self._dirty = True

    def _remark(self) -> None:
        assert self.view is not None
        self._out += map(Remark, self.view.remarks)
        self.view.remarks.clear()

    @property
    def wake_at(self) -> float | None:
        """When to decide again; not while an answer is awaited first, which would wake this node for ever."""
        return self._wake if self._complete and not self._publishing else None

    @property
    def _publishing(self) -> bool:
        return self._requests.awaits(Purpose.PUBLISH, Purpose.PUBLISH_PLACES)

    def decide(self, now: float) -> str:
        """Decide, where something has changed or is due; the reason, empty where nothing was decided."""
        due = self._dirty or (self._wake is not None and now >= self._wake)
        if self.view is None or not due or not self._complete or self._publishing:
            return ""
        if now < self._decided + QUIET:
            self._wake = self._decided + QUIET
            return ""
        self._decided, self._dirty = now, False
        decision = decide(now, self.view, self._options)
        self._wake = decision.wake_at
        if decision.commands:
            *batches, main = decision.commands
            assert isinstance(main, Txn)
            self._unsent = main
            for batch in batches:
                self._requests.send(now, Purpose.PUBLISH_PLACES, batch)
            self._publish(now)
        elif now >= self._status_at + _STATUS:
            self._status_at = now
            prefix = self._options.prefix
            guard = When(prefix + "ctl/leader", "create", self.view.term)
            status = Put(prefix + "status", decision.reason.encode())
            self._requests.send(now, Purpose.NO_ANSWER, Txn((guard,), (status,)))
        return decision.reason

    def _publish(self, now: float) -> None:
        """Send the round, once the places that belong to it are written."""
        if self._unsent is not None and not self._requests.awaits(Purpose.PUBLISH_PLACES):
            self._published, self._unsent = self._unsent, None
            self._requests.send(now, Purpose.PUBLISH, self._published)

    def published(self, now: float, purpose: Purpose, reply: Reply) -> Entry | None:
        """The answer to a write; the key of another leader, where there is one."""
        view = self.view
        if view is None:
            return None
        if reply.ok and purpose is Purpose.PUBLISH_PLACES:
            self._publish(now)
            return None
        self._dirty, self._unsent = True, None
        if reply.ok:
            made = [p for p in self._published.puts if not p.lease]
            changes = [Change(Entry(p.key, p.value, mod=reply.revision)) for p in made]
            swept = [d.key for d in self._published.deletes if not d.prefix]
            changes += [Change(Entry(key, mod=reply.revision), deleted=True) for key in swept]
            view.learn(now, tuple(changes))
            return None
        view.failed_writes += 1
        node = self._options.prefix + "node/"
        given_back = [p.key for p in self._published.puts if p.key.startswith(node)]
        if (
            reply.error == "lease" and given_back and purpose is Purpose.PUBLISH
        ):  # the node is gone: so is its key
            gone = tuple(map(Delete, given_back))
            self._requests.send(now, Purpose.PUBLISH, Txn(self._published.when, deletes=gone))
            self._published = Txn(())
        elif reply.entries and reply.entries[0].create != view.term:
            return reply.entries[0]
        else:
            self._read_everything(now)
        return None
