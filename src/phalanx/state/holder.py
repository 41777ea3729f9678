"""The agent's side of kept state: it holds the memory files of its node's ranks, over all starts.

The agent makes one memory file for each local worker and hands its descriptor to every start of that worker.
It is the one process on a node that outlives workers, restarts and replaced helpers, and ends with the job.
The memory is free as soon as it and the workers are gone, however they ended.

A file follows its global rank. After a change of ranks, a file whose rank is now on another node goes to a
worker that has none: what is in it carries the rank and world size it was kept with, and `worker.kept`
returns it only if asked for.
"""

from __future__ import annotations

import os

from phalanx.log import warn
from phalanx.state.memory_file import MemoryFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.zygote.spawner import Place

VARIABLE = "PHALANX_STATE"
FILE_FD = 15  # in an executed worker; a forked one has them at any number
BELL_FD = 16


class StateHolder:
    """The memory files of one agent."""

    def __init__(self) -> None:
        self.files: dict[int, MemoryFile] = {}  # by global rank
        self._unavailable = False

    def assign(self, ranks: Sequence[int], world_size: int, number: int) -> StateFiles | None:
        """The files for a start: global ranks by local rank, in this round; None where there are none."""
        if self._unavailable:
            return None
        spare = [file for rank, file in self.files.items() if rank not in ranks]
        files = {}
        try:
            for rank in ranks:
                files[rank] = self.files.get(rank) or (spare.pop(0) if spare else MemoryFile.create())
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
        return StateFiles([files[rank] for rank in ranks], ranks, world_size, number)

    def close(self) -> None:
        """Give all memory back; idempotent."""
        files, self.files = self.files, {}
        for file in files.values():
            file.close()


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
