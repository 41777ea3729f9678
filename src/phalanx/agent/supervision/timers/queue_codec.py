"""Requests in the pipe of a `multiprocessing.Queue`.

A queue's pipe carries frames: four bytes of length, then a pickle. Its `put` passes the object to a feeder
thread, which is too late for a watchdog: if code hangs with the interpreter locked right after `acquire`, the
request never leaves. So a client writes the frame itself. Its pickle has a fixed layout
(`make_request(micros, pid, started, scope)`) that the server parses without unpickling, while `queue.get()`
still returns a `TimerRequest`.

Invariants
- A frame is at most PIPE_BUF long and written in one call, so frames of several writers never mix. No lock is
  taken: a worker killed while it holds the queue's lock would block all others.
- A reader never leaves a partial frame in the pipe: it reads the rest at once.
- Other frames are unpickled with every class refused except the request classes (torch's is read as ours,
  without importing torch).
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any

from phalanx.agent.supervision.timers.api import RELEASE, TimerRequest
from phalanx.agent.supervision.timers.pipe_codec import shorten


def make_request(micros: int, pid: int, started: int, scope: str) -> TimerRequest:
    """The request of a frame; pickle calls it by name."""
    request = TimerRequest(pid, scope, micros / 1e6 if micros >= 0 else RELEASE)
    request.started = started
    return request


_LENGTH = struct.Struct("!i")
_HEAD = b"\x80\x02c" + __name__.encode() + b"\nmake_request\n("
_FIELDS = struct.Struct("<2sq c i 2sq c I".replace(" ", ""))  # micros, pid, started, length of the scope
_LONG, _INT, _TEXT, _END = b"\x8a\x08", b"J", b"X", b"tR."
_KEY_AT = len(_HEAD) + 10  # after micros: pid, started and scope, which name the timer
_NUMBER = struct.Struct("<q")
_FIXED = len(_HEAD) + _FIELDS.size + len(_END)
_MAX_SCOPE = select.PIPE_BUF - _LENGTH.size - _FIXED

_MAX_FRAME = 1 << 20
_READ_SIZE = 1 << 16  # a pipe's usual capacity
_MAX_MICROS = 1 << 62
_CLASSES = {
    ("torch.distributed.elastic.timer.api", "TimerRequest"): TimerRequest,
    (TimerRequest.__module__, "TimerRequest"): TimerRequest,
    (__name__, "make_request"): make_request,
}


def halves(pid: int, started: int, scope: str) -> tuple[bytes, bytes]:
    """The parts of a frame before and after the time; the same for all requests of one scope."""
    name = shorten(scope.encode("utf-8", "surrogatepass"), _MAX_SCOPE)
    fields = _FIELDS.pack(_LONG, 0, _INT, pid, _LONG, started, _TEXT, len(name))
    whole = _LENGTH.pack(_FIXED + len(name)) + _HEAD + fields + name + _END
    return whole[: 4 + _KEY_AT - 8], whole[4 + _KEY_AT :]


def join(parts: tuple[bytes, bytes], expiration_time: float) -> bytes:
    """The whole frame."""
    micros = int(min(expiration_time * 1e6, _MAX_MICROS)) if expiration_time >= 0 else -1
    return parts[0] + _NUMBER.pack(micros) + parts[1]


def encode(request: TimerRequest) -> bytes:
    """The whole frame of a request."""
    return join(halves(request.worker_id, request.started, request.scope_id), request.expiration_time)


def decode(body: bytes) -> TimerRequest | None:
    """The request in a frame of the fixed layout; None if it is malformed."""
    try:
        _, micros, _, pid, _, started, _, length = _FIELDS.unpack_from(body, len(_HEAD))
        name = body[len(_HEAD) + _FIELDS.size : -len(_END)]
        if len(name) != length:
            return None
        return make_request(micros, pid, started, name.decode("utf-8", "surrogatepass"))
    except (struct.error, UnicodeDecodeError):
        return None


def unpickle(body: bytes) -> TimerRequest | None:
    """The request in a frame of another layout; None for anything but a request."""
    import io
    import pickle

    class Requests(pickle.Unpickler):
        """Refuses everything but the request classes."""

        def find_class(self, module: str, name: str) -> Any:
            try:
                return _CLASSES[module, name]
            except KeyError:
                if (module, name) == ("copyreg", "__newobj__"):
                    return lambda cls, *args: cls.__new__(cls, *args)
                raise pickle.UnpicklingError(f"{module}.{name} is not a timer request") from None

    try:
        found = Requests(io.BytesIO(body)).load()
    except Exception:  # noqa: BLE001 - garbage may raise anything
        return None
    return checked(found)


def checked(found: Any) -> TimerRequest | None:
    """The request with fields of the right types, or None."""
    if not isinstance(found, TimerRequest):
        return None
    pid, at = getattr(found, "worker_id", None), getattr(found, "expiration_time", None)
    if type(pid) is not int or not -(2**31) <= pid < 2**31 or not isinstance(at, int | float) or at != at:
        return None
    if not isinstance(getattr(found, "scope_id", None), str):
        return None
    found.started = getattr(found, "started", 0)
    return found


class FrameReader:
    """Reads all available frames at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.garbage = 0

    def bodies(self) -> list[bytes]:
        """The frames that have arrived."""
        try:
            data = os.read(self._fd, _READ_SIZE)
        except BlockingIOError:
            return []
        found, at, unpack = [], 0, _LENGTH.unpack_from
        while at < len(data):
            if at + 4 > len(data):
                data += self._rest(at + 4 - len(data))
            if at + 4 > len(data):
                self.garbage += 1
                break
            (length,) = unpack(data, at)
            if not 0 < length <= _MAX_FRAME:
                # The start of the next frame is unknown: the rest of this read is lost.
                self.garbage += 1
                break
            end = at + 4 + length
            if end > len(data):
                data += self._rest(end - len(data))
            if end > len(data):
                self.garbage += 1
                break
            found.append(data[at + 4 : end])
            at = end
        return found

    def _rest(self, missing: int) -> bytes:
        """The rest of a partial frame; gives up after a second (its writer was killed)."""
        got, end = b"", time.monotonic() + 1.0
        while len(got) < missing:
            try:
                got += os.read(self._fd, missing - len(got))
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLIN)
                if not poll.poll(max(0, int((end - time.monotonic()) * 1000))):
                    break
        return got


def latest(bodies: list[bytes]) -> tuple[list[TimerRequest], int]:
    """The last request for each timer, and the number of frames that were not requests.

    Most timers are released before the server reads: such a pair costs two slices and no object.
    """
    final: dict[bytes, bytes] = {}
    garbage = 0
    for body in bodies:
        if not body.startswith(_HEAD):
            other = unpickle(body)
            if other is None:
                garbage += 1
                continue
            body = encode(other)[4:]
        final[body[_KEY_AT:]] = body
    requests = []
    for body in final.values():
        request = decode(body)
        if request is None:
            garbage += 1
        else:
            requests.append(request)
    return requests, garbage


def every(bodies: list[bytes]) -> list[TimerRequest]:
    """All requests in the frames, in order."""
    found = (decode(body) if body.startswith(_HEAD) else unpickle(body) for body in bodies)
    return [request for request in found if request is not None]
