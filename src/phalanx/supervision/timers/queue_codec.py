"""Requests inside a `multiprocessing.Queue`, straight through its pipe.

What a queue carries is a pipe of frames: four bytes of length, then a pickle. Its own `put` hands the object
to a feeder thread, which is too late for a watchdog: code that hangs with the interpreter locked right after
`acquire` would keep the request from ever leaving. So a client writes the frame itself, at once. Its pickle
has a fixed layout (`sent(micros, pid, started, scope)`), so that the server cuts it up without unpickling,
while `queue.get()` still makes a `TimerRequest` of it.

Invariants
- A frame is at most PIPE_BUF long and written in one call, so frames of several writers never mix. No lock
  is taken for it: a worker that is killed while it holds the queue's lock would silence all others.
- A reader never leaves half a frame behind: what a read cut off is fetched at once.
- Frames of others are unpickled with every class refused but the request classes (torch's is read as ours,
  without importing torch).
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any

from phalanx.supervision.timers.requests import RELEASE, TimerRequest, cut, sent

_LENGTH = struct.Struct("!i")
_HEAD = b"\x80\x02c" + sent.__module__.encode() + b"\nsent\n("
_FIELDS = struct.Struct("<2sq c i 2sq c I".replace(" ", ""))  # micros, pid, started, length of the scope
_LONG, _INT, _TEXT, _END = b"\x8a\x08", b"J", b"X", b"tR."
_KEY_AT = len(_HEAD) + 10  # behind micros: pid, started and scope, which name the timer
_NUMBER = struct.Struct("<q")
_FIXED = len(_HEAD) + _FIELDS.size + len(_END)
_ROOM = select.PIPE_BUF - _LENGTH.size - _FIXED

LARGEST = 1 << 20
"""A frame longer than this is no request."""

READ = 1 << 16
"""Bytes of one read: a pipe's usual capacity."""

_FAR = 1 << 62
_CLASSES = {
    ("torch.distributed.elastic.timer.api", "TimerRequest"): TimerRequest,
    (TimerRequest.__module__, "TimerRequest"): TimerRequest,
    (sent.__module__, "sent"): sent,
}


def halves(pid: int, started: int, scope: str) -> tuple[bytes, bytes]:
    """What stands in a frame before and after the time; the same for all requests of one scope."""
    name = cut(scope.encode("utf-8", "surrogatepass"), _ROOM)
    fields = _FIELDS.pack(_LONG, 0, _INT, pid, _LONG, started, _TEXT, len(name))
    whole = _LENGTH.pack(_FIXED + len(name)) + _HEAD + fields + name + _END
    return whole[: 4 + _KEY_AT - 8], whole[4 + _KEY_AT :]


def join(parts: tuple[bytes, bytes], expiration_time: float) -> bytes:
    """The whole frame."""
    micros = int(min(expiration_time * 1e6, _FAR)) if expiration_time >= 0 else -1
    return parts[0] + _NUMBER.pack(micros) + parts[1]


def encode(request: TimerRequest) -> bytes:
    """The whole frame of a request."""
    return join(halves(request.worker_id, request.started, request.scope_id), request.expiration_time)


def decode(body: bytes) -> TimerRequest | None:
    """The request in a frame of the fixed layout; None when it is not quite one."""
    try:
        _, micros, _, pid, _, started, _, length = _FIELDS.unpack_from(body, len(_HEAD))
        name = body[len(_HEAD) + _FIELDS.size : -len(_END)]
        if len(name) != length:
            return None
        return sent(micros, pid, started, name.decode("utf-8", "surrogatepass"))
    except (struct.error, UnicodeDecodeError):
        return None


def unpickle(body: bytes) -> TimerRequest | None:
    """The request in a frame that somebody else pickled; None for anything but a request."""
    import io
    import pickle

    class Requests(pickle.Unpickler):
        """Knows the request classes and nothing else."""

        def find_class(self, module: str, name: str) -> Any:
            try:
                return _CLASSES[module, name]
            except KeyError:
                if (module, name) == ("copyreg", "__newobj__"):
                    return lambda cls, *args: cls.__new__(cls, *args)
                raise pickle.UnpicklingError(f"{module}.{name} is no timer request") from None

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
    """The reading end: all frames that are there, in one read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.garbage = 0

    def bodies(self) -> list[bytes]:
        """The frames that have arrived, whole; empty when there is none."""
        try:
            data = os.read(self._fd, READ)
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
            if not 0 < length <= LARGEST:
                # Nothing tells where the next frame begins; what is in this read is lost, no more.
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
        """What a read cut off; a frame that is never finished (its writer was killed) is given up."""
        got, patience = b"", time.monotonic() + 1.0
        while len(got) < missing:
            try:
                got += os.read(self._fd, missing - len(got))
            except BlockingIOError:
                look = select.poll()
                look.register(self._fd, select.POLLIN)
                if not look.poll(max(0, int((patience - time.monotonic()) * 1000))):
                    break
        return got


def latest(bodies: list[bytes]) -> tuple[list[TimerRequest], int]:
    """The last request for each timer, and how many frames were none.

    Only the last one counts, and most timers are released before the server looks: their pair costs two
    slices and never becomes an object.
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


assert RELEASE == -1  # what micros < 0 stands for
