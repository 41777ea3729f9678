"""`--expect`: what the workers' output has matched so far, as found by a process of its own.

A regular expression can take for ever on an unlucky line, and Python's engine does not let any other thread
run meanwhile. So it runs in another process (pattern_process.py), which reads the log files by itself: the
agent neither copies the output for it nor wakes up for a match. Matches are in a page of shared memory, read
when a deadline arrives; a value that is not finite, and the end of the process, make a pipe readable.
"""

from __future__ import annotations

import os
import struct
import sys

from phalanx.environment import without_secrets
from phalanx.kernel import anonymous_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

PAGE = struct.Struct("=dQQ")  # when a line last matched, how many have, whether output waits to be read
TASK = 4096  # from here on: what to search for, as JSON
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_COMMAND = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from phalanx.supervision.pattern_process import main; main(int(sys.argv[2]))"
)
_LONGEST_NEWS = 8192


class ExpectedOutput:
    """The search through the output of one start of the workers."""

    def __init__(
        self, pattern: str, finite: bool, files: list[tuple[int, str]], note: Callable[[str], None]
    ) -> None:
        """`files`: the global rank and the path of every log."""
        self._note = note
        self._page = anonymous_file("phalanx-expect")
        os.pwrite(self._page, PAGE.pack(0.0, 0, 1), 0)  # as long as it starts, everything waits
        self._news = b""
        self._bad: tuple[int, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start(pattern, finite, files)

    def _start(self, pattern: str, finite: bool, files: list[tuple[int, str]]) -> None:
        import json
        import subprocess

        os.pwrite(
            self._page, json.dumps({"pattern": pattern, "finite": finite, "files": files}).encode(), TASK
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _COMMAND, _PACKAGE, str(self._page)],
                stdin=subprocess.PIPE,  # closed with the agent, however that ends
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._page],
                env=without_secrets(),
                start_new_session=True,
            )
        except OSError as error:
            self._give_up(f"its process cannot be started: {error.strerror}")
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process

    def fileno(self) -> int:
        """Readable when there is news; -1: there will be none."""
        process = self._process
        return -1 if process is None or process.stdout is None else process.stdout.fileno()

    @property
    def works(self) -> bool:
        """Whether the output is searched."""
        return self._process is not None

    def matched(self) -> tuple[float, bool]:
        """When a line last matched (0.0: none has), and whether output is waiting to be searched."""
        at, _count, busy = PAGE.unpack(os.pread(self._page, PAGE.size, 0))
        return at, bool(busy)

    def look(self) -> bool:
        """Take in the news; whether there is any."""
        if self._process is None:
            return False
        try:
            data = os.read(self.fileno(), _LONGEST_NEWS)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._give_up("its process has ended")
            return False
        self._news = (self._news + data)[-_LONGEST_NEWS:]
        while b"\n" in self._news:
            line, _, self._news = self._news.partition(b"\n")
            self._hear(line.decode("utf-8", "replace"))
        return True

    def _hear(self, news: str) -> None:
        kind, _, rest = news.partition(" ")
        if kind == "value":
            rank, _, line = rest.partition(" ")
            self._bad = self._bad or (int(rank), line)
        elif kind == "slow":
            self._give_up(f"the pattern takes too long on a line of rank {rest}; use a simpler one")

    def take_bad(self) -> tuple[int, str] | None:
        """A value that is not finite, once: its rank and line."""
        bad, self._bad = self._bad, None
        return bad

    def _give_up(self, why: str) -> None:
        self._note(f"--expect: the output is not watched any more: {why}")
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()

    def close(self) -> None:
        self._end()
        if self._page >= 0:
            os.close(self._page)
            self._page = -1
