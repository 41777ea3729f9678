"""torch.distributed.elastic.timer.local_timer's names: timers over a `multiprocessing.Queue`.

A queue's pipe carries frames: four bytes of length, then a pickle. Its `put` passes the object to a feeder
thread, which is too late for a watchdog: if code hangs with the interpreter locked right after `acquire`, the
request never leaves. So a client writes the frame itself, and `queue.get()` still returns a `TimerRequest`.

Invariants
- When `acquire` and `release` return, the request has left the process. They wait for room in a full queue,
  but not forever. They take no lock: a worker killed while it holds the queue's would block all others.
- Whatever is unpickled, every class but the request classes is refused (torch's is read as ours, without
  importing torch).
- Other kinds of queues (a manager's, a `JoinableQueue`) work through their own `put` and `get`.
- The queue's counter behind `qsize()` and `maxsize` stays correct.
"""

from __future__ import annotations

import io
import os
import pickle
import queue as queues
from signal import SIGKILL
from typing import Any

from phalanx.agent.supervision.timers.timer_pipe import (
    RELEASE,
    PipeQueue,
    TimerRequest,
    decode_line,
    encode_line,
    write_message,
)
from phalanx.agent.supervision.timers.watchdog import Watchdog
from phalanx.agent.supervision.timers.watched_processes import identity
from phalanx.elastic.lazy_modules import found_in
from phalanx.elastic.timer.api import TimerClient

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

WRITE_TIMEOUT = 5.0
"""Seconds a worker waits for room: a server that has not read for this long is stuck."""
_MAX_FRAME = 1 << 20
_MODULES = ("torch.distributed.elastic.timer.api", TimerRequest.__module__)
_HEAD = b"\x80\x03c%b\n%b\nB" % (decode_line.__module__.encode(), decode_line.__name__.encode())
_TAIL = b"\x85R."
"""A frame is a pickle: `decode_line`, the bytes of a line, and a call."""


class _Unpickler(pickle.Unpickler):
    """Refuses everything but requests."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "TimerRequest" and module in _MODULES:
            return TimerRequest
        raise pickle.UnpicklingError(f"{module}.{name} is not a timer request")


def encode_frame(line: bytes) -> bytes:
    """The frame of a line."""
    body = _HEAD + len(line).to_bytes(4, "little") + line + _TAIL
    return len(body).to_bytes(4, "big") + body


def line_of(found: Any) -> bytes:
    """The line of an object in a queue; garbage if it is not a request."""
    try:
        return encode_line(found, getattr(found, "started", 0))
    except Exception:  # noqa: BLE001 - garbage may raise anything
        return b"?\n"


class FrameReader:
    """Finds lines in frames of data of any chunk size."""

    def __init__(self) -> None:
        self.frames = 0
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines in the frames completed by `data`."""
        data, at, lines = self._rest + data, 0, []
        while (start := at + 4) <= len(data):
            end = start + int.from_bytes(data[at:start], "big")
            if end - at > _MAX_FRAME:
                lines.append(b"?\n")
                at = len(data)  # the start of the next frame is unknown
            if end > len(data):
                break
            lines.append(self._line(data[start:end]))
            self.frames += 1
            at = end
        self._rest = data[at:]
        return b"".join(lines)

    def _line(self, body: bytes) -> bytes:
        if body.startswith(_HEAD):
            return body[len(_HEAD) + 4 : -len(_TAIL)]
        try:
            return line_of(_Unpickler(io.BytesIO(body)).load())
        except Exception:  # noqa: BLE001 - garbage may raise anything
            return b"?\n"


def _open_end(queue: Any, side: str, flags: int) -> int:
    """Another, non-blocking descriptor for one end of the queue's pipe; -1 if it has no such pipe.

    Opened rather than duplicated: duplicates share the flag, and the queue's own must block.
    """
    if not hasattr(queue, "_sem"):
        return -1
    fd = getattr(queue, side).fileno()
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)


class LocalTimerClient(TimerClient):
    """Sends the requests of this process through a multiprocessing queue."""

    def __init__(self, mp_queue: Any) -> None:
        super().__init__()
        self._mp_queue = mp_queue
        self._fd: int | None = None  # -1: the queue has no pipe
        identity()

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """See `TimerClient.acquire`."""
        pid, started = identity()
        request = TimerRequest(pid, scope_id, expiration_time)
        request.started = started
        if self._fd is None:
            counts_tasks = hasattr(self._mp_queue, "_unfinished_tasks")
            self._fd = -1 if counts_tasks else _open_end(self._mp_queue, "_writer", os.O_WRONLY)
        if self._fd < 0:
            self._mp_queue.put(request)
            return
        room = self._mp_queue._sem
        if room.acquire(True, WRITE_TIMEOUT):
            if write_message(self._fd, encode_frame(encode_line(request, started)), WRITE_TIMEOUT):
                return
            room.release()
        raise TimeoutError(
            f"timer {scope_id!r}: the queue has had no room for {WRITE_TIMEOUT:g} s; is its server stuck?"
        )

    def release(self, scope_id: str) -> None:
        """See `TimerClient.release`."""
        self.acquire(scope_id, RELEASE)

    def __getstate__(self) -> dict[str, Any]:
        return {"_mp_queue": self._mp_queue, "_fd": None}

    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None and fd >= 0:
            os.close(fd)


class MultiprocessingRequestQueue(PipeQueue):
    """A multiprocessing queue as a source of requests; other objects in it are dropped and counted."""

    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue
        self._frames = FrameReader()
        super().__init__()

    def size(self) -> int:
        """The approximate number of waiting requests."""
        try:
            return super().size() + int(self._mp_queue.qsize())
        except NotImplementedError:  # the platform does not provide it
            return super().size()

    def get(self, size: int, timeout: float) -> list[Any]:
        """Up to `size` requests; waits at most `timeout` seconds in all for that many."""
        if self.open() >= 0:
            return super().get(size, timeout)
        try:
            return self._lines.feed(line_of(self._mp_queue.get(timeout > 0, timeout)))
        except queues.Empty:
            return []

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        return _open_end(self._mp_queue, "_reader", os.O_RDONLY)

    def _unframed(self, data: bytes) -> bytes:
        return self._frames.feed(data)

    def _read(self) -> list[Any]:
        if not self._mp_queue._rlock.acquire(True, 0.1):
            return []  # somebody else reads
        try:
            before, found = self._frames.frames, super()._read()
        finally:
            self._mp_queue._rlock.release()
        try:
            for _ in range(self._frames.frames - before):
                self._mp_queue._sem.release()
        except ValueError:
            pass  # a writer ignored the counter, which is at its maximum now, as it should be
        return found


class LocalTimerServer(Watchdog):
    """Kills workers of this host that do not leave a scope in time."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        self._mp_queue = mp_queue
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        """Kill the worker if it is still the process that sent the request; True if killed or gone."""
        return self._signal(worker_id, SIGKILL)


__getattr__ = found_in(__name__)
