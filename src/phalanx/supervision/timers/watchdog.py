"""The loop under both timer servers: sleeps until a request, a worker's death or the next deadline.

Invariants
- One thread owns deadlines and workers while it runs; public methods that touch them take the lock, which
  is never held during a sleep, a signal, a log line or a caller's function.
- It sleeps in one `poll` without an upper bound: no work, no wake-up. How late an expiry is handled
  therefore depends on no interval.
- One round handles at most one read of the source, so a flood of requests cannot keep deadlines waiting.
- A bad request is dropped alone: it is counted under its reason in `dropped`, and said once per reason.
- Whatever a caller's function or the source throws, the loop goes on.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.core.deadlines import Deadlines, Expired
from phalanx.supervision.timers.workers import GONE, TimedWorker, Workers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.supervision.timers.requests import TimerRequest

_LONGEST = 3_600_000
"""Milliseconds of one sleep; only so that a deadline years away fits into the kernel's integer."""

_AGAIN = 1.0
"""Seconds until a worker that could not be stopped is tried again."""

_BURST = 0.0005
"""Seconds between requests that make a stream, and that a stream is left to gather."""

_STALLED = 1.0
"""Seconds past its own plan after which a loop counts as stalled."""


class TimerSource(Protocol):
    """Where requests come from: readable when there are some."""

    def fileno(self) -> int:
        """What to wait for."""

    def read(self) -> Iterable[TimerRequest]:
        """What there is now, without waiting; of several requests for one scope only the last."""

    def close(self) -> None:
        """No more reading."""


class Owner(Protocol):
    """The server that a watchdog works for."""

    def register_timers(self, timer_requests: list[Any]) -> None:
        """Files admitted requests."""

    def _overdue(self, pid: int, requests: list[Any], expired: list[Expired]) -> None:
        """A worker's requests that have expired, and why."""


