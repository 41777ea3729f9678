"""The log of a preload: which modules were executed, which are unsuitable, and how far it has come.

Several processes write it (vetting.py), and the agent and all of them read it; it is the memory file that
also holds the list of modules (spawner.py). So what was found is known although the process that found it was
killed, or the job ended early. One line each:

    ( NAME           the body of this module is being executed; modules that it imports follow
    )                and has ended: that of the last one opened
    bad NAME: WHY    does not suit a fork
    with NAME ROOT   neither does this one: it imports ROOT
    spoiled NAME: WHY   the preload is given up: this entry of the list was vetted, and is unsuitable now
    passed NAME      this entry of the list is done
    over             the end of the list
    gone             the process that executed these modules has ended; another one goes on
    late             the keeper kills the process that imports, because a module takes too long
    renew KIND PLACE a value that every worker sets again (import_values.py)
    fixed NUMBERS    check sums of what is the same in every process (twin.py)
    ready SECONDS    the zygote has imported what can be
"""

from __future__ import annotations

import os
import time

from phalanx.kernel import anonymous_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class ImportGate:
    """The first byte of the file: with it, the agent holds up imports in the background while workers start.

    Every process that imports passes it before each module. A priority is not enough: it counts within one
    session only where the kernel groups processes by session, and ordinary users cannot raise it again.
    """

    OPEN, CLOSED = b".", b"|"
    _PAUSE = 0.1  # seconds between two looks at a closed gate

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """In the agent: hold up what comes."""
        os.pwrite(self._fd, self.CLOSED, 0)

    def open(self) -> None:
        """In the agent: let it go on."""
        os.pwrite(self._fd, self.OPEN, 0)

    def wait(self, report: Callable[[], None]) -> None:
        """In a process that imports: until the gate is open; `report` is called meanwhile."""
        while os.pread(self._fd, 1, 0) == self.CLOSED:
            report()
            time.sleep(self._PAUSE)


class VerdictLog:
    """A reader of the log, which may also write it."""

    def __init__(self, fd: int, offset: int) -> None:
        self.fd = fd
        self._offset = offset
        self._rest = b""
        self.unsuitable: dict[str, str] = {}  # name → why
        self.importers: dict[str, str] = {}  # name → the unsuitable one that it imports
        self.passed: set[str] = set()
        self.executing: list[str] = []  # outermost first
        self.over = False
        self.renewals: list[str] = []
        self.fixed = ""
        self.spoiled = ""
        self._late = False
        self.hung = False  # a module did not finish importing
        self.seconds: float | None = None  # that the imports took; None before they are done

    def write(self, line: str) -> None:
        """Add a line. All processes share one file position, so lines never overlap."""
        os.write(self.fd, f"{line}\n".encode("utf-8", "surrogateescape"))

    def part(self) -> None:
        """In a process that is not to be heard: go on in a log of its own."""
        self.read()
        self.fd = anonymous_file("phalanx-verdicts")
        self._offset = 0

    def read(self) -> None:
        """Take in what is new."""
        while data := os.pread(self.fd, 1 << 20, self._offset):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(*line.decode("utf-8", "surrogateescape").partition(" ")[::2])

    def _take(self, word: str, rest: str) -> None:
        if word == "(":
            self.executing.append(rest)
        elif word == ")":
            self.executing.pop()
        elif word == "bad":
            name, _, why = rest.partition(": ")
            self.unsuitable.setdefault(name, why)
        elif word == "with":
            name, _, root = rest.partition(" ")
            self.importers.setdefault(name, root)
        elif word == "passed":
            self.passed.add(rest)
        elif word == "spoiled":
            self.spoiled = rest
        elif word == "over":
            self.over = True
        elif word == "gone":
            self.executing = []
        elif word == "late":
            self._late = True
        elif word == "renew":
            self.renewals.append(rest)
        elif word == "fixed":
            self.fixed = rest
        elif word == "ready":
            self.seconds = float(rest)

    def is_unsuitable(self, name: str) -> bool:
        """Whether this module, or a package that it belongs to, must not be preloaded."""
        return covers(self.unsuitable, name) or covers(self.importers, name)

    def blame(self, name: str, why: str, importers: Iterable[str]) -> None:
        """Write that a module is unsuitable, and with it those that import it. No `why`: it is known."""
        if why and name not in self.unsuitable and name not in self.importers:
            self.unsuitable[name] = why
            self.write(f"bad {name}: {why}".replace("\n", " "))
        for importer in importers:
            if importer != name and importer not in self.unsuitable and importer not in self.importers:
                self.importers[importer] = name
                self.write(f"with {importer} {name}")

    def blame_executing(self) -> None:
        """The process that wrote the log is gone: the module that it was executing is to blame."""
        why = "did not finish importing" if self._late else "ended the process"
        self.hung = self.hung or self._late
        self._late = False
        if self.executing:
            *importers, name = self.executing
            self.executing = []
            self.blame(name, why, importers)
            self.write("gone")

    def in_words(self) -> list[str]:
        """`NAME: WHY`, one line for each module that is unsuitable by itself."""
        lines = []
        for name, why in self.unsuitable.items():
            count = sum(self._root(importer) == name for importer in self.importers)
            more = f" (so are {count} modules that import it)" if count > 1 else ""
            more = " (so is a module that imports it)" if count == 1 else more
            lines.append(f"{name}: {why}{more}")
        return lines

    def _root(self, name: str) -> str:
        for _ in range(len(self.importers)):
            if name not in self.importers:
                break
            name = self.importers[name]
        return name


def covers(names: Iterable[str], name: str) -> bool:
    """Whether a module, or a package that it belongs to, is among these; they are a set or a dictionary."""
    while name:
        if name in names:
            return True
        name = name.rpartition(".")[0]
    return False
