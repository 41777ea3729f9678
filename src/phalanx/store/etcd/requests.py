"""The store's commands as calls to etcd, one at a time; whoever makes the calls retries them.

`call(path, body)` sends a request until some member has answered it, so a request may reach etcd
more than once. Everything here is written for that: writes are transactions with a memory
(`etcd_translation.Once`), leases have numbers of our own choice, a counter is a compare-and-set.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from phalanx.core.store_commands import (
    Add,
    Command,
    Compact,
    Delete,
    Entry,
    Get,
    Grant,
    KeepAlive,
    Put,
    Reply,
    Revoke,
    Txn,
    Watch,
    When,
)
from phalanx.store.etcd import translation as words
from phalanx.store.etcd.http import NOT_FOUND, OUT_OF_RANGE, PRECONDITION, EtcdError
from phalanx.store.model import LARGEST, LONGEST

MEMORY_TTL = 600  # of the key that remembers the last request; one that is gone costs a round trip


class EtcdRequests:
    """Commands of one session; `newest` is the highest revision that a read or write has shown."""

    def __init__(self, session: str, call: Callable[[str, words.Json], words.Json]) -> None:
        self._call = call
        self._doing = 0
        self._memory = Entry(f"phalanx.once/{session}")
        self.tries = 0  # of the call in hand; kept by whoever makes the calls
        self.newest = 0

    @property
    def memory(self) -> Entry:
        """The session's own key, and the lease it hangs on."""
        return self._memory

    def carry_out(self, number: int, command: Command) -> Reply:
        """Request `number` of the session."""
        self._doing = number
        match command:
            case Put():
                return self._txn(Txn((), (command,)))._replace(entries=())
            case Txn():
                return self._txn(command)
            case Get(name, prefix):
                answer = self.range(words.where(name, prefix))
                return Reply(True, words.revision(answer), words.entries(answer))
            case Delete(name, prefix):
                answer = self._call("/v3/kv/deleterange", words.where(name, prefix))
                return Reply(True, words.revision(answer), number=int(answer.get("deleted", 0)))
            case Add(name, amount):
                return self._add(name, amount)
            case Grant():
                return self._grant(command)
            case KeepAlive(lease):
                answer = self._call("/v3/lease/keepalive", {"ID": str(lease)})
                alive = int(answer.get("TTL", 0)) > 0
                return Reply(alive, self.newest, number=lease * alive, error="" if alive else "lease")
            case Revoke(lease):
                return self._revoke(lease)
            case Watch():
                return self._look(command)
            case Compact(revision):
                return self._compact(revision)
        raise TypeError(f"{command!r} is no command of the store")

    def _txn(self, txn: Txn) -> Reply:
        """A transaction, done once however often it has to be sent."""
        fresh = False
        while True:
            once = self._once() if txn.puts or txn.deletes else None
            try:
                answer = self._call("/v3/kv/txn", words.transaction(txn, once))
            except EtcdError as error:
                if error.code != NOT_FOUND:
                    raise
                if not fresh:  # is it the lease of our own key?
                    self._memory, fresh = Entry(self._memory.key), True
                    continue
                return self._show(txn, "lease")
            done = words.outcome(txn, once, answer)
            if once is None or done.ok:
                if once is not None:
                    self._memory = Entry(once.key, once.value, 0, done.revision, once.lease)
                return Reply(done.ok, done.revision, done.entries, error="" if done.ok else "condition")
            assert done.memory is not None
            if done.memory.mod == once.mod:
                return Reply(False, done.revision, done.entries, error="condition")
            # Either an earlier try has been done, or the memory ran out while we were idle.
            self._memory = done.memory
            if done.memory.value == once.value:
                return Reply(True, done.revision, done.entries)

    def _once(self) -> words.Once:
        if not self._memory.lease:
            lease = self._grant(Grant(MEMORY_TTL)).number
            self._memory = Entry(self._memory.key, lease=lease)
        return words.Once(self._memory.key, str(self._doing).encode(), self._memory.mod, self._memory.lease)

    def _show(self, txn: Txn, why: str) -> Reply:
        looked = words.outcome(txn, None, self._call("/v3/kv/txn", words.transaction(Txn(txn.when), None)))
        return Reply(False, looked.revision, looked.entries, error=why)

    def _add(self, name: str, amount: int) -> Reply:
        found = Entry(name)
        known = False
        while True:
            if not known:
                answer = self.range(words.where(name, False))
                found = (words.entries(answer) or (Entry(name),))[0]
            try:
                total = int(found.value or b"0") + amount
            except ValueError:
                total = LARGEST + 1
            if not -LARGEST <= total <= LARGEST:
                return Reply(False, self.newest, (found,), error="number")
            reply = self._txn(Txn((When(name, "mod", found.mod),), (Put(name, str(total).encode()),)))
            if reply.ok:
                return reply._replace(entries=(), number=total)
            found, known = reply.entries[0], True

    def _grant(self, command: Grant) -> Reply:
        if not 0 < command.ttl <= LONGEST:
            return Reply(False, self.newest, error="ttl")
        # A number of our own choice makes the second of two tries harmless.
        lease = random.SystemRandom().randrange(1, 2**63)
        try:
            self._call("/v3/lease/grant", {"ID": str(lease), "TTL": str(words.lease_seconds(command))})
        except EtcdError as error:
            if error.code != PRECONDITION:
                raise
        return Reply(True, self.newest, number=lease)

    def _revoke(self, lease: int) -> Reply:
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease)})
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise
            if self.tries == 1:  # else an earlier try may have done it
                return Reply(False, self.newest, error="lease")
        return Reply(True, self.newest)

    def _compact(self, revision: int) -> Reply:
        try:
            answer = self._call("/v3/kv/compaction", {"revision": str(revision)})
        except EtcdError as error:
            if error.code != OUT_OF_RANGE:
                raise
            future = "future" in str(error)
            return Reply(not future, self.newest, error="future" if future else "")
        return Reply(True, words.revision(answer))

    def _look(self, command: Watch) -> Reply:
        """What is there, or whether the past from `start` on still is."""
        where = words.where(command.key, command.prefix)
        if not command.start:
            answer = self.range(where)
            return Reply(True, words.revision(answer), words.entries(answer))
        revision = words.revision(self.range({**where, "count_only": True}))
        if command.start > revision + 1:
            return Reply(False, revision, error="future")
        try:
            self.range({**where, "count_only": True, "revision": str(max(1, command.start - 1))})
        except EtcdError as error:
            if error.code != OUT_OF_RANGE:
                raise
            return Reply(False, revision, number=revision + 1, error="compacted")
        return Reply(True, revision)

    def range(self, body: words.Json) -> words.Json:
        """Read, as of now on a majority."""
        return self._call("/v3/kv/range", body)
