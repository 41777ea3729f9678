"""Timer servers: take requests from a queue, and reap the workers whose timers have expired.

A timer is a worker's promise to leave a scope by a given time. It arrives with a wall-clock time (torch's
names and formats carry that) and is converted to the monotonic clock on arrival: later jumps have no effect.

Invariants
- One thread runs the loop; what other threads access too is behind a lock, which is never held during a
  sleep or a callback.
- It sleeps until a request or the next deadline: expiries wait for no interval, and an idle watchdog never
  wakes. `max_interval` is only an upper bound, for subclasses that keep timers in their own way.
- One round reads the queue at most once, so a flood of requests cannot delay deadlines.
- A bad request is dropped alone: it is counted under its reason in `dropped` and logged once per reason.
- The loop survives any exception of the queue or a subclass, and never spins.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from math import inf
from typing import Any

from phalanx.agent.supervision.timers.timer_pipe import PipeQueue, RequestQueue, TimerRequest
from phalanx.agent.supervision.timers.watched_processes import ENDED, GONE, REUSED, WatchedProcess, admit

_RETRY = 1.0  # seconds until the next attempt to reap a worker, or to run a loop that failed
_MAX_WORKERS = 4096  # of one server; each takes a descriptor
_MAX_SCOPES = 10_000  # of one worker: far above any real nesting, far below what would hurt
_STALLED = 1.0  # seconds past its planned wake-up after which the loop counts as stalled


class TimerServer(ABC):
    """The loop. Subclasses define how timers are kept and how workers are stopped."""

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._lock = threading.RLock()
        self._timers: dict[
            Any, dict[str, tuple[float, Any]]
        ] = {}  # by worker and scope, and when they expire
        self._drops: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._seen = time.time()
        self._planned = inf

    @abstractmethod
    def register_timers(self, timer_requests: list[Any]) -> None:
        """Keep acquired timers and drop released ones (negative expiration time)."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of these workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the timers that expire at or before this wall time."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """Stop a worker; True if it is stopped or gone."""

    def start(self) -> None:
        """Serve the queue in a thread, if none does."""
        if self._thread is None:
            self._end.clear()
            self._thread = threading.Thread(target=self._loop, name=type(self).__name__, daemon=self._daemon)
            self._thread.start()

    def stop(self) -> None:
        """Stop serving; takes up to `max_interval` where the queue cannot be woken."""
        thread, self._thread = self._thread, None
        self._end.set()
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def last_progress(self) -> float:
        """Wall time of the last round; now, while the loop sleeps as planned."""
        alive = self._thread is not None and self._thread.is_alive()
        return time.time() if alive and time.monotonic() <= self._planned + _STALLED else self._seen

    def _wake(self) -> None:
        if isinstance(self._request_queue, PipeQueue):
            self._request_queue.wake()

    def _loop(self) -> None:
        while not self._end.is_set():
            try:
                self._run_watchdog()
            except Exception as error:  # noqa: BLE001 - one bad request must not end the watchdog
                log("error", f"timers: {type(error).__name__}: {error} (the watchdog continues)")
                self._end.wait(min(_RETRY, self._max_interval))

    def _run_watchdog(self, most: float = inf) -> None:
        """One round: wait for requests or the next deadline, at most so long; register, reap."""
        with self._lock:
            upcoming = min((at for timers in self._timers.values() for at, _ in timers.values()), default=inf)
        now = time.monotonic()
        wait = min(most, self._max_interval, max(0.0, upcoming - now))
        self._planned = now + wait
        # First one alone: waiting for several could miss the deadline of the first.
        requests = self._request_queue.get(1, wait)
        self._planned, self._seen = time.monotonic(), time.time()
        if requests and (more := self._request_queue.size()) > 0:
            requests = requests + self._request_queue.get(more, 0)
        self._register(requests)
        for worker_id, expired in self._take_expired().items():
            try:
                reaped = self._reap(worker_id, expired)
            except Exception as error:  # noqa: BLE001 - one worker's error must not protect the others
                log("error", f"timers: worker {worker_id}: {type(error).__name__}: {error}")
                reaped = False
            if not reaped:
                self._set(expired, time.monotonic() + _RETRY)

    def _register(self, requests: list[Any]) -> None:
        self._set(requests)
        self.register_timers(requests)

    def _set(self, requests: list[Any], at: float | None = None) -> None:
        """Set deadlines of the loop, or drop them."""
        with self._lock:
            for request in requests:
                if request.expiration_time < 0:
                    self._timers.get(request.worker_id, {}).pop(request.scope_id, None)
                    continue
                timers = self._timers.setdefault(request.worker_id, {})
                if len(timers) < _MAX_SCOPES or request.scope_id in timers:
                    when = at or time.monotonic() + request.expiration_time - time.time()
                    timers[request.scope_id] = when, request
                else:
                    self._drop("too many scopes of one worker")

    def _take_expired(self) -> dict[Any, list[Any]]:
        self._take_due()
        return self.get_expired_timers(time.time())

    def _take_due(self) -> dict[Any, list[Any]]:
        """By worker, the requests whose deadline has passed; each is taken once."""
        found: dict[Any, list[Any]] = {}
        now = time.monotonic()
        with self._lock:
            due = [timer for timers in self._timers.values() for timer in timers.values() if timer[0] <= now]
            for _, request in sorted(due, key=lambda timer: timer[0]):
                del self._timers[request.worker_id][request.scope_id]
                found.setdefault(request.worker_id, []).append(request)
        return found

    def _reap(self, worker_id: Any, expired: list[Any]) -> bool:
        """Reap one worker, log why, and drop its timers; False to try it again."""
        names = ", ".join(repr(request.scope_id) for request in expired)
        reaped = self._reap_worker(worker_id)
        if reaped:
            log("warning", f"timers: worker {worker_id} did not leave {names} in time and was reaped")
            self._timers.pop(worker_id, None)
            self.clear_timers({worker_id})
        else:
            log("error", f"timers: worker {worker_id} did not leave {names} in time, and could not be reaped")
        return reaped

    def _drop(self, reason: str) -> None:
        """Count a dropped request; log the first one of each reason."""
        self._drops[reason] = self._drops.get(reason, 0) + 1
        if self._drops[reason] == 1:
            log("warning", f"timers: dropped a request: {reason} (further ones are only counted)")


