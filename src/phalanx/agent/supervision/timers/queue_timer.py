"""Timers over a `multiprocessing.Queue`: client, queue and server.

Invariants
- When `acquire` and `release` return, the request has left the process (see `queue_codec`). They wait for
  room in a full queue, but not forever.
- Other kinds of queues (a manager's, a `SimpleQueue`) work through their own `put` and `get`.
- The queue's counter behind `qsize()` and `maxsize` stays correct.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from typing import Any

from phalanx.agent.supervision.timers import queue_codec
from phalanx.agent.supervision.timers.api import RELEASE, RequestQueue, TimerClient, TimerRequest, TimerServer
from phalanx.agent.supervision.timers.pipe_codec import write_when_writable
from phalanx.agent.supervision.timers.watchdog import Watchdog, changed
from phalanx.agent.supervision.timers.watched_processes import identity

_MAX_SCOPES = 256
WRITE_TIMEOUT = 5.0
"""Seconds a worker waits for room: a server that has not read for this long is stuck."""


def _open_end(queue: Any, side: str, flags: int) -> int | None:
    """Another, non-blocking descriptor for one end of the queue's pipe; None if it has no such pipe.

    Opened rather than duplicated: duplicates share the flag, and the queue's own must block.
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
    """Sends the requests of this process through a multiprocessing queue."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._fd: int | None = None
        self._tried = False
        self._halves: tuple[int, dict[str, tuple[bytes, bytes]]] = (0, {})
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`."""
        self._send(scope_id, expiration_time)

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        self._send(scope_id, RELEASE)

    def __getstate__(self) -> dict[str, Any]:
        return {"_mp_queue": self._mp_queue, "_fd": None, "_tried": False, "_halves": (0, {})}

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
        if not room.acquire(False) and not room.acquire(True, WRITE_TIMEOUT):
            raise TimeoutError(
                f"timer {scope!r}: the queue has been full for {WRITE_TIMEOUT:g} s; is its server stuck?"
            )
        try:
            os.write(fd, frame)
        except BlockingIOError:
            if not write_when_writable(fd, frame, WRITE_TIMEOUT):
                room.release()
                raise TimeoutError(
                    f"timer {scope!r}: the server has not read for {WRITE_TIMEOUT:g} s; is it stuck?"
                ) from None

    def _frame(self, scope: str, expiration_time: float) -> bytes:
        """Most of a frame is cached, because a loop uses the same scopes again."""
        pid, known = self._halves
        if pid != os.getpid() or len(known) > _MAX_SCOPES:
            self._halves = pid, known = os.getpid(), {}
        parts = known.get(scope)
        if parts is None:
            parts = known[scope] = queue_codec.halves(*identity(), scope)
        return queue_codec.join(parts, expiration_time)

    def _open(self) -> int | None:
        if not self._tried:
            self._fd = _open_end(self._mp_queue, "_writer", os.O_WRONLY)
            self._tried = True
        return self._fd


class MultiprocessingRequestQueue(RequestQueue):
    """A multiprocessing queue as a source of requests; other objects in it are dropped and counted."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._fd: int | None = None
        self._reader: queue_codec.FrameReader | None = None
        self._ready: deque[TimerRequest] = deque()
        self.garbage = 0

    def size(self) -> int:
        """The approximate number of waiting requests; 0 if the platform does not provide it."""
        try:
            return len(self._ready) + int(self._mp_queue.qsize())
        except NotImplementedError:
            return len(self._ready)

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits at most `timeout` seconds in all for that many."""
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
        """Readable when there are requests; -1 if the queue has no pipe."""
        if self._fd is None:
            self._fd = _open_end(self._mp_queue, "_reader", os.O_RDONLY)
            if self._fd is None:
                return -1
            self._reader = queue_codec.FrameReader(self._fd)
        return self._fd

    def read(self) -> list[TimerRequest]:
        """The available requests, of each timer only the last."""
        early = list(self._ready)
        self._ready.clear()
        requests, garbage = queue_codec.latest(self._bodies())
        self.garbage += garbage
        return early + requests

    def close(self) -> None:
        """Close the descriptor; `fileno` opens it again. The queue itself stays open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self._reader = None

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()

    def _fetch(self, timeout: float) -> None:
        """Move what arrives within `timeout` to the ready requests."""
        if self._fd is None:
            self._fetch_object(timeout)
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(int(timeout * 1000) + (timeout > 0)):
            bodies = self._bodies()
            found = queue_codec.every(bodies)
            self.garbage += len(bodies) - len(found)
            self._ready.extend(found)

    def _fetch_object(self, timeout: float) -> None:
        import queue

        try:
            found = queue_codec.checked(self._mp_queue.get(timeout > 0, timeout))
        except queue.Empty:
            return
        if found is None:
            self.garbage += 1
        else:
            self._ready.append(found)

    def _bodies(self) -> list[bytes]:
        """Frames from the pipe, read under the queue's lock."""
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
            pass  # a writer ignored the counter, which is at its maximum now, as it should be
        self.garbage += self._reader.garbage
        self._reader.garbage = 0
        return bodies


class LocalTimerServer(TimerServer):
    """Kills workers of this host that do not leave a scope in time.

    The server sleeps until the next deadline. `max_interval` is the longest time between two looks where a
    subclass has its own way to register, find or reap: it gets to see each of them.
    """

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        self._queue = MultiprocessingRequestQueue(mp_queue)
        super().__init__(self._queue, max_interval, daemon)
        self._mp_queue = mp_queue
        self._watchdog = Watchdog()

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped requests by reason."""
        counts = dict(self._watchdog.dropped)
        if self._queue.garbage:
            counts["garbage"] = counts.get("garbage", 0) + self._queue.garbage
        return counts

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set or drop deadlines."""
        self._watchdog.register(timer_requests)

    def clear_timers(self, worker_ids: set[int]) -> None:
        """Drop all deadlines of these workers."""
        self._watchdog.forget(worker_ids)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """By worker, the timers that expire at or before this wall time; changes nothing."""
        return self._watchdog.due_by(deadline)

    def start(self) -> None:
        """Serve the queue in a thread, if none does."""
        if self._queue.fileno() < 0 or changed(self, _OWN):
            super().start()
        elif not self._watchdog.running():
            self._watchdog.start(self._queue, self, self._daemon)

    def stop(self) -> None:
        """Stop serving; waiting requests stay in the queue."""
        super().stop()
        self._watchdog.stop()
        self._queue.close()

    def _reap_worker(self, worker_id: int) -> bool:
        """Kill the worker if it is still the process that sent the request; True if killed or gone."""
        return self._watchdog.signal(worker_id, signal.SIGKILL)

    def _reap(self, worker_id: Any, scopes: list[str]) -> bool:
        if worker_id not in self._watchdog.workers.known:
            # It has exited or was never admitted: the pid may belong to another process now.
            self._watchdog.drop("no worker of this server")
            return True
        return super()._reap(worker_id, scopes)

    def _overdue(self, pid: int, requests: list[TimerRequest]) -> None:
        if self._reap(pid, [request.scope_id for request in requests]):
            self.clear_timers({pid})
        else:
            self._watchdog.retry(requests)


_OWN = {
    name: getattr(LocalTimerServer, name)
    for name in ("register_timers", "clear_timers", "get_expired_timers", "_reap_worker", "_run_watchdog")
}
