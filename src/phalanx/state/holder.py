"""The agent's side of kept state: it holds the memory files of its node's ranks, over all starts.

The agent makes one memory file for each local worker and hands its descriptor to every start of that worker.
It is the one process on a node that outlives workers, restarts and replaced helpers, and ends with the job.
The memory is free as soon as it and the workers are gone, however they ended.

A file follows its global rank. After a change of ranks, a file whose rank is now on another node goes to a
worker that has none: what is in it carries the rank and world size it was kept with, and `worker.kept`
returns it only if asked for.

What an earlier launch left on disk is brought in beside the start of the workers. Meanwhile the file is
locked; a worker waits for the lock when it first uses its file.
"""

from __future__ import annotations

import os

from phalanx.core.record import Record
from phalanx.log import warn
from phalanx.state.memory_file import MemoryFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from phalanx.state.spill import SpillDirectory
    from phalanx.zygote.spawner import Place

FILE_FD = 15  # in an executed worker; a forked one has them at any number
BELL_FD = 16


class StateOptions(Record):
    """What becomes of kept state beyond this node and this launch."""

    spill: str = ""  # a directory; empty: nothing is written


class StateHolder:
    """The memory files of one agent."""

    def __init__(self, run_id: str = "", options: StateOptions = StateOptions()) -> None:  # noqa: B008 - immutable
        self.files: dict[int, MemoryFile] = {}  # by global rank
        self.note: Callable[[str], None] = lambda _line: None
        self.post: Callable[[Callable[[], None]], None] = lambda _call: None
        self.job_succeeded = False  # set before the end: then nothing needs to be written
        self._unavailable = False
        self._closing = False  # nothing is brought in any more,
        self._stopped = False  # or written
        self._threads: list[threading.Thread] = []
        self._spill: SpillDirectory | None = None
        if options.spill:
            from phalanx.state.spill import SpillDirectory

            self._spill = SpillDirectory(options.spill, run_id)

    def prepare(self) -> None:
        """Check what the options name, before anything starts; OSError."""
        if self._spill is not None:
            self._spill.prepare()

    # -- a start ------------------------------------------------------------------------------------

    def assign(self, ranks: Sequence[int], world_size: int, number: int) -> StateFiles | None:
        """The files for a start: global ranks by local rank, in this round; None where there are none."""
        if self._unavailable:
            return None
        spare = [file for rank, file in self.files.items() if rank not in ranks]
        files = {}
        new = []
        try:
            for rank in ranks:
                known = self.files.get(rank) or (spare.pop(0) if spare else None)
                files[rank] = known or MemoryFile.create()
                if known is None:
                    new.append(rank)
        except OSError as error:
            self._unavailable = True
            warn(f"worker.keep has no effect: no memory files here ({error.strerror})")
            for file in {*files.values(), *self.files.values()}:
                file.close()
            self.files = {}
            return None
        for file in spare:
            file.close()
        self.files = files
        if self._spill is not None:
            self._bring_in([rank for rank in new if self._spill.exists(rank)])
        return StateFiles([files[rank] for rank in ranks], ranks, world_size, number)

    def _bring_in(self, ranks: list[int]) -> None:
        """Read what an earlier launch wrote, in a thread; the workers may start meanwhile."""
        locks = {rank: FileLock(self.files[rank]) for rank in ranks}

        def bring() -> None:
            for rank, lock in locks.items():
                try:
                    self._read(rank, lock.file)
                finally:
                    lock.release()

        if ranks:
            self._begin("phalanx-state-read", bring)

    def _read(self, rank: int, file: MemoryFile) -> None:
        from phalanx.state.spill import SpillStopped

        assert self._spill is not None
        try:
            self._spill.read(rank, file, lambda: self._closing)
        except SpillStopped:
            pass
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._say(f"the kept state of rank {rank} in {self._spill.path} is not used: {why}")

    # -- the end ------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """The job is over: write what is kept if it may be needed again, and give the memory back."""
        files, self.files = self.files, {}
        self._closing = True

        def end() -> None:
            try:
                if self._spill is not None and self.job_succeeded:
                    self._spill.clear()
                elif self._spill is not None:
                    self._write(self._spill, files)
            finally:
                for file in files.values():
                    file.close()

        if self._spill is None:
            end()
        else:
            self._begin("phalanx-state-write", end)

    def _write(self, spill: SpillDirectory, files: dict[int, MemoryFile]) -> None:
        from phalanx.state.spill import SpillStopped

        written: dict[int, int] = {}
        try:
            spill.prepare()
            for rank, file in files.items():
                size = spill.write(rank, file, lambda: self._stopped)
                if size:
                    written[rank] = size
        except SpillStopped:
            self._say("kept state is not written completely: the agent was told to end")
        except OSError as error:
            self._say(f"kept state is not written to {spill.path}: {error.strerror}")
        if written:
            names = ", ".join(map(str, written))
            total = sum(written.values()) / 1e9
            self._say(f"kept state of rank {names} written to {spill.path} ({total:.3f} GB)")

    def hurry(self) -> None:
        """End without writing the rest."""
        self._stopped = True

    @property
    def closed(self) -> bool:
        """Whether nothing is being written any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def _say(self, line: str) -> None:
        self.post(lambda: self.note(line))

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        import threading

        def run() -> None:
            try:
                work()
            finally:
                self.post(lambda: thread.join())  # wakes the loop, which may wait for this

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()] + [thread]
        thread.start()


class FileLock:
    """Keeps the worker from using its file.

    It belongs to another opening of the same file: the worker has a copy of the agent's own descriptor, which
    would share the lock. The lock ends with this process.
    """

    def __init__(self, file: MemoryFile) -> None:
        import fcntl

        self.file = MemoryFile(os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(self.file.fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let the worker go on."""
        self.file.close()


class StateFiles:
    """The files of one start, by local rank."""

    def __init__(
        self, files: list[MemoryFile], ranks: Sequence[int], world_size: int, number: int, bell: int = -1
    ) -> None:
        self._files = files
        self._ranks = ranks
        self._world_size = world_size
        self._number = number
        self._bell = bell

    def places(self, local_rank: int, executed: bool) -> list[Place]:
        """The descriptors that the worker inherits."""
        found = [("state", self._files[local_rank].fd, FILE_FD if executed else -1)]
        if self._bell >= 0:
            found.append(("state-bell", self._bell, BELL_FD if executed else -1))
        return found

    def variable(self, local_rank: int) -> str:
        """The value of PHALANX_STATE."""
        file = os.fstat(self._files[local_rank].fd)
        bell = BELL_FD if self._bell >= 0 else -1
        whose = f"{self._number},{self._ranks[local_rank]},{self._world_size}"
        return f"{FILE_FD},{bell},{file.st_dev},{file.st_ino},{whose}"
