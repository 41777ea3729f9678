"""A second process that does the same imports: what differs afterwards is random, or exists only once.

Before a list is vetted, the process that imports it forks a copy of itself, the *reserve*, which sleeps. The
reserve forks the *twin*: it does the same imports, through the same code (some packages keep the stack of
their import), sends check sums of the values and of the generator states that it then has (import_values.py,
generators.py), and exits. It runs at the same time, so that the comparison takes no longer than the imports.

* The twin finds unsuitable modules by itself, and leaves them out as the zygote does (vetting.py). If it does
  not get through, or its values differ although modules were left out, the two may have gone different ways:
  another twin does what the zygote did, and its values count.
* If values differ, the zygote has them already. It exits, and the reserve becomes the zygote, without the
  modules that have them.

The end of each twin is told: `+NUMBER` is its own word; `-NUMBER` is the reserve's, if nothing is left of it.
The reserve sees that by a pipe that every process of the twin holds.
"""

from __future__ import annotations

import os
import select
import sys
import time

from phalanx import kernel
from phalanx.warm.generators import all_generators, states
from phalanx.warm.import_values import Clocks, ImportValues, differing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

_PATIENCE = 120.0  # seconds after which a twin that does not finish counts as different
_PROGRESS = 0.5  # seconds between two signs of life while it is awaited


class TwinFindings:
    """What a process sends about its imports."""

    def __init__(self, sums: dict[str, int], fixed: set[int]) -> None:
        self.sums = sums
        self.fixed = fixed  # check sums of generator states, and of texts that look like identifiers

    @classmethod
    def of(cls, values: ImportValues) -> TwinFindings:
        """Of this process."""
        return cls(values.sums, states(all_generators()) | values.identifiers)

    def written(self) -> bytes:
        lines = [f"{value} {name}" for name, value in self.sums.items()]
        return "\n".join([" ".join(map(str, sorted(self.fixed))), *lines]).encode()

    @classmethod
    def read(cls, data: bytes) -> TwinFindings:
        first, *lines = data.decode().split("\n")
        sums = {name: int(value) for value, _, name in (line.partition(" ") for line in lines)}
        return cls(sums, {int(word) for word in first.split()})


class Comparison:
    """The values of this process beside those of its twin."""

    def __init__(self, values: ImportValues, there: TwinFindings | None) -> None:
        """`there`: None if the twin did not get through: nothing is known to be the same."""
        self.values = values
        there = there or TwinFindings({}, set())
        self.fixed = there.fixed
        self.random = [*differing(values.sums, there.sums), *values.settle(there.fixed)]
        self.all_there = values.sums.keys() <= there.sums.keys()


class Reserve:
    """Made before the imports; in the process that imports, in the reserve and in the twin."""

    def __init__(self) -> None:
        """Returns at once in this process, and later, when it is needed, in the twin or in the reserve."""
        self._known = {*sys.modules, "__mp_main__"}
        self._clocks = Clocks()
        self._answer = kernel.anonymous_file("phalanx-twin")
        commands, self._commands = os.pipe()
        self._ready, ready = os.pipe()
        self._twins = 0
        self.is_twin = False
        self.takes_over = False
        self.pid = os.fork()
        if self.pid:
            os.close(commands)
            os.close(ready)
            return
        os.close(self._commands)
        os.close(self._ready)
        self._serve(commands, ready)

    # -- in the reserve and the twin ----------------------------------------------------------------

    def _serve(self, commands: int, ready: int) -> None:
        kernel.become_subreaper()  # what a twin starts is not to become a child of the process that imports
        alive = -1  # its other end is the twin's
        while True:
            poll = select.poll()
            for fd in (commands, alive):
                if fd >= 0:
                    poll.register(fd, select.POLLIN)
            if commands not in {fd for fd, _ in poll.poll()}:
                os.close(alive)
                alive = -1
                os.write(ready, b"-%d\n" % self._twins)
                continue
            command = os.read(commands, 1)
            _end_children()
            if alive >= 0:
                os.close(alive)
            if command == b"z":
                break
            if command != b"t":
                os._exit(0)
            self._twins += 1
            alive, held = os.pipe()
            if os.fork() == 0:
                os.close(alive)
                self.is_twin = True
                self._commands = ready  # where the end is told
                os.close(commands)
                return
            os.close(held)
        os.close(commands)
        os.close(ready)
        os.close(self._answer)
        self.takes_over = True
        kernel.wake_at_parent_death()  # not inherited over a fork

    def send(self, others: set[int]) -> NoReturn:
        """The twin has done the imports. `others`: check sums of other values."""
        findings = TwinFindings.of(self._values())
        findings.fixed |= others
        data = findings.written()
        os.ftruncate(self._answer, 0)
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._answer, data[offset:], offset)
        os.write(self._commands, b"+%d\n" % self._twins)
        os._exit(0)

    # -- in the process that becomes the zygote -----------------------------------------------------

    def start_twin(self) -> None:
        """Start a twin; an earlier one is ended."""
        self._twins += 1
        self._tell(b"t")

    def compare(self, progress: Callable[[], None]) -> Comparison:
        """This process and the twin, when it is done."""
        return Comparison(self._values(), self._receive(progress))

    def take_over(self) -> NoReturn:
        """The reserve becomes the zygote instead of this process."""
        self._tell(b"z")
        os._exit(0)

    def end(self) -> None:
        """Neither is needed any more."""
        self._tell(b"q")
        for fd in (self._commands, self._ready, self._answer):
            os.close(fd)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass  # that of an earlier process

    def _tell(self, command: bytes) -> None:
        try:
            os.write(self._commands, command)
        except OSError:
            pass  # it is gone

    def _receive(self, progress: Callable[[], None]) -> TwinFindings | None:
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if not poll.poll(_PROGRESS * 1000):
                progress()
                continue
            answers = os.read(self._ready, 1 << 12).split()  # each was written in one piece
            if b"+%d" % self._twins in answers:
                return TwinFindings.read(os.pread(self._answer, os.fstat(self._answer).st_size, 0))
            if not answers or b"-%d" % self._twins in answers:
                return None
        return None

    def _values(self) -> ImportValues:
        new = [name for name in sys.modules if name not in self._known and not name.startswith("phalanx.")]
        return ImportValues(new, self._clocks)


def _end_children() -> None:
    """End a twin, and what it has started."""
    while children := kernel.children():
        for pid in children:
            os.kill(pid, 9)
        os.waitpid(-1, 0)
