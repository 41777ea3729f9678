"""One followed log file: where reading stands, and how its bytes are cut into whole prefixed lines.

Invariants
- `offset` only moves over bytes that were handed to the sink (or judged away by the filter). What has no
  newline yet is read again later rather than kept, so a waiting source costs no memory.
- A block starts at the start of a line, or goes on with the line this source has open.
- Work is per block (`bytes.replace`), not per line; only a line filter looks at lines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.logs.sinks import Sink

BLOCK = 256 * 1024  # also the longest line that is kept whole before it is streamed


class Containing:
    """A line filter: true for lines with any of the given substrings; skips whole blocks without one."""

    def __init__(self, substrings: Iterable[str]) -> None:
        self._strings = tuple(substrings)
        self.needles = tuple(s.encode("utf-8", "surrogateescape") for s in self._strings)

    def __call__(self, line: str) -> bool:
        return any(s in line for s in self._strings)


def add_prefix(data: bytes, prefix: bytes, bare_cr: bool) -> bytes:
    """`data` with the prefix after every line end (with `bare_cr` also after a carriage return alone)."""
    if not prefix:
        return data
    if not bare_cr or b"\r" not in data:
        return data.replace(b"\n", b"\n" + prefix)
    parts = [
        part.replace(b"\n", b"\n" + prefix).replace(b"\r", b"\r" + prefix) for part in data.split(b"\r\n")
    ]
    return (b"\r\n" + prefix).join(parts)


def line_end(data: bytes, bare_cr: bool, final: bool) -> int:
    """How far `data` reaches in whole lines; on a terminal a carriage return ends one too."""
    cut = data.rfind(b"\n") + 1
    if bare_cr:
        # The very last byte may be the first half of \r\n: undecided unless nothing more comes.
        cut = max(cut, data.rfind(b"\r", cut, len(data) if final else max(len(data) - 1, 0)) + 1)
    return cut


class FollowedFile:
    """A file that is followed to one sink with one prefix."""

    def __init__(
        self,
        path: str,
        sink: Sink,
        prefix: bytes,
        line_filter: Callable[[str], bool] | None,
    ) -> None:
        self.path = path
        self.sink = sink
        self.prefix = prefix
        self.line_filter = line_filter
        self.needles: tuple[bytes, ...] = getattr(line_filter, "needles", ())
        self.fd = -1
        self.offset = 0
        self.scanned = 0  # bytes past `offset` known to hold no line end
        self.size = 0  # the most the file was seen to hold
        self.limit: int | None = None  # draining: stop here
        self.open_line = False  # the sink shows the start of a line of ours
        self.bar = False  # ... and that start follows a bare \r: a progress bar, redrawn soon
        self.skipping = False  # inside a long line that the filter refused
        self.spoke = 0.0  # when something new was last read
        self.queued = False  # in sink.ready
        self.watch = -1
        self.polled = False
        self.lost = 0
        self.done = False
        self.filter_error = ""

    def read(self, everything: bool) -> tuple[bytes, bool]:
        """Bytes from `offset` on (at most a block), and whether that is all there is for now.

        Without `everything` the answer is empty as long as what is new ends no line.
        """
        want = BLOCK
        if self.limit is not None:
            want = max(0, min(want, self.limit - self.offset))
        elif self.scanned and not everything:
            # A line that grows in small steps is not read from its start at every step.
            new = os.pread(self.fd, BLOCK - self.scanned, self.offset + self.scanned)
            if not self._worth(new) and self.scanned + len(new) < BLOCK:
                self.scanned += len(new)
                self.size = max(self.size, self.offset + self.scanned)
                return b"", True
        data = os.pread(self.fd, want, self.offset) if want else b""
        self.size = max(self.size, self.offset + len(data))
        return data, len(data) < want or not want

    def _worth(self, new: bytes) -> bool:
        return self.open_line or b"\n" in new or (self.sink.tty and b"\r" in new)

    def frame(self, data: bytes, show_rest: bool) -> tuple[int, list[memoryview]]:
        """How many bytes of `data` are used up, and the block for the sink; `show_rest`: the open end too."""
        last = self.limit is not None and self.offset + len(data) >= self.limit
        cut = line_end(data, self.sink.tty, last or show_rest)
        if not cut and (self.open_line or len(data) >= BLOCK):
            show_rest = True  # the line is open already, or too long to be kept whole: stream it
        used = len(data) if last or show_rest else cut
        if self.line_filter is None:
            body, judged = data, used
        else:
            judged, body = self._sift(data, used)
        # What the filter has not judged yet counts as new, so that it is looked at again.
        self.scanned = len(data) - used if judged == used else 0
        block = self._block(body, used if self.line_filter is None else len(body))
        used = judged
        if last and self.offset + used >= (self.limit or 0) and self.open_line:
            block.append(memoryview(b"\n"))
            self.open_line = False
        return used, block

    def _block(self, data: bytes, used: int) -> list[memoryview]:
        if not used:
            return []
        tty, prefix = self.sink.tty, self.prefix
        if tty and used < len(data):
            data = data[:used]
        out = memoryview(add_prefix(data, prefix, tty))
        rest = len(data) - used
        tail = data[used - 1]
        ended = tail == 0x0A or (tty and tail == 0x0D)
        block = [memoryview(prefix)] if prefix and not self.open_line else []
        # Bytes past `used` hold no line end, so they and the prefix before them are the very end of `out`.
        block.append(out[: len(out) - rest - len(prefix)] if ended else out)
        self.open_line = not ended
        self.bar = tty and not ended and data.rfind(b"\r") > data.rfind(b"\n")
        return block

    def _sift(self, data: bytes, used: int) -> tuple[int, bytes]:
        """The part of `data[:used]` that the filter lets through, and how much of it was judged."""
        if self.skipping or self.open_line:
            end = data.find(b"\n", 0, used) + 1
            head = data[: end or used]
            if not self.skipping:
                return len(head), head
            self.skipping = not end
            return len(head), b""
        whole = data[:used]
        if self.needles and not any(needle in whole for needle in self.needles):
            self.skipping = bool(whole) and not whole.endswith(b"\n")
            return used, b""
        lines = whole.split(b"\n")
        rest = lines.pop()
        kept = [line + b"\n" for line in lines if self._accepts(line + b"\n")]
        if rest and self._accepts(rest):
            kept.append(rest)
        else:
            self.skipping = bool(rest)
        return used, b"".join(kept)

    def _accepts(self, line: bytes) -> bool:
        assert self.line_filter is not None
        try:
            return bool(self.line_filter(line.decode("utf-8", "replace")))
        except Exception as error:  # noqa: BLE001 - a user's predicate: better one line too many than none
            self.filter_error = f"the line filter for {self.path} raised {type(error).__name__}: {error}"
            return True

    def grew(self) -> bool:
        """Whether the file holds anything that has not been looked at."""
        size = os.fstat(self.fd).st_size
        if size < self.offset:
            return True
        return size > self.offset + self.scanned

    def unshown(self) -> int:
        """Bytes of the file that never went to the sink."""
        return max(0, (self.on_disk() if self.limit is None else self.limit) - self.offset)

    def on_disk(self) -> int:
        """The size of the file as far as it can be told."""
        try:
            return os.fstat(self.fd).st_size if self.fd >= 0 else os.stat(self.path).st_size
        except OSError:
            return self.size

    def close(self) -> None:
        """Stops reading; the file itself is never touched."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
