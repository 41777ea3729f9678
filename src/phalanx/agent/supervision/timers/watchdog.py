"""The loop of both timer servers: sleeps until a request, a worker's death or the next deadline.

Invariants
- One thread owns deadlines and workers while it runs; public methods that access them take the lock, which is
  never held during a sleep, a signal, a log line or a callback.
- It sleeps in one `poll` without an upper bound: an idle watchdog never wakes, and expiries are handled
  without the delay of an interval.
- One iteration does at most one read of the source, so a flood of requests cannot delay deadlines.
- A bad request is dropped alone: it is counted under its reason in `dropped` and logged once per reason.
- The loop survives any exception of a callback or the source.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.agent.supervision.timers.watched_processes import GONE, TimedWorker, WatchedProcesses
from phalanx.core.deadlines import Deadlines, Expired

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.agent.supervision.timers.api import TimerRequest

_MAX_SLEEP = 3_600_000  # milliseconds; a deadline years away must fit into the kernel's integer
_RETRY = 1.0  # seconds until the next attempt to stop a worker
_BURST = 0.0005
"""Requests less than this many seconds apart are a burst; the loop pauses as long to read several at once."""
_STALLED = 1.0  # seconds past its planned wake-up after which the loop counts as stalled


class TimerSource(Protocol):
    """The source of requests."""

    def fileno(self) -> int:
        """Readable when there are requests."""

    def read(self) -> Iterable[TimerRequest]:
        """The available requests, without waiting; of several for one scope only the last."""

    def close(self) -> None:
        """Close the descriptor; `fileno` may open it again."""


class WatchdogOwner(Protocol):
    """The server that runs a watchdog."""

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Keep admitted requests."""

    def _overdue(self, pid: int, requests: list[Any]) -> None:
        """Handle a worker's expired requests."""


