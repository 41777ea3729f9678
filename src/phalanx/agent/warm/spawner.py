"""The agent's handle on its helpers (keeper.py, zygote.py): start workers, see them end, stop them.

A Spawner may serve one group after another, so that a restart does not pay for new helpers. It has at
most one group at a time: whatever the zygote adopts then belongs to that group, and ends with it.

A helper may be busy for long (it imports modules) or stopped. So requests are only sent, and their answers
are events; `spawn` and `close`, which wait, are for callers without a loop.
"""

from __future__ import annotations

import _socket
import errno
import os
import posix
import select
import sys
import time
from _thread import RLock

from phalanx import kernel
from phalanx.core.record import Record
from phalanx.errors import StartError, UnkillableError
from phalanx.helpers import messages
from phalanx.helpers.channel import Channel
from phalanx.helpers.messages import (
    Exit,
    GroupStopped,
    WorkerLaunch,
    WorkerParked,
    WorkerReenters,
    WorkersFenced,
    WorkersStarted,
    WorkerUnfit,
)
from phalanx.helpers.witness import Witness
from phalanx.job.program import BOOTSTRAP
from phalanx.python_command import PACKAGE_ROOT
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx.agent.warm.keep_warm import AdoptedHelpers
    from phalanx.helpers.messages import StandbyRank
    from phalanx.helpers.preload.preload_log import PreloadLog
    from phalanx.helpers.zygote import Runner

_PROGRAM = (
    "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; "  # not the current directory
    "from phalanx.helpers.keeper import close_others, main; "
    "close_others({fd}); main({fd}, {agent}{more})"
)
_WISHES_FD = 4  # and the list of modules to import
_SOCKET_FD = 3  # where a freshly started helper finds its end of the socket
CLEAR_NOW = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # to the keeper: the zygote hangs, end it
_OWN_FILES = 20  # pipes, sockets and such, whatever the number of workers
_KILL_PATIENCE = 2.0  # for the keeper to kill the zygote, and for SIGKILL to end both
_CLOSE_PATIENCE = 6.0  # longer than the zygote's own patience with processes that outlive SIGKILL


class StartRefused(Record):
    """Nothing of the group was started; `error` names the rank and why."""

    error: StartError


class HelpersLost(Record):
    """Keeper and zygote are gone: so are all workers, by the parent-death signal."""


# What `events` returns: messages of the zygote, and these two.
Event = (
    WorkersStarted
    | StartRefused
    | Exit
    | GroupStopped
    | WorkersFenced
    | HelpersLost
    | WorkerReenters
    | WorkerParked
    | WorkerUnfit
)


