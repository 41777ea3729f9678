"""A group of worker processes on this host: start all, wait for all or the first failure, stop all.

worker_kinds.py has the kinds of worker (programs, functions) and `start_processes`.

    new ──begin──► starting ──► running ──an exit decides──► stopping ──nothing left──► done
                      └────────────┴──────────close─────────────┘

* All or nothing: `wait` has a result when every worker succeeded, or when one failed and the rest is
  stopped. A poll (`wait(0)`) only asks for that stop; it never sits out a grace period.
* Everything is an event of the spawner's socket: an exit wakes a wait at once. An owner with a loop calls
  `begin`, `advance` and `ask_stop`, which never wait; `start`, `wait` and `close` are for the others.
* Exits that the zygote does not report are seen through the workers' pidfds (helpers/witness.py).
* A helper that does not answer a stop is bypassed, then killed, and the workers with it (core/group/stop.py).
* Helpers that end before they have answered a start are replaced: nothing of the group is left of it.
* What the workers wrote before they ended is on the console before the result is given.
* Whatever ends a group, all of it is given back: processes, descriptors, threads, signal handlers.
"""

from __future__ import annotations

import abc
import os
import select
import signal
import sys
import time
from _thread import RLock

from phalanx.agent.warm.spawner import HelpersLost, Spawner, StartRefused, files_needed, require_files
from phalanx.agent.workers.result import RunProcsResult, tail_of
from phalanx.agent.workers.signals import SignalScope
from phalanx.core.group import stop as stops
from phalanx.core.group.events import SiblingStop
from phalanx.core.record import Record
from phalanx.errors import StartError
from phalanx.helpers.messages import (
    Exit,
    GroupStopped,
    WorkerLaunch,
    WorkerParked,
    WorkersFenced,
    WorkersStarted,
    WorkerUnfit,
)
from phalanx.job.program import BOOTSTRAP
from phalanx.log import warn
from phalanx.worker.bootstrap import ERROR_FILE, TALLY_FD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from phalanx.agent.logs.console import Console, JsonNames, OutputOptions
    from phalanx.agent.logs.specs import LogsDest, LogsSpecs
    from phalanx.agent.state.holder import StateFiles
    from phalanx.agent.workers.exit_evidence import Snapshot
    from phalanx.agent.workers.failure import ProcessFailure
    from phalanx.helpers.lease_timer import LeaseTimer
    from phalanx.helpers.messages import Place, StandbyRank
    from phalanx.job.numa import NumaOptions
    from phalanx.worker.board import Boards

STRAY_GRACE = 2.0  # for what successful workers left running behind them
_REPORT = 0.5  # for a zygote to report an exit, after the worker's pidfd has shown it
_REPORT_OF_START = 5.0  # the same while it waits until all workers have executed their program
_LOST_TICK = 0.02
_MOMENT = 0.05  # what a poll may take once nothing is left: mostly the last lines are out by then
_START_TRIES = 3  # helpers that may end while they start a group; after that, something else is wrong


class ReentryTerms(Record):
    """What a worker that re-enters is told of its round."""

    timeout: float  # seconds for a worker to park
    number: int  # of the round
    cause: str = ""  # why there is another round

    def text(self) -> str:
        """As it travels, in a variable: one line."""
        return f"{self.timeout:g},{self.number},{' '.join(self.cause.split())[:1000]}"


class GroupOptions(Record):
    """What an owner with a loop of its own chooses beyond torch's arguments."""

    at_failure: SiblingStop = SiblingStop()
    warm: bool = False  # Python workers may be forks of a prepared interpreter
    lease: LeaseTimer | None = None  # the time until which the workers may run
    boards: Boards | None = None  # memory shared with the workers (worker/board.py)
    state: StateFiles | None = None  # what the workers keep (agent/state/holder.py)
    reentry: ReentryTerms | None = None  # what workers that re-enter are told; None: none does
    attach: int | None = None  # only this rank gets the standard input, the others none
    output: OutputOptions | None = None  # how lines are shown and files rotated; None: as torch does
    host: str = ""  # this node, as JSON lines name it
    explains: bool = True  # False: the owner calls `explain` for the failures that it shows
    handles_signals: bool = True  # False: the owner has its own handlers
    take_helpers: Callable[[str | None], Spawner | None] = lambda _kind: None  # None: its own,
    retire: Callable[[Spawner], None] = Spawner.close  # and ends them with this


