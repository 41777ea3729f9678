"""The messages between starter and steward: a kind, a length, and bytes.

From the starter: `J` the job as JSON, `A` it is alive (first as the answer to the greeting, then regularly),
`S` a signal to pass on (its place in the order of all signals, and its number; a new connection repeats all),
`D` the end has been seen. From the steward: `o` and `e` the agent's output, `x` its outcome as JSON. The
steward's stream begins with a line, because a login shell may have printed something before:
`phalanx-steward VERSION OFFSET`, where OFFSET counts the bytes of frames before it.
"""

from __future__ import annotations

GREETING = b"phalanx-steward "
VERSION = b"2"
_LONGEST = 1 << 26  # an environment may have megabytes, and JSON writes some bytes as six
_NOISE = 1 << 16  # bytes that a login shell may print
_HEADER = 5


def silence(patience: float) -> float:
    """Seconds without a message after which a starter counts as gone; it sends one four times as often."""
    return max(patience, 10.0)


def frame(kind: bytes, data: bytes = b"") -> bytes:
    """One message."""
    return kind + len(data).to_bytes(4, "big") + data


class LinkFrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The messages that are complete by now; ValueError: the other side is not what it should be."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _HEADER:
            size = int.from_bytes(self._buffer[1:_HEADER], "big")
            if size > _LONGEST:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) < _HEADER + size:
                break
            found.append((bytes(self._buffer[:1]), bytes(self._buffer[_HEADER : _HEADER + size])))
            del self._buffer[: _HEADER + size]
        return found


class GreetingReader:
    """Finds the greeting after what a login shell has printed."""

    def __init__(self) -> None:
        self._buffer = b""
        self.offset: int | None = None  # None: not found yet

    def feed(self, data: bytes) -> bytes:
        """What follows the greeting; empty before it."""
        if self.offset is not None:
            return data
        self._buffer += data
        start = self._buffer.find(GREETING)
        end = self._buffer.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            if len(self._buffer) > _NOISE:
                raise ValueError(f"the login shell prints more than {_NOISE} bytes before the agent starts")
            return b""
        version, _, number = self._buffer[start + len(GREETING) : end].partition(b" ")
        if version != VERSION or not number.isdigit():
            raise ValueError("another version of Phalanx is installed there; every host needs the same one")
        self.offset = int(number)
        rest, self._buffer = self._buffer[end + 1 :], b""
        return rest


class SentFrames:
    """The frames that were sent last, to be sent again over a new connection."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: list[bytes] = []
        self._size = 0
        self.end = 0  # offset after the last frame

    @property
    def start(self) -> int:
        """The offset of the first frame that is still there."""
        return self.end - self._size

    def add(self, kind: bytes, data: bytes) -> None:
        """Add a message; the oldest ones go when there are too many."""
        made = frame(kind, data)
        self._frames.append(made)
        self._size += len(made)
        self.end += len(made)
        while self._size > self._most and len(self._frames) > 1:
            self._size -= len(self._frames.pop(0))

    def since(self, offset: int) -> tuple[int, bytes]:
        """Where the answer begins, and all bytes from there: `offset`, or the first whole frame left."""
        begin = self.start if offset < self.start or offset > self.end else offset
        return begin, b"".join(self._frames)[begin - self.start :]
