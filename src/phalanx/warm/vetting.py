"""Finds all unsuitable modules of a list in one pass: a process that imports, and a copy to go back to.

The process that imports the list is to become the zygote. From time to time it forks a *checkpoint*, which
sleeps. If no module is unsuitable, the checkpoint is killed, and nothing else has happened. At the first
unsuitable module the process is spoiled. It goes on through the rest of the list as a *scout*, to find all
others. The checkpoint wakes up and imports: it follows behind the scout, knows what it has found, and leaves
that out. What was imported before the checkpoint is not imported again. It has a checkpoint, too: a module
may need one that is left out in a way that cannot be seen where both are loaded.

If a module kills the process, or hangs and the keeper kills it, the checkpoint goes on without that module.

Rejected: a zygote that begins from scratch after each unsuitable module (each costs a whole import); a scout
that always runs first (twice the time, even if nothing is unsuitable); hiding an unsuitable module
from its importers (to them it would look as if it were not installed).
"""

from __future__ import annotations

import os
import time

from phalanx import kernel
from phalanx.warm.import_judge import count_threads, fork_silently
from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.warm.verdict_log import VerdictLog


class Checkpoint:
    """A sleeping copy of this process, in the process that goes on."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd

    def tell(self) -> None:
        """Wake it, or tell it that there is something new in the log."""
        try:
            os.write(self._fd, b"!")
        except OSError:
            os._exit(0)  # it is gone, and no one needs a scout

    def end(self) -> None:
        """It is not needed."""
        os.close(self._fd)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Scout:
    """The process ahead, in the copy that follows behind it."""

    def __init__(self, fd: int, log: VerdictLog) -> None:
        self._fd = fd
        self._log = log
        self.gone = False

    def wait(self) -> None:
        """For something new in the log, or the end of the scout."""
        if not os.read(self._fd, 1 << 12):
            self.gone = True
            os.close(self._fd)
        self._log.read()

    def has_passed(self, name: str) -> bool:
        """Whether it has tried this one; waits for it. False if it ended before."""
        while name not in self._log.passed and not self.gone:
            self.wait()
        return name in self._log.passed


def fork_checkpoint(keeper: int, log: VerdictLog) -> Checkpoint | Scout:
    """Returns at once in this process, and in the copy when it is needed."""
    ahead = os.getpid()
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return Checkpoint(pid, write)
    os.close(write)
    scout = Scout(read, log)
    scout.wait()
    while scout.gone and os.getppid() == ahead:
        time.sleep(0.001)  # its descriptors are closed a moment before its children are adopted
    if scout.gone and os.getppid() != keeper:
        os._exit(0)  # the keeper is gone, too
    kernel.become_subreaper()  # neither is inherited over a fork
    kernel.wake_at_parent_death()
    return scout


def kill_children(but: tuple[int, ...] = ()) -> None:
    """End what imports have started in a scout."""
    for pid in kernel.children():
        if pid not in but:
            os.kill(pid, signal.SIGKILL)


def starts_no_thread(hints: dict[str, str]) -> bool:
    """Whether these modules, by themselves, start as many threads as in a worker, and all end at a fork.

    Tried in a fork: thread pools of numerical libraries are no obstacle, and are common.
    """
    if not hints:
        return True
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        base = before = count_threads()
        for name, count in hints.items():
            __import__(name)
            if count_threads() - before < int(count):
                os._exit(1)  # another module starts them
            before = count_threads()
        trial = fork_silently()
        if trial == 0:
            os._exit(0)
        os.waitpid(trial, 0)
        os._exit(0 if count_threads() <= base else 1)
    except BaseException:  # noqa: BLE001 - a module may do anything
        os._exit(1)
