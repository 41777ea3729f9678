"""Which helpers the next start gets: cold ones, preloaded ones, or standby processes.

The first start waits until the listed packages are imported that the script itself imports before it does
anything else (agent/warm/import_cache.py). One worker writes down what it imports later on. Once it has been
quiet for a while, other helpers are started in the background with that list, too. A restart takes them if
they are ready; if not, it takes the helpers of the last start, and never waits.

Helpers that find a package unsuitable give up, and are bare from then on; the package is left out of the
next ones.

    off      every worker is executed from scratch
    auto     as above
    standby  also keeps one parked process per local rank, ready for the next start

Helpers that serve no workers (before the first round, in a spare node, between two starts) are watched here:
when they end, others take their place before a start needs them.
"""

from __future__ import annotations

import os
import select
import time

from phalanx.agent.warm.spawner import ClosingHelpers, Spawner
from phalanx.errors import StartError, UnkillableError
from phalanx.helpers.preload.preload_list import names_in, package_of
from phalanx.log import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.agent.warm.import_cache import ImportCache
    from phalanx.agent.warm.keep_warm import KeepWarm, StayingHelpers
    from phalanx.agent.workers.worker_group import PContext
    from phalanx.core.group.group import Phase
    from phalanx.helpers.messages import StandbyRank
    from phalanx.job.options import Workers

# Seconds after a start at which it is looked at what a worker has imported: often while its first step may
# come, which most libraries load a part of themselves for.
_LOOKS = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0)
_QUIET = 0.5  # seconds without an import in a worker, after which it is taken to have done its own
_LONGEST = 60.0  # seconds that a worker's own imports are waited for
_WORTH_IT = 25  # fewer new modules than this are not worth another set of helpers
_REPLACE_AFTER = 1.0  # seconds between two replacements of idle helpers; the next start makes them anyway
_SAY_AFTER = 5.0  # seconds that a start waits for imports before that is said: longer than torch needs
_GIVE_UP_AFTER = 60.0  # and before it is not waited for any longer
_NO_START = ("BARRIER", "ENDING", "DONE")  # phases after which a start is unlikely


