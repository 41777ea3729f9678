"""The store's commands as requests to etcd's v3 JSON gateway, and its answers as replies; no sockets.

In the gateway's JSON, keys and values are base64, 64-bit numbers are strings, and fields with their default
(0, "", false) are missing from answers.

`call(path, body)` sends a request until a member answers, so a request may reach etcd more than once, and
etcd, unlike the embedded store, does not recognize a repeated one. So every transaction that writes also
writes the session's own key (`SessionKey`), on condition that it is unchanged since this session last wrote
it. If an answer was lost and the request is sent again, that condition fails, and the key's value shows that
the request has been carried out. This costs one more put per transaction. Leases have numbers chosen here,
and a counter is a compare-and-set, so both can be repeated, too.
"""

from __future__ import annotations

import binascii
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phalanx.core.record import Record
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
    Watch,
    When,
)
from phalanx.errors import StoreError
from phalanx.store.etcd.http import NOT_FOUND, OUT_OF_RANGE, PRECONDITION, EtcdError
from phalanx.store.model import LARGEST, LONGEST

Json = dict[str, Any]
_SESSION_KEY_TTL = 600  # seconds; an expired key costs one round trip
_TARGETS = {"mod": ("MOD", "mod_revision"), "create": ("CREATE", "create_revision")}


class EtcdRequests:
    """The commands of one session; `newest` is the highest revision seen so far."""

    def __init__(self, session: str, call: Callable[[str, Json], Json]) -> None:
        self._call = call
        self._number = 0
        self.session_entry = Entry(f"phalanx.once/{session}")
        self.tries = 0  # of the current call; maintained by `call`
        self.newest = 0

    def carry_out(self, number: int, command: Command) -> Reply:
        """Carry out request `number` of the session."""
        self._number = number
        match command:
            case Put():
                return self._txn(Txn((), (command,)))._replace(entries=())
            case Txn():
                return self._txn(command)
            case Get(name, prefix):
                answer = self.range(key_range(name, prefix))
                return Reply(True, revision_of(answer), decode_entries(answer))
            case Delete(name, prefix):
                answer = self._call("/v3/kv/deleterange", key_range(name, prefix))
                return Reply(True, revision_of(answer), number=int(answer.get("deleted", 0)))
            case Add(name, amount):
                return self._add(name, amount)
            case Grant(_, txn):
                granted = self._grant(command)
                if txn is None or not granted.ok:
                    return granted
                puts = tuple(put._replace(lease=granted.number) for put in txn.puts)
                return self._txn(txn._replace(puts=puts))._replace(number=granted.number)
            case KeepAlive(lease):
                answer = self._call("/v3/lease/keepalive", {"ID": str(lease)})
                alive = int(answer.get("TTL", 0)) > 0
                return Reply(alive, self.newest, number=lease * alive, error="" if alive else "lease")
            case Revoke(lease):
                return self._revoke(lease)
            case Watch():
                return self._watch_start(command)
            case Compact(revision):
                return self._compact(revision)
        raise TypeError(f"{command!r} is not a store command")

    def _txn(self, txn: Txn) -> Reply:
        """A transaction, carried out once however often it is sent."""
        fresh = False
        while True:
            session_key = self._session_key() if txn.puts or txn.deletes else None
            try:
                answer = self._call("/v3/kv/txn", transaction(txn, session_key))
            except EtcdError as error:
                if error.code != NOT_FOUND:
                    raise
                if not fresh:  # perhaps the lease of the session's key
                    self.session_entry, fresh = Entry(self.session_entry.key), True
                    continue
                return self._refuse(txn, "lease")
            done = decode_outcome(txn, session_key, answer)
            if session_key is None or done.ok:
                if session_key is not None:
                    self.session_entry = Entry(
                        session_key.key, session_key.value, 0, done.revision, session_key.lease
                    )
                return Reply(done.ok, done.revision, done.entries, error="" if done.ok else "condition")
            assert done.session_entry is not None
            if done.session_entry.mod == session_key.mod:
                return Reply(False, done.revision, done.entries, error="condition")
            # Either an earlier try has succeeded, or the session's key has expired.
            self.session_entry = done.session_entry
            if done.session_entry.value == session_key.value:
                return Reply(True, done.revision, done.entries)

    def _session_key(self) -> SessionKey:
        if not self.session_entry.lease:
            lease = self._grant(Grant(_SESSION_KEY_TTL)).number
            self.session_entry = Entry(self.session_entry.key, lease=lease)
        entry = self.session_entry
        return SessionKey(entry.key, str(self._number).encode(), entry.mod, entry.lease)

    def _refuse(self, txn: Txn, error: str) -> Reply:
        """A failed reply with the current entries of the transaction's conditions."""
        answer = self._call("/v3/kv/txn", transaction(Txn(txn.when), None))
        found = decode_outcome(txn, None, answer)
        return Reply(False, found.revision, found.entries, error=error)

    def _add(self, name: str, amount: int) -> Reply:
        answer = self.range(key_range(name, False))
        found = (decode_entries(answer) or (Entry(name),))[0]
        while True:
            try:
                total = int(found.value or b"0") + amount
            except ValueError:
                total = LARGEST + 1
            if not -LARGEST <= total <= LARGEST:
                return Reply(False, self.newest, (found,), error="number")
            reply = self._txn(Txn((When(name, "mod", found.mod),), (Put(name, str(total).encode()),)))
            if reply.ok:
                return reply._replace(entries=(), number=total)
            found = reply.entries[0]

    def _grant(self, command: Grant) -> Reply:
        if not 0 < command.ttl <= LONGEST:
            return Reply(False, self.newest, error="ttl")
        # Choosing the number here makes a second try harmless.
        lease = random.SystemRandom().randrange(1, 2**63)
        try:
            self._call("/v3/lease/grant", {"ID": str(lease), "TTL": str(lease_seconds(command))})
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
            if self.tries == 1:  # else an earlier try may have revoked it
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
        return Reply(True, revision_of(answer))

    def _watch_start(self, command: Watch) -> Reply:
        """The current entries, or whether the history from `start` on still exists."""
        keys = key_range(command.key, command.prefix)
        if not command.start:
            answer = self.range(keys)
            return Reply(True, revision_of(answer), decode_entries(answer))
        revision = revision_of(self.range({**keys, "count_only": True}))
        if command.start > revision + 1:
            return Reply(False, revision, error="future")
        try:
            self.range({**keys, "count_only": True, "revision": str(max(1, command.start - 1))})
        except EtcdError as error:
            if error.code != OUT_OF_RANGE:
                raise
            return Reply(False, revision, number=revision + 1, error="compacted")
        return Reply(True, revision)

    def range(self, body: Json) -> Json:
        """A linearizable read."""
        return self._call("/v3/kv/range", body)


