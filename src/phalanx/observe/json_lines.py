"""`--log-format json`: lines as JSON objects, one object per line of output.

    {"time":"2026-01-02T03:04:05.678901Z","host":"a1","rank":3,"stream":"stdout","line":"step 10 loss 0.3"}

`time` is when the line was read (of our own lines: written), in UTC. `rank` is the global rank, null for
lines of the launcher, whose stream is `phalanx`. The rules by which no byte is lost:

- An object stands for a line without its line feed. Carriage returns and all other characters are in `line`.
- A piece of a line that has no end yet has `"partial":true`: a progress bar (once a second), text that waited
  for its line feed for five seconds, a piece of a line longer than a block, the last words of a worker that
  was killed. What follows it from the same rank and stream continues it.
- Bytes that are not UTF-8 are replaced in `line`, and the object has the exact bytes in `base64` as well.

So the output of a stream is `line` (or the decoded `base64`) of its objects in order, each with a line feed
after it unless it is partial.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring, encode_basestring_ascii

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PARTIAL = ',"partial":true'


def timestamp(now: float) -> str:
    """UTC as RFC 3339 writes it, to the microsecond."""
    whole = int(now // 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((now - whole) * 1e6):06d}Z"


def whole_characters(data: bytes, end: int) -> int:
    """The largest length up to `end` that does not cut a character; `end` if only that one is there."""
    for back in range(1, min(4, end + 1)):
        byte = data[end - back]
        if byte >= 0xC0:  # the first byte of a character of 2 to 4 bytes
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end - back if size > back and end > back else end
        if byte < 0x80:
            break
    return end


class JsonLines:
    """Makes the objects of one stream of one rank."""

    def __init__(self, host: str, rank: int | None, stream: str) -> None:
        who = "null" if rank is None else str(rank)
        name, host = encode_basestring_ascii(stream), encode_basestring_ascii(host)
        self._who = f'","host":{host},"rank":{who},"stream":{name},"line":'

    def _head(self) -> str:
        return '{"time":"' + timestamp(time.time()) + self._who

    def of_lines(self, lines: Iterable[str]) -> str:
        """The objects of whole lines."""
        head = self._head()
        texts = (line.encode("utf-8", "backslashreplace").decode() for line in lines)
        # ASCII only: stderr may have any encoding.
        return "".join(f"{head}{encode_basestring_ascii(text)}}}\n" for text in texts)

    def of_bytes(self, data: bytes) -> bytes:
        """The objects of a worker's output; what follows the last line feed is partial."""
        head = self._head()
        try:
            lines = data.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            return self._of_broken(data, head)
        rest = lines.pop()
        out = [f"{head}{encode_basestring(line)}}}\n" for line in lines]
        if rest:
            out.append(f"{head}{encode_basestring(rest)}{_PARTIAL}}}\n")
        return "".join(out).encode()

    def _of_broken(self, data: bytes, head: str) -> bytes:
        import base64

        out = []
        lines = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            last = number == len(lines)
            if last and not line:
                break
            text = line.decode("utf-8", "replace")
            exact = ""
            if "\ufffd" in text and text.encode() != line:
                exact = f',"base64":"{base64.b64encode(line).decode()}"'
            out.append(f"{head}{encode_basestring(text)}{exact}{_PARTIAL * last}}}\n")
        return "".join(out).encode()
