r"""The lines of a named pipe.

    \x1e <pid>.<started>:<scope> \t <microseconds since 1970> <signal> \n      acquire
    \x1e <pid>.<started>:<scope> \t - \n                                      release

(without the spaces around \x1e and \t). JSON lines, as torch's client writes them, are read too.

Invariants
- A line is at most PIPE_BUF long and written in one call, so lines of several writers never mix.
- \x1e occurs only at the beginning of a line (scopes are escaped), so a partial line, left by a killed writer
  or by garbage, does not damage the next line.
- Everything before the tab names the timer. The reader parses only the last line for each name: most timers
  are released before it reads.
"""

from __future__ import annotations

import os
import select
import time
from math import isfinite
from typing import Any

from phalanx.agent.supervision.timers.api import RELEASE, FileTimerRequest

MAX_LINE = select.PIPE_BUF
_MARK = b"\x1e"
_MAX_SCOPE = MAX_LINE - 96
_SIGNALS = range(65)
_MAX_PID = 1 << 31
_MAX_MICROS = 1 << 62


def shorten(scope: bytes, limit: int) -> bytes:
    """The scope, or if it is too long, its beginning and a checksum of all of it."""
    if len(scope) <= limit:
        return scope
    from zlib import crc32

    return scope[: limit - 10].decode("utf-8", "ignore").encode() + b"~%08x" % crc32(scope)


def write_when_writable(fd: int, data: bytes, timeout: float) -> bool:
    """Write to a full pipe once there is room; False after `timeout` seconds."""
    end = time.monotonic() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    while True:
        try:
            os.write(fd, data)
            return True
        except BlockingIOError:
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll.poll(int(left * 1000) + 1)


def name(pid: int, started: int, scope: str) -> bytes:
    """The timer's name: the part before the tab."""
    text = scope.encode("utf-8", "surrogatepass")
    if b"\n" in text or b"\\" in text or _MARK in text:
        text = text.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(_MARK, b"\\e")
    return b"\x1e%d.%d:%b" % (pid, started, shorten(text, _MAX_SCOPE))


def acquire(name: bytes, expiration_time: float, signal: int) -> bytes:
    """The line that acquires a timer."""
    return b"%b\t%d %d\n" % (name, min(expiration_time * 1e6, _MAX_MICROS), signal)


def release(name: bytes) -> bytes:
    """The line that releases a timer."""
    return b"%b\t-\n" % name


class LineReader:
    """Parses requests from data of any chunk size."""

    def __init__(self) -> None:
        self.garbage = 0
        self._rest = b""

    def feed(self, data: bytes) -> list[FileTimerRequest]:
        """The last request for each timer in the lines completed by `data`."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE:
            # Too long for a line: keep only what could be the beginning of the next one.
            self.garbage += 1
            mark = self._rest.rfind(_MARK)
            self._rest = self._rest[mark:] if mark >= len(self._rest) - MAX_LINE else b"?"
        final: dict[bytes, bytes] = {}
        for line in lines:
            key, _, tail = line.rpartition(b"\t")
            if key.rfind(_MARK) != 0:
                key, tail = self._repair(line)
                if not key:
                    continue
            final[key] = tail
        requests = []
        for key, tail in final.items():
            request = _parse(key, tail)
            if request is None:
                self.garbage += 1
            else:
                requests.append(request)
        return requests

    def _repair(self, line: bytes) -> tuple[bytes, bytes]:
        """Name and rest of a line that does not begin with the mark; an empty name for garbage."""
        at = line.rfind(_MARK)
        if at > 0:
            self.garbage += 1
            key, _, tail = line[at:].rpartition(b"\t")
            return key, tail
        found = _from_json(line) if line else None
        if found is None:
            self.garbage += bool(line)
            return b"", b""
        key = name(found.worker_id, 0, found.scope_id)
        return key, b"-" if found.expiration_time < 0 else b"%d %d" % (
            min(found.expiration_time * 1e6, _MAX_MICROS),
            found.signal,
        )


def _parse(key: bytes, tail: bytes) -> FileTimerRequest | None:
    who, colon, scope = key[1:].partition(b":")
    pid, _, started = who.partition(b".")
    if not colon or not (pid.isdigit() and started.isdigit()) or len(pid) > 10 or len(started) > 18:
        return None
    at, signal = RELEASE, 0
    if tail != b"-":
        try:
            first, second = tail.split(b" ")
            at, signal = int(first) / 1e6, int(second)
        except (ValueError, OverflowError):
            return None
        if at < 0 or signal not in _SIGNALS:
            return None
    if b"\\" in scope:
        scope = b"\\".join(
            part.replace(b"\\n", b"\n").replace(b"\\e", _MARK) for part in scope.split(b"\\\\")
        )
    request = FileTimerRequest(int(pid), scope.decode("utf-8", "replace"), at, signal)
    request.started = int(started)
    return request


def _from_json(line: bytes) -> FileTimerRequest | None:
    """A line as torch writes it; garbage before the object is skipped."""
    at = line.rfind(b'{"version"')
    if at < 0:
        at = line.find(b"{")
    if at < 0 or len(line) > 4 * MAX_LINE:
        return None
    import json

    try:
        data: Any = json.loads(line[at:])
        pid, scope = data["pid"], data["scope_id"]
        when, signal = data["expiration_time"], data.get("signal", 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    numbers = type(pid) is int and type(signal) is int and isinstance(when, int | float)
    if not numbers or not isinstance(scope, str) or not isfinite(when):
        return None
    if not 0 <= pid < _MAX_PID or signal not in _SIGNALS:
        return None
    return FileTimerRequest(pid, scope, when, signal)
