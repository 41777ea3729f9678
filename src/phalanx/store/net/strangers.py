"""Connections that have not proved the token yet: which one makes room for the next, and what is reported.

Whoever can reach a port can open connections to it, send anything or nothing, and do that without end. That
keeps no node out, and does not fill the log (connections.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Peer = TypeVar("Peer")

_COMPLAINTS = 5  # lines about strangers in each
_COMPLAINT_TIME = 10.0  # seconds


class Strangers(Generic[Peer]):
    """They, in the order in which they were added, with the addresses they come from."""

    def __init__(self) -> None:
        self._hosts: dict[Peer, str] = {}
        self._crowd: dict[str, int] = {}  # how many of them an address has

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._hosts)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._hosts

    def add(self, peer: Peer, host: str) -> None:
        """One more."""
        self._hosts[peer] = host
        self._crowd[host] = self._crowd.get(host, 0) + 1

    def discard(self, peer: Peer) -> None:
        """It has proved the token, or is gone."""
        host = self._hosts.pop(peer, None)
        if host is not None:
            self._crowd[host] -= 1
            if not self._crowd[host]:
                del self._crowd[host]

    def next_to_go(self) -> Peer:
        """The first of the address with the most of them: a node needs milliseconds to prove the token."""
        crowded = max(self._crowd, key=lambda host: self._crowd[host])
        return next(peer for peer, host in self._hosts.items() if host == crowded)


class Complaints:
    """Reports what strangers can cause as often as they like: five lines in ten seconds."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._until, self._count = 0.0, 0

    def say(self, text: str, now: float) -> None:
        """Report this, unless there was much of the kind."""
        if now >= self._until:
            if self._count > _COMPLAINTS:
                text = f"{text} ({self._count - _COMPLAINTS} similar incidents were not reported)"
            self._until, self._count = now + _COMPLAINT_TIME, 0
        self._count += 1
        if self._count <= _COMPLAINTS:
            self._report(text)


def descriptors() -> int:
    """How many files this process may have open."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
