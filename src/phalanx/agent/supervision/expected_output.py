"""`--expect`: what the workers' output has matched so far, as found by a process of its own.

A regular expression can take for ever on an unlucky line, and Python's engine does not let any other thread
run meanwhile. So it runs in another process (pattern_process.py), which reads the log files by itself: the
agent neither copies the output for it nor wakes up for a match. Matches are in a page of shared memory, read
when a deadline arrives; a value that is not finite, and the end of the process, make a pipe readable.

The silence of that process says nothing about the job. When a match is overdue, the process is asked, and
counts only once it has searched everything that was written before the question. One that neither answers nor
gets on with its work for a while (it was stopped, or starves) is replaced.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable

from phalanx.job.environment import without_secrets
from phalanx.kernel import anonymous_file
from phalanx.python_command import python_command

PAGE = struct.Struct("=dQQ")  # when a line last matched, blocks that were searched, questions answered
TASK = 4096  # from here on: what to search for, as JSON
_LONGEST_NEWS = 8192
_SILENT = 4.0  # seconds without an answer or a searched block, after which the process is replaced
_REPLACEMENTS = 3  # in a row, before the search is given up
_AGAIN = 1.0  # seconds until the next look at a question that is not answered


class ExpectedOutput:
    """The search through the output of one start of the workers."""

    def __init__(
        self, pattern: str, finite: bool, files: list[tuple[int, str]], note: Callable[[str], None]
    ) -> None:
        """`files`: the global rank and the path of every log."""
        import json

        self._note = note
        self._page = anonymous_file("phalanx-expect")
        os.pwrite(self._page, PAGE.pack(0.0, 0, 0), 0)
        task = {"pattern": pattern, "finite": finite, "files": files}
        os.pwrite(self._page, json.dumps(task).encode(), TASK)
        self._news = b""
        self._bad: tuple[int, str] | None = None
        self._told: set[int] = set()  # ranks whose bad value was taken in; a new process finds it again
        self._process: subprocess.Popen[bytes] | None = None
        self._asked, self._asked_at = 0, 0.0  # questions to this process, and when the last one was put
        self._seen, self._seen_at = (0, 0), 0.0  # what it had done, and when that last changed
        self._replaced = 0
        self._start()

    def _start(self) -> None:
        self._asked, self._asked_at, self._news = 0, 0.0, b""
        try:
            process = subprocess.Popen(
                python_command("phalanx.agent.supervision.pattern_process", str(self._page)),
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
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        self._process = process

    def fileno(self) -> int:
        """Readable when there is news; -1: there will be none."""
        process = self._process
        return -1 if process is None or process.stdout is None else process.stdout.fileno()

    @property
    def works(self) -> bool:
        """Whether the output is searched."""
        return self._process is not None

    def matched(self) -> float:
        """When a line last matched; 0.0: none has."""
        return float(self._read_page()[0])

    def _read_page(self) -> tuple[float, int, int]:
        at, blocks, answered = PAGE.unpack(os.pread(self._page, PAGE.size, 0))
        return at, blocks, answered

    def last_match(self, now: float, since: float, every: float | None) -> float:
        """When a line last matched, `since` at the earliest; not longer ago than `every` seconds unless it is
        known that everything has been searched."""
        at = max(self.matched(), since)
        if every is None or now < at + every:
            return at
        if not self.searched(now, at + every):
            return now + _AGAIN - every
        return max(self.matched(), since)

    def searched(self, now: float, then: float) -> bool:
        """Whether everything that was written before `then` has been searched; asks, if need be."""
        if self._process is None:
            return True
        _at, blocks, answered = self._read_page()
        if answered >= self._asked:
            if self._asked_at >= then:
                self._replaced = 0
                return True
            self._ask(now)
        if (blocks, answered) != self._seen:
            self._seen, self._seen_at = (blocks, answered), now
        elif now >= self._seen_at + _SILENT:
            self._replace(now)
        return False

    def _ask(self, now: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b"?")
        except OSError:
            return  # it has ended, which `look` will find
        self._asked += 1
        self._asked_at, self._seen_at = now, now

    def _replace(self, now: float) -> None:
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            self._give_up("its process does not answer")
            return
        silent = f"the process that searches the output did not answer for {_SILENT:g} s"
        self._note(f"--expect: {silent}: replaced")
        self._end()
        os.pwrite(self._page, PAGE.pack(self.matched(), 0, 0), 0)
        self._start()
        self._seen, self._seen_at = (0, 0), now

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
            report, _, self._news = self._news.partition(b"\n")
            kind, _, rest = report.decode("utf-8", "replace").partition(" ")
            if kind == "value":
                rank, _, line = rest.partition(" ")
                if int(rank) not in self._told:
                    self._told.add(int(rank))
                    self._bad = self._bad or (int(rank), line)
            elif kind == "slow":
                self._give_up(f"the pattern takes too long on a line of rank {rest}; use a simpler one")
        return True

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
