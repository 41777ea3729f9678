"""Deadlines of scopes, and the time of the next one.

A scope belongs to an owner (a worker) and has one deadline. All deadlines are in a heap, so the shell can
sleep until `next()`.

Invariants
- An owner's scopes are independent: dropping or expiring one does not affect the others.
- Setting a scope again moves its deadline. The old heap entry stays and is skipped later; the heap is rebuilt
  when most entries are stale, so repeated setting and dropping does not use up memory.
- An owner has at most `limit` scopes; further ones are rejected.
- The caller chooses the clock, and always uses the same one.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from phalanx.core.record import Record

T = TypeVar("T")

LIMIT = 10_000
"""Scopes per owner: far above any real nesting, far below what would hurt."""

_SLACK = 64


class Expired(Record):
    """One scope whose deadline has passed; `what` is the caller's own value."""

    owner: Any
    scope: str
    at: float
    what: Any
    reason: str


class Deadlines(Generic[T]):
    """The deadlines of all owners."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._owners: dict[Any, dict[str, tuple[float, int, Any, str, T]]] = {}
        # The number breaks ties, so that owners and values are never compared.
        self._heap: list[tuple[float, int, Any, str, T]] = []
        self._number = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def set(self, owner: Any, scope: str, at: float, what: T) -> bool:
        """Set or move a deadline; False if the owner has too many."""
        scopes = self._owners.get(owner)
        if scopes is None:
            scopes = self._owners[owner] = {}
        if scope not in scopes:
            if len(scopes) >= self.limit:
                return False
            self._live += 1
        self._number += 1
        entry = scopes[scope] = (at, self._number, owner, scope, what)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * self._live + _SLACK:
            self._rebuild()
        return True

    def drop(self, owner: Any, scope: str) -> bool:
        """Remove a scope that was left in time; False if it is not known."""
        scopes = self._owners.get(owner)
        if scopes is None or scopes.pop(scope, None) is None:
            return False
        self._live -= 1
        if not scopes:
            del self._owners[owner]
        return True

    def forget(self, owner: Any) -> int:
        """Remove all scopes of an owner; returns how many there were."""
        count = len(self._owners.pop(owner, ()))
        self._live -= count
        if not self._live:
            self._heap.clear()
        return count

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        heap = self._heap
        while heap and self._stale(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[Expired]:
        """Remove and return the scopes that have expired by `now`, earliest first."""
        found: list[Expired] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heappop(heap)
            if self._stale(entry):
                continue
            at, _, owner, scope, what = entry
            self.drop(owner, scope)
            reason = f"scope {scope!r} was not left in time: its deadline passed {now - at:.3f} s ago"
            found.append(Expired(owner, scope, at, what, reason))
        return found

    def owners(self) -> list[Any]:
        """The owners with a deadline."""
        return list(self._owners)

    def filed(self, owner: Any) -> list[T]:
        """The values of one owner, in the order in which they were set."""
        return [entry[4] for entry in sorted(self._owners.get(owner, {}).values(), key=lambda e: e[1])]

    def _stale(self, entry: tuple[float, int, Any, str, T]) -> bool:
        return self._owners.get(entry[2], {}).get(entry[3]) is not entry

    def _rebuild(self) -> None:
        self._heap = [entry for scopes in self._owners.values() for entry in scopes.values()]
        heapify(self._heap)
