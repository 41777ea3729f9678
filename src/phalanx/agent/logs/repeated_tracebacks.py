"""Shows a traceback that several workers print alike only once on a console; the files keep all of them.

When one bug ends eight ranks, the console would show the same twenty lines eight times, just before the
report that shows them again. The first one is shown in full; of each other file's copy one line is left, with
the exception.

A block of output is only looked at if it holds the first line of a traceback, so that other output costs one
search. Tracebacks that were cut by the end of a block are shown as they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

_FIRST = b"Traceback (most recent call last):\n"
# The prefix is what torch puts before each line of an uncaught exception.
_WHOLE = re.compile(
    rb"^((?:\[rank\d+\]: ?)?)Traceback \(most recent call last\):\n"
    rb"(?:\1[ \t].*\n)+"
    rb"\1(?P<error>[^\s].*)\n",
    re.MULTILINE,
)
_VARYING = re.compile(rb"0x[0-9a-f]+|\[rank\d+\]: ?|\b(?:rank|pid|cuda:|device)[ :=]?\d+", re.IGNORECASE)
_KEEP = 64


class RepeatedTracebacks:
    """The tracebacks that a console has shown, each with the file that it came from."""

    def __init__(self) -> None:
        self._shown: dict[bytes, Hashable] = {}

    def without(self, data: bytes, source: Hashable) -> bytes:
        """`data`, whole lines of one file, with a line instead of each traceback that another file had."""
        if _FIRST not in data:
            return data

        def shorter(found: re.Match[bytes]) -> bytes:
            key = _VARYING.sub(b"", found[0])
            first = self._shown.setdefault(key, source)
            while len(self._shown) > _KEEP:
                del self._shown[next(iter(self._shown))]
            if first == source:
                return found[0]
            return b"(the same traceback as above) " + found["error"] + b"\n"

        return _WHOLE.sub(shorter, data)
