"""What the core may ask of a key-value store, and what comes back: plain tuples, no behaviour.

The store is a map from text keys to bytes in which every change has a number, the revision. A
transaction changes everything it names in one revision or nothing at all, and may be conditional on
the revision at which a key was made (`create`), last changed (`mod`), or on its value. Keys may
be attached to a lease and are removed with it. A watch reports each change of a key or prefix once, in order.

These are the operations of etcd's v3 interface, so that an adapter translates and does not emulate.
Named tuples rather than dataclasses: they are their own compact wire form, and compare by value.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A key as the store holds it; an absent key has `mod` 0."""

    key: str
    value: bytes = b""
    create: int = 0
    mod: int = 0
    lease: int = 0


class Change(NamedTuple):
    """One step in the life of a key; `deleted` entries carry the revision of the deletion in `mod`."""

    entry: Entry
    deleted: bool = False


class When(NamedTuple):
    """A condition of a transaction: `what` is "mod", "create" (both against `number`) or "value"."""

    key: str
    what: str
    number: int = 0
    value: bytes = b""


class Put(NamedTuple):
    """Set a key; with a lease it goes when the lease does. `new`: only if it is absent."""

    key: str
    value: bytes
    lease: int = 0
    new: bool = False


class Delete(NamedTuple):
    """Remove a key, or everything under a prefix; the reply's number counts what went."""

    key: str
    prefix: bool = False


class Get(NamedTuple):
    """Read a key, or everything under a prefix in key order."""

    key: str
    prefix: bool = False


class Txn(NamedTuple):
    """All of it in one revision if every condition holds; the reply shows the keys of the conditions."""

    when: tuple[When, ...]
    puts: tuple[Put, ...] = ()
    deletes: tuple[Delete, ...] = ()


class Add(NamedTuple):
    """Add to a decimal counter (absent counts as 0); the reply's number is the sum."""

    key: str
    amount: int


class Grant(NamedTuple):
    """A new lease; the reply's number names it. `txn`: carried out then, with all its puts on the lease.

    The rest of the reply is the transaction's. The lease is granted whether or not its conditions hold.
    """

    ttl: float
    txn: Txn | None = None


class KeepAlive(NamedTuple):
    """Start a lease's time again; not ok when it is gone."""

    lease: int


class Revoke(NamedTuple):
    """End a lease and every key on it."""

    lease: int


class Watch(NamedTuple):
    """Report changes from revision `start` on; 0: the reply has the current entries, then changes follow."""

    watch: int
    key: str
    prefix: bool = False
    start: int = 0


class Unwatch(NamedTuple):
    """End a watch."""

    watch: int


class Compact(NamedTuple):
    """Drop the history up to and including a revision; current keys stay."""

    revision: int


Command = (
    Put | Delete | Get | Txn | Add | Grant | KeepAlive | Revoke | Watch | Unwatch | Compact
)  # fmt: skip


class Reply(NamedTuple):
    """The answer to any command; `error` is "" or a key of ERRORS."""

    ok: bool
    revision: int
    entries: tuple[Entry, ...] = ()
    number: int = 0
    error: str = ""


class Notice(NamedTuple):
    """Changes for one watch, oldest first; `reset`: they are all there is, older knowledge is void."""

    watch: int
    changes: tuple[Change, ...]
    revision: int
    reset: bool = False


ERRORS = {
    "condition": "a condition of the transaction did not hold; the entries show why",
    "compacted": "the history before `number` is gone: read again and watch from there",
    "lease": "the lease does not exist",
    "number": "the value is not a decimal number of 64 bits, or would not be one any more",
    "ttl": "a lease lasts more than 0 s and at most some months",
    "stale": "a request that the client itself has already counted as answered",
    "size": "the answer is larger than a message may be: read less at a time",
    "future": "the revision lies ahead of the store: it is not the store this client knew",
}