# ---- requests ----------------------------------------------------------------------------------------


class SessionKey(Record):
    """The session's own key: the value to write, and the revision at which it must be unchanged."""

    key: str
    value: bytes
    mod: int
    lease: int


def _base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def encode_key(name: str) -> str:
    """A key in the gateway's JSON."""
    try:
        return _base64(name.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"the key {name!r} cannot be sent: {error}") from None


def key_range(name: str, prefix: bool) -> Json:
    """One key, or all keys with this prefix."""
    if not prefix:
        return {"key": encode_key(name)}
    # The range ends before the first key without the prefix; NUL means no end.
    stem = name.encode().rstrip(b"\xff")
    end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\x00"
    return {"key": encode_key(name or "\x00"), "range_end": _base64(end)}


def _condition(when: When) -> Json:
    if when.what == "value":
        target: Json = {"target": "VALUE", "value": _base64(when.value)}
    else:
        name, field = _TARGETS[when.what]
        target = {"target": name, field: str(when.number)}
    return {"key": encode_key(when.key), "result": "EQUAL", **target}


def _put(command: Put) -> Json:
    body: Json = {"key": encode_key(command.key), "value": _base64(command.value)}
    if command.lease:
        body["lease"] = str(command.lease)
    if command.new:
        absent = _condition(When(command.key, "create", 0))
        return {"request_txn": {"compare": [absent], "success": [{"request_put": body}]}}
    return {"request_put": body}


def _condition_keys(txn: Txn) -> tuple[str, ...]:
    """The keys whose entries the reply contains."""
    return tuple(dict.fromkeys(when.key for when in txn.when))


