"""Which helpers the next start gets: cold ones, ones that have imported what the workers need, parked ones.

At the first start of a script nothing is known: the helpers are bare, and one worker writes down what it
imports. Once it has been quiet for a while, other helpers are started in the background with that list; a
restart takes them. The list is kept (warm/import_cache.py), so that the next launch starts with it.

    off      every worker is executed from scratch
    auto     as above
    standby  also keeps one parked process per local rank, ready for the next start
"""

from __future__ import annotations

import os

from phalanx.zygote.spawner import Spawner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.warm.import_cache import ImportCache
    from phalanx.workers.worker_group import PContext

# Seconds after a start at which the list is looked at: early for the imports at the top of a script, later
# for the ones that come with the first step.
_LOOKS = (2.0, 10.0, 60.0)
_WORTH_IT = 25  # fewer new modules than this are not worth another set of helpers


class HelperPool:
    """The helpers of one agent, over all its starts."""

    def __init__(
        self,
        kind: str,
        mode: str = "auto",
        learned: ImportCache | None = None,
        preload: tuple[str, ...] = (),
        warm_up: str = "",
    ) -> None:
        self.kind = kind
        self.mode = mode
        self.learned = learned
        self.warm_up = warm_up
        self.say: Callable[[str], None] = lambda _line: None
        self._own = list(preload)
        self._next: Spawner | None = None
        self._due: list[float] = []
        self._parked = 0
        self._told: set[str] = set()
        # Now, so that the helpers come up while the rest of the agent is still being imported.
        self._now = self._make(background=False)

    def _make(self, background: bool) -> Spawner:
        names = [*self._own, *(self.learned.names if self.learned else ())]
        if self.kind.startswith("python") and (names or background):
            return Spawner(self.kind, preload=names, background=background)
        return Spawner(self.kind)

    def take(self, kind: str | None) -> Spawner | None:
        """The helpers for a start; None when this kind of worker needs its own."""
        if kind is None:
            return None
        if self._next is not None and self._next.how == kind:
            self._now.close()
            self._now, self._next = self._next, None
        if self._now.lost or self._now.how != kind:
            self._now.close()
            self.kind = kind
            self._now = self._make(background=False)
        return self._now

    def started(self, now: float) -> None:
        """Workers run; look at what they import, now and then."""
        self._due = [now + after for after in _LOOKS] if self.kind.startswith("python") else []
        self._parked = 0

    def idle(self, count: int) -> None:
        """Nothing runs and a round is awaited (a spare, a first node): be as ready for it as can be."""
        if self.mode == "standby" and self.kind.startswith("python") and not self._parked:
            self._parked = count
            (self._next or self._now).park(count, self.warm_up)

    @property
    def parked(self) -> list[int]:
        """The pids of processes that wait for the next start."""
        found = []
        for helpers in (self._now, self._next):
            if helpers is not None:
                helpers.catch_up()  # nobody listens to those that have no workers yet
                found += helpers.parked
        return found

    def due(self) -> float | None:
        """When `look` wants to be called next."""
        return self._due[0] if self._due else None

    def look(self, context: PContext, now: float) -> None:
        """Learn; start better helpers in the background, or park processes, where that pays."""
        while self._due and self._due[0] <= now:
            self._due.pop(0)
        self.learn(context)
        ready = self._next or self._now
        if self.learned is not None and self.mode != "off":
            better = len(set(self.learned.names) - set(ready.preload))
            if better >= _WORTH_IT:
                if self._next is not None:
                    self._next.close()
                ready = self._next = self._make(background=True)
        self.tell_dropped(ready)
        if self.mode == "standby" and self.kind.startswith("python"):
            ready.park(context.nprocs, self.warm_up)

    def learn(self, context: PContext) -> None:
        """Take in and keep what the first worker imported so far."""
        if self.learned is not None and self.learned.add(context.imported()):
            self.learned.save()

    def tell_dropped(self, spawner: Spawner) -> None:
        """One line for each module that does not suit a fork; it is not tried again."""
        for what in spawner.dropped:
            name = what.partition(":")[0]
            if name not in self._told:
                self._told.add(name)
                self.say(f"not imported ahead: {what} (workers import it themselves)")
                if self.learned is not None:
                    self.learned.forget(name)
                    self.learned.save()

    def close(self) -> None:
        """End all helpers."""
        try:
            self.tell_dropped(self._now)
            if self._next is not None:
                self._next.close()
        finally:
            self._now.close()


def helper_pool_for_function(
    function: Callable[..., object], start_method: str, mode: str
) -> HelperPool | None:
    """For functions: the same where each worker is to be a fresh process; None where it is not."""
    if mode == "off" or start_method != "spawn":
        return None
    import sys

    from phalanx.warm.import_cache import ImportCache
    from phalanx.zygote.spawner import interpreter_flags

    flags = interpreter_flags()
    main = getattr(sys.modules["__main__"], "__file__", "") or "interactive"
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    learned = ImportCache(["function", name, main, *flags], os.environ)
    return HelperPool(" ".join(["python", *flags]), mode, learned)


def helper_pool_for(
    program: str, args: tuple[str, ...], mode: str, preload: tuple[str, ...] = (), warm_up: str = ""
) -> HelperPool:
    """For programs: forks of one Python where that is possible and wanted, else a fresh start for each."""
    from phalanx.workers.program import python_flags, split_python

    flags = None if mode == "off" else python_flags(program, [args], {})
    if flags is None:
        return HelperPool("exec", "off")
    from phalanx.warm.import_cache import ImportCache

    split = split_python(args)
    assert split is not None
    learned = ImportCache([split[1], split[2], *flags], os.environ)
    return HelperPool(" ".join(["python", *flags]), mode, learned, preload, warm_up)
