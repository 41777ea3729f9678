"""One followed log file: the read position, and how its bytes are cut into whole prefixed lines.

Invariants
- `offset` only moves over bytes that were passed to the sink or rejected by the filter. An unfinished line is
  read again later rather than kept, so a waiting file costs no memory.
- A block starts at the start of a line, or continues the line that this file has open.
- Work is per block (`bytes.replace`), not per line; only a line filter splits a block.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.agent.logs.sinks import Sink
    from phalanx.observe.json_lines import JsonLines

BLOCK = 256 * 1024  # longer lines are streamed in parts
_SHOW_ON_TERMINAL = 0.1  # a terminal shows an unfinished line after this much silence
_SHOW_BAR = 1.0  # elsewhere a progress bar is shown once in this time, however often it is redrawn,
_SHOW_TEXT = 5.0  # and other text when its line has been unfinished for this long
_BUFFER = 4096


class Containing:
    """A line filter: accepts lines with any of the given substrings; blocks without one are skipped whole."""

    def __init__(self, substrings: Iterable[str]) -> None:
        self._strings = tuple(substrings)
        self.needles = tuple(s.encode("utf-8", "surrogateescape") for s in self._strings)

    def __call__(self, line: str) -> bool:
        return any(s in line for s in self._strings)


def add_prefix(data: bytes, prefix: bytes, bare_cr: bool) -> bytes:
    """`data` with the prefix after every line end; with `bare_cr`, a carriage return ends a line too."""
    if not prefix:
        return data
    if not bare_cr or b"\r" not in data:
        return data.replace(b"\n", b"\n" + prefix)
    parts = [
        part.replace(b"\n", b"\n" + prefix).replace(b"\r", b"\r" + prefix) for part in data.split(b"\r\n")
    ]
    return (b"\r\n" + prefix).join(parts)


def line_end(data: bytes, bare_cr: bool, final: bool) -> int:
    """The length of the whole lines in `data`; with `bare_cr`, a carriage return ends a line too."""
    cut = data.rfind(b"\n") + 1
    if bare_cr:
        # A \r in the last byte may be the first half of \r\n, unless nothing follows.
        cut = max(cut, data.rfind(b"\r", cut, len(data) if final else max(len(data) - 1, 0)) + 1)
    return cut


class FollowedFile:
    """A log file, its sink and its prefix."""

    def __init__(
        self,
        path: str,
        sink: Sink,
        prefix: bytes,
        line_filter: Callable[[str], bool] | None,
        json: JsonLines | None = None,
    ) -> None:
        """`json`: makes an object of each line; then no line is ever open on the sink."""
        self.path = path
        self.json = json
        self.sink = sink
        self.prefix = prefix
        self.line_filter = line_filter
        self.needles: tuple[bytes, ...] = getattr(line_filter, "needles", ())
        self.fd = -1
        self.offset = 0
        self.scanned = 0  # bytes past `offset` known to hold no line end
        self.size = 0  # the largest size seen
        self.limit: int | None = None  # draining: stop here
        self.held_since = 0.0  # when the unshown bytes of an unfinished line began to wait; 0: there are none
        self.redrawn = False  # ... and a \r is among them: a progress bar
        self.open_line = False  # the sink shows the start of a line of this file
        self.yields = False  # ... which was shown because it took so long: any other file may interrupt it
        self.bar = False  # ... which follows a bare \r: a progress bar, redrawn soon
        self.skipping = False  # inside a long line that the filter rejected
        self.read_at = 0.0  # when new output was last read
        self.queued = False  # in sink.ready
        self.watch = -1
        self.polled = False
        self.lost = 0
        self.done = False
        self.filter_error = ""

    def read(self, everything: bool) -> tuple[bytes, bool]:
        """Bytes from `offset` (at most a block), and whether the file has no more for now.

        Without `everything`, the bytes are empty until the new ones end a line.
        """
        want = BLOCK
        if self.limit is not None:
            want = max(0, min(want, self.limit - self.offset))
        elif self.scanned and not everything:
            # Read a line that grows in small steps only once from its start.
            new = os.pread(self.fd, BLOCK - self.scanned, self.offset + self.scanned)
            if not self._worth(new) and self.scanned + len(new) < BLOCK:
                self.scanned += len(new)
                self.redrawn = self.redrawn or b"\r" in new
                self.size = max(self.size, self.offset + self.scanned)
                return b"", True
        data = os.pread(self.fd, want, self.offset) if want else b""
        self.size = max(self.size, self.offset + len(data))
        return data, len(data) < want or not want

    def _worth(self, new: bytes) -> bool:
        return self._streams() or b"\n" in new or (self.sink.tty and b"\r" in new)

    def _streams(self) -> bool:
        """Whether what follows an open line is shown as it comes."""
        return self.open_line and not self.yields

    def show_at(self) -> float | None:
        """When the start of an unfinished line is shown; None: not before the line ends."""
        if not self.scanned or (self.line_filter is not None and not self.sink.tty):
            return None
        if self.sink.tty:
            return self.read_at + _SHOW_ON_TERMINAL
        if self.redrawn:
            return self.held_since + _SHOW_BAR
        # Cut by the buffer of a program that does not flush its lines: the rest follows when that is full.
        cut = (self.offset + self.scanned) % _BUFFER == 0
        return None if cut else self.held_since + _SHOW_TEXT

    def note_held(self, now: float) -> None:
        """Keep the time since which an unfinished line waits."""
        if not self.scanned:
            self.held_since = 0.0
        elif not self.held_since:
            self.held_since = now

    def frame(self, data: bytes, show_rest: bool) -> tuple[int, list[memoryview]]:
        """How many bytes of `data` are used, and the block for the sink; `show_rest`: with the open line."""
        last = self.limit is not None and self.offset + len(data) >= self.limit
        cut = line_end(data, self.sink.tty, last or show_rest)
        if not cut and (self._streams() or len(data) >= BLOCK):
            show_rest = True  # the line is already open, or too long to keep whole: stream it
            self.yields = False
        elif show_rest:
            self.yields = not self.sink.tty
        used = len(data) if last or show_rest else cut
        if self.json is not None and used > cut and not last:
            from phalanx.observe.json_lines import whole_characters

            used = whole_characters(data, used)
        if self.line_filter is None:
            body, judged = data, used
        else:
            judged, body = self._sift(data, used)
        repeated = self.sink.repeated_tracebacks
        shorter = None
        if repeated is not None and used and not self.open_line:
            whole = body if self.line_filter is not None else data[:used]
            shorter = repeated.without(whole, self.path)
            shorter = None if shorter is whole else shorter
        # Bytes that the filter has not judged count as new, so that they are read again.
        self.scanned = len(data) - used if judged == used else 0
        self.redrawn = b"\r" in data[used:]
        if used:
            self.held_since = 0.0
        if shorter is not None:
            block = self._block(shorter, len(shorter))
        else:
            block = self._block(body, used if self.line_filter is None else len(body))
        used = judged
        if last and self.offset + used >= (self.limit or 0) and self.open_line:
            block.append(memoryview(b"\n"))
            self.open_line = False
        return used, block

    def _block(self, data: bytes, used: int) -> list[memoryview]:
        if not used:
            return []
        if self.json is not None:
            return [memoryview(self.json.of_bytes(data[:used]))]
        tty, prefix = self.sink.tty, self.prefix
        if tty and used < len(data):
            data = data[:used]
        out = memoryview(add_prefix(data, prefix, tty))
        rest = len(data) - used
        tail = data[used - 1]
        ended = tail == 0x0A or (tty and tail == 0x0D)
        block = [memoryview(prefix)] if prefix and not self.open_line else []
        # Bytes past `used` hold no line end, so they and the prefix before them are the end of `out`.
        block.append(out[: len(out) - rest - len(prefix)] if ended else out)
        self.open_line = not ended
        self.bar = tty and not ended and data.rfind(b"\r") > data.rfind(b"\n")
        return block

    def _sift(self, data: bytes, used: int) -> tuple[int, bytes]:
        """How much of `data[:used]` was judged, and the part of it that the filter accepts."""
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
        except Exception as error:  # noqa: BLE001 - user code: rather one line too many than one too few
            self.filter_error = f"the line filter for {self.path} raised {type(error).__name__}: {error}"
            return True

    def grew(self) -> bool:
        """Whether the file holds bytes that were not scanned, or was truncated."""
        return not self.offset <= os.fstat(self.fd).st_size <= self.offset + self.scanned

    def unshown(self) -> int:
        """Bytes of the file that were not passed to the sink."""
        return max(0, (self.on_disk() if self.limit is None else self.limit) - self.offset)

    def on_disk(self) -> int:
        """The size of the file; the last known one if it cannot be read."""
        try:
            return os.fstat(self.fd).st_size if self.fd >= 0 else os.stat(self.path).st_size
        except OSError:
            return self.size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