class Watchdog(TimerServer):
    """A server of processes of this host: it admits those that send requests, and signals no other."""

    def __init__(self, request_queue: PipeQueue, max_interval: float, daemon: bool = True) -> None:
        # A subclass that keeps timers in its own way sees every interval; this class needs none.
        kept = "register_timers", "clear_timers", "get_expired_timers"
        is_plain = all(getattr(type(self), name) is getattr(Watchdog, name) for name in kept)
        super().__init__(request_queue, inf if is_plain else max_interval, daemon)
        self._queue = request_queue
        self._workers: dict[int, WatchedProcess] = {}
        _watchdogs.add(self)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped requests by reason."""
        return {**self._drops, **({"garbage": self._queue.garbage} if self._queue.garbage else {})}

    def start(self) -> None:
        """Serve the queue in a thread, if none does."""
        self._queue.open()
        super().start()

    def stop(self) -> None:
        """Stop serving, and forget workers and timers; waiting requests stay in the queue."""
        super().stop()
        self._close()

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Keep acquired timers and drop released ones, from any thread."""
        with self._lock:
            self._set([request for request in timer_requests if self._is_current(request)])
        if timer_requests and threading.current_thread() is not self._thread:
            self._queue.wake()

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Drop all timers of these workers."""
        with self._lock:
            for worker_id in worker_ids:
                self._timers.pop(worker_id, None)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the timers that expire at or before this wall time."""
        self._forget_dead()
        with self._lock:
            due = {
                worker_id: [request for _, request in timers.values() if request.expiration_time <= deadline]
                for worker_id, timers in self._timers.items()
            }
        return {worker_id: requests for worker_id, requests in due.items() if requests}

    def _take_expired(self) -> dict[Any, list[Any]]:
        if type(self).get_expired_timers is not Watchdog.get_expired_timers:
            return super()._take_expired()
        found, known = self._take_due(), set(self._workers)
        if found:
            self._forget_dead()
        for _ in found.keys() - known:  # never admitted: the pid may belong to anybody
            self._drop("no worker of this server")
        return {pid: requests for pid, requests in found.items() if pid in self._workers}

    def _signal(self, pid: Any, sig: int) -> bool:
        """Signal a worker if it is still the process that sent the request; True if done, or it is gone."""
        with self._lock:
            worker = self._workers.get(pid)
            problem = GONE if worker is None else worker.signal(sig)
        if problem not in ("", GONE):
            log("error", f"timers: pid {pid} could not be signalled: {problem}")
        return problem in ("", GONE)

    def _register(self, requests: list[Any]) -> None:
        # Most timers are released before they are read: of each, only the last request counts.
        final = {(r.worker_id, r.started, r.scope_id): r for r in requests}
        with self._lock:
            admitted = [request for request in final.values() if self._is_admitted(request)]
        self.register_timers(admitted)

    def _is_admitted(self, request: TimerRequest) -> bool:
        worker = self._workers.get(request.worker_id)
        if request.expiration_time < 0:
            return worker is not None and request.started in (0, worker.started)
        if worker is not None and worker.alive():
            reason = "" if request.started in (0, worker.started) else REUSED
        else:
            reason = self._admit(request)
        if reason:
            self._drop(reason)
        else:
            request.started = self._workers[request.worker_id].started  # torch's clients send none
        return not reason

    def _is_current(self, request: TimerRequest) -> bool:
        """Whether the process that sent a request still runs; those of other callers have no start time."""
        worker = self._workers.get(request.worker_id)
        if worker is None:  # now: at expiry the pid may be another process
            return self._admit(request) not in ENDED or not request.started
        return request.started in (0, worker.started)

    def _admit(self, request: TimerRequest) -> str:
        """Note the process that sent a request; returns why it is refused, or ''."""
        self._forget_dead()
        if len(self._workers) >= _MAX_WORKERS:
            return "too many workers"
        found = admit(request.worker_id, request.started, self._queue.named)
        if isinstance(found, str):
            return found
        self._workers[found.pid] = found
        return ""

    def _forget_dead(self) -> None:
        with self._lock:
            for pid in [pid for pid, worker in self._workers.items() if not worker.alive()]:
                self._workers.pop(pid).close()
                self._timers.pop(pid, None)

    def _close(self) -> None:
        with self._lock:
            self._timers = {}
            while self._workers:
                self._workers.popitem()[1].close()
            self._queue.close()


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: there is no watchdog thread, and its descriptors must be closed.

    While a worker holds the reading end of the pipe, writers do not notice that the server is gone.
    """
    for watchdog in list(_watchdogs):
        watchdog._lock = threading.RLock()
        watchdog._thread = None
        watchdog._close()


os.register_at_fork(after_in_child=_after_fork)


def log(level: str, text: str) -> None:
    """Log one line; imports logging only when needed."""
    import logging

    getattr(logging.getLogger("phalanx.timers"), level)("%s", text)
