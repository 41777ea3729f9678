"""The store's words in etcd's v3 JSON and back: pure, no sockets.

The JSON is that of etcd's gRPC gateway: keys and values are base64, 64-bit numbers are text, fields
with their default (0, "", false) are left out of answers.

Writes carry a memory: etcd, unlike our own server, does not know a repeated request when it sees
one. So every transaction that writes also writes one small key of the session (`Once`), on
condition that it is still as the session last knew it. When an answer was lost and the request is
made again, that condition fails, the value of the key shows that this very request has been done,
and nothing is done twice. It costs one more put in a transaction that happens anyway.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from phalanx.core.store_commands import Change, Delete, Entry, Grant, Notice, Put, Reply, Txn, Watch, When
from phalanx.errors import StoreError

Json = dict[str, Any]
SMALLEST_TTL = 1
_TARGETS = {"mod": ("MOD", "mod_revision"), "create": ("CREATE", "create_revision")}


class Once(NamedTuple):
    """The session's memory key: what this request would write into it, and how it is known to be."""

    key: str
    value: bytes
    mod: int
    lease: int


class RequestOutcome(NamedTuple):
    """What a transaction came to; `memory` is the session's key as a failed one found it."""

    ok: bool
    revision: int
    entries: tuple[Entry, ...]
    memory: Entry | None


def text(raw: bytes) -> str:
    """Bytes as the gateway wants them."""
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def key(name: str) -> str:
    """A key as the gateway wants it."""
    try:
        return text(name.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"the key {name!r} cannot be sent: {error}") from None


def where(name: str, prefix: bool) -> Json:
    """One key, or all keys that begin so."""
    if not prefix:
        return {"key": key(name)}
    # The end is the first key that does not begin so; etcd writes "to the very end" as a NUL.
    stem = name.encode().rstrip(b"\xff")
    end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\x00"
    return {"key": key(name or "\x00"), "range_end": text(end)}


def entry(kv: Mapping[str, Any]) -> Entry:
    """A key as etcd holds it."""
    return Entry(
        binascii.a2b_base64(kv["key"]).decode("utf-8", "surrogateescape"),
        binascii.a2b_base64(kv.get("value", "")),
        int(kv.get("create_revision", 0)),
        int(kv.get("mod_revision", 0)),
        int(kv.get("lease", 0)),
    )


def entries(answer: Mapping[str, Any]) -> tuple[Entry, ...]:
    """What a range holds, in key order."""
    return tuple(map(entry, answer.get("kvs") or ()))


def revision(answer: Mapping[str, Any]) -> int:
    """The store's revision at the time of an answer."""
    return int(answer.get("header", {}).get("revision", 0))


def condition(when: When) -> Json:
    """One comparison of a transaction."""
    if when.what == "value":
        return {"key": key(when.key), "target": "VALUE", "result": "EQUAL", "value": text(when.value)}
    target, field = _TARGETS[when.what]
    return {"key": key(when.key), "target": target, "result": "EQUAL", field: str(when.number)}


def put(command: Put) -> Json:
    """A put, alone or in a transaction."""
    body: Json = {"key": key(command.key), "value": text(command.value)}
    if command.lease:
        body["lease"] = str(command.lease)
    return body


def condition_keys(txn: Txn) -> tuple[str, ...]:
    """The keys that the reply shows."""
    return tuple(dict.fromkeys(when.key for when in txn.when))


def transaction(txn: Txn, once: Once | None) -> Json:
    """A transaction that also reads the keys of its conditions, whichever way it goes."""
    reads = [{"request_range": where(name, False)} for name in condition_keys(txn)]
    compare = [condition(when) for when in txn.when]
    success: list[Json] = [{"request_put": put(one)} for one in _effective(txn)]
    success += [{"request_delete_range": where(*one)} for one in dict.fromkeys(txn.deletes)]
    failure: list[Json] = list(reads)
    if once is not None:
        compare.append(condition(When(once.key, "mod", once.mod)))
        success.append({"request_put": put(Put(once.key, once.value, once.lease))})
        failure.append({"request_range": where(once.key, False)})
    return {"compare": compare, "success": success + reads, "failure": failure}


def _effective(txn: Txn) -> Iterable[Put]:
    """The puts whose effect is still there at the end: etcd refuses a key that is named twice."""
    last = {one.key: one for one in txn.puts}
    return [one for one in last.values() if not any(_covers(d, one.key) for d in txn.deletes)]


def _covers(delete: Delete, name: str) -> bool:
    return name.startswith(delete.key) if delete.prefix else name == delete.key


def outcome(txn: Txn, once: Once | None, answer: Mapping[str, Any]) -> RequestOutcome:
    """What the answer to `transaction` says."""
    ok, responses = bool(answer.get("succeeded")), answer.get("responses") or []
    names = condition_keys(txn)
    memory = None
    if not ok and once is not None:
        found = entries(responses[-1].get("response_range", {}))
        memory = found[0] if found else Entry(once.key)
        responses = responses[:-1]
    reads = responses[len(responses) - len(names) :]
    shown = []
    for name, response in zip(names, reads, strict=True):
        found = entries(response.get("response_range", {}))
        shown.append(found[0] if found else Entry(name))
    return RequestOutcome(ok, revision(answer), tuple(shown), memory)


def lease_seconds(command: Grant) -> int:
    """etcd counts whole seconds: never shorter than asked."""
    return max(SMALLEST_TTL, math.ceil(command.ttl))


def watch_request(command: Watch, start: int) -> Json:
    """The one message that opens a watch."""
    return {"create_request": {**where(command.key, command.prefix), "start_revision": str(start)}}


def notice(number: int, message: Mapping[str, Any]) -> Notice | None:
    """What a message of a watch tells, if it tells of changes."""
    changes = tuple(map(_change, message.get("events") or ()))
    return Notice(number, changes, changes[-1].entry.mod) if changes else None


def _change(event: Mapping[str, Any]) -> Change:
    return Change(entry(event["kv"]), event.get("type") == "DELETE")


def compacted_to(message: Mapping[str, Any]) -> int:
    """The revision below which a cancelled watch could have told nothing; 0: that is not why it ended."""
    return int(message.get("compact_revision", 0)) if message.get("canceled") else 0


def snapshot(number: int, answer: Mapping[str, Any]) -> Notice:
    """Everything there is, in place of a history that is gone."""
    return Notice(number, tuple(map(Change, entries(answer))), revision(answer), reset=True)


def refused(answer: Mapping[str, Any], why: str, shown: tuple[Entry, ...] = ()) -> Reply:
    """A reply that says no."""
    return Reply(False, revision(answer), shown, error=why)
