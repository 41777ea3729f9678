"""The general timer server: any queue, any way to keep timers, any way to stop a worker.

Subclasses say how timers are kept and workers stopped; the loop here says when. It sees every request pass
and keeps its own note of the deadlines, so it sleeps until the next one instead of looking every
`max_interval`; that remains only an upper bound, because a foreign queue cannot be woken for `stop`.

Invariant: whatever a queue or a subclass throws, the loop goes on, and it never spins.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from phalanx.core.deadlines import Deadlines
from phalanx.supervision.timers.watchdog import say

if TYPE_CHECKING:
    import threading

    from phalanx.supervision.timers.requests import RequestQueue, TimerRequest

_AGAIN = 1.0
"""Seconds until a worker that could not be reaped is tried again, and after trouble in the loop."""


class TimerServer(ABC):
    """Takes requests from a queue and reaps the workers whose timers have expired."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._noted: Deadlines[None] = Deadlines()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Keeps acquired timers and drops released ones (negative expiration time)."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drops all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[str, list[TimerRequest]]:
        """By worker, the timers that expire at or before this wall time."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Stops a worker; True when it is stopped or gone."""

    def start(self) -> None:
        """Minds the queue from now on, in a thread."""
        import threading

        if self._thread is not None:
            raise RuntimeError(f"{type(self).__name__} is running already; stop() it first")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=type(self).__name__, daemon=self._daemon)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watching; within `max_interval`, for that is how long the queue may be asked to wait."""
        thread, self._thread = self._thread, None
        if thread is not None and self._stop is not None:
            self._stop.set()
            thread.join()

    def _loop(self) -> None:
        assert self._stop is not None
        while not self._stop.is_set():
            try:
                self._run_watchdog()
            except Exception as error:  # noqa: BLE001 - a watchdog that dies of one bad request guards nothing
                say("error", f"timers: {type(error).__name__}: {error} (the watchdog goes on)")
                self._stop.wait(min(_AGAIN, self._max_interval))

    def _run_watchdog(self) -> None:
        """One round: wait for requests or the next deadline, register, reap."""
        upcoming, wait = self._noted.next(), self._max_interval
        if upcoming is not None:
            wait = min(wait, max(0.0, upcoming - time.monotonic()))
        # One first: to wait for several would let the deadline of the first pass unseen.
        requests = self._request_queue.get(1, wait)
        if requests and (more := self._request_queue.size()) > 0:
            requests = requests + self._request_queue.get(more, 0)
        for request in requests:
            if request.expiration_time < 0:
                self._noted.drop(request.worker_id, request.scope_id)
            else:
                at = time.monotonic() + (request.expiration_time - time.time())
                self._noted.set(request.worker_id, request.scope_id, at, None)
        self.register_timers(requests)
        self._noted.due(time.monotonic())
        self._reap_expired(self.get_expired_timers(time.time()))

    def _reap_expired(self, expired: dict[Any, list[TimerRequest]]) -> None:
        reaped = set()
        for worker_id, requests in expired.items():
            if self._reap(worker_id, [request.scope_id for request in requests]):
                reaped.add(worker_id)
                self._noted.forget(worker_id)
            else:
                self._noted.set(worker_id, requests[0].scope_id, time.monotonic() + _AGAIN, None)
        if reaped:
            self.clear_timers(reaped)

    def _reap(self, worker_id: Any, scopes: list[str]) -> bool:
        """Reaps one worker and says why; trouble counts as not reaped."""
        try:
            done = self._reap_worker(worker_id)
        except Exception as error:  # noqa: BLE001 - one worker's trouble must not shield the others
            say("error", f"timers: worker {worker_id}: {type(error).__name__}: {error}")
            return False
        names = ", ".join(repr(scope) for scope in scopes)
        if done:
            say("warning", f"timers: worker {worker_id} did not leave {names} in time and was reaped")
        else:
            say("error", f"timers: worker {worker_id} did not leave {names} in time, and could not be reaped")
        return done
