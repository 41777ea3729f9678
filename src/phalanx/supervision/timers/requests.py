"""What is said about a timer, and `expires`, with which user code says it.

A timer is a promise of a worker: "I shall have left this scope by then". It is acquired with a time of the
wall clock (that is what the names and formats shared with torch carry) and released with a negative one.
The server turns it into its own monotonic time on arrival, so later jumps of the clock change nothing.

Invariants
- `expires` scopes are independent: however often a name is entered at once, nested, by threads or by
  re-entry, each entry has a scope of its own. The first one bears the plain name, so what a client sees
  for the common case is the name it was given.
- A request that came over a wire may carry `started`, the start time of the process that sent it in clock
  ticks since boot (0: not told). It tells a worker from a later process that got the same pid.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

RELEASE = -1.0
"""The expiration time of a release; any negative number is one."""


class TimerRequest:
    """A worker acquires the timer of a scope, or releases it (negative expiration time)."""

    __slots__ = ("expiration_time", "scope_id", "started", "worker_id")

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time
        self.started = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TimerRequest):
            return NotImplemented
        return (self.worker_id, self.scope_id, self.expiration_time) == (
            other.worker_id,
            other.scope_id,
            other.expiration_time,
        )

    __hash__ = None  # type: ignore[assignment]  # mutable, and unhashable in torch too

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.worker_id!r}, {self.scope_id!r}, {self.expiration_time!r})"


class FileTimerRequest(TimerRequest):
    """A request by way of a named pipe: the worker is a pid, and says which signal it wants to get."""

    __slots__ = ("signal", "version")

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTimerRequest):
            return NotImplemented
        return super().__eq__(other) is True and self.signal == other.signal

    __hash__ = None

    @property
    def worker_pid(self) -> int:
        """The pid of the worker."""
        return int(self.worker_id)

    def to_json(self) -> str:
        """The request as torch writes it into the pipe, without the end of line."""
        import json

        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_id,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


class TimerClient(ABC):
    """The worker's side; subclasses carry the two requests to a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """The worker must release the scope before this time of the wall clock (seconds since 1970)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """The worker has left the scope."""


class RequestQueue(ABC):
    """Where a server gets its requests from."""

    @abstractmethod
    def size(self) -> int:
        """About how many requests wait."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits at most `timeout` seconds for them."""


_configured: TimerClient | None = None

# Scopes that are entered now. Every step on it is one dict operation, which is atomic: a lock could be
# held by another thread at the moment of a fork, and then never be free again in the child.
_entered: dict[tuple[int, str], object] = {}


def configure(timer_client: TimerClient) -> None:
    """Sets the client that `expires` uses in this process."""
    global _configured
    _configured = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> Countdown:
    """A context manager (and decorator): a block not left within `after` seconds has its worker stopped.

    `scope` names the block in logs and reports; by default it is the place of the call.
    """
    if scope is None:
        frame = sys._getframe(1)
        scope = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if after != after:
        raise ValueError(f"expires(after={after!r}): not a number of seconds")
    return Countdown(after, scope, client)


class Countdown:
    """One block with a deadline, which may be entered again; as a decorator, a new one for every call."""

    __slots__ = ("_after", "_client", "_open", "_scope")

    def __init__(self, after: float, scope: str, client: TimerClient | None) -> None:
        self._after = after
        self._scope = scope
        self._client = client
        self._open: list[tuple[TimerClient, str]] = []

    def __enter__(self) -> None:
        client = self._client if self._client is not None else _configured
        if client is None:
            raise RuntimeError(
                f"expires({self._after!r}): no timer client; call configure(client) first, or pass client="
            )
        scope = self._name(client)
        try:
            client.acquire(scope, time.time() + self._after)
        except BaseException:
            _entered.pop((id(client), scope), None)
            raise
        self._open.append((client, scope))

    def __exit__(self, *exc: object) -> None:
        client, scope = self._open.pop()
        try:
            client.release(scope)
        finally:
            _entered.pop((id(client), scope), None)

    def __call__(self, function: F) -> F:
        """As a decorator: a countdown of its own for every call."""
        from functools import wraps

        @wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            with Countdown(self._after, self._scope, self._client):
                return function(*args, **named)

        return counted  # type: ignore[return-value]  # wraps keeps the signature, which cannot be said

    def _name(self, client: TimerClient) -> str:
        """The scope's name if nobody is in it, else the name with the first free number."""
        token, name, number = object(), self._scope, 1
        while _entered.setdefault((id(client), name), token) is not token:
            number += 1
            name = f"{self._scope} ({number})"
        return name


def cut(scope: bytes, room: int) -> bytes:
    """The scope itself, or its beginning and a checksum of all of it when it does not fit."""
    if len(scope) <= room:
        return scope
    from zlib import crc32

    return scope[: room - 10].decode("utf-8", "ignore").encode() + b"~%08x" % crc32(scope)


def sent(micros: int, pid: int, started: int, scope: str) -> TimerRequest:
    """The request in a frame of the multiprocessing queue (see `phalanx.supervision.timers.queue_codec`)."""
    request = TimerRequest(pid, scope, micros / 1e6 if micros >= 0 else RELEASE)
    request.started = started
    return request