def transaction(txn: Txn, session_key: SessionKey | None) -> Json:
    """A transaction that also reads the keys of its conditions, whether it succeeds or not."""
    reads = [{"request_range": key_range(name, False)} for name in _condition_keys(txn)]
    compare = [_condition(when) for when in txn.when]
    success: list[Json] = [_put(one) for one in _effective_puts(txn)]
    success += [{"request_delete_range": key_range(*one)} for one in dict.fromkeys(txn.deletes)]
    failure: list[Json] = list(reads)
    if session_key is not None:
        compare.append(_condition(When(session_key.key, "mod", session_key.mod)))
        success.append(_put(Put(session_key.key, session_key.value, session_key.lease)))
        failure.append({"request_range": key_range(session_key.key, False)})
    return {"compare": compare, "success": success + reads, "failure": failure}


def _effective_puts(txn: Txn) -> Iterable[Put]:
    """The puts that are not overwritten or deleted in the transaction: etcd refuses duplicate keys."""
    last = {one.key: one for one in txn.puts}
    return [one for one in last.values() if not any(_covers(d, one.key) for d in txn.deletes)]


def _covers(delete: Delete, name: str) -> bool:
    return name.startswith(delete.key) if delete.prefix else name == delete.key


def lease_seconds(command: Grant) -> int:
    """The TTL in whole seconds, as etcd needs it, never shorter than requested."""
    return max(1, math.ceil(command.ttl))


def watch_request(command: Watch, start: int) -> Json:
    """The message that opens a watch."""
    return {"create_request": {**key_range(command.key, command.prefix), "start_revision": str(start)}}


# ---- answers -----------------------------------------------------------------------------------------


class TxnOutcome(Record):
    """The result of a transaction; `session_entry` is the session's key as a failed one found it."""

    ok: bool
    revision: int
    entries: tuple[Entry, ...]
    session_entry: Entry | None


def decode_entry(kv: Mapping[str, Any]) -> Entry:
    return Entry(
        binascii.a2b_base64(kv["key"]).decode("utf-8", "surrogateescape"),
        binascii.a2b_base64(kv.get("value", "")),
        int(kv.get("create_revision", 0)),
        int(kv.get("mod_revision", 0)),
        int(kv.get("lease", 0)),
    )


def decode_entries(answer: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The entries of a range, in key order."""
    return tuple(map(decode_entry, answer.get("kvs") or ()))


def revision_of(answer: Mapping[str, Any]) -> int:
    """The store's revision at the time of an answer."""
    return int(answer.get("header", {}).get("revision", 0))


def decode_outcome(txn: Txn, session_key: SessionKey | None, answer: Mapping[str, Any]) -> TxnOutcome:
    ok, responses = bool(answer.get("succeeded")), answer.get("responses") or []
    names = _condition_keys(txn)
    session_entry = None
    if not ok and session_key is not None:
        session_entry = _read_entry(session_key.key, responses[-1])
        responses = responses[:-1]
    reads = responses[len(responses) - len(names) :]
    entries = tuple(_read_entry(name, response) for name, response in zip(names, reads, strict=True))
    return TxnOutcome(ok, revision_of(answer), entries, session_entry)


def _read_entry(name: str, response: Mapping[str, Any]) -> Entry:
    found = decode_entries(response.get("response_range", {}))
    return found[0] if found else Entry(name)


def decode_notice(number: int, message: Mapping[str, Any]) -> Notice | None:
    """The changes in a message of a watch, if it has any."""
    changes = tuple(map(_change, message.get("events") or ()))
    return Notice(number, changes, changes[-1].entry.mod) if changes else None


def _change(event: Mapping[str, Any]) -> Change:
    return Change(decode_entry(event["kv"]), event.get("type") == "DELETE")


def compacted_to(message: Mapping[str, Any]) -> int:
    """The first revision that still exists, if the watch was cancelled because of a compaction; else 0."""
    return int(message.get("compact_revision", 0)) if message.get("canceled") else 0


def snapshot(number: int, answer: Mapping[str, Any]) -> Notice:
    """All current entries, in place of a history that no longer exists."""
    return Notice(number, tuple(map(Change, decode_entries(answer))), revision_of(answer), reset=True)
