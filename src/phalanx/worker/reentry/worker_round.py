"""The round that a re-entered function is called for, as user code sees it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TIMEOUT = 300.0


class WorkerRound:
    """A rank's place in one round.

    `survivors`, `joined` and `left` are exchanged between the ranks when one of them is first asked for:
    every rank has to ask.
    """

    def __init__(self, number: int = 0, cause: str = "", before: tuple[int, int, int] | None = None) -> None:
        """From the environment; `before`: number, rank and world size of this process in its last round."""
        self.number = number
        self.cause = cause
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._before = before
        self._found: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def reentered(self) -> bool:
        """Whether this process was a worker of an earlier round."""
        return self._before is not None

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks of this round whose processes were kept."""
        return self._exchanged()[0]

    @property
    def joined(self) -> tuple[int, ...]:
        """The ranks of this round whose processes are new."""
        return self._exchanged()[1]

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks of the round before whose processes are gone."""
        return self._exchanged()[2]

    def __repr__(self) -> str:
        where = f"rank={self.rank}, world_size={self.world_size}, local_rank={self.local_rank}"
        return f"Round({where}, number={self.number}, cause={self.cause!r})"

    def _exchanged(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        if self._found is None:
            texts = [self._before] if self.world_size == 1 else self._exchange()
            self._found = compare(texts)
        return self._found

    def _exchange(self) -> list[tuple[int, int, int] | None]:
        import json

        from phalanx.worker.state.agreement import round_store

        with round_store("round.survivors", "phalanx/reentry/", _TIMEOUT) as store:
            store.set(f"{self.rank}", json.dumps(self._before))
            names = [f"{rank}" for rank in range(self.world_size)]
            store.wait(names, _TIMEOUT)
            return [_read(json.loads(text)) for text in store.multi_get(names)]


def compare(
    befores: list[tuple[int, int, int] | None],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Survivors, joined and left, from what each rank was before: number, rank and world size, or None.

    A worker that was parked for longer than a round counts as one that survived; only the last round tells
    who has left."""
    survivors = tuple(rank for rank, before in enumerate(befores) if before is not None)
    joined = tuple(rank for rank, before in enumerate(befores) if before is None)
    known = [before for before in befores if before is not None]
    if not known:
        return survivors, joined, ()
    last = max(number for number, _, _ in known)
    size = max(size for number, _, size in known if number == last)
    stayed = {rank for number, rank, _ in known if number == last}
    return survivors, joined, tuple(rank for rank in range(size) if rank not in stayed)


def _read(found: Any) -> tuple[int, int, int] | None:
    if found is None:
        return None
    number, rank, size = (int(one) for one in found)
    return number, rank, size
