"""The store itself: a revisioned map with leases and watches, pure and deterministic.

Commands go in with the caller's session and the time; a reply and the notices for watches come out.
The same sequence of calls always gives the same state, which is what makes the journal (a log of
calls), the simulator and the server three users of one thing.

Invariants:
- `revision` grows by exactly one per call that changes anything, and every change of that call
  bears it; a call that changes nothing leaves it alone.
- A key on a lease is in that lease's set and nowhere else; a lease that ends takes its keys along
  in one revision.
- A watch sees each change of its keys from its start revision once, in order of revision.
- A mutating request that is repeated with the same session and number has no second effect and
  gets the first answer again, until the client confirms it (`done`).
- No clock: `now` is the caller's, must not run backwards, and is used for leases only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import islice, takewhile
from typing import Any

from phalanx.core.rounds.store_commands import (
    Add,
    Change,
    Command,
    Compact,
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

Notices = list[tuple[str, Notice]]  # (session, notice for it)
LARGEST = 2**63 - 1  # a counter
LONGEST = 10**7  # a lease, in seconds
_MUTATING = (Put, Delete, Txn, Add, Grant, Revoke, Compact)


def mutates(command: Command) -> bool:
    """Whether a command must be journalled and must not be carried out twice."""
    return isinstance(command, _MUTATING)


class Lease:
    """Time that a client has to show itself; everything on it goes when the time is over."""

    __slots__ = ("deadline", "keys", "number", "session", "ttl")

    def __init__(self, number: int, ttl: float, session: str, deadline: float) -> None:
        self.number = number
        self.ttl = ttl
        self.session = session
        self.deadline = deadline
        self.keys: set[str] = set()


class _Answered:
    """The answers that one session may still ask for again."""

    __slots__ = ("floor", "replies")

    def __init__(self) -> None:
        self.floor = 0
        self.replies: dict[int, Reply] = {}


_SKIPPED = 1 << 20  # more than a store can do between two commits of its journal


class Model:
    """The map, its history, leases and watches."""

    def __init__(self, *, history: int = 10_000, history_bytes: int = 16 << 20, first_lease: int = 1) -> None:
        self.revision = 0
        self.compacted = 0
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []  # of the entries, in order
        self._history: deque[Change] = deque()
        self._history_limit = history
        self._history_bytes = 0
        self._history_bytes_limit = history_bytes
        self._leases: dict[int, Lease] = {}
        self._held: dict[str, set[int]] = {}  # session -> its leases
        # A store that lost its data must not hand out numbers that clients of the old one still
        # use, so the shell gives each fresh store a different place to begin.
        self._next_lease = first_lease
        self._answered: dict[str, _Answered] = {}
        self._watches: dict[str, dict[int, Watch]] = {}
        self._by_key: dict[str, dict[tuple[str, int], None]] = {}
        self._by_prefix: dict[str, dict[tuple[str, int], None]] = {}
        self._changes: list[Change] = []
        # No lease ends before this; keeping one alive leaves it too early, which costs a look, not an error.
        self._soonest = float("inf")

    # Calls

    def apply(
        self, session: str, number: int, done: int, command: Command, now: float
    ) -> tuple[Reply, Notices]:
        """Carry out request `number` of a session, which has seen all answers below `done`."""
        if not mutates(command):
            return self._carry_out(session, command, now), []
        answered = self._answered.setdefault(session, _Answered())
        if number in answered.replies:
            return answered.replies[number], []
        if number < answered.floor:
            return Reply(False, self.revision, error="stale"), []
        if done > answered.floor:
            answered.floor = done
            for old in [n for n in answered.replies if n < done]:
                del answered.replies[old]
        reply = self._carry_out(session, command, now)
        answered.replies[number] = reply
        return reply, self._collect()

    def expired(self, now: float) -> list[int]:
        """The leases whose time is over: a query; `revoke` each to make it so."""
        if now < self._soonest:
            return []
        return sorted(lease.number for lease in self._leases.values() if lease.deadline <= now)

    def next_expiry(self, now: float) -> float | None:
        """When to look for expired leases: never later than the first one runs out."""
        if self._soonest <= now:
            self._find_soonest()
        return self._soonest if self._leases else None

    def expire(self, now: float) -> Notices:
        """End every lease whose time is over."""
        return [notice for number in self.expired(now) for notice in self.revoke(number)]

    def revoke(self, number: int) -> Notices:
        """End one lease in the store's own name."""
        self._revoke(number)
        return self._collect()

    def hang_up(self, session: str) -> None:
        """A connection is gone: its watches go with it (the client starts them again)."""
        for number in list(self._watches.get(session, ())):
            self._unwatch(session, number)

    def shorten(self, session: str, deadline: float) -> None:
        """A client hung up: unless it comes back and keeps its leases alive they end early."""
        for number in self._held.get(session, ()):
            lease = self._leases[number]
            lease.deadline = min(lease.deadline, deadline)
            self._soonest = min(self._soonest, lease.deadline)

    def forget(self, session: str) -> None:
        """A session will never come back: drop the answers kept for it."""
        self._answered.pop(session, None)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def leases(self) -> int:
        """How many are held."""
        return len(self._leases)

    def sessions(self) -> set[str]:
        """Every session that something is kept for."""
        return set(self._answered) | set(self._held)

    def renew_all(self, now: float) -> None:
        """Start every lease again, after the store itself was away."""
        for lease in self._leases.values():
            lease.deadline = now + lease.ttl
        self._find_soonest()

    def _find_soonest(self) -> None:
        self._soonest = min((lease.deadline for lease in self._leases.values()), default=float("inf"))

    # Commands

    def _carry_out(self, session: str, command: Command, now: float) -> Reply:
        match command:
            case Put():
                return self._txn(Txn((), (command,)))._replace(entries=())
            case Delete():
                return self._done(number=self._delete(command, self.revision + 1))
            case Get(key, prefix):
                return Reply(True, self.revision, self._read(key, prefix))
            case Txn():
                return self._txn(command)
            case Add(key, amount):
                return self._add(key, amount)
            case Grant(ttl, txn):
                if not 0 < ttl <= LONGEST:
                    return Reply(False, self.revision, error="ttl")
                lease_number, self._next_lease = self._next_lease, self._next_lease + 1
                self._hold(Lease(lease_number, ttl, session, now + ttl))
                self._soonest = min(self._soonest, now + ttl)
                then = Txn(()) if txn is None else txn
                then = then._replace(puts=tuple(put._replace(lease=lease_number) for put in then.puts))
                return self._txn(then)._replace(number=lease_number)
            case KeepAlive(lease):
                if (held := self._leases.get(lease)) is None:
                    return Reply(False, self.revision, error="lease")
                held.deadline = now + held.ttl
                if held.session != session:
                    self._release(held)
                    held.session = session
                    self._hold(held)
                return Reply(True, self.revision, number=lease)
            case Revoke(lease):
                known = lease in self._leases
                self._revoke(lease)
                return Reply(known, self.revision, error="" if known else "lease")
            case Watch():
                return self._watch(session, command)
            case Unwatch(watch):
                self._unwatch(session, watch)
                return Reply(True, self.revision)
            case Compact(revision):
                return self._compact(revision)
        raise TypeError(f"{command!r} is not a command of the store")

    def _done(self, number: int = 0) -> Reply:
        if self._changes:
            self.revision += 1
        return Reply(True, self.revision, number=number)

    def _txn(self, txn: Txn) -> Reply:
        keys = {when.key: None for when in txn.when}
        if not all(self._holds(when) for when in txn.when):
            return Reply(False, self.revision, tuple(map(self._entry, keys)), error="condition")
        for put in txn.puts:
            if put.lease and put.lease not in self._leases:
                return Reply(False, self.revision, tuple(map(self._entry, keys)), error="lease")
        revision = self.revision + 1
        for put in txn.puts:
            self._put(put, revision)
        for delete in txn.deletes:
            self._delete(delete, revision)
        return self._done()._replace(entries=tuple(map(self._entry, keys)))

    def _holds(self, when: When) -> bool:
        entry = self._entry(when.key)
        if when.what == "mod":
            return entry.mod == when.number
        if when.what == "create":
            return entry.create == when.number
        return entry.mod != 0 and entry.value == when.value

    def _entry(self, key: str) -> Entry:
        return self._entries.get(key) or Entry(key)

    def _read(self, key: str, prefix: bool) -> tuple[Entry, ...]:
        if not prefix:
            return (self._entries[key],) if key in self._entries else ()
        after = islice(self._keys, bisect_left(self._keys, key), None)
        return tuple(self._entries[k] for k in takewhile(lambda k: k.startswith(key), after))

    def _put(self, put: Put, revision: int) -> None:
        old = self._entries.get(put.key)
        if old is None:
            insort(self._keys, put.key)
        elif put.new:
            return
        elif old.lease and old.lease != put.lease and old.lease in self._leases:
            self._leases[old.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        entry = Entry(put.key, put.value, old.create if old else revision, revision, put.lease)
        self._entries[put.key] = entry
        self._changes.append(Change(entry))

    def _delete(self, delete: Delete, revision: int) -> int:
        going = self._read(delete.key, delete.prefix)
        for entry in going:
            del self._entries[entry.key]
            del self._keys[bisect_left(self._keys, entry.key)]
            if entry.lease in self._leases:
                self._leases[entry.lease].keys.discard(entry.key)
            self._changes.append(Change(Entry(entry.key, b"", entry.create, revision, entry.lease), True))
        return len(going)

    def _add(self, key: str, amount: int) -> Reply:
        try:
            total = int(self._entry(key).value or b"0") + amount
        except ValueError:
            total = LARGEST + 1
        if not -LARGEST <= total <= LARGEST:
            return Reply(False, self.revision, (self._entry(key),), error="number")
        self._put(Put(key, str(total).encode()), self.revision + 1)
        return self._done(number=total)

    def _revoke(self, number: int) -> None:
        lease = self._leases.get(number)
        if lease is not None:
            self._release(lease)
            for key in sorted(lease.keys):
                self._delete(Delete(key), self.revision + 1)
            self._done()

    def _hold(self, lease: Lease) -> None:
        self._leases[lease.number] = lease
        self._held.setdefault(lease.session, set()).add(lease.number)

    def _release(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._held[lease.session].discard(lease.number)
        if not self._held[lease.session]:
            del self._held[lease.session]

    # History and watches

    def _compact(self, revision: int) -> Reply:
        if revision > self.revision:
            return Reply(False, self.revision, error="future")
        while self._history and self._history[0].entry.mod <= revision:
            self._history_bytes -= len(self._history.popleft().entry.value)
        self.compacted = max(self.compacted, revision)
        return Reply(True, self.revision)

    def _watch(self, session: str, watch: Watch) -> Reply:
        key = (session, watch.watch)
        self._unwatch(session, watch.watch)
        if watch.start > self.revision + 1:
            return Reply(False, self.revision, error="future")
        if 0 < watch.start <= self.compacted:
            return Reply(False, self.revision, number=self.compacted + 1, error="compacted")
        self._watches.setdefault(session, {})[watch.watch] = watch
        index = self._by_prefix if watch.prefix else self._by_key
        index.setdefault(watch.key, {})[key] = None
        entries = () if watch.start else self._read(watch.key, watch.prefix)
        return Reply(True, self.revision, entries)

    def replay(self, session: str, watch: Watch) -> Notice | None:
        """What a watch that starts in the past has missed; call it right after the watch was accepted."""
        if (
            not watch.start
            or watch.start > self.revision
            or watch.watch not in self._watches.get(session, ())
        ):
            return None
        history = list(self._history)
        first = bisect_left(history, watch.start, key=lambda change: change.entry.mod)
        seen = tuple(c for c in history[first:] if _covers(watch, c.entry.key))
        return Notice(watch.watch, seen, self.revision) if seen else None

    def _unwatch(self, session: str, number: int) -> None:
        watch = self._watches.get(session, {}).pop(number, None)
        if watch is not None:
            if not self._watches[session]:
                del self._watches[session]
            index = self._by_prefix if watch.prefix else self._by_key
            del index[watch.key][session, number]
            if not index[watch.key]:
                del index[watch.key]

    def _collect(self) -> Notices:
        """Move the changes of this call into the history and address them to the watches."""
        changes, self._changes = self._changes, []
        wanted: dict[tuple[str, int], list[Change]] = {}
        for change in changes:
            self._history.append(change)
            self._history_bytes += len(change.entry.value)
            for watcher in self._by_key.get(change.entry.key, ()):
                wanted.setdefault(watcher, []).append(change)
            for prefix, watchers in self._by_prefix.items():
                if change.entry.key.startswith(prefix):
                    for watcher in watchers:
                        wanted.setdefault(watcher, []).append(change)
        while len(self._history) > self._history_limit or self._history_bytes > self._history_bytes_limit:
            # A revision is dropped whole: half of one would be a lie to a watch that starts at it.
            self._compact(self._history[0].entry.mod)
        return [(session, Notice(n, tuple(seen), self.revision)) for (session, n), seen in wanted.items()]

    # Keeping

    @property
    def next_lease(self) -> int:
        return self._next_lease

    def begin_incarnation(self, first_lease: int) -> None:
        """Continue with other lease numbers than those that a lost end of the journal handed out."""
        self._next_lease = first_lease

    def begin_epoch(self) -> None:
        """Changes were lost: skip their revisions and forget the history, so that watches start again."""
        self.revision += _SKIPPED
        self._history.clear()
        self._history_bytes = 0
        self.compacted = self.revision

    def dump(self) -> dict[str, Any]:
        """Everything but the watches and lease clocks, as builtins."""
        return {
            "revision": self.revision,
            "compacted": self.compacted,
            "next_lease": self._next_lease,
            "entries": [tuple(e) for e in self._entries.values()],
            "history": [(tuple(c.entry), c.deleted) for c in self._history],
            "leases": [(lease.number, lease.ttl, lease.session) for lease in self._leases.values()],
            "answered": [
                (session, a.floor, [(n, tuple(r._replace(entries=())), [tuple(e) for e in r.entries])
                                    for n, r in a.replies.items()])
                for session, a in self._answered.items()
            ],
        }  # fmt: skip

    def load(self, state: dict[str, Any], now: float) -> None:
        """Become what `dump` saw; every lease starts again at `now`."""
        self.revision, self.compacted = state["revision"], state["compacted"]
        self._next_lease = state["next_lease"]
        for number, ttl, session in state["leases"]:
            self._hold(Lease(number, ttl, session, now + ttl))
        self.renew_all(now)
        self._entries = {}
        self._keys = sorted(fields[0] for fields in state["entries"])
        for fields in state["entries"]:
            entry = Entry(*fields)
            self._entries[entry.key] = entry
            if entry.lease in self._leases:
                self._leases[entry.lease].keys.add(entry.key)
        self._history = deque(Change(Entry(*fields), deleted) for fields, deleted in state["history"])
        self._history_bytes = sum(len(c.entry.value) for c in self._history)
        for session, floor, replies in state["answered"]:
            answered = self._answered[session] = _Answered()
            answered.floor = floor
            for n, (ok, revision, _, number, error), entries in replies:
                answered.replies[n] = Reply(ok, revision, tuple(Entry(*e) for e in entries), number, error)


def _covers(watch: Watch, key: str) -> bool:
    return key.startswith(watch.key) if watch.prefix else key == watch.key