class Spawner:
    """Keeper and zygote, started on construction."""

    def __init__(
        self,
        how: str = "exec",
        runner: Runner | None = None,
        preload: list[str] | None = None,
        background: bool = False,
        adopted: AdoptedHelpers | None = None,
        outlives: bool = False,
    ) -> None:
        """`how` the helpers are made, and so what they can run:

        exec: a bare interpreter, for programs. forkserver: a whole one, for functions. fork: a fork of this
        very process, for functions. python and its flags ("python -u"): a whole one, for Python programs.
        Only the last has `preload`: what to import first (helpers/preload/preload.py), in `background` with a
        low priority. It may be `adopted` from an earlier launch, or made for the
        next one, which it `outlives` this one for.
        """
        self.how = how
        self._adopted = adopted
        self._lock = RLock()  # a signal handler may ask for a stop while a wait is reading
        self._early: list[Event] = []
        self._group = 0
        self.lost = False  # the helpers are gone; make another Spawner
        self.in_use = False  # by a group, which reads `events`; else the owner calls `catch_up`
        self._closed = False
        self.preload = preload or []
        self.importing = preload is not None
        self.parked: list[int] = []  # the pids of standbys that wait
        self.reenter: set[int] = set()  # ranks of the group that can be recalled
        self.survivors: set[int] = set()  # ranks that wait to re-enter: the next group has to be started here
        self.standby_lines: list[str] = []  # for the user: standbys that do not work out
        self.witness: Witness | None = None  # of the workers of the last start
        self._wishes = -1  # the file with the list and its log
        self._log: PreloadLog | None = None
        self.silent = False  # the zygote has not confirmed the last `stop`
        self.kept: bool | None = None  # the answer to `keep`
        self._files = (0, 0)
        if adopted is not None:
            self.channel, self.pid = adopted.channel, adopted.keeper
            self.preload = adopted.names
            return
        ours, theirs = (
            _above_standard(end) for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        )
        self.channel = Channel(ours)
        try:
            if how == "fork":
                self.pid = _fork_helpers(ours, theirs, runner)
            else:
                if preload is not None:
                    self._write_wishes(preload, background or outlives)
                self.pid = _exec_helpers(theirs, how, self._wishes, outlives)
        except BaseException:
            ours.close()
            self._end_log()
            raise
        finally:
            theirs.close()

    def _write_wishes(self, names: list[str], background: bool) -> None:
        from phalanx.helpers.preload.preload_log import ImportGate, PreloadLog
        from phalanx.kernel import anonymous_file

        words = f"{ImportGate.OPEN.decode()} {'nice' if background else '-'}"
        text = "\n".join([words, *names]).encode("utf-8", "surrogateescape")
        self._wishes = anonymous_file("phalanx-modules")
        os.write(self._wishes, text)
        self._log = PreloadLog(self._wishes, len(text))

    @property
    def log(self) -> PreloadLog | None:
        """What is known so far of the preload."""
        if self._log is not None and self._wishes >= 0:
            self._log.read()
        return self._log

    def hold(self, held: bool) -> None:
        """Hold up its imports, or let them go on; nothing happens if there are none."""
        if self._wishes >= 0:
            from phalanx.helpers.preload.preload_log import ImportGate

            gate = ImportGate(self._wishes)
            gate.close() if held else gate.open()

    def _end_log(self) -> None:
        if self._wishes >= 0:
            os.close(self._wishes)
            self._wishes = -1

    def fileno(self) -> int:
        """Readable when `events` has something to tell."""
        return self.channel.fileno()

    @property
    def mask(self) -> int:
        """What to poll `fileno` for."""
        return select.POLLIN | (select.POLLOUT if self.channel.unsent else 0)

    def request(
        self,
        jobs: list[WorkerLaunch],
        env: Mapping[str, str],
        at_failure: tuple[int, float] | None = None,
        lease: int = -1,
    ) -> None:
        """Ask for a group, all of it or nothing; answered by WorkersStarted, StartRefused or HelpersLost.

        `at_failure`: the signal and the grace with which the helpers themselves stop the others when one
        fails. `lease`: a file with the time until which the workers may run. `stop` may be called before the
        answer, and is answered after it.
        """
        places: dict[int, int] = {}  # descriptor → its place in the message; each travels once
        launches = [_with_places(job, places) for job in jobs]
        fds = list(places)
        null = None
        std = []
        for number in (0, 1, 2):
            try:
                os.fstat(number)
            except OSError:  # closed in this process; a worker must not get a random file there
                null = os.open(os.devnull, os.O_RDWR) if null is None else null
                number = null
            std.append(len(fds))
            fds.append(number)
        self._group += 1
        self.in_use = True
        self.reenter, self.survivors = self.survivors, set()
        self._early = [event for event in self._early if isinstance(event, HelpersLost)]  # not of this group
        self._end_watch()
        leased = -1
        if lease >= 0:
            leased = len(fds)
            fds.append(lease)
        self._files = (len(jobs), files_needed(jobs))
        group = messages.SpawnGroup(
            self._group,
            launches,
            dict(env),
            os.getcwd(),
            std,
            _ignored_signals(),
            leased,
            None if at_failure is None else (int(at_failure[0]), float(at_failure[1])),
        )
        try:
            self._send(group, fds)
        finally:
            if null is not None:
                os.close(null)

    def spawn(
        self, jobs: list[WorkerLaunch], env: Mapping[str, str], at_failure: tuple[int, float] | None = None
    ) -> dict[int, int]:
        """`request`, and wait for the answer: rank → pid, or StartError."""
        self.request(jobs, env, at_failure)
        other: list[Event] = []
        while True:
            heard = self.events()
            for place, event in enumerate(heard):
                if isinstance(event, WorkersStarted):
                    with self._lock:  # a worker may have ended already
                        self._early = [*other, *heard[place + 1 :], *self._early]
                    return dict(event.pids)
                if isinstance(event, StartRefused):
                    raise event.error
                if isinstance(event, HelpersLost):
                    raise self.lost_at_start()
                other.append(event)

    def lost_at_start(self) -> StartError:
        """The error of a start whose helpers ended before they answered."""
        return StartError(f"the helper process (pid {self.pid}) ended while workers were started")

    def events(self, timeout: float | None = None) -> list[Event]:
        """What happened, waiting up to `timeout` seconds (None: forever) for the first of it."""
        with self._lock:
            early, self._early = self._early, []
            if early:
                return early
        if timeout != 0 and not (self.lost and self.witness is None):
            poll = select.poll()
            if not self.lost:
                poll.register(self.channel.fileno(), self.mask)
            if self.witness is not None:
                poll.register(self.witness.fileno(), select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        self.catch_up()
        with self._lock:
            early, self._early = self._early, []
            return early

    def catch_up(self) -> None:
        """Send and read what can be; events stay for `events`, which must be asked before the next wait."""
        with self._lock:
            try:
                self.channel.flush()
            except OSError:
                pass
            came, gone = self.channel.pending() if not self.lost else ([], False)
            for message, fds in came:
                self._note(message, fds)
            if gone:
                self.lost = True
                self._early.append(HelpersLost())

    def _note(self, message: Record, fds: list[int]) -> None:
        if isinstance(message, messages.GroupStopping | GroupStopped) and message.group == self._group:
            self.silent = False  # anything else may have been on its way before the stop
        if isinstance(message, Exit | WorkersStarted):
            self._early.append(message)
        elif isinstance(message, messages.WorkersForked):
            self._watch(message.pids, fds)
        elif isinstance(message, messages.SpawnRefused):
            error = StartError(f"rank {message.rank} could not be started: {message.why}")
            if message.why.endswith(os.strerror(errno.EMFILE)):
                error = _too_many_files(*self._files)
            self._early.append(StartRefused(error))
        elif isinstance(message, messages.PreloadDone):
            self.importing = False
        elif isinstance(message, messages.KeptAnswer):
            self.kept = message.stays
        elif isinstance(message, messages.StandbysParked):
            self.parked = message.pids
        elif isinstance(message, messages.StandbyRemark):
            self.standby_lines.append(message.text)
        elif isinstance(message, WorkersFenced | GroupStopped | WorkerReenters | WorkerParked | WorkerUnfit):
            if message.group != self._group:
                return
            if isinstance(message, WorkerReenters):
                self.reenter = self.reenter | {message.rank} if message.can else self.reenter - {message.rank}
            elif isinstance(message, WorkerParked):
                self.survivors.add(message.rank)
            self._early.append(message)

    def _watch(self, pids: Mapping[int, int], fds: list[int]) -> None:
        self._end_watch()
        if len(fds) == len(pids) + 1:
            try:
                self.witness = Witness(pids, fds)
                return
            except OSError:
                pass  # out of descriptors: the zygote alone reports exits
        for fd in fds:
            os.close(fd)

    def _end_watch(self) -> None:
        if self.witness is not None:
            self.witness.close()
            self.witness = None

    def stop(self, sig: int, grace: float) -> None:
        """Ask for the group's end: `sig` now, SIGKILL after `grace`; answered by a Stopped event.

        Only sends, so that it can be called from a signal handler and from a poll.
        """
        self.silent = True
        self.survivors = set()
        self._send(messages.StopGroup(self._group, int(sig), float(max(0.0, grace))))
        os.sched_yield()  # the zygote may wait for this very processor, and the caller has work to do

    def recall(self, sig: int, grace: float, timeout: float, cause: str, culprits: list[int]) -> None:
        """As `stop`, but workers that can re-enter have `timeout` seconds to park; `culprits` have none."""
        self.silent = True
        grace = float(max(0.0, grace))
        self._send(messages.RecallGroup(self._group, int(sig), grace, float(timeout), cause, list(culprits)))
        os.sched_yield()

    def park(
        self,
        count: int,
        warm_up: str = "",
        ranks: list[StandbyRank] | None = None,
        limit: float | None = None,
    ) -> None:
        """Have a standby for each of this many ranks; `parked` tells which are ready.

        `ranks`: what is known of the workers that they become. `limit`: seconds for the warm-up.
        """
        known = ranks or [messages.StandbyRank() for _ in range(count)]
        limit = messages.WARM_UP_LIMIT if limit is None else limit
        environ, ignored = dict(os.environ), _ignored_signals()
        self._send(messages.StandbyPlan(known, warm_up, limit, os.getcwd(), environ, ignored))

    def keep(self, terms: messages.KeptTerms) -> None:
        """Ask the helpers to stay for the next launch (agent/warm/keep_warm.py); answered in `kept`."""
        self._send(terms)

    def let_go(self) -> None:
        """The helpers stay when this process ends; nothing more to do with them."""
        self._closed = True
        self.channel.close()
        self._end_watch()
        self._end_log()
        if self._adopted is not None:
            self._adopted.close()

    def signal(self, sig: int, ranks: set[int], alone: bool = False) -> None:
        """Pass a signal on to some workers, `alone` or with what they started; nothing is stopped."""
        self._send(messages.SignalWorkers(int(sig), sorted(ranks), alone))

    def clear_now(self) -> None:
        """The zygote does not answer: have the keeper kill it and all its workers. HelpersLost follows."""
        self._signal_keeper(CLEAR_NOW)
        self._wake_keeper()

    def _wake_keeper(self) -> None:
        self._signal_keeper(signal.SIGCONT)  # it may be stopped

    def _signal_keeper(self, sig: int) -> None:
        signal_keeper(self.pid, None if self._adopted is None else self._adopted.keeper_fd, sig)

    def kill_now(self) -> None:
        """The keeper does not respond either: kill it, the zygote and the workers directly."""
        if self.witness is not None:
            self.witness.kill_zygote()
            self.witness.signal(signal.SIGKILL)
        self._signal_keeper(signal.SIGKILL)

    def _send(self, message: Record, fds: list[int] | None = None) -> None:
        try:
            with self._lock:
                self.channel.post(message, fds)
        except OSError:
            pass  # the helpers are gone: `events` has HelpersLost

    def close(self) -> None:
        """End the helpers and whatever they still have; idempotent and bounded."""
        closing = self.begin_close()
        while closing is not None and not closing.reap():
            poll = select.poll()
            for fd in closing.fds():
                poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, closing.deadline() - time.monotonic()) * 1000)

    def begin_close(self) -> ClosingHelpers | None:
        """End the helpers without waiting for it; None where that was begun before."""
        if self._closed:
            return None
        self._closed = True
        if self.importing:
            self.catch_up()  # it may be over by now
        _ = self.log
        self._end_log()
        self.channel.close()  # the zygote kills everything when its socket closes,
        if self.importing:
            self.clear_now()  # unless it is deep in an import
        else:
            self._wake_keeper()
        witness, self.witness = self.witness, None
        if self._adopted is None:
            return ClosingHelpers(self.pid, witness)
        os.close(self._adopted.tether)
        return ClosingHelpers(self.pid, witness, self._adopted.keeper_fd)


