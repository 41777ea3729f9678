"""A second process that does the same imports: what differs afterwards is random, or exists only once.

The second process is forked before the imports. It does them as well, through the same code (some packages
keep the stack of their import), with its output discarded. It sends check sums of the values and of the
generator states that it then has (import_values.py, generators.py), and exits.
"""

from __future__ import annotations

import os
import sys

from phalanx.warm.generators import GeneratorPlan, all_generators, states
from phalanx.warm.import_values import Clocks, ImportValues, differing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class Findings:
    """What a process sends about its imports."""

    def __init__(self, sums: dict[str, int], fixed: set[int]) -> None:
        self.sums = sums
        self.fixed = fixed  # check sums of generator states, and of texts that look like identifiers

    @classmethod
    def of(cls, values: ImportValues) -> Findings:
        return cls(values.sums, states(all_generators()) | values.identifiers)

    def written(self) -> bytes:
        lines = [f"{value} {name}" for name, value in self.sums.items()]
        return "\n".join([" ".join(map(str, sorted(self.fixed))), *lines, "."]).encode()

    @classmethod
    def read(cls, data: bytes) -> Findings | None:
        """None when it is not complete."""
        first, *lines = data.decode().split("\n")
        if not lines or lines[-1] != ".":
            return None
        sums = {name: int(value) for value, _, name in (line.partition(" ") for line in lines[:-1])}
        return cls(sums, {int(word) for word in first.split()})


class Twin:
    """Made before the imports, in both processes; both do them, and then `compare`."""

    def __init__(self) -> None:
        self._known = {*sys.modules, "__mp_main__"}
        self._clocks = Clocks()
        read, write = os.pipe()
        self._pid = os.fork()
        self._fd = read if self._pid else write
        os.close(write if self._pid else read)
        if not self._pid:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for fd in (1, 2):
                os.dup2(nowhere, fd)
            os.close(nowhere)

    @property
    def is_other(self) -> bool:
        """Whether this is the second process, which reports nothing."""
        return self._pid == 0

    def compare(self) -> tuple[list[str], ImportValues, GeneratorPlan]:
        """The modules that differ, and what workers set again. Does not return in the second process."""
        new = [name for name in sys.modules if name not in self._known and not name.startswith("phalanx.")]
        values = ImportValues(new, self._clocks)
        if self.is_other:
            self._send(Findings.of(values))
        there = self._receive()
        if there is None:  # it did not get through: nothing is known to be the same
            return new[:1], values, GeneratorPlan(set())
        differ = [*differing(values.sums, there.sums), *values.settle(there.fixed)]
        return differ, values, GeneratorPlan(there.fixed)

    def _send(self, findings: Findings) -> NoReturn:
        data = findings.written()
        while data:
            data = data[os.write(self._fd, data) :]
        os._exit(0)

    def _receive(self) -> Findings | None:
        data = b""
        while piece := os.read(self._fd, 1 << 16):
            data += piece
        os.close(self._fd)
        os.waitpid(self._pid, 0)
        return Findings.read(data)
