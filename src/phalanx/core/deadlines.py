"""Which scopes have run out of time, and when to look again.

A scope belongs to an owner (a worker) and has one deadline. All deadlines lie in a heap, so the shell can
sleep until `next()` and never has to look around in between.

Invariants
- An owner's scopes are independent: dropping or expiring one leaves the others alone.
- Setting a scope again moves its deadline. The old heap entry stays and is skipped when it comes up; the
  heap is rebuilt when most of it is like that, so a worker that sets and drops for ever costs no memory.
- An owner holds at most `limit` scopes; further ones are refused, the ones it has stay.
- Time is whatever clock the caller uses, as long as it is always the same one.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from phalanx.core.record import Record

T = TypeVar("T")

LIMIT = 10_000
"""Scopes one owner may hold: far above any real nesting, far below what would hurt."""

_SLACK = 64


class Expired(Record):
    """One scope whose deadline has passed; `what` is what the caller filed under it."""

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
        # The number breaks ties, so that owners and contents are never compared.
        self._heap: list[tuple[float, int, Any, str, T]] = []
        self._number = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def set(self, owner: Any, scope: str, at: float, what: T) -> bool:
        """Files or moves a deadline; False when the owner holds too many already."""
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
        """The scope was left in time; False when it was not known."""
        scopes = self._owners.get(owner)
        if scopes is None or scopes.pop(scope, None) is None:
            return False
        self._live -= 1
        if not scopes:
            del self._owners[owner]
        return True

    def forget(self, owner: Any) -> int:
        """The owner is gone, its deadlines with it; how many there were."""
        count = len(self._owners.pop(owner, ()))
        self._live -= count
        if not self._live:
            self._heap.clear()
        return count

    def next(self) -> float | None:
        """The earliest deadline; None when there is nothing to wait for."""
        heap = self._heap
        while heap and self._stale(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[Expired]:
        """Takes out what has expired by `now`, earliest first."""
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
        """Those that hold a deadline."""
        return list(self._owners)

    def filed(self, owner: Any) -> list[T]:
        """What is filed for one owner, in the order in which it came."""
        return [entry[4] for entry in sorted(self._owners.get(owner, {}).values(), key=lambda e: e[1])]

    def _stale(self, entry: tuple[float, int, Any, str, T]) -> bool:
        return self._owners.get(entry[2], {}).get(entry[3]) is not entry

    def _rebuild(self) -> None:
        self._heap = [entry for scopes in self._owners.values() for entry in scopes.values()]
        heapify(self._heap)
