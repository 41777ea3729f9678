"""Timers over a `multiprocessing.Queue`: client, queue and server.

Invariants
- `acquire` and `release` have left the process when they return (see `queue_codec`); a full queue is waited
  for, but never for ever.
- Any other kind of queue (a manager's, a `SimpleQueue`, one of another platform) works too, through its own
  `put` and `get`.
- The count behind `qsize()` and `maxsize` of the queue is kept right.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.supervision.timers import queue_codec
from phalanx.supervision.timers.requests import RELEASE, RequestQueue, TimerClient, TimerRequest
from phalanx.supervision.timers.server import TimerServer
from phalanx.supervision.timers.watchdog import Watchdog
from phalanx.supervision.timers.workers import identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.core.deadlines import Expired

_KEEP = 256

PATIENCE = 5.0
"""Seconds a worker waits for room: a server that has not read for so long is stuck."""


def _own_end(queue: Any, side: str, flags: int) -> int | None:
    """A non-blocking descriptor of our own on one end of the queue's pipe; None when it has no such pipe.

    Opened anew rather than duplicated: the flag belongs to the open file, and the queue's own must block.
    """
    queues = sys.modules.get("multiprocessing.queues")
    if queues is None or not isinstance(queue, queues.Queue) or isinstance(queue, queues.JoinableQueue):
        return None
    try:
        fd = getattr(queue, side).fileno()
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except (AttributeError, OSError):
        return None


class LocalTimerClient(TimerClient):
    """Sends requests of this process through a multiprocessing queue."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._fd: int | None = None
        self._looked = False
        self._halves: tuple[int, dict[str, tuple[bytes, bytes]]] = (0, {})
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`."""
        self._send(scope_id, expiration_time)

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        self._send(scope_id, RELEASE)

    def __getstate__(self) -> dict[str, Any]:
        return {"_mp_queue": self._mp_queue, "_fd": None, "_looked": False, "_halves": (0, {})}

    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def _send(self, scope: str, expiration_time: float) -> None:
        fd = self._fd
        if fd is None:
            fd = self._open()
        if fd is None:
            request = TimerRequest(os.getpid(), scope, expiration_time)
            request.started = identity()[1]
            self._mp_queue.put(request)
            return
        frame = self._frame(scope, expiration_time)
        room = self._mp_queue._sem
        if not room.acquire(False) and not room.acquire(True, PATIENCE):
            raise TimeoutError(
                f"timer {scope!r}: the queue has been full for {PATIENCE:g} s; is its server stuck?"
            )
        try:
            os.write(fd, frame)
        except BlockingIOError:
            self._write_late(fd, frame, scope)

    def _frame(self, scope: str, expiration_time: float) -> bytes:
        """Most of a frame is remembered, because a loop says the same scope over and over."""
        pid, known = self._halves
        if pid != os.getpid() or len(known) > _KEEP:
            self._halves = pid, known = os.getpid(), {}
        parts = known.get(scope)
        if parts is None:
            parts = known[scope] = queue_codec.halves(*identity(), scope)
        return queue_codec.join(parts, expiration_time)

    def _open(self) -> int | None:
        if not self._looked:
            self._fd = _own_end(self._mp_queue, "_writer", os.O_WRONLY)
            self._looked = True
        return self._fd

    def _write_late(self, fd: int, frame: bytes, scope: str) -> None:
        end = time.monotonic() + PATIENCE
        look = select.poll()
        look.register(fd, select.POLLOUT)
        while (left := end - time.monotonic()) > 0:
            if look.poll(int(left * 1000) + 1):
                try:
                    os.write(fd, frame)
                    return
                except BlockingIOError:
                    continue  # another worker was faster
        self._mp_queue._sem.release()
        raise TimeoutError(f"timer {scope!r}: the server has not read for {PATIENCE:g} s; is it stuck?")


class MultiprocessingRequestQueue(RequestQueue):
    """A multiprocessing queue as a source of requests; whatever else is in it is dropped and counted."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._fd: int | None = None
        self._reader: queue_codec.FrameReader | None = None
        self._ready: deque[TimerRequest] = deque()
        self.garbage = 0

    def size(self) -> int:
        """About how many requests wait; 0 where the platform cannot tell."""
        try:
            return len(self._ready) + int(self._mp_queue.qsize())
        except NotImplementedError:
            return len(self._ready)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests: waits up to `timeout` seconds in all, but not once that many are there."""
        self.fileno()
        found: list[TimerRequest] = []
        end = time.monotonic() + timeout
        while True:
            while self._ready and len(found) < size:
                found.append(self._ready.popleft())
            left = end - time.monotonic()
            if len(found) >= size or (left <= 0 and timeout > 0):
                return found
            before = len(self._ready)
            self._fetch(max(0.0, left))
            if timeout <= 0 and len(self._ready) == before:
                return found

    def fileno(self) -> int:
        """What is readable when requests wait; -1 where the queue has no pipe."""
        if self._fd is None:
            self._fd = _own_end(self._mp_queue, "_reader", os.O_RDONLY)
            if self._fd is None:
                return -1
            self._reader = queue_codec.FrameReader(self._fd)
        return self._fd

    def read(self) -> list[TimerRequest]:
        """For a server: what is there now, of each timer only the last request."""
        early = list(self._ready)
        self._ready.clear()
        requests, garbage = queue_codec.latest(self._bodies())
        self._count(garbage)
        return early + requests

    def close(self) -> None:
        """Gives the descriptor back until it is needed again; the queue itself stays as it is."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._reader = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()

    def _fetch(self, timeout: float) -> None:
        """Moves what arrives within `timeout` into the ready line."""
        if self._fd is None:
            self._fetch_object(timeout)
            return
        look = select.poll()
        look.register(self._fd, select.POLLIN)
        if look.poll(int(timeout * 1000) + (timeout > 0)):
            bodies = self._bodies()
            found = queue_codec.every(bodies)
            self._count(len(bodies) - len(found))
            self._ready.extend(found)

    def _fetch_object(self, timeout: float) -> None:
        import queue

        try:
            found = queue_codec.checked(self._mp_queue.get(timeout > 0, timeout))
        except queue.Empty:
            return
        if found is None:
            self._count(1)
        else:
            self._ready.append(found)

    def _bodies(self) -> list[bytes]:
        """Frames from the pipe; the queue's own lock keeps another reader out meanwhile."""
        lock, room = self._mp_queue._rlock, self._mp_queue._sem
        if self._reader is None or not lock.acquire(True, 0.1):
            return []
        try:
            bodies = self._reader.bodies()
        finally:
            lock.release()
        try:
            for _ in bodies:
                room.release()
        except ValueError:
            pass  # somebody wrote past the count; it is full again, which is right
        self._count(self._reader.garbage)
        self._reader.garbage = 0
        return bodies

    def _count(self, garbage: int) -> None:
        self.garbage += garbage


class LocalTimerServer(TimerServer):
    """Stops (SIGKILL) workers of this host that overstay a scope; `dropped` counts what was not a request.

    `max_interval` is accepted for torch's sake; the server sleeps until the next deadline whatever it is.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        self._queue = MultiprocessingRequestQueue(mp_queue)
        super().__init__(self._queue, max_interval, daemon)
        self._mp_queue = mp_queue
        self._watchdog = Watchdog()

    @property
    def dropped(self) -> dict[str, int]:
        """What was dropped, by reason."""
        counts = dict(self._watchdog.dropped)
        if self._queue.garbage:
            counts["garbage"] = counts.get("garbage", 0) + self._queue.garbage
        return counts

    @property
    def owns(self) -> Callable[[int], bool]:
        """Which pids may be watched; by default the descendants of this process. May be set."""
        return self._watchdog.workers.owns

    @owns.setter
    def owns(self, owns: Callable[[int], bool]) -> None:
        self._watchdog.workers.owns = owns

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Files or drops deadlines."""
        self._watchdog.file_all((request.worker_id, request) for request in timer_requests)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Drops all deadlines of these workers."""
        self._watchdog.forget(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker, the timers that expire at or before this wall time; changes nothing."""
        return self._watchdog.due_by(deadline)

    def start(self) -> None:
        """Minds the queue from now on."""
        if self._queue.fileno() < 0:
            super().start()
            return
        self._watchdog.start(_Queue(self._queue), self, self._daemon)

    def stop(self) -> None:
        """Ends the watching; what is still in the queue stays there."""
        super().stop()
        self._watchdog.stop()
        self._queue.close()

    def _reap_worker(self, worker_id: int) -> bool:
        """Kills the worker if it is still the process that asked; True when it is gone or going."""
        return self._watchdog.signal(worker_id, signal.SIGKILL)

    def _reap(self, worker_id: Any, scopes: list[str]) -> bool:
        if worker_id not in self._watchdog.workers.known:
            # It ended, or never was a worker of ours: to look the pid up now might find another process.
            self._watchdog.drop("no worker of this server")
            return True
        return super()._reap(worker_id, scopes)

    def _overdue(self, pid: int, requests: list[TimerRequest], expired: list[Expired]) -> None:
        if self._reap(pid, [one.scope for one in expired]):
            self.clear_timers({pid})
        else:
            self._watchdog.later(requests)


class _Queue:
    """The queue as the watchdog's source; it outlives the watchdog, which may be started again."""

    def __init__(self, queue: MultiprocessingRequestQueue) -> None:
        self.fileno = queue.fileno
        self.read = queue.read

    def close(self) -> None:
        """Nothing: the descriptor belongs to the queue."""
