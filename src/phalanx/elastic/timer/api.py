"""torch.distributed.elastic.timer.api's names: the clients' interface, and `expires` for user code.

Invariants
- `expires` scopes are independent: if a name is entered several times at once by threads or asyncio tasks,
  each has a scope of its own. The first one has the plain name.
- A name that is entered again inside of its own block (a recursion) is one scope, as torch's: each entry
  begins the time again. So does each exit but the last, with the time of the block around it; torch drops
  the timer there, and the rest of the outer block is not watched.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ContextDecorator
from contextvars import ContextVar

from phalanx.agent.supervision.timers.timer_pipe import RequestQueue, TimerRequest
from phalanx.agent.supervision.timers.watchdog import TimerServer
from phalanx.elastic.lazy_modules import found_in

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]


class TimerClient(ABC):
    """The worker's side; subclasses send the two requests to a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """The worker must release the scope before this wall-clock time (seconds since 1970)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """The worker has left the scope."""


_configured: TimerClient | None = None


class _Scope:
    """An entered scope: its name on the wire, its process and thread, and the times of its open blocks."""

    def __init__(self, name: str, owner: tuple[int, int]) -> None:
        self.name = name
        self.owner = owner
        self.blocks: list[float] = []


# The names in use. Every access is one dict operation, which is atomic: a lock held by another thread
# during a fork would never be released in the child.
_entered: dict[tuple[int, str], object] = {}
_around: ContextVar[dict[tuple[int, str], _Scope] | None] = ContextVar(
    "scopes around this code", default=None
)


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses in this process."""
    global _configured
    _configured = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> Countdown:
    """A context manager and decorator: a worker that does not leave the block in `after` seconds is stopped.

    `scope` names the block in logs and reports; by default it is the caller's file and line.
    """
    if scope is None:
        frame = sys._getframe(1)
        scope = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if after != after:
        raise ValueError(f"expires(after={after!r}): not a number of seconds")
    return Countdown(after, scope, client)


class Countdown(ContextDecorator):
    """A block with a deadline, which may be entered repeatedly; as a decorator, once per call."""

    def __init__(self, after: float, scope: str, client: TimerClient | None) -> None:
        self._after = after
        self._scope = scope
        self._client = client
        self._open: list[tuple[TimerClient, _Scope]] = []

    def _recreate_cm(self) -> Countdown:
        return Countdown(self._after, self._scope, self._client)

    def __enter__(self) -> None:
        client = self._client if self._client is not None else _configured
        if client is None:
            raise RuntimeError(
                f"expires({self._after!r}): no timer client; call configure(client) first, or pass client="
            )
        around, key = _around.get() or {}, (id(client), self._scope)
        scope, owner = around.get(key), (os.getpid(), threading.get_ident())
        # Not one of the task or thread that this one was started from.
        if scope is None or not scope.blocks or scope.owner != owner:
            scope = _Scope(self._name(client), owner)
            _around.set({**around, key: scope})
        try:
            client.acquire(scope.name, time.time() + self._after)
        except BaseException:
            if not scope.blocks:
                _entered.pop((id(client), scope.name), None)
            raise
        scope.blocks.append(self._after)
        self._open.append((client, scope))

    def __exit__(self, *exc: object) -> None:
        client, scope = self._open.pop()
        scope.blocks.remove(self._after)
        if scope.blocks:
            client.acquire(scope.name, time.time() + scope.blocks[-1])
            return
        try:
            client.release(scope.name)
        finally:
            _entered.pop((id(client), scope.name), None)

    def _name(self, client: TimerClient) -> str:
        """The scope's name if it is not entered, else the name with the first free number."""
        token, name, number = object(), self._scope, 1
        while _entered.setdefault((id(client), name), token) is not token:
            number += 1
            name = f"{self._scope} ({number})"
        return name


__getattr__ = found_in(__name__)