class ClosingHelpers:
    """Helpers that are being ended: reaped when they exit, killed when they do not.

    First by the keeper (CLEAR_NOW), then by SIGKILL to keeper and zygote; each step has a deadline.
    """

    def __init__(self, pid: int, witness: Witness | None = None, adopted: int | None = None) -> None:
        """`adopted`: the keeper's pidfd, where it is not a child of this process."""
        self._pid = pid
        self._witness = witness
        self._adopted = adopted
        self._pidfd = kernel.pidfd(pid) if adopted is None else adopted
        self._patience = [_KILL_PATIENCE, _KILL_PATIENCE, _CLOSE_PATIENCE]
        self._until = time.monotonic() + self._patience.pop()

    def fds(self) -> list[int]:
        """Readable when `reap` succeeds."""
        return [] if self._pidfd is None else [self._pidfd]

    def deadline(self) -> float:
        """When `reap` must be called at the latest."""
        return self._until if self._pidfd is not None else min(self._until, time.monotonic() + 0.01)

    def reap(self) -> bool:
        """Whether the helpers are gone; never waits. UnkillableError when SIGKILL is all that is left."""
        done = self._ended()
        if not done and time.monotonic() >= self._until:
            if not self._patience:
                what = kernel.describe(self._pid)
                self._close()
                raise UnkillableError(f"the helper process did not end: {what}")
            self.hurry()
        if done:
            self._close()
        return done

    def _ended(self) -> bool:
        if self._adopted is not None:
            poll = select.poll()
            poll.register(self._adopted, select.POLLIN)
            return bool(poll.poll(0))
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # something in this process waits for all children
            return True

    def hurry(self) -> None:
        """Take the next step now: have the keeper kill the zygote, or kill both."""
        if not self._patience:
            return
        self._until = time.monotonic() + self._patience.pop()
        if self._patience:
            signal_keeper(self._pid, self._adopted, CLEAR_NOW)
            signal_keeper(self._pid, self._adopted, signal.SIGCONT)
            return
        if self._witness is not None:
            self._witness.kill_zygote()
        signal_keeper(self._pid, self._adopted, signal.SIGKILL)

    def _close(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def signal_keeper(pid: int, adopted: int | None, sig: int) -> None:
    """To the keeper, by its number where it is a child: until it is reaped, the number is its own."""
    try:
        if adopted is None:
            os.kill(pid, sig)
        else:
            signal.pidfd_send_signal(adopted, sig)
    except ProcessLookupError:
        pass  # it has ended; or something in this process waits for all children


def files_needed(jobs: list[WorkerLaunch], followed: int = 0) -> int:
    """About how many descriptors the helper or, with this many files to follow, the agent has at a time."""
    helper = len(jobs) + len({fd for job in jobs for _, fd, _ in job.fds})
    helper += sum(bool(job.reentry) for job in jobs)
    agent = followed + len(os.listdir("/proc/self/fd" if kernel.LINUX else "/dev/fd")) if followed else 0
    return max(helper, agent)


def require_files(workers: int, needed: int = 0) -> None:
    """StartError when the limit on open files does not allow a start: it would fail halfway."""
    if 0 < os.sysconf("SC_OPEN_MAX") < _OWN_FILES + max(workers, needed):
        raise _too_many_files(workers, needed)


def _too_many_files(workers: int, needed: int) -> StartError:
    limit = os.sysconf("SC_OPEN_MAX")
    # Rounded up, and with room for what a group may have, so that it is raised only once.
    enough = 64 * ((_OWN_FILES + max(4 * workers, needed)) // 64 + 1)
    return StartError(f"too many open files: raise ulimit -n ({limit} here, about {enough} needed)")


def _with_places(job: WorkerLaunch, known: dict[int, int]) -> WorkerLaunch:
    """As it travels: descriptors by their place in the message."""
    places = [(name, known.setdefault(fd, len(known)), target) for name, fd, target in job.fds]
    return job.replace(fds=places, argv=list(job.argv), env=dict(job.env), cpus=list(job.cpus))


def _exec_helpers(theirs: _socket.socket, how: str, wishes: int, outlives: bool = False) -> int:
    """Start a fresh interpreter as keeper and zygote.

    posix_spawn, because the agent may be large, threaded and full of CUDA: nothing of it is copied.
    Its own session, so that Ctrl-C on the terminal reaches the agent alone.
    """
    high = _above(theirs.fileno(), 10)
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, high, _SOCKET_FD)]
    list_fd = -1
    agent = 0 if outlives else os.getpid()
    if outlives:  # nothing of this launch, whose output may be somebody's input
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)] + actions
    if how == "exec":
        words = ["-I", "-S", "-c", _PROGRAM.format(root=PACKAGE_ROOT, fd=_SOCKET_FD, agent=agent, more="")]
    elif how == "forkserver":
        more = ", __import__('phalanx.agent.workers.function_worker', fromlist='x').runner()"
        code = _PROGRAM.format(root=PACKAGE_ROOT, fd=_SOCKET_FD, agent=agent, more=more)
        words = [*interpreter_flags(), "-c", code]
    else:
        flags = how.split(" ")[1:]
        options = f"{_SOCKET_FD},{agent}"
        if wishes >= 0:
            list_fd = _above(wishes, 10)  # above the numbers that helpers use
            options += f",{_WISHES_FD}"
            actions.append((os.POSIX_SPAWN_DUP2, list_fd, _WISHES_FD))
        words = [*flags, BOOTSTRAP, "zygote", options, PACKAGE_ROOT]
    everything = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    try:
        # Not os.posix_spawn, which a debugger replaces in order to follow what it starts.
        return posix.posix_spawn(
            sys.executable,
            [sys.executable, *words],
            os.environ,
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=everything,
        )
    except OSError as error:
        raise StartError(f"cannot start a helper process ({sys.executable}): {error.strerror}") from None
    finally:
        os.close(high)
        if list_fd >= 0:
            os.close(list_fd)


def _ignored_signals() -> list[int]:
    """Those that the workers ignore as well: nohup's."""
    return [int(s) for s in (signal.SIGHUP,) if signal.getsignal(s) == signal.SIG_IGN]


def interpreter_flags() -> list[str]:
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing

    flags: list[str] = _args_from_interpreter_flags()
    return flags


def _fork_helpers(ours: _socket.socket, theirs: _socket.socket, runner: Runner | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # else every copy would write what is still in the buffer
    agent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        os.setsid()
        from phalanx.helpers.keeper import main

        main(theirs.detach(), agent, runner)
    finally:
        os._exit(1)


def _above_standard(end: _socket.socket) -> _socket.socket:
    """Not 0, 1 or 2, which it gets where those are closed: a worker would take it for its own."""
    if end.fileno() > 2:
        return end
    moved = _socket.socket(fileno=_above(end.fileno(), 3))
    end.close()
    return moved


def _above(fd: int, floor: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)
