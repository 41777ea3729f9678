"""torch's Store methods over a store client, for user code: what `RendezvousInfo.store` is.

Keys live under a prefix, so that a round's users see an empty store and `num_keys` counts only
theirs. Values are bytes; text is taken as UTF-8. Waiting is by watch, never by asking again. A
time-out raises StoreTimeoutError, which is also a TimeoutError, and names the missing keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from phalanx.core.rounds.store_commands import Add, Delete, Entry, Get, Notice, Put, Reply, Txn, When
from phalanx.errors import StoreError, StoreTimeoutError
from phalanx.store.client import StoreClient
from phalanx.store.tcpstore.torch_errors import as_torchs

DEFAULT_TIMEOUT = timedelta(seconds=300)


class StoreFacade:
    """A shared dictionary with the methods of `torch.distributed.Store`."""

    def __init__(self, client: StoreClient, prefix: str = "", timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._client, self._prefix = client, prefix
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait when nothing else is said."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        self._request(Put(self._key(key), _bytes(value)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        reply = self._client.request(Add(self._key(key), amount), self._seconds())
        if not reply.ok:
            raise StoreError(
                f"add({key!r}, {amount}): the value {reply.entries[0].value[:40]!r} is not a number"
            )
        return reply.number

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there now."""
        return all(self._request(Get(self._key(key))).entries for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value ("" also: if it is not there); returns what it has then.

        A key that is not there, when something was expected, stays so, and `expected` comes back.
        """
        name, want, new = self._key(key), _bytes(expected), _bytes(desired)
        put = (Put(name, new),)
        reply = self._client.request(Txn((When(name, "value", value=want),), put), self._seconds())
        if not reply.ok and reply.entries[0].mod == 0 and not want:
            reply = self._client.request(Txn((When(name, "mod", 0),), put), self._seconds())
        return reply.entries[0].value if reply.entries[0].mod else want

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the end of a value."""
        name, entry = self._key(key), Entry(key)
        while True:
            put = (Put(name, entry.value + _bytes(value)),)
            reply = self._client.request(Txn((When(name, "mod", entry.mod),), put), self._seconds())
            if reply.ok:
                return
            entry = reply.entries[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._request(Delete(self._key(key))).number > 0

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        found = self._request(Get(self._prefix, prefix=True)).entries
        return [entry.key.removeprefix(self._prefix) for entry in found]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys, all at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys and {len(values)} values")
        self._request(Txn((), tuple(Put(self._key(k), _bytes(v)) for k, v in zip(keys, values, strict=True))))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all are there."""
        found = self._await(keys, self._timeout)
        return [found[self._key(key)] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._await(keys, self._timeout if timeout is None else timeout)

    def subscribe(self, prefix: str, heard: Callable[[str, bytes], None]) -> Callable[[], None]:
        """Watch every key that is set below a prefix, those that are there first; what is returned ends it.

        `heard` is called in the client's thread, and for the first ones in the caller's.
        """

        def noticed(notice: Notice) -> None:
            tell([change.entry for change in notice.changes if not change.deleted])

        def tell(entries: Sequence[Entry]) -> None:
            for entry in entries:
                heard(entry.key.removeprefix(self._prefix), entry.value)

        number, reply = self._client.watch(self._key(prefix), noticed, prefix=True)
        tell(reply.entries)

        def end() -> None:
            if self._client.lost is None:
                try:
                    self._client.unwatch(number)
                except StoreError:
                    pass  # closed in this moment

        return end

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set exist."""
        return True

    def _await(self, keys: Sequence[str], timeout: timedelta) -> dict[str, bytes]:
        names = [self._key(key) for key in keys]
        found: dict[str, bytes] = {}
        for name in names:
            for entry in self._request(Get(name)).entries:
                found[name] = entry.value
        missing = [name for name in names if name not in found]
        if missing:
            found.update(self._watch_for(missing, timeout))
        return found

    def _watch_for(self, missing: list[str], timeout: timedelta) -> dict[str, bytes]:
        """Watch each missing key until the last of them has come."""
        found: dict[str, bytes] = {}
        complete = threading.Event()
        wanted = set(missing)

        def note(entries: Sequence[Entry]) -> None:
            found.update((entry.key, entry.value) for entry in entries)
            if wanted <= found.keys():
                complete.set()

        def noticed(notice: Notice) -> None:
            note([change.entry for change in notice.changes if not change.deleted])

        watches = []
        lost = self._client.when_lost(complete.set)
        try:
            for name in missing:
                number, reply = self._client.watch(name, noticed)
                watches.append(number)
                note(reply.entries)
            if not complete.wait(timeout.total_seconds()):
                names = ", ".join(sorted(n.removeprefix(self._prefix) for n in wanted - found.keys()))
                waited = f"waited {timeout.total_seconds():g} s for keys that did not come: {names}"
                raise as_torchs(StoreTimeoutError(waited))
            if not wanted <= found.keys():
                raise self._client.lost or StoreError("the connection to the store ended")
            return found
        finally:
            lost()
            if self._client.lost is None:
                for number in watches:
                    self._client.unwatch(number)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _seconds(self) -> float:
        return self._timeout.total_seconds()

    def _request(self, command: Put | Get | Delete | Txn) -> Reply:
        reply = self._client.request(command, self._seconds())
        if not reply.ok:
            raise StoreError(f"the store refused {type(command).__name__}: {reply.error}")
        return reply


def prefixed(store: Any, prefix: str) -> Any:
    """The same store with its keys under a prefix: torch's own class for a store of torch's."""
    import sys

    torch = sys.modules.get("torch.distributed")
    if torch is not None and hasattr(torch, "Store") and isinstance(store, torch.Store):
        return torch.PrefixStore(prefix, store)
    return PrefixedStore(prefix + "/", store)


class PrefixedStore:
    """A store of any kind with torch's methods, seen through a prefix of its keys."""

    _KEYED = ("set", "get", "add", "append", "compare_set", "delete_key", "wait", "check")
    _SEVERAL = ("wait", "check", "multi_get", "multi_set")

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self.underlying_store = prefix, store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.underlying_store, name)
        if name in self._SEVERAL:
            return lambda keys, *args: method([self._prefix + key for key in keys], *args)
        if name in self._KEYED:
            return lambda key, *args: method(self._prefix + key, *args)
        if name in ("subscribe", "list_keys", "num_keys"):
            raise AttributeError(f"a store under a prefix has no {name}")
        return method


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