class Watchdog:
    """Deadlines, the processes they belong to, and the thread that minds both."""

    def __init__(self) -> None:
        self.deadlines: Deadlines[Any] = Deadlines()
        self.workers = Workers(self._joined, self._left)
        self.dropped: dict[str, int] = {}
        self.lock = threading.RLock()
        # Only while it runs: a circle of references would keep the caller's queue open after its last use.
        self._owner: Owner | None = None
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._source: TimerSource | None = None
        self._stopping = False
        self._seen = time.time()
        self._planned = inf
        _running.add(self)

    def start(self, source: TimerSource, owner: Owner, daemon: bool) -> None:
        """Minds the source from now on, in a thread."""
        name = type(owner).__name__
        if self._thread is not None:
            raise RuntimeError(f"{name} is running already; stop() it first")
        self._stopping = False
        self._open(source, owner)
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and forgets workers and deadlines; nothing to do when it does not run."""
        thread, self._thread = self._thread, None
        self._stopping = True
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.close()

    def running(self) -> bool:
        """Whether the thread is there and alive."""
        return self._thread is not None and self._thread.is_alive()

    def once(self, source: TimerSource, owner: Owner) -> None:
        """One round over what is there now, in the caller's thread."""
        if self._source is None:
            self._open(source, owner)
        self._round(0)

    def last_progress(self) -> float:
        """Wall time of the last sign of life: now, while the loop sleeps as planned."""
        if self.running() and time.monotonic() <= self._planned + _STALLED:
            return time.time()
        return self._seen

    def file(self, worker_id: Any, request: TimerRequest) -> None:
        """Sets or drops one deadline, given in wall time, by the monotonic clock."""
        if request.expiration_time < 0:
            self.deadlines.drop(worker_id, request.scope_id)
            return
        if type(worker_id) is int and worker_id not in self.workers.known:
            self.workers.admit(worker_id, request.started)  # now: at expiry it may be another process
        at = time.monotonic() + (request.expiration_time - time.time())
        if not self.deadlines.set(worker_id, request.scope_id, at, request):
            self.drop("too many scopes of one worker")

    def file_all(self, requests: Iterable[tuple[Any, TimerRequest]]) -> None:
        """The same for several, from any thread."""
        with self.lock:
            for worker_id, request in requests:
                self.file(worker_id, request)
        self.wake()

    def forget(self, worker_ids: Iterable[Any]) -> None:
        """Drops all deadlines of these workers."""
        with self.lock:
            for worker_id in worker_ids:
                self.deadlines.forget(worker_id)

    def due_by(self, deadline: float) -> dict[Any, list[Any]]:
        """By worker, the requests that expire at or before this wall time; changes nothing."""
        with self.lock:
            every = {owner: self.deadlines.filed(owner) for owner in self.deadlines.owners()}
        late = {who: [r for r in filed if r.expiration_time <= deadline] for who, filed in every.items()}
        return {who: requests for who, requests in late.items() if requests}

    def signal(self, pid: Any, sig: int) -> bool:
        """Signals a worker if it is still the process that asked; True when that is done or it is gone."""
        with self.lock:
            worker = self.workers.known.get(pid) or (
                self.workers.admit(pid) if type(pid) is int else "no pid"
            )
        if isinstance(worker, str):
            say("info", f"timers: pid {pid} was not signalled: {worker}")
            return worker in GONE
        trouble = worker.signal(sig)
        if trouble == "it is gone":
            with self.lock:
                self.workers.remove(worker.pid)
        elif trouble:
            say("error", f"timers: pid {pid} could not be signalled: {trouble}")
            return False
        return True

    def later(self, requests: list[Any]) -> None:
        """Takes expired requests up again in a second: their worker could not be stopped."""
        with self.lock:
            for request in requests:
                at = time.monotonic() + _AGAIN
                self.deadlines.set(request.worker_id, request.scope_id, at, request)

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts dropped requests; a person is told of the first of each kind."""
        seen = self.dropped.get(reason, 0)
        self.dropped[reason] = seen + count
        if not seen:
            say("warning", f"timers: a request was dropped: {reason} (further ones are only counted)")

    def wake(self) -> None:
        """Lets a sleeping loop look again."""
        if self._wake is not None:
            try:
                os.write(self._wake[1], b"x")
            except BlockingIOError:
                pass  # it is being woken already

    def close(self) -> None:
        """Gives every descriptor back."""
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

    def _open(self, source: TimerSource, owner: Owner) -> None:
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
                self._round(None)
            except Exception as error:  # noqa: BLE001 - a watchdog that dies of one bad event guards nothing
                self.drop("internal error")
                say("error", f"timers: {type(error).__name__}: {error} (the watchdog goes on)")

    def _round(self, most: int | None) -> None:
        """Sleeps until something happens (at most `most` ms), then handles it."""
        with self.lock:
            upcoming = self.deadlines.next()
        now = time.monotonic()
        wait = most
        if upcoming is not None and most is None:
            wait = max(0, min(_LONGEST, ceil(min((upcoming - now) * 1000, _LONGEST))))
        # From here on it is asleep by plan; without a deadline the plan has no end.
        self._planned = inf if wait is None else now + wait / 1000
        events = self._poll.poll(wait)
        self._planned = time.monotonic()
        self._seen = time.time()
        readable = {fd for fd, _ in events}
        if self._wake is not None and self._wake[0] in readable:
            os.read(self._wake[0], 4096)
        # The dead first: a request that came after a death is of the next process with that pid.
        for fd in readable & self._pidfds.keys():
            with self.lock:
                self.workers.remove(self._pidfds[fd])
        if self._source is not None and self._source.fileno() in readable:
            if most is None:
                self._gather(now)
            self._take(self._source.read())
        self._expire()

    def _gather(self, slept: float) -> None:
        """Under a stream of requests, lets a few come together: each wake-up costs their writers far more.

        Not a poll: it only happens while requests keep coming within `_BURST` of each other, and never
        reaches past a deadline by more than itself.
        """
        if time.monotonic() - slept < _BURST:
            time.sleep(_BURST)

    def _take(self, requests: Iterable[TimerRequest]) -> None:
        """Files the requests of processes that are this server's own."""
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
                self._owner._overdue(pid, [one.what for one in expired], expired)
            except Exception as error:  # noqa: BLE001 - one worker's trouble must not shield the others
                say("error", f"timers: pid {pid}: {type(error).__name__}: {error}")

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


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: no watchdog thread came along, and its descriptors must not stay open.

    A worker that held the reading end of the pipe would keep writers from noticing that the server is gone.
    """
    for watchdog in list(_running):
        watchdog.lock = threading.RLock()
        watchdog._thread = None
        watchdog.close()


os.register_at_fork(after_in_child=_forked)


def say(level: str, text: str) -> None:
    """One line to the log; logging is only loaded when there is something to say."""
    import logging

    getattr(logging.getLogger("phalanx.timers"), level)("%s", text)
