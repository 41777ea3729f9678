"""The timer interface: requests, client, queue, server, and `expires` for user code.

A timer is a worker's promise to leave a scope by a given time. It is acquired with a wall-clock time (torch's
names and formats carry that) and released with a negative one. The server converts it to its own monotonic
time on arrival, so later jumps of the clock have no effect.

`TimerServer` is the general server: subclasses define how timers are kept and how workers are stopped, and
the loop here decides when. It sees every request and keeps its own deadlines, so it sleeps until the next one
instead of checking every `max_interval`; that is only an upper bound, because `stop` cannot wake a queue of
unknown type. The loop survives any exception of the queue or the subclass, and never spins.

Invariants
- `expires` scopes are independent: if a name is entered several times at once by threads or asyncio tasks,
  each has a scope of its own. The first one has the plain name.
- A name that is entered again inside of its own block (a recursion) is one scope, as torch's: each entry
  begins the time again. So does each exit but the last, with the time of the block around it; torch drops
  the timer there, and the rest of the outer block is not watched.
- A request that came over a wire may carry `started`, the start time of the sending process in clock ticks
  since boot (0: unknown). It distinguishes a worker from a later process with the same pid.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import get_ident
from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.agent.supervision.timers.watchdog import log
from phalanx.core.deadlines import Deadlines

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    F = TypeVar("F", bound=Callable[..., Any])

RELEASE = -1.0
"""The expiration time of a release; any negative number is one."""

_RETRY = 1.0
"""Seconds until the next attempt after a worker could not be reaped or the loop failed."""


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
    """A request through a named pipe: the worker is a pid and chooses the signal."""

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
        """The request as torch writes it into the pipe, without the newline."""
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
    """The worker's side; subclasses send the two requests to a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """The worker must release the scope before this wall-clock time (seconds since 1970)."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """The worker has left the scope."""


class RequestQueue(ABC):
    """The source of a server's requests."""

    @abstractmethod
    def size(self) -> int:
        """The approximate number of waiting requests."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits at most `timeout` seconds for them."""


_configured: TimerClient | None = None


class _Scope:
    """An entered scope: its name on the wire, its process and thread, and the times of its open blocks."""

    __slots__ = ("blocks", "name", "owner")

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


class Countdown:
    """A block with a deadline, which may be entered repeatedly; as a decorator, once per call."""

    __slots__ = ("_after", "_client", "_open", "_scope")

    def __init__(self, after: float, scope: str, client: TimerClient | None) -> None:
        self._after = after
        self._scope = scope
        self._client = client
        self._open: list[tuple[TimerClient, _Scope]] = []

    def __enter__(self) -> None:
        client = self._client if self._client is not None else _configured
        if client is None:
            raise RuntimeError(
                f"expires({self._after!r}): no timer client; call configure(client) first, or pass client="
            )
        around, key, owner = _around.get() or {}, (id(client), self._scope), (os.getpid(), get_ident())
        scope = around.get(key)
        if (
            scope is None or not scope.blocks or scope.owner != owner
        ):  # a task's and a thread's may be another's
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

    def __call__(self, function: F) -> F:
        from functools import wraps

        @wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            with Countdown(self._after, self._scope, self._client):
                return function(*args, **named)

        return counted  # type: ignore[return-value]  # wraps keeps the signature

    def _name(self, client: TimerClient) -> str:
        """The scope's name if it is not entered, else the name with the first free number."""
        token, name, number = object(), self._scope, 1
        while _entered.setdefault((id(client), name), token) is not token:
            number += 1
            name = f"{self._scope} ({number})"
        return name


class TimerServer(ABC):
    """Takes requests from a queue and reaps the workers whose timers have expired."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._deadlines: Deadlines[None] = Deadlines()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Keep acquired timers and drop released ones (negative expiration time)."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """By worker, the timers that expire at or before this wall time."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Stop a worker; True if it is stopped or gone."""

    def start(self) -> None:
        """Serve the queue in a thread, if none does."""
        import threading

        if self._thread is not None:
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=type(self).__name__, daemon=self._daemon)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; takes up to `max_interval`, the longest wait on the queue."""
        thread, self._thread = self._thread, None
        if thread is not None and self._stop is not None:
            self._stop.set()
            thread.join()

    def _loop(self) -> None:
        assert self._stop is not None
        while not self._stop.is_set():
            try:
                self._run_watchdog()
            except Exception as error:  # noqa: BLE001 - one bad request must not end the watchdog
                log("error", f"timers: {type(error).__name__}: {error} (the watchdog continues)")
                self._stop.wait(min(_RETRY, self._max_interval))

    def _run_watchdog(self) -> None:
        """One round: wait for requests or the next deadline, register, reap."""
        upcoming, wait = self._deadlines.next(), self._max_interval
        if upcoming is not None:
            wait = min(wait, max(0.0, upcoming - time.monotonic()))
        # First one alone: waiting for several could miss the deadline of the first.
        requests = self._request_queue.get(1, wait)
        if requests and (more := self._request_queue.size()) > 0:
            requests = requests + self._request_queue.get(more, 0)
        for request in requests:
            if request.expiration_time < 0:
                self._deadlines.drop(request.worker_id, request.scope_id)
            else:
                at = time.monotonic() + (request.expiration_time - time.time())
                self._deadlines.set(request.worker_id, request.scope_id, at, None)
        self.register_timers(requests)
        self._deadlines.due(time.monotonic())
        self._reap_expired(self.get_expired_timers(time.time()))

    def _reap_expired(self, expired: dict[Any, list[TimerRequest]]) -> None:
        reaped = set()
        for worker_id, requests in expired.items():
            if self._reap(worker_id, [request.scope_id for request in requests]):
                reaped.add(worker_id)
                self._deadlines.forget(worker_id)
            else:
                self._deadlines.set(worker_id, requests[0].scope_id, time.monotonic() + _RETRY, None)
        if reaped:
            self.clear_timers(reaped)

    def _reap(self, worker_id: Any, scopes: list[str]) -> bool:
        """Reap one worker and log why; an exception counts as not reaped."""
        try:
            done = self._reap_worker(worker_id)
        except Exception as error:  # noqa: BLE001 - one worker's error must not protect the others
            log("error", f"timers: worker {worker_id}: {type(error).__name__}: {error}")
            return False
        names = ", ".join(repr(scope) for scope in scopes)
        if done:
            log("warning", f"timers: worker {worker_id} did not leave {names} in time and was reaped")
        else:
            log("error", f"timers: worker {worker_id} did not leave {names} in time, and could not be reaped")
        return done