class PContext(abc.ABC):
    """A group of workers; see the module's top for the rules. Made by `start_processes`."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: dict[int, tuple[Any, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        numa_options: NumaOptions | None = None,
        *,
        options: GroupOptions = GroupOptions(),  # noqa: B008 - immutable
    ) -> None:
        nprocs = len(args)
        check_ranks("args", args, nprocs)
        check_ranks("envs", envs, nprocs)
        if nprocs == 0:
            raise RuntimeError(f"group {name!r} has no workers: args and envs are empty")
        require_files(nprocs)
        self.name = name
        self.entrypoint = entrypoint
        self.args = args
        self.envs = envs
        self.nprocs = nprocs
        self.numa_options = numa_options
        self.options = options
        self.spawner: Spawner | None = None  # from `begin` on
        self.unkillable: tuple[str, ...] = ()
        self.started_at = 0.0
        self.logs: LogsDest = logs_specs.reify(envs)
        self.stdouts = self.logs.stdouts
        self.stderrs = self.logs.stderrs
        self.error_files = self.logs.error_files
        self.filtered_stdout = self.logs.filtered_stdout
        self.filtered_stderr = self.logs.filtered_stderr
        self._prefixes = log_line_prefixes
        self._filters = (duplicate_stdout_filters, duplicate_stderr_filters)
        self._lock = RLock()
        self._listening = RLock()  # an RLock, because a signal's exception may strike before its release
        self._state = "new"
        self.start_error: StartError | None = None  # why nothing of the group was started
        self.start_lost = False  # it is that the helpers ended, which says nothing about the next start
        self._jobs: list[WorkerLaunch] = []  # until the start is answered
        self._tries = 0
        self._answered = False  # the helpers have started the group, or refused to
        self._stop: stops.Stop | None = None  # from the first request on, or once the helpers do not answer
        self._unreported: dict[int, tuple[float, float]] = {}  # rank → report due by, time of the exit
        self.parked: set[int] = set()  # ranks that wait to re-enter in the next group
        self.unfit: dict[int, str] = {}  # ranks that were recalled and do not, and why
        self.fenced = False  # the helpers killed the workers, because their lease was not renewed
        self._ran_out = 0  # how often that had happened before the start
        self._stopped_at = 0.0  # by the wall clock, as exits are
        self._pids: dict[int, int] = {}
        self._exits: dict[int, Exit] = {}
        self._result: RunProcsResult | None = None
        self._console: Console | None = None
        self._tally = -1
        self._learn = -1
        self.learned: list[str] = []  # modules that the first worker imported
        self._signals = SignalScope()
        self._before: Snapshot | None = None
        self._owns_spawner = False

    # -- what a kind of worker fills in -----------------------------------------------------------

    @abc.abstractmethod
    def _job(self, rank: int, env: dict[str, str]) -> WorkerLaunch:
        """What this rank runs; raises StartError when it cannot be run."""

    @property
    @abc.abstractmethod
    def spawner_kind(self) -> str | None:
        """Which helpers can serve this kind of worker; None: only its own."""

    @abc.abstractmethod
    def _new_spawner(self) -> Spawner:
        """The helpers this kind of worker needs."""

    @abc.abstractmethod
    def _return_value(self, rank: int) -> Any:
        """What a rank that exited with 0 returned."""

    def _give_back(self) -> None:  # noqa: B027 - most kinds hold nothing of their own
        """Release what the kind of worker holds."""

    # -- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every worker, or none: on an error nothing is left behind."""
        self.begin()
        try:
            while not self._answered and self._state != "done":
                self._listen(1.0)
            if self.start_error is not None:
                raise self.start_error
        except BaseException:
            self.abandon()
            raise

    def begin(self) -> None:
        """Begin to start every worker, without waiting; `advance` takes in how that went."""
        with self._lock:
            if self._state != "new":
                raise RuntimeError(f"group {self.name!r} was started already; make a new one to start again")
            self._state = "starting"
        if self.options.handles_signals:
            self._signals.__enter__()
        try:
            self._prepare()
            jobs = [self._complete(rank) for rank in range(self.nprocs)]
            if self._tally >= 0:
                os.ftruncate(self._tally, 16 * self.nprocs)
            from phalanx.agent.workers.exit_evidence import snapshot

            self._before = snapshot()
            rotate = self.options.output.rotate if self.options.output is not None else None
            if self.logs.tee_stdouts or self.logs.tee_stderrs or any(self._filters) or rotate is not None:
                from phalanx.agent.logs.console import Console

                json = self._json_names()
                self._console = Console(self.name, self.logs, self._prefixes, self._filters, json, rotate)
            require_files(self.nprocs, files_needed(jobs, self._console.files if self._console else 0))
            if self._console is not None:
                self._console.start()
            self._jobs = jobs
            self._launch()
        except BaseException:
            self.abandon()
            raise

    def _json_names(self) -> JsonNames | None:
        if self.options.output is None or not self.options.output.json:
            return None
        from phalanx.agent.logs.console import JsonNames

        ranks = tuple(int(self.envs[rank].get("RANK", rank)) for rank in range(self.nprocs))
        return JsonNames(self.options.host or os.uname().nodename, ranks)

    def _launch(self) -> None:
        """Have helpers start the group."""
        self._tries += 1
        self.spawner = self.options.take_helpers(self.spawner_kind)
        if self.spawner is None:
            self.spawner = self._new_spawner()
            self._owns_spawner = True
        self.started_at = time.time()
        policy = self.options.at_failure
        at_failure = (policy.sig, policy.grace) if policy.by_helpers else None
        lease = self.options.lease
        self._ran_out = 0 if lease is None else lease.ran_out()
        self.spawner.request(self._jobs, os.environ, at_failure, -1 if lease is None else lease.fileno())

    def _launch_again(self) -> None:
        """The helpers ended before they answered, and what they had forked with them: take others."""
        assert self.spawner is not None
        if self.spawner.witness is not None:  # workers had been forked, and may have run
            warn(f"group {self.name!r}: the helper process was lost during the start, which begins again")
        lost = self.spawner
        lost.in_use = False
        self._stop, self._unreported = None, {}
        try:
            if self._owns_spawner:
                self.options.retire(lost)
            self._launch()
        except (StartError, OSError) as error:
            self.start_error = error if isinstance(error, StartError) else StartError(str(error.strerror))
            self._finish()

    def _finish(self) -> None:
        """Nothing of the group is left: the helpers are free for the next one."""
        self._state = "done"
        self._jobs = []
        self._unreported = {}
        if self.spawner is not None:
            self.spawner.in_use = False

    def _prepare(self) -> None:  # noqa: B027 - most kinds need nothing
        """What a kind of worker does before anything is started; raises what makes a start impossible."""

    def _complete(self, rank: int) -> WorkerLaunch:
        """A kind's job plus what all kinds have: environment, logs, processors."""
        env = {key: str(value) for key, value in self.envs[rank].items()}
        if "pydevd" in sys.modules:
            from phalanx.agent.workers.debugger import attaching

            env |= attaching()
        if path := self.error_files.get(rank):
            env[ERROR_FILE] = "" if path == os.devnull else path
        job = self._job(rank, env)
        boards = self.options.boards
        if boards is not None:
            job.fds = [*job.fds, *boards.places(rank, executed=bool(job.argv))]
            env["PHALANX_WORKER"] = boards.variable(rank)
        state = self.options.state
        if state is not None:
            job.fds = [*job.fds, *state.places(rank, executed=bool(job.argv))]
            env["PHALANX_STATE"] = state.variable(rank)
        terms = self.options.reentry
        if terms is not None and self.spawner_kind and (not job.argv or BOOTSTRAP in job.argv):
            job.reentry = terms.text()
        job.env = env
        job.stdout = self.stdouts.get(rank) or ""
        job.stderr = self.stderrs.get(rank) or ""
        if self.options.attach is not None and rank != self.options.attach:
            job.stdin = os.devnull
        if self.numa_options is not None:
            from phalanx.job.numa import cpus_for

            job.cpus = sorted(cpus_for(rank, self.nprocs, self.numa_options) or ())
        return job

    def describe(self, standbys: list[StandbyRank]) -> None:
        """Note what the next workers of these ranks will have in common with those that run."""
        for job, known in zip(self._jobs, standbys, strict=False):
            known.options, known.cpus = job.options, list(job.cpus)

    def _options(self, rank: int) -> str:
        """For `bootstrap.prepare`: which streams are log files, and the rank's place in the tally."""
        streams = ("o" if self.stdouts.get(rank) else "") + ("e" if self.stderrs.get(rank) else "")
        return f"{streams}:{16 * rank}" if streams else ""

    def _tally_place(self, rank: int, number: int = TALLY_FD) -> list[Place]:
        if not self._options(rank):
            return []
        if self._tally < 0:
            from phalanx.kernel import anonymous_file

            self._tally = anonymous_file("phalanx-tally")
        return [("tally", self._tally, number)]

    def abandon(self) -> None:
        """Kill what may be left, give everything back, and do not wait for it; idempotent."""
        with self._lock:
            ended = self._state == "done"
            if self.spawner is not None and not self._owns_spawner and not ended:
                self.spawner.stop(signal.SIGKILL, 0)
            self._finish()
        self._release(ended)

    # -- wait -------------------------------------------------------------------------------------

    def pids(self) -> dict[int, int]:
        """Local rank → pid of every worker that was started."""
        return dict(self._pids)

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """The result, or None when there is none after `timeout` (0: poll, negative: wait forever).

        `period` bounds how long one sleep may last; nothing is polled at that rate.
        """
        self._signals.armed = True
        if timeout == 0:
            return self._step(0.0)
        end = None if timeout < 0 else time.monotonic() + timeout
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return self._step(0.0)
            result = self._step(period if left is None else min(left, period))
            if result is not None:
                return result

    def _step(self, patience: float) -> RunProcsResult | None:
        """Take in what happened, waiting up to `patience` for it, and decide."""
        if self._result is not None:
            return self._result
        self.advance(patience)
        self._decide()
        return self.outcome(max(patience, _MOMENT))

    # For an owner that decides by itself (the agent): the same in single steps.

    def fds(self) -> list[tuple[int, int]]:
        """Descriptors that are ready when `advance` has something to take in, and what to poll them for."""
        spawner = self.spawner
        if spawner is None or self._state == "done":
            shown = self._console is None or self._console.over
            return [] if shown or self._console is None else [(self._console.fileno(), select.POLLIN)]
        found = [] if spawner.lost else [(spawner.fileno(), spawner.mask)]
        if spawner.witness is not None:
            found.append((spawner.witness.fileno(), select.POLLIN))
        return found

    def deadline(self) -> float | None:
        """When `advance` must be called at the latest: the helpers may have to be killed."""
        if self._state == "done":
            return None
        if self._orphaned:
            return time.monotonic() + _LOST_TICK
        times = [] if self._stop is None else [stops.deadline(self._stop)]
        return min([*times, *(by for by, _ in self._unreported.values())], default=None)

    def advance(self, patience: float = 0.0) -> None:
        """Take in what happened; a helper that has not answered a stop in time is killed."""
        if self._state == "new":
            raise RuntimeError(f"group {self.name!r} was not started")
        self._listen(patience)
        self._check_helpers(time.monotonic())
        if self._state == "done" and self._console is not None:
            self._console.finish(patience)

    @property
    def unknown(self) -> bool:
        """Whether workers may run already of which the helpers have not told yet."""
        forked = self.spawner is not None and self.spawner.witness is not None
        return self._state == "starting" and not self._answered and forked

    @property
    def _orphaned(self) -> bool:
        """Whether the helpers are gone, and their workers are still ending."""
        return self._stop is not None and self._stop.stage in (stops.ORPHANED, stops.GIVEN_UP)

    def _check_helpers(self, now: float) -> None:
        """Take the next step of a stop, if it is due."""
        if self._state == "done" or self.spawner is None:
            return
        if not self._orphaned:
            self._look_at_workers(now)
        if self._stop is None:
            return
        with self._lock:
            if not self.spawner.silent:
                self._stop = stops.respond(self._stop)
            reachable = self.spawner.witness is not None
            self._move_on(*stops.tick(self._stop, now, bool(self.running), reachable))

    def _move_on(self, stop: stops.Stop, actions: tuple[str, ...]) -> None:
        """Do what the table of a stop says."""
        assert self.spawner is not None
        self._stop = stop
        for action in actions:
            if action == stops.ASK:
                self.spawner.stop(stop.sig, stop.kill_at - time.monotonic())
            elif action == stops.SIGNAL:
                if stop.sig and self.spawner.witness is not None:
                    self.spawner.witness.signal(stop.sig)
                    self._look_at_workers(time.monotonic())  # it may have seen an exit
            elif action == stops.KILL_ZYGOTE:
                if self._answered:
                    warn(f"group {self.name!r}: the helper process does not answer; it is killed")
                self.spawner.clear_now()
            elif action == stops.KILL_HELPERS:
                self.spawner.kill_now()
            else:
                self._lose_helpers()

    def _look_at_workers(self, now: float) -> None:
        """Take in exits that the zygote should have reported by now: it may be stopped."""
        # Taken once: another thread may end the group meanwhile.
        witness = None if self.spawner is None else self.spawner.witness
        if witness is None:
            return
        with self._lock:
            for rank in witness.ended():
                patience = _REPORT if self._answered else _REPORT_OF_START
                self._unreported[rank] = now + patience, time.time()
            for rank, (by, when) in list(self._unreported.items()):
                if rank in self._exits:
                    del self._unreported[rank]
                elif now >= by and not self._answered:
                    self._unreported = {}
                    # And start again: the zygote was stopped in between.
                    self._move_on(*stops.kill_zygote(self._stop, now))
                    return
                elif now >= by:
                    del self._unreported[rank]
                    code = witness.exit_code(rank)
                    exit = Exit(rank, self._pids[rank], code, when, self._stopped_at)
                    self._exits[rank] = self._fenced(exit)

    def failed(self) -> dict[int, ProcessFailure]:
        """The failures known so far, by local rank."""
        bad = [exit for exit in self._exits.values() if exit.code != 0 and not exit.signalled_at]
        return {exit.rank: self._failure(exit) for exit in bad}

    @property
    def started(self) -> bool:
        """Whether the workers run, or did."""
        return bool(self._pids)

    @property
    def any_failed(self) -> bool:
        """Whether a worker has failed; costs nothing, unlike `failed`, which reads what it left behind."""
        return any(exit.code != 0 and not exit.signalled_at for exit in self._exits.values())

    @property
    def all_succeeded(self) -> bool:
        """Whether every worker exited with 0."""
        return len(self._exits) == self.nprocs and not any(exit.code for exit in self._exits.values())

    @property
    def done(self) -> bool:
        """Whether nothing of the group is left, and its output is shown."""
        return self._state == "done" and (self._console is None or self._console.over)

    def ask_stop(self, sig: int, grace: float) -> None:
        """Begin to stop, or hurry a stop that has begun; returns at once."""
        with self._lock:
            if self._state in ("starting", "running", "stopping"):
                self._ask_stop(sig, grace)
            elif self._console is not None and grace <= 0:
                self._console.hurry()

    @property
    def reenters(self) -> bool:
        """Whether workers can be recalled."""
        return self.spawner is not None and self._state == "running" and bool(self.spawner.reenter)

    def ask_recall(
        self, sig: int, grace: float, timeout: float, cause: str, culprits: tuple[int, ...] = ()
    ) -> None:
        """Begin to stop, except for the workers that re-enter: they have `timeout` seconds to park."""
        with self._lock:
            assert self.spawner is not None
            now = time.monotonic()
            others = self.running - self.spawner.reenter
            patience = max(timeout, grace if others else 0.0)
            self._stop, _ = stops.ask(None, now, sig, patience, bool(self.running))
            self._stopped_at = self._stopped_at or time.time()
            self._state = "stopping"
            self.spawner.recall(sig, grace, timeout, cause, list(culprits))

    def outcome(self, patience: float = 0.0) -> RunProcsResult | None:
        """The result once nothing of the group is left and its output is shown; then all is given back."""
        if self._state != "done" or not self._shown(patience):
            return self._result
        with self._lock:
            if self._result is None:
                self._result = self._conclude()
        return self._result

    def _listen(self, patience: float) -> None:
        """Wait for news and take it in; one thread at a time: none waits for what another has read."""
        if not self._listening.acquire(timeout=max(0.0, patience)):
            return
        try:
            if self._state != "done":
                assert self.spawner is not None
                self._take_in(self.spawner.events(patience))
        finally:
            self._listening.release()

    def _take_in(self, events: list[Any]) -> None:
        with self._lock:
            for event in events:
                if isinstance(event, Exit):
                    self._exits.setdefault(event.rank, self._attributed(event))
                elif isinstance(event, WorkersFenced):
                    self.fenced = True
                elif isinstance(event, WorkerParked):
                    self.parked.add(event.rank)
                elif isinstance(event, WorkerUnfit):
                    self.unfit[event.rank] = event.why
                elif isinstance(event, WorkersStarted):
                    self._answered = True
                    self._pids = dict(event.pids)
                    self._jobs = []
                    if self._state == "starting":
                        self._state = "running"
                    elif self._stop is not None:
                        self._stop = stops.answer(self._stop, time.monotonic())
                elif isinstance(event, StartRefused):
                    self._answered = True
                    self.start_error = event.error
                    self._finish()
                elif isinstance(event, GroupStopped):
                    self._finish()
                    self.unkillable = tuple(event.unkillable)
                elif isinstance(event, HelpersLost) and self._state != "done" and not self._orphaned:
                    self._lose_helpers()

    def _lose_helpers(self) -> None:
        """Keeper and zygote were killed; the kernel kills the workers with them."""
        assert self.spawner is not None
        if not self._workers_ended():
            return
        unanswered = not self._answered and self._state == "starting"
        if unanswered and self._tries < _START_TRIES:
            self._launch_again()
            return
        self.parked = set()
        for rank, pid in self._pids.items():
            if rank not in self._exits:
                exit = Exit(rank, pid, -signal.SIGKILL, time.time(), self._stopped_at)
                self._exits[rank] = self._fenced(exit)
        if unanswered:
            self.start_error, self.start_lost = self.spawner.lost_at_start(), True
        cleared = self._stop is not None and self._stop.cleared
        if self._answered and not cleared and not self._lease_ran_out():
            warn("the helper process of the group was killed; its workers ended with it")
        self._answered = True
        self._finish()

    def _workers_ended(self) -> bool:
        """Whether the workers of lost helpers are gone: nothing is started beside them."""
        assert self.spawner is not None
        witness = self.spawner.witness
        from phalanx.helpers.job_cgroup import sweep

        clear = sweep(self.spawner.pid) or not self._answered
        if witness is None:
            return True
        left = witness.alive()
        if left or not clear:
            if not self._orphaned:
                self._stop, _ = stops.lose_helpers(self._stop, time.monotonic())
            assert self._stop is not None
            if self._stop.stage != stops.GIVEN_UP:
                witness.signal(signal.SIGKILL)
                return False
            from phalanx.kernel import describe

            self.unkillable = tuple(describe(pid) for pid in left.values())
        return True

    def _fenced(self, exit: Exit) -> Exit:
        """An exit that the zygote does not report: the keeper killed both, if the lease has run out."""
        if exit.code != -signal.SIGKILL or not self._lease_ran_out():
            return exit
        self.fenced = self.fenced or (self._state == "running" and not self.any_failed)
        return exit.replace(signalled_at=exit.signalled_at or exit.at)

    def _lease_ran_out(self) -> bool:
        """Whether it did at any time since the start, renewed or not."""
        return self.options.lease is not None and self.options.lease.ran_out() > self._ran_out

    def _attributed(self, exit: Exit) -> Exit:
        """With when it was signalled: the zygote does not know of a worker that was killed from here."""
        by = None if self._stop is None else self._stop.sig
        killed = by == signal.SIGKILL == -exit.code and exit.at >= self._stopped_at
        return exit.replace(signalled_at=exit.signalled_at or self._stopped_at) if killed else exit

    def _decide(self) -> None:
        with self._lock:
            if self._state != "running":
                return
            if any(exit.code != 0 for exit in self._exits.values()):
                self._ask_stop(self.options.at_failure.sig, self.options.at_failure.grace)
            elif len(self._exits) == self.nprocs:
                # Nothing to stop but what they may have left behind.
                self._ask_stop(signal.SIGTERM, min(STRAY_GRACE, self.options.at_failure.grace))

    def _ask_stop(self, sig: int, grace: float) -> None:
        assert self.spawner is not None
        self._stopped_at = self._stopped_at or time.time()
        self._state = "stopping"
        self.parked = set()
        now = time.monotonic()
        self._move_on(*stops.ask(self._stop, now, sig, grace, bool(self.running), self._answered))
        if sig == signal.SIGKILL and self.spawner.witness is not None:
            # At the end of a lease another node may run these ranks, and the zygote may be stopped.
            self.spawner.witness.kill()
        if not self._answered and self._stop is not None and self._stop.stage == stops.ASKED:
            self.spawner.catch_up()  # the import may be over by now
            if self.spawner.importing:  # it cannot answer meanwhile
                self._move_on(*stops.kill_zygote(self._stop, now))

    def _shown(self, patience: float) -> bool:
        """Whether all output is on the console, or that was given up."""
        return self._console is None or self._console.finish(patience)

    def _conclude(self) -> RunProcsResult:
        """Build the result from how every worker ended, and give everything back."""
        result = RunProcsResult(stdouts=self.stdouts, stderrs=self.stderrs)
        try:
            failed = {rank: exit for rank, exit in self._exits.items() if exit.code != 0}
            ended = {rank: self._failure(exit) for rank, exit in sorted(failed.items())}
            result.failures = {rank: failure for rank, failure in ended.items() if not failure.is_victim}
            result.stopped = {rank: failure for rank, failure in ended.items() if failure.is_victim}
            if not result.failures and len(self._exits) - len(failed) < self.nprocs:
                # Closed by the caller while it ran: not caused by a failure, and not a success.
                result.failures, result.stopped = result.stopped, {}
            if self.options.explains:
                self.explain(result.failures)
            if not result.failures and len(self._exits) == self.nprocs:
                result.return_values = {rank: self._return_value(rank) for rank in range(self.nprocs)}
        finally:
            self._release()
        return result

    def _failure(self, exit: Exit) -> ProcessFailure:
        from phalanx.agent.workers.failure import ProcessFailure

        rank = exit.rank
        stopped = exit.signalled_at or None
        return ProcessFailure(
            rank,
            exit.pid,
            exit.code,
            self.error_files.get(rank, ""),
            exited_at=exit.at,
            stopped_at=stopped,
            tail=tail_of(self.stderrs.get(rank, "")),
            stdout_path=self.stdouts.get(rank, ""),
            stderr_path=self.stderrs.get(rank, ""),
            alone=str(self.envs[rank].get("WORLD_SIZE", self.nprocs)) == "1",
            tolerant=True,  # whatever a worker writes, its failure is reported
        )

    def explain(self, failures: dict[int, ProcessFailure]) -> None:
        """Add what the system knows of these ends; takes a moment (the kernel's log is read)."""
        from phalanx.agent.workers.exit_evidence import explain

        for failure in failures.values():
            failure.evidence = explain(failure.exitcode, failure.pid, self._before)

    # -- stop -------------------------------------------------------------------------------------

    def send_signal(self, sig: int, ranks: set[int] | None = None, alone: bool = False) -> None:
        """Pass a signal to workers that run on, or save before they end; `alone`: not to their children."""
        if self.spawner is not None and self._state in ("running", "stopping"):
            self.spawner.signal(sig, set(range(self.nprocs)) if ranks is None else ranks, alone)

    def exit_code(self, rank: int) -> int | None:
        """How a rank ended, negative for a signal; None while that is not known."""
        return self._exits[rank].code if rank in self._exits else None

    def succeeded_at(self, rank: int) -> float | None:
        """When a rank succeeded, by the wall clock; None if it has not."""
        exit = self._exits.get(rank)
        return exit.at if exit is not None and exit.code == 0 else None

    @property
    def running(self) -> set[int]:
        """The local ranks that have not ended, and have not parked."""
        return self._pids.keys() - self._exits.keys() - self.parked

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop everything: `death_sig` (SIGTERM), then SIGKILL after `timeout` seconds. Idempotent.

        A signal to this process meanwhile ends the patience at once, and is raised when all is done.
        """
        if self._state == "new":
            self._state = "done"
            self._result = RunProcsResult()
            self._release()
            return
        if self._result is not None or self.spawner is None:
            self._signals.__exit__(None, None, None)  # else with handlers, if another thread got the result
            return
        with self._signals.deferred(self._hurry):
            with self._lock:
                if self._state != "done":
                    self._ask_stop(death_sig or signal.SIGTERM, timeout)
            while self._state != "done":
                self._listen(min(1.0, max(0.0, (self.deadline() or 0.0) - time.monotonic())))
                self._check_helpers(time.monotonic())
            if self.unkillable:
                warn(f"group {self.name!r}: SIGKILL did not end {', '.join(self.unkillable)}")
            while not self._shown(1.0):
                pass
            with self._lock:
                if self._result is None:
                    self._result = self._conclude()
            self._signals.__exit__(None, None, None)

    def _hurry(self) -> None:
        self.ask_stop(signal.SIGKILL, 0)
        if self._console is not None:
            self._console.hurry()

    def imported(self) -> list[str]:
        """The modules that the first worker has imported so far, where they are recorded."""
        if self._learn >= 0:
            from phalanx.agent.warm.import_cache import read_names

            self.learned = read_names(self._learn)
        return self.learned

    def _release(self, ended: bool = True) -> None:
        """Give back everything but the result; idempotent. `ended`: nothing of the group is left."""
        try:
            self.imported()
            if self._console is not None:
                self._console.stop(ended)
            self._report_losses()
            self._remove_empty_stacks()
            if self._owns_spawner and self.spawner is not None:
                self.options.retire(self.spawner)
        finally:
            self._give_back()
            for fd in (self._tally, self._learn):
                if fd >= 0:
                    os.close(fd)
            self._tally = self._learn = -1
            self._signals.__exit__(None, None, None)

    def _report_losses(self) -> None:
        if self._tally < 0:
            return
        for rank in range(self.nprocs):
            for index, files in enumerate((self.stdouts, self.stderrs)):
                lost = int.from_bytes(os.pread(self._tally, 8, 16 * rank + 8 * index), "little")
                if lost:
                    warn(f"rank {rank}: {lost} bytes did not fit into {files.get(rank)} (is the disk full?)")

    def _remove_empty_stacks(self) -> None:
        for rank in self._pids:
            path = self.error_files.get(rank)
            if path:
                try:
                    if os.stat(path + ".stack").st_size == 0:
                        os.unlink(path + ".stack")
                except OSError:
                    pass

    def __enter__(self) -> PContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_ranks(what: str, given: Mapping[int, object], nprocs: int) -> None:
    """The keys of a rank map must be exactly 0..n-1."""
    expected = set(range(nprocs))
    if set(given) != expected:
        raise RuntimeError(
            f"{what}: the local ranks are {sorted(given, key=str)}, but for {nprocs} workers they must be "
            f"{sorted(expected)}"
        )