class HelperPool:
    """The helpers of one agent, over all its starts; a part of its loop."""

    def __init__(
        self,
        kind: str = "",
        mode: str = "off",
        learned: ImportCache | None = None,
        preload: tuple[str, ...] = (),
        warm_up: str = "",
        spare: int = 1,
        keep: KeepWarm | None = None,
    ) -> None:
        """`kind`: the helpers to start now, while the rest of the agent is imported; empty: none yet.

        `spare`: processors without a worker. If there are none, imports in the background wait for those of
        the workers.
        """
        self.kind = kind
        self.mode = mode
        self.learned = learned
        self.warm_up = warm_up
        self.standby_ranks: list[StandbyRank] = []  # of the workers, as far as it is known beforehand
        self._waits_for_rank: set[int] = set()  # local ranks whose program calls wait_for_rank()
        self._steps_aside = spare < 1
        self._imported = 0  # modules, by a worker, at the last look
        self._quiet_by = 0.0  # when its imports are not waited for any longer
        self.say: Callable[[str], None] = lambda _line: None
        self._own = list(preload)
        if learned is not None:
            learned.allow(self._own)
        self._next: Spawner | None = None
        self._context: PContext | None = None  # of the last start
        self._due: list[float] = []
        self._parked = 0
        self._standbys_at: Spawner | None = None  # where they were last asked for
        self._told: set[str] = set()
        self._waiting_now: set[int] = set()  # of the current incarnation
        self._closing: list[ClosingHelpers | StayingHelpers] = []
        self._replaced_at = 0.0
        self._examined: set[Spawner] = set()  # those of which the outcome was taken in
        self._asked_at: float | None = None  # a start waits for helpers that import
        self._has_said = False
        self._keep = keep
        self._now: Spawner | None = (self._adopt() or self._make_first()) if kind else None

    def _adopt(self) -> Spawner | None:
        """The helpers that an earlier launch left behind, with --warm-for."""
        adopted = self._keep.adopt() if self._keep is not None else None
        return None if adopted is None else Spawner(self.kind, adopted=adopted)

    def _make_first(self) -> Spawner:
        """For the first start, which waits for them."""
        lines = self.learned.first_lines() if self.learned is not None else []
        if self.kind.startswith("python") and (lines or self._own):
            return Spawner(self.kind, preload=[*self._asked_for(), *lines])
        return Spawner(self.kind)

    def _asked_for(self) -> list[str]:
        return [f"*{name}" for name in self._own]

    def _make_better(self) -> Spawner:
        """For a later start: in the background, with everything that is known."""
        lines = self.learned.all_lines() if self.learned is not None else []
        return Spawner(self.kind, preload=[*self._asked_for(), *lines], background=True)

    @property
    def warm(self) -> bool:
        """Whether workers may be forks of a prepared process."""
        return self.mode != "off"

    @property
    def current(self) -> Spawner | None:
        """The helpers that serve the workers."""
        return self._now

    def take(self, kind: str | None) -> Spawner | None:
        """The helpers for a start; None when this kind of worker needs its own."""
        if kind is None:
            return None
        self._drop_lost()
        if self._now is not None and self._now.survivors and self._now.how == kind:
            return self._now  # the parent of the workers that re-enter
        self._drop_outdated()
        now = self._now
        if self._next is not None and self._next.how == kind and not self._next.importing:
            if now is not None:
                self.retire(now)
            now, self._next = self._next, None
        if now is None or now.how != kind:
            if now is not None:
                self.retire(now)
            self.kind = kind
            now = Spawner(kind)
        if self._next is not None and self._steps_aside:
            self._next.hold(True)
        self._now = now
        self._asked_at = time.monotonic() if now.importing else None
        self._has_said = False
        return now

    def retire(self, helpers: Spawner) -> None:
        """End these helpers; they are reaped by `look`."""
        self._examine(helpers, over=True)
        closing = helpers.begin_close()
        if closing is not None:
            self._closing.append(closing)

    def started(self, context: PContext, now: float) -> None:
        """These workers run; look at what they import, now and then."""
        self._context = context
        looks = (_LOOKS[0] - _QUIET, *_LOOKS) if self._steps_aside else _LOOKS
        self._due = [now + after for after in looks] if self.kind.startswith("python") else []
        self._imported, self._quiet_by = 0, now + _LONGEST
        self._parked = 0
        self._waiting_now = set()

    def prepare(self, count: int) -> None:
        """Nothing runs and a round is awaited (a spare, a first node): park processes for it."""
        ready = self._for_standbys
        if (
            ready is not None
            and self.mode == "standby"
            and ready.how.startswith("python")
            and not self._parked
        ):
            self._parked = count
            self._park(ready, count)

    def _park(self, helpers: Spawner, count: int) -> None:
        for rank, known in enumerate(self.standby_ranks):
            known.runs_script = rank in self._waits_for_rank
        self._standbys_at = helpers
        if helpers is self._now and self._next is not None:
            self._next.park(0)  # workers re-enter: a second set would wait for nothing
        helpers.park(count, self.warm_up, self.standby_ranks[:count])

    def _see_who_waits(self, context: PContext) -> None:
        """A worker that calls wait_for_rank() has just rung the bell: prepare the next one up to there."""
        if self.mode != "standby" or not self.standby_ranks or (boards := context.options.boards) is None:
            return
        ranks = {rank for rank in range(context.nprocs) if boards.calls_wait_for_rank(rank)}
        ready = self._for_standbys
        # That a worker can re-enter is known a moment after that it waits for its rank.
        moves = bool(ranks) and ready is self._now and ready is not self._standbys_at
        if ranks - self._waiting_now or moves:
            self._waiting_now = ranks
            self._waits_for_rank |= ranks
            if ready is not None and ready.how.startswith("python"):
                self._park(ready, context.nprocs)

    @property
    def _for_standbys(self) -> Spawner | None:
        """The helpers of the next start: where workers re-enter, their own."""
        now = self._now
        return now if now is not None and (now.reenter or now.survivors) else self._next or now

    @property
    def parked(self) -> list[int]:
        """The pids of processes that wait for the next start."""
        for helpers in self._idle():
            helpers.catch_up()  # not those that serve workers: an exit would be read, and wake no one
        return [pid for helpers in (self._now, self._next) if helpers is not None for pid in helpers.parked]

    # -- the loop's view ----------------------------------------------------------------------------

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        """Helpers that are about to end, and idle ones, which may end at any time."""
        found = [(fd, select.POLLIN) for closing in self._closing for fd in closing.fds()]
        return found + [(helpers.fileno(), helpers.mask) for helpers in self._idle()]

    def deadline(self, phase: Phase) -> float | None:
        """The next look at the imports counts only while workers run: else it would be due for ever."""
        times = [closing.deadline() for closing in self._closing]
        if self._due and phase == "RUNNING":
            times.append(self._due[0])
        if self._asked_at is not None and phase == "STARTING":
            times.append(self._asked_at + (_GIVE_UP_AFTER if self._has_said else _SAY_AFTER))
        return min(times, default=None)

    def look(self, phase: Phase, now: float) -> None:
        """Reap helpers, replace lost ones; learn from the workers when it is time for that."""
        self._reap()
        for helpers in (self._now, self._next):
            if helpers is not None:
                self._examine(helpers)
        self._watch_preload(phase, now)
        if self._drop_lost() and self._now is None and phase not in _NO_START:
            self._replace(now)
        self._tell_of_standbys()
        if phase == "RUNNING" and self._context is not None:
            self._see_who_waits(self._context)
        if phase == "RUNNING" and self._due and self._due[0] <= now and self._context is not None:
            self._improve(self._context, now)

    def _watch_preload(self, phase: Phase, now: float) -> None:
        """A start waits for imports: say so, and do not wait for ever."""
        helpers = self._now
        if helpers is None or not helpers.importing:
            self._asked_at = None
        if helpers is None or self._asked_at is None or phase != "STARTING":
            return
        if not self._has_said and now >= self._asked_at + _SAY_AFTER:
            self._has_said = True
            name = helpers.log.importing.partition(":")[0] if helpers.log is not None else ""
            self.say(
                f"the workers start when {name or 'a module'} is imported (--warm off: without a preload)"
            )
        if now >= self._asked_at + _GIVE_UP_AFTER:
            self._asked_at = None
            if not self._own:  # what the user asked for is waited for
                self.say(f"workers start without a preload: it takes longer than {_GIVE_UP_AFTER:.0f} s")
                helpers.clear_now()  # the start takes others

    def _reap(self) -> None:
        for closing in list(self._closing):
            try:
                done = closing.reap()
            except UnkillableError as error:  # not a reason to end a job that has other helpers
                warn(str(error))
                done = True
            if done:
                self._closing.remove(closing)

    def _idle(self) -> list[Spawner]:
        """Helpers that serve no workers: nothing else reads what they send."""
        return [helpers for helpers in (self._now, self._next) if helpers is not None and not helpers.in_use]

    def _drop_lost(self) -> bool:
        """Read what idle helpers sent, and forget those that have ended; whether there were any."""
        lost = []
        for helpers in self._idle():
            helpers.catch_up()
            if helpers.lost:
                lost.append(helpers)
                self.retire(helpers)
        if self._now in lost:
            self._now = None
        if self._next in lost:
            self._next = None
        if lost:
            self._parked = 0  # the standbys ended with them
        return bool(lost)

    def _drop_outdated(self) -> None:
        """Forget helpers whose packages were upgraded meanwhile."""
        if self.learned is None:
            return
        self.learn()
        renewed = self.learned.renewed()
        if renewed is None:
            return
        for helpers in (self._now, self._next):
            if helpers is not None:
                self.retire(helpers)
        self._now = self._next = None
        self.learned = renewed

    def _replace(self, now: float) -> None:
        """Make new helpers ahead of the start, unless the last ones ended a moment ago, too."""
        if now >= self._replaced_at + _REPLACE_AFTER:
            self._replaced_at = now
            try:
                self._now = Spawner(self.kind)
            except StartError:
                pass  # the start tries again, and reports it

    def _improve(self, context: PContext, now: float) -> None:
        """Learn; start better helpers in the background, or park processes, where that pays."""
        while self._due and self._due[0] <= now:
            self._due.pop(0)
        self.learn()
        if self._steps_aside and not self._is_quiet(context, now):
            self._due.insert(0, now + _QUIET)
            return
        if self._next is not None:
            self._next.hold(False)
        ready = self._next or self._now
        # Standbys that wait for their rank have imported everything.
        if self.mode != "off" and not self._waits_for_rank and self._is_worth_it(ready):
            if self._next is not None:
                self.retire(self._next)
            ready = self._next = self._make_better()
        if ready is None:
            return
        ready = self._for_standbys
        if ready is not None and self.mode == "standby" and self.kind.startswith("python"):
            self._park(ready, context.nprocs)

    def _is_worth_it(self, ready: Spawner | None) -> bool:
        """Whether better helpers could be made than these."""
        if self._next is not None and self._next.importing:
            return False  # what is found now may be a part of what they import
        wanted = {*self._own, *(self.learned.wanted() if self.learned is not None else ())}
        if ready is not None:
            wanted -= names_in(ready.preload)
            if ready.log is not None and ready.log.seconds is None and not ready.importing:
                return bool(wanted)  # they have given up
            if ready.log is not None:
                wanted -= ready.log.loaded
        return len(wanted) >= _WORTH_IT

    def _is_quiet(self, context: PContext, now: float) -> bool:
        """Whether the first worker has imported nothing since the last look."""
        before, self._imported = self._imported, len(context.imported())
        return self._imported == before or now >= self._quiet_by

    def learn(self) -> None:
        """Take in and keep what the first worker imported so far."""
        learned, context = self.learned, self._context
        if learned is None or context is None:
            return
        if learned.add(context.imported()):
            learned.save()

    def _examine(self, helpers: Spawner, over: bool = False) -> None:
        """Take in how a preload went, when it is done or cut short."""
        log = helpers.log
        if log is None or helpers in self._examined or (helpers.importing and not over):
            return
        self._examined.add(helpers)
        if helpers.importing or log.seconds is not None:
            return
        # A bare zygote took its place.
        package, why = log.refused()
        if package not in self._told:
            self._told.add(package)
            self.say(f"{package} is not preloaded: {why}; workers import it")
        if self.learned is not None:
            self.learned.refuse(package, why, log.for_all)
            self.learned.save()
        self._own = [name for name in self._own if package_of(name) != package]
        helpers.preload = []  # better ones are worth their while, and these are not worth keeping
        self._due.insert(0, time.monotonic())

    def _tell_of_standbys(self) -> None:
        """One line for each reason why there are none."""
        for helpers in (self._now, self._next):
            if helpers is not None and helpers.standby_lines:
                lines, helpers.standby_lines = helpers.standby_lines, []
                for line in lines:
                    if line not in self._told:
                        self._told.add(line)
                        self.say(line)

    # -- the end ------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """End all helpers, without waiting for it."""
        self._tell_of_standbys()
        left = [helpers for helpers in (self._next, self._now) if helpers is not None]
        for helpers in left:
            helpers.hold(False)
            self._examine(helpers, over=True)
        if self._keep is not None and left:
            keep, self._keep = self._keep, None
            try:
                staying = keep.leave(left, self.kind, _WORTH_IT)
            except (StartError, OSError) as error:
                staying = None
                warn(f"nothing is kept warm: {error}")
            if staying is not None:
                self._closing.append(staying)
                left.remove(staying.helpers)
        for helpers in left:
            self.retire(helpers)
        self._next = self._now = None

    def hurry(self) -> None:
        """Do not wait for helpers that are being ended: kill them."""
        for closing in self._closing:
            closing.hurry()

    @property
    def closed(self) -> bool:
        """Whether all helpers that were being ended are gone."""
        return not self._closing

    def close(self) -> None:
        """End all helpers and wait for it; for an owner without a loop."""
        self.begin_close()
        while self._closing:
            poll = select.poll()
            for closing in self._closing:
                for fd in closing.fds():
                    poll.register(fd, select.POLLIN)
            until = min(closing.deadline() for closing in self._closing)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)
            self._reap()