class Watchdog:
    """Deadlines, the processes they belong to, and the thread that watches both."""

    def __init__(self) -> None:
        self.deadlines: Deadlines[Any] = Deadlines()
        self.workers = WatchedProcesses(self._joined, self._left)
        self.dropped: dict[str, int] = {}
        self.lock = threading.RLock()
        # Set only while running: a reference cycle would keep the caller's queue open after its last use.
        self._owner: WatchdogOwner | None = None
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._source: TimerSource | None = None
        self._stopping = False
        self._seen = time.time()
        self._planned = inf
        self._period: float | None = None
        _running.add(self)

    def start(
        self, source: TimerSource, owner: WatchdogOwner, daemon: bool, period: float | None = None
    ) -> None:
        """Watch the source in a thread; with a `period`, `register_timers` is called at least that often."""
        name = type(owner).__name__
        if self._thread is not None:
            raise RuntimeError(f"{name} is already running; call stop() first")
        self._stopping = False
        self._period = period
        self._open(source, owner)
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and forget workers and deadlines; does nothing if not running."""
        thread, self._thread = self._thread, None
        self._stopping = True
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.close()

    def running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def once(self, source: TimerSource, owner: WatchdogOwner) -> None:
        """One iteration in the caller's thread, without waiting."""
        if self._source is None:
            self._open(source, owner)
        self._iterate(0)

    def last_progress(self) -> float:
        """Wall time of the last iteration; now, while the loop sleeps as planned."""
        if self.running() and time.monotonic() <= self._planned + _STALLED:
            return time.time()
        return self._seen

    def register(self, requests: Iterable[TimerRequest]) -> None:
        """Set or drop deadlines, from any thread."""
        with self.lock:
            for request in requests:
                self._register(request.worker_id, request)
        if threading.current_thread() is not self._thread:
            self.wake()

    def _register(self, worker_id: Any, request: TimerRequest) -> None:
        if request.expiration_time < 0:
            self.deadlines.drop(worker_id, request.scope_id)
            return
        if type(worker_id) is int and worker_id not in self.workers.known:
            self.workers.admit(worker_id, request.started)  # now: at expiry the pid may be another process
        at = time.monotonic() + (request.expiration_time - time.time())
        if not self.deadlines.set(worker_id, request.scope_id, at, request):
            self.drop("too many scopes of one worker")

    def forget(self, worker_ids: Iterable[Any]) -> None:
        """Drop all deadlines of these workers."""
        with self.lock:
            for worker_id in worker_ids:
                self.deadlines.forget(worker_id)

    def due_by(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the requests that expire at or before this wall time; changes nothing."""
        with self.lock:
            filed = {worker: self.deadlines.filed(worker) for worker in self.deadlines.owners()}
        due = {worker: [r for r in some if r.expiration_time <= deadline] for worker, some in filed.items()}
        return {worker: requests for worker, requests in due.items() if requests}

    def signal(self, pid: Any, sig: int) -> bool:
        """Signal a worker if it is still the process that sent the request; True if done, or it is gone."""
        with self.lock:
            worker = self.workers.known.get(pid) or (
                self.workers.admit(pid) if type(pid) is int else "not a pid"
            )
        if isinstance(worker, str):
            log("info", f"timers: pid {pid} was not signalled: {worker}")
            return worker in GONE
        problem = worker.signal(sig)
        if problem == "it is gone":
            with self.lock:
                self.workers.remove(worker.pid)
        elif problem:
            log("error", f"timers: pid {pid} could not be signalled: {problem}")
            return False
        return True

    def retry(self, requests: list[Any]) -> None:
        """Let expired requests expire again in a second: their worker could not be stopped."""
        with self.lock:
            for request in requests:
                at = time.monotonic() + _RETRY
                self.deadlines.set(request.worker_id, request.scope_id, at, request)

    def drop(self, reason: str) -> None:
        """Count a dropped request; log the first one of each reason."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if self.dropped[reason] == 1:
            log("warning", f"timers: dropped a request: {reason} (further ones are only counted)")

    def wake(self) -> None:
        """Wake the loop."""
        if self._wake is not None:
            try:
                os.write(self._wake[1], b"x")
            except BlockingIOError:
                pass  # a wake-up is pending already

    def close(self) -> None:
        """Close all descriptors."""
        with self.lock:
            self.workers.close()
            for owner in self.deadlines.owners():
                self.deadlines.forget(owner)
            self._owner = None
            if self._source is not None:
                self._unwatch(self._source.fileno())
                self._source.close()
                self._source = None
            if self._wake is not None:
                self._unwatch(self._wake[0])
                os.close(self._wake[0])
                os.close(self._wake[1])
                self._wake = None

    def _open(self, source: TimerSource, owner: WatchdogOwner) -> None:
        self._owner = owner
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        self._source = source
        self._poll.register(self._wake[0], select.POLLIN)
        self._poll.register(source.fileno(), select.POLLIN)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._iterate(None)
            except Exception as error:  # noqa: BLE001 - one bad event must not end the watchdog
                self.drop("internal error")
                log("error", f"timers: {type(error).__name__}: {error} (the watchdog continues)")

    def _iterate(self, timeout: int | None) -> None:
        """Sleep until an event (at most `timeout` ms), then handle it."""
        with self.lock:
            upcoming = self.deadlines.next()
        now = time.monotonic()
        wait = timeout
        if upcoming is not None and timeout is None:
            wait = max(0, min(_MAX_SLEEP, ceil(min((upcoming - now) * 1000, _MAX_SLEEP))))
        if self._period is not None and timeout is None:
            most = ceil(self._period * 1000)
            wait = most if wait is None else min(wait, most)
        # Without a deadline, the planned sleep has no end.
        self._planned = inf if wait is None else now + wait / 1000
        events = self._poll.poll(wait)
        self._planned = time.monotonic()
        self._seen = time.time()
        readable = {fd for fd, _ in events}
        if self._wake is not None and self._wake[0] in readable:
            os.read(self._wake[0], 4096)
        # Deaths first: a request that arrived after a death is from the next process with that pid.
        for fd in readable & self._pidfds.keys():
            with self.lock:
                self.workers.remove(self._pidfds[fd])
        if self._source is not None and self._source.fileno() in readable:
            if timeout is None:
                self._wait_for_burst(now)
            self._admit(self._source.read())
        elif self._period is not None and self._owner is not None:
            self._owner.register_timers([])
        self._expire()

    def _wait_for_burst(self, slept_at: float) -> None:
        """In a burst of requests, pause to read several at once: every wake-up slows down their writers.

        This is not a poll: it happens only in a burst, and delays a deadline by at most `_BURST`.
        """
        if time.monotonic() - slept_at < _BURST:
            time.sleep(_BURST)

    def _admit(self, requests: Iterable[TimerRequest]) -> None:
        """Register the requests of admitted processes."""
        admitted = []
        with self.lock:
            for request in requests:
                if request.expiration_time < 0:
                    worker = self.workers.known.get(request.worker_id)
                    if worker is not None and request.started in (0, worker.started):
                        admitted.append(request)
                    continue
                found = self.workers.admit(request.worker_id, request.started)
                if isinstance(found, str):
                    self.drop(found)
                else:
                    admitted.append(request)
        if admitted and self._owner is not None:
            self._owner.register_timers(admitted)

    def _expire(self) -> None:
        with self.lock:
            due = self.deadlines.due(time.monotonic())
        found: dict[int, list[Expired]] = {}
        for one in due:
            found.setdefault(one.owner, []).append(one)
        for pid, expired in found.items():
            if self._owner is None:
                return
            try:
                self._owner._overdue(pid, [one.what for one in expired])
            except Exception as error:  # noqa: BLE001 - one worker's error must not protect the others
                log("error", f"timers: pid {pid}: {type(error).__name__}: {error}")

    def _joined(self, worker: TimedWorker) -> None:
        if worker.fd is not None:
            self._pidfds[worker.fd] = worker.pid
            self._poll.register(worker.fd, select.POLLIN)

    def _left(self, worker: TimedWorker) -> None:
        self.deadlines.forget(worker.pid)
        if worker.fd is not None:
            self._pidfds.pop(worker.fd, None)
            self._unwatch(worker.fd)

    def _unwatch(self, fd: int) -> None:
        try:
            self._poll.unregister(fd)
        except KeyError:
            pass


def changed(server: object, own: dict[str, Any]) -> bool:
    """Whether a subclass, or a test, has put something else in place of these methods."""
    return any(
        name in vars(server) or getattr(type(server), name) is not method for name, method in own.items()
    )


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: there is no watchdog thread, and its descriptors must be closed.

    While a worker holds the reading end of the pipe, writers do not notice that the server is gone.
    """
    for watchdog in list(_running):
        watchdog.lock = threading.RLock()
        watchdog._thread = None
        watchdog.close()


os.register_at_fork(after_in_child=_forked)


def log(level: str, text: str) -> None:
    """Log one line; imports logging only when needed."""
    import logging

    getattr(logging.getLogger("phalanx.timers"), level)("%s", text)
