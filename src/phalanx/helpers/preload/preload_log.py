"""The log of a preload: how far it has come, and why it was given up.

The zygote writes it, and the agent and the keeper read it; it is the memory file that also holds the list of
entries (spawner.py). So what was found is known although the zygote is gone. One line each:

    import ENTRY          this entry of the list is being imported
    refused PACKAGE: WHY  does not suit a fork: the zygote has given up
    unfit PACKAGE: WHY    the same, whatever the script
    late                  the keeper kills the zygote, because an import takes too long
    loaded NAME …         all modules that the zygote has now
    ready SECONDS         all is imported
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class ImportGate:
    """The first byte of the file: with it, the agent holds up imports in the background while workers start.

    A process that imports passes it before each module. A priority is not enough: it counts within one
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


class PreloadLog:
    """A reader of the log, which may also write it."""

    def __init__(self, fd: int, offset: int) -> None:
        self.fd = fd
        self._offset = offset
        self._rest = b""
        self._late = False
        self._refused: tuple[str, str] | None = None
        self.for_all = False  # the refusal, whatever the script
        self.importing = ""  # the entry
        self.loaded: set[str] = set()
        self.seconds: float | None = None  # that the imports took; None before they are done

    def write(self, line: str) -> None:
        """Add a line."""
        os.write(self.fd, f"{line}\n".encode("utf-8", "surrogateescape"))

    def refuse(self, package: str, why: str, for_all: bool = False) -> None:
        """This package does not suit a fork; `for_all`: whatever the script."""
        self.write(f"{'unfit' if for_all else 'refused'} {package}: {why}".replace("\n", " "))

    def read(self) -> None:
        """Take in what is new."""
        while data := os.pread(self.fd, 1 << 20, self._offset):
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode("utf-8", "surrogateescape").partition(" ")
                if word == "import":
                    self.importing = rest
                elif word in ("refused", "unfit"):
                    package, _, why = rest.partition(": ")
                    self._refused, self.for_all = (package, why), word == "unfit"
                elif word == "loaded":
                    self.loaded.update(rest.split(" "))
                elif word == "late":
                    self._late = True
                elif word == "ready":
                    self.seconds = float(rest)

    def refused(self) -> tuple[str, str]:
        """Of a preload that was given up: the package, and why."""
        if self._refused is not None:
            return self._refused
        from phalanx.helpers.preload.preload_list import package_of

        why = "did not finish importing" if self._late else "ended the process"
        return package_of(self.importing.partition(":")[0]), why
