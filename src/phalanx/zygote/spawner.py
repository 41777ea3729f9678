"""The agent's handle on its helpers (keeper.py, zygote.py): start workers, hear of their ends, stop them.

A Spawner may serve one group after another, so that a restart does not pay for new helpers. It has at
most one group at a time: whatever the zygote adopts then belongs to that group, and ends with it.
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import sys
import time
from _thread import RLock

from phalanx import kernel
from phalanx.core.record import Record
from phalanx.errors import StartError, UnkillableError
from phalanx.workers.program import BOOTSTRAP
from phalanx.zygote.channel import Channel
from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); from phalanx.zygote.keeper import close_others, main; "
    "close_others({fd}); main({fd}, {agent}{more})"
)
_WISHES_FD = 4  # and the list of modules to import
_SOCKET_FD = 3  # where a freshly started helper finds its end of the socket
CLEAR_NOW = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # to the keeper: the zygote hangs, end it
_OWN_FILES = 20  # pipes, sockets and such, whatever the number of workers
_CLOSE_PATIENCE = 6.0  # longer than the zygote's own patience with processes that outlive SIGKILL


Place = tuple[str, int, int]  # name, descriptor here, number in the worker (-1: any, for forks)


class WorkerLaunch:
    """What one worker runs. `argv` empty: a function or a Python program, run in a fork of the zygote."""

    def __init__(
        self,
        rank: int,
        argv: list[str] | None = None,
        path: str = "",
        fds: list[Place] | None = None,
        name: str = "",
        options: str = "",
        program: tuple[str, str, list[str]] | None = None,
    ) -> None:
        self.rank = rank
        self.argv = argv or []
        self.path = path
        self.fds = fds or []
        self.name = name  # for a function: the name of its process
        self.options = options  # what child.prepare is to do
        self.program = program  # in a fork of a Python zygote: mode, target, arguments
        self.env: Mapping[str, str] = {}
        self.stdin = ""  # a path; empty: as in this process. The same for the other two:
        self.stdout = ""
        self.stderr = ""
        self.cpus: list[int] = []


class Exit(Record):
    """How a worker ended. `signalled_at` is 0.0 unless the zygote had signalled it before."""

    rank: int
    pid: int
    code: int
    at: float
    signalled_at: float


class GroupStopped(Record):
    """Nothing of the group is left, but for the processes named here, which outlived SIGKILL."""

    unkillable: tuple[str, ...] = ()


class HelpersLost(Record):
    """Keeper and zygote are gone: so are all workers, by the parent-death signal."""


Event = Exit | GroupStopped | HelpersLost


class Spawner:
    """Keeper and zygote, started on construction."""

    def __init__(
        self,
        how: str = "exec",
        runner: Callable[[dict[str, Any]], NoReturn] | None = None,
        preload: list[str] | None = None,
        background: bool = False,
    ) -> None:
        """`how` the helpers are made, and so what they can run:

        exec: a bare interpreter, for programs. forkserver: a whole one, for functions. fork: a fork of this
        very process, for functions. python and its flags ("python -u"): a whole one, for Python programs.
        Only the last has `preload`: modules to import first, in `background` with a low priority.
        """
        self.how = how
        ours, theirs = (
            _above_standard(end) for end in _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        )
        self.channel = Channel(ours)
        self._lock = RLock()  # a signal handler may ask for a stop while a wait is reading
        self._early: list[Event] = []
        self._group = 0
        self.lost = False  # the helpers are gone; make another Spawner
        self._closed = False
        self.preload = preload or []
        self.importing = preload is not None
        self.parked: list[int] = []  # the pids of forks that wait, when they were last told
        self.dropped: list[str] = []  # modules that do not suit a fork, and why
        self.running: set[int] = set()
        try:
            if how == "fork":
                self.pid = _fork_helpers(ours, theirs, runner)
            else:
                self.pid = _exec_helpers(theirs, how, preload, background)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def fileno(self) -> int:
        """Readable when `events` has something to tell."""
        return self.channel.fileno()

    def spawn(
        self, jobs: list[WorkerLaunch], env: Mapping[str, str], at_failure: tuple[int, float] | None = None
    ) -> dict[int, int]:
        """Start the whole group or nothing: rank → pid, or StartError that names the rank and why.

        `at_failure`: the signal and the grace with which the helpers themselves stop the others when one
        fails. `stop` may still be called, and is still answered.
        """
        places: dict[int, int] = {}  # descriptor → its place in the message; each travels once
        specs = [_wire(job, places) for job in jobs]
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
        ignored = [int(s) for s in (signal.SIGHUP,) if signal.getsignal(s) is signal.SIG_IGN]
        self._group += 1
        request = {
            "group": self._group,
            "workers": specs,
            "env": dict(env),
            "cwd": os.getcwd(),
            "std": std,
            "ignored": ignored,
            "at_failure": None if at_failure is None else (int(at_failure[0]), float(at_failure[1])),
        }
        try:
            with self._lock:
                self.channel.send(("spawn", request), fds)
                return self._started(jobs)
        except StartError:
            raise  # some are OSErrors as well
        except (OSError, EOFError) as error:
            raise StartError(
                f"the helper process (pid {self.pid}) ended while workers were started: {error}"
            ) from None
        finally:
            if null is not None:
                os.close(null)

    def _started(self, jobs: list[WorkerLaunch]) -> dict[int, int]:
        while True:
            message, _ = self.channel.receive()
            if message[0] == "started":
                pids: dict[int, int] = message[1]
                self.running = set(pids)
                return pids
            if message[0] == "refused":
                if message[2].endswith(os.strerror(errno.EMFILE)):
                    raise _too_many_files(len(jobs), files_needed(jobs))
                raise StartError(f"rank {message[1]} could not be started: {message[2]}")
            self._note(message)  # news of a former group

    def events(self, timeout: float | None = None) -> list[Event]:
        """What happened, waiting up to `timeout` seconds (None: forever) for the first of it."""
        with self._lock:
            early, self._early = self._early, []
            if early:
                return early
        if timeout != 0 and not self.lost:
            poll = select.poll()
            poll.register(self.channel.fileno(), select.POLLIN)
            poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        self.catch_up()
        with self._lock:
            early, self._early = self._early, []
            return early

    def catch_up(self) -> None:
        """Read what is there; events stay for `events`, which must be asked before the next wait."""
        with self._lock:
            messages, gone = self.channel.pending() if not self.lost else ([], False)
            for message in messages:
                self._note(message)
            if gone:
                self.lost = True
                self._early.append(HelpersLost())

    def _note(self, message: tuple[Any, ...]) -> None:
        if message[0] == "exit":
            event = Exit(*message[1:])
            self.running.discard(event.rank)
            self._early.append(event)
        elif message[0] == "preloaded":
            self.importing = False
            self.dropped = list(message[1])
        elif message[0] == "parked":
            self.parked = list(message[1])
        elif message[0] == "stopped" and message[1] == self._group:
            self._early.append(GroupStopped(tuple(message[2])))

    def stop(self, sig: int, grace: float) -> None:
        """Ask for the group's end: `sig` now, SIGKILL after `grace`; answered by a Stopped event.

        Only sends, so that it can be called from a signal handler and from a poll.
        """
        self._send(("stop", self._group, int(sig), float(max(0.0, grace))))
        os.sched_yield()  # who is to hear it may wait for this very processor, and we have work for long

    def park(self, count: int, warm_up: str = "") -> None:
        """Have this many forks ready for the next start; answered when they are."""
        self._send(("park", count, warm_up))

    def signal(self, sig: int, ranks: set[int], alone: bool = False) -> None:
        """Pass a signal on to some workers, `alone` or with what they started; nothing is stopped."""
        self._send(("signal", int(sig), sorted(ranks), alone))

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self.channel.send(message)
        except OSError:
            pass  # helpers are gone; `events` tells

    def close(self) -> None:
        """End helpers and whatever they still have; idempotent and bounded."""
        if self._closed:
            return
        self._closed = True
        if self.importing:
            self.events(0)  # it may be over by now
        self.channel.close()  # the zygote kills everything when its socket closes,
        if self.importing:
            os.kill(self.pid, CLEAR_NOW)  # unless it is deep in an import
        if not _reaped(self.pid, _CLOSE_PATIENCE):
            os.kill(self.pid, CLEAR_NOW)
            if not _reaped(self.pid, _CLOSE_PATIENCE):
                what = kernel.describe(self.pid)
                os.kill(self.pid, signal.SIGKILL)
                raise UnkillableError(f"the helper process did not end: {what}")


def files_needed(jobs: list[WorkerLaunch], followed: int = 0) -> int:
    """About how many descriptors the helper or, with this many files to follow, the agent has at a time."""
    helper = len(jobs) + len({fd for job in jobs for _, fd, _ in job.fds})
    agent = followed + len(os.listdir("/proc/self/fd" if kernel.LINUX else "/dev/fd")) if followed else 0
    return max(helper, agent)


def require_files(workers: int, needed: int = 0) -> None:
    """StartError when the limit on open files does not allow a start: it would fail halfway."""
    if 0 < os.sysconf("SC_OPEN_MAX") < _OWN_FILES + max(workers, needed):
        raise _too_many_files(workers, needed)


def _too_many_files(workers: int, needed: int) -> StartError:
    limit = os.sysconf("SC_OPEN_MAX")
    # Rounded up, and with room for what a group may have: nobody wants to raise it twice.
    enough = 64 * ((_OWN_FILES + max(4 * workers, needed)) // 64 + 1)
    return StartError(f"too many open files: raise ulimit -n ({limit} here, about {enough} needed)")


def _wire(job: WorkerLaunch, known: dict[int, int]) -> dict[str, Any]:
    places = [(name, known.setdefault(fd, len(known)), target) for name, fd, target in job.fds]
    return {
        "rank": job.rank,
        "argv": list(job.argv),
        "path": job.path,
        "env": dict(job.env),
        "stdin": job.stdin,
        "stdout": job.stdout,
        "stderr": job.stderr,
        "fds": places,
        "cpus": list(job.cpus),
        "name": job.name,
        "options": job.options,
        "program": job.program,
    }


def _exec_helpers(theirs: _socket.socket, how: str, preload: list[str] | None, background: bool) -> int:
    """Start a fresh interpreter as keeper and zygote.

    posix_spawn, because the agent may be large, threaded and full of CUDA: nothing of it is copied.
    Its own session, so that Ctrl-C on the terminal reaches the agent alone.
    """
    high = _above(theirs.fileno(), 10)
    actions = [(os.POSIX_SPAWN_DUP2, high, _SOCKET_FD)]
    wishes = -1
    agent = os.getpid()
    if how == "exec":
        words = ["-I", "-S", "-c", _PROGRAM.format(root=_PACKAGE_ROOT, fd=_SOCKET_FD, agent=agent, more="")]
    elif how == "forkserver":
        more = ", __import__('phalanx.workers.function_worker', fromlist='x').runner()"
        code = _PROGRAM.format(root=_PACKAGE_ROOT, fd=_SOCKET_FD, agent=agent, more=more)
        words = [*interpreter_flags(), "-c", code]
    else:
        flags = how.split(" ")[1:]
        options = f"{_SOCKET_FD},{agent}"
        if preload is not None:
            wishes = _wishes(preload, background)
            options += f",{_WISHES_FD}"
            actions.append((os.POSIX_SPAWN_DUP2, wishes, _WISHES_FD))
        words = [*flags, BOOTSTRAP, "zygote", options, _PACKAGE_ROOT]
    everything = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    try:
        return os.posix_spawn(
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
        if wishes >= 0:
            os.close(wishes)


def _wishes(names: list[str], background: bool) -> int:
    """A file with the modules to import, above the numbers that helpers use."""
    from phalanx.kernel import anonymous_file

    low = anonymous_file("phalanx-modules")
    try:
        os.write(low, "\n".join(["nice" if background else "", *names]).encode())
        os.lseek(low, 0, os.SEEK_SET)
        return _above(low, 10)
    finally:
        os.close(low)


def interpreter_flags() -> list[str]:
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # as multiprocessing

    flags: list[str] = _args_from_interpreter_flags()
    return flags


def _fork_helpers(
    ours: _socket.socket, theirs: _socket.socket, runner: Callable[[dict[str, Any]], NoReturn] | None
) -> int:
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
        from phalanx.zygote.keeper import main

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


def _reaped(pid: int, patience: float) -> bool:
    """Wait for our child by event where the kernel has pidfds, else by looking now and then."""
    end = time.monotonic() + patience
    fd = kernel.pidfd(pid)
    try:
        while True:
            try:
                done, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # somebody in this process waits for all children
                return True
            if done:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            if fd is not None:
                poll.register(fd, select.POLLIN)
            poll.poll((left if fd is not None else min(left, 0.01)) * 1000)
    finally:
        if fd is not None:
            os.close(fd)
