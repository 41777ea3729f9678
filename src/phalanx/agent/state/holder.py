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
from phalanx.worker.state.memory_file import FileLock, MemoryFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.state.replicas import Replicas
    from phalanx.agent.state.spill import SpillDirectory
    from phalanx.helpers.messages import Place

FILE_FD = 15  # in an executed worker; a forked one has them at any number
BELL_FD = 16


class RoundNodes(Record):
    """The nodes of a round, as far as copies of state need them."""

    store: Any
    node: int  # this one, of
    nodes: int


class StateHolder:
    """The memory files of one agent."""

    def __init__(self, spill: SpillDirectory | None = None, replicas: Replicas | None = None) -> None:
        """`spill`: where state goes at the end; `replicas`: its copies on other nodes."""
        self.files: dict[int, MemoryFile] = {}  # by global rank
        self.note: Callable[[str], None] = lambda _line: None
        self.post: Callable[[Callable[[], None]], None] = lambda _call: None
        self.job_succeeded = False  # set before the end: then nothing needs to be written
        self._unavailable = False
        self._closing = False  # nothing is brought in any more,
        self._stopped = False  # or written
        self._threads: list[threading.Thread] = []
        self._spill = spill
        self._replicas = replicas
        self._number = 0  # of the last round
        if replicas is not None:
            replicas.note = self._note

    # -- a start ------------------------------------------------------------------------------------

    def assign(
        self, ranks: Sequence[int], world_size: int, number: int, others: RoundNodes | None = None
    ) -> StateFiles | None:
        """The files for a start: global ranks by local rank, in this round; None where there are none."""
        if self._unavailable:
            return None
        if len(self.files) < len(ranks):
            from phalanx.agent.warm.spawner import require_files

            require_files(len(ranks), 2 * len(ranks))  # with the workers' boards; StartError
        before = self.files
        spare = [file for rank, file in before.items() if rank not in ranks]
        files: dict[int, MemoryFile] = {}
        new = []
        try:
            for rank in ranks:
                known = before.get(rank) or (self._replicas.take(rank) if self._replicas else None)
                if known is None and spare:
                    known = spare.pop(0)
                files[rank] = known or MemoryFile.create()
                if known is None:
                    new.append(rank)
        except OSError as error:
            self._unavailable = True
            warn(f"worker.keep has no effect: no memory files here ({error.strerror})")
            self._give_back([*{*files.values(), *before.values()}])
            self.files = {}
            return None
        self.files = files
        read = [rank for rank in new if self._spill is not None and self._spill.exists(rank)]
        self._bring_in(read)
        bell = -1
        if self._replicas is not None and others is not None and others.nodes > 1:
            bell = self._replicas.bell
            # A node that was part of every round has the newest state of the ranks that it has had.
            known_here = before.keys() if number == self._number + 1 else set()
            wanted = [rank for rank in ranks if rank not in known_here and rank not in read]
            self._replicas.begin_round(others, number, files, wanted)
        self._give_back(spare)
        self._number = number
        return StateFiles([files[rank] for rank in ranks], ranks, world_size, number, bell)

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
        from phalanx.agent.state.spill import SpillStopped

        assert self._spill is not None
        try:
            for damage in self._spill.read(rank, file, lambda: self._closing):
                self._note(f"a save of rank {rank} in {self._spill.path} is not used: {damage}")
        except SpillStopped:
            pass
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._note(f"the kept state of rank {rank} in {self._spill.path} is not used: {why}")

    # -- the end ------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """The job is over: write what is kept if it may be needed again, and give the memory back."""
        files, self.files = self.files, {}
        self._closing = True
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.close()

        def end() -> None:
            try:
                if self._spill is not None and self.job_succeeded:
                    self._spill.clear()
                elif self._spill is not None:
                    self._write(self._spill, files)
            finally:
                for file in files.values():
                    file.close()

        if self._spill is None and all(file.is_empty() for file in files.values()):
            end()
        else:
            self._begin("phalanx-state-write", end)

    def _give_back(self, files: list[MemoryFile]) -> None:
        """Close files; in a thread if there is something in them, because that may take seconds."""

        def close() -> None:
            for file in files:
                file.close()

        if all(file.is_empty() for file in files):
            close()
        else:
            self._begin("phalanx-state-free", close)

    def _write(self, spill: SpillDirectory, files: dict[int, MemoryFile]) -> None:
        from phalanx.agent.state.spill import SpillStopped

        written: dict[int, int] = {}
        try:
            spill.prepare()
            for rank, file in files.items():
                size = spill.write(rank, file, lambda: self._stopped)
                if size:
                    written[rank] = size
        except SpillStopped:
            self._note("kept state is not written completely: the agent was told to end")
        except OSError as error:
            self._note(f"kept state is not written to {spill.path}: {error.strerror}")
        if written:
            names = ", ".join(map(str, written))
            total = sum(written.values()) / 1e9
            self._note(f"kept state of rank {names} written to {spill.path} ({total:.3f} GB)")

    def hurry(self) -> None:
        """End without writing the rest."""
        self._stopped = True

    @property
    def closed(self) -> bool:
        """Whether nothing is being written any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def _note(self, line: str) -> None:
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
