"""The process that searches the workers' output for `--expect`; see expected_output.py.

It sleeps until a file grows, and ends with the agent. A line is searched up to its first 4,096 characters;
parts of a progress bar (between carriage returns) are lines. Searching one block of output may take a
second of processor time; a pattern that takes longer is reported, and the process ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from select import POLLHUP, POLLIN, poll
from typing import Any

from phalanx.agent.logs.inotify import Watcher
from phalanx.agent.supervision.expected_output import PAGE, TASK
from phalanx.core.diagnosis.progress import is_finite
from phalanx.kernel import die_with_parent
from phalanx.observe.log_layout import data_at

_BLOCK = 64 * 1024
_LINE = 4096
_SHOWN = 200  # characters of a line with a bad value
_CPU = 1.0  # seconds of processor time for one block
_LINGER = 0.05  # seconds between two looks at files that grow


class PatternTooSlow(Exception):
    """A line keeps the pattern busy."""


class SearchedFile:
    """One log and how far it was searched."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        self.path = path
        self.fd = -1
        self._offset = 0
        self._rest = b""  # the start of a line that has no end yet

    def open(self) -> None:
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                pass  # not there yet

    def lines(self) -> list[str] | None:
        """Lines of the next block; None at the end of the file."""
        if self.fd < 0:
            return None
        data = os.pread(self.fd, _BLOCK, self._offset)
        if not data:
            return None
        if data[0] == 0 and self._skip_hole():
            return []
        self._offset += len(data)
        lines = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()[:_LINE]
        return [line[:_LINE].decode("utf-8", "replace") for line in lines if line]

    def _skip_hole(self) -> bool:
        """What was rotated away before it was searched reads as zeros; whether there was such a hole."""
        start = data_at(self.fd, self._offset)
        skipped = start > self._offset
        if skipped:
            self._offset, self._rest = start, b""
        return skipped


class PatternSearch:
    """Searches the files, and tells what it finds."""

    def __init__(self, page: int, task: dict[str, Any]) -> None:
        self._page = page
        self._pattern = re.compile(task["pattern"])
        self._finite = task["finite"]
        self._files = [SearchedFile(rank, path) for rank, path in task["files"]]
        self._blocks = 0
        self._asked = self._answered = 0
        self._at: float = PAGE.unpack(os.pread(page, PAGE.size, 0))[0]  # of a process that this one replaces
        self._told: set[int] = set()  # ranks whose bad value is known

    def run(self) -> None:
        watcher = Watcher()
        waits, pause = poll(), poll()
        for one in (waits, pause):
            one.register(0, POLLIN)
        if watcher.fd >= 0:
            waits.register(watcher.fd, POLLIN)
        while True:
            # Armed before the files are read: what is written meanwhile wakes it up.
            armed = [self._arm(watcher, file) for file in self._files]
            self._search()
            for fd, _ in waits.poll(None if all(armed) else 1000):
                if fd == 0 and not self._read_questions():
                    return  # the agent has ended
            watcher.read()
            if self._asked == self._answered and pause.poll(_LINGER * 1000) and not self._read_questions():
                return

    def _read_questions(self) -> bool:
        """Take questions in: they are answered when the files have been searched once more."""
        questions = len(os.read(0, 4096))
        self._asked += questions
        return questions > 0

    def _arm(self, watcher: Watcher, file: SearchedFile) -> bool:
        file.open()
        return file.fd >= 0 and watcher.watch_file(file.fd, file.path) >= 0

    def _search(self) -> None:
        asked, left = self._asked, list(self._files)
        while left:
            left = [file for file in left if self._search_block(file)]
        answers, self._answered = asked > self._answered, asked
        self._publish()
        if answers:
            _report("searched")

    def _search_block(self, file: SearchedFile) -> bool:
        lines = file.lines()
        if lines is None:
            return False
        signal.setitimer(signal.ITIMER_PROF, _CPU)
        try:
            for line in lines:
                found = self._pattern.search(line)
                if found is not None:
                    self._at = time.monotonic()
                    value = found[1] if found.re.groups else found[0]
                    if self._finite and not is_finite(value or ""):
                        self._report_value(file.rank, line)
        except PatternTooSlow:
            _report(f"slow {file.rank}")
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self._blocks += 1
        self._publish()
        return True

    def _report_value(self, rank: int, line: str) -> None:
        if rank not in self._told:
            self._told.add(rank)
            _report(f"value {rank} {''.join(c if c.isprintable() else ' ' for c in line[:_SHOWN])}")

    def _publish(self) -> None:
        os.pwrite(self._page, PAGE.pack(self._at, self._blocks, self._answered), 0)


def _report(line: str) -> None:
    os.write(1, line.encode("utf-8", "replace") + b"\n")


def _too_slow(_sig: int, _frame: object) -> None:
    raise PatternTooSlow


def main(page: int) -> None:
    """Search until the agent closes stdin."""
    die_with_parent()
    parent = poll()
    parent.register(0, POLLIN)
    if any(events & POLLHUP for _, events in parent.poll(0)):
        return  # it has ended before that
    signal.signal(signal.SIGPROF, _too_slow)
    task = json.loads(os.pread(page, os.fstat(page).st_size, TASK))
    try:
        PatternSearch(page, task).run()
    except (PatternTooSlow, BrokenPipeError):
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
