"""Which ranks have succeeded while others run, on this node and on others."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.agent.workers.worker_group import PContext


class RankExits:
    """The exits of one start; `global_ranks` maps the local ranks of this node to global ones."""

    def __init__(self, context: PContext, global_ranks: dict[int, int]) -> None:
        self._context, self._global_ranks = context, global_ranks
        self._alive = len(global_ranks)
        self._elsewhere: tuple[int, ...] = ()
        self.first_at = 0.0  # when the first rank of any node had succeeded

    def look(self) -> bool:
        """Whether a worker of this node has exited since the last call."""
        before, self._alive = self._alive, len(self._context.running)
        return self._alive != before

    def first(self, now: float) -> tuple[int, ...]:
        """The ranks of this node that have succeeded, if no rank of the job had before."""
        return self._first(now, self.finished())

    def all_finished(self, now: float) -> tuple[int, ...]:
        """The same, where all workers of this node have."""
        return self._first(now, tuple(sorted(self._global_ranks.values())))

    def _first(self, now: float, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if self.first_at:
            return ()
        self.first_at = now
        return ranks

    def elsewhere(self, now: float, ranks: tuple[int, ...]) -> None:
        """The first ranks of the job that have succeeded are another node's."""
        self.first_at, self._elsewhere = now, ranks

    def finished(self) -> tuple[int, ...]:
        """The global ranks of this node that have succeeded."""
        running = self._context.running
        return tuple(self._global_ranks[rank] for rank in sorted(self._global_ranks) if rank not in running)

    def finished_anywhere(self) -> tuple[int, ...]:
        return tuple(sorted({*self.finished(), *self._elsewhere}))