def helper_pool_for_function(
    function: Callable[..., object], start_method: str, mode: str
) -> HelperPool | None:
    """For functions: the same where each worker is to be a fresh process; None where it is not."""
    if mode == "off" or start_method != "spawn":
        return None
    import sys

    from phalanx.agent.warm.import_cache import ImportCache
    from phalanx.agent.warm.spawner import interpreter_flags

    flags = interpreter_flags()
    main = getattr(sys.modules["__main__"], "__file__", "") or "interactive"
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    learned = ImportCache(["function", name, main, *flags], os.environ)
    return HelperPool(" ".join(["python", *flags]), mode, learned)


def helper_pool_for(program: str, args: tuple[str, ...], workers: Workers) -> HelperPool:
    """For programs: forks of one Python where that is possible and wanted, else a fresh start for each."""
    from phalanx.job.program import python_flags, split_python

    flags = None if workers.warm == "off" else python_flags(program, [args], {})
    if flags is None:
        return HelperPool("exec", "off")
    from phalanx.agent.warm.import_cache import ImportCache

    split = split_python(args)
    assert split is not None
    learned = ImportCache([split[1], split[2], *flags], os.environ)
    spare = len(os.sched_getaffinity(0)) - workers.local_world_size
    keep = None
    if workers.warm_for:
        from phalanx.agent.warm.keep_warm import KeepWarm

        keep = KeepWarm(workers.warm_for, learned, list(workers.preload), os.environ)
    name = " ".join(["python", *flags])
    return HelperPool(name, workers.warm, learned, workers.preload, workers.warmup, spare, keep)
