"""Standbys: forks of the zygote made in advance, so that a restart costs a message.

A standby is for one local rank: it has LOCAL_RANK and LOCAL_WORLD_SIZE from the beginning, and receives its
other ranks, its log and its environment with the hand-over. Until then it waits, after one of these:

    nothing       a fork of the zygote, as it is
    a warm-up     `module:function`, for example to open a device
    the script    up to `worker.wait_for_rank()` (script_standby.py)

* It belongs to no group and dies with the zygote. If it dies, it is forgotten.
* What it prints is kept in memory and goes to the log of the worker that it becomes; else to nobody.
* A warm-up that fails, or that does not end in time, and a script that ends before it waits, are reported
  in one line and not tried again: starts go on without them.
* A standby that is not ready when a start needs it, or that has loaded a file of the user's that was edited
  since, is killed: the start does not wait.

A *parked worker* (reentry/) is a standby that has run before: it waits for the next place of its local rank
with all of its memory, and takes it before any other standby of this rank does.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time

from phalanx import kernel
from phalanx.helpers.channel import Channel
from phalanx.helpers.fork_setup import leave_zygote
from phalanx.helpers.messages import Handover, StandbyFailed, StandbyPlan, StandbyRank, StandbyReady
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from phalanx.helpers.messages import OwnFile, Program

_MOST_LOST = 3  # standbys that may die for no reason of their own
PRIORITY = 5  # how much nicer than a worker: the running workers come first


class Standby:
    """One standby, as the zygote sees it; without a plan: a parked worker."""

    def __init__(
        self, rank: int, pid: int, channel: Channel, plan: StandbyPlan | None = None, printed: int = -1
    ) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel
        self.was_worker = plan is None
        self.known = StandbyRank() if plan is None else plan.ranks[rank]
        self.warm_up, self.limit, self.cwd = (
            ("", 0.0, "") if plan is None else (plan.warm_up, plan.limit, plan.cwd)
        )
        self.printed = printed  # what it wrote to stderr; -1: nothing is kept
        self.ready = self.was_worker
        limited = bool(self.warm_up) and not self.known.runs_script
        self.ready_by = time.monotonic() + self.limit if limited else None
        self.since = time.time_ns()
        self.files: list[OwnFile] = []  # the user's, which it has loaded
        self.dropped = False  # it is being killed

    def edited(self) -> str:
        """A file that it has loaded and that has changed since; empty: none."""
        tree = os.path.join(first_path(self.known.program, self.cwd), "")
        for path, when, size in self.files:
            try:
                found = os.stat(path)
            except OSError:
                return path
            # A file below the script's directory could have been edited between its import and `files`;
            # elsewhere, a package may just have generated it.
            early = found.st_mtime_ns >= self.since and len(tree) > 1 and path.startswith(tree)
            if early or (found.st_mtime_ns, found.st_size) != (when, size):
                return path
        return ""

    def how_it_ended(self, status: int) -> str:
        """Why it did not get to the point where it waits."""
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            return f"was killed by signal {-code}"
        last = _last_words(self.printed)
        return f"failed: {last}" if code and last else f"exited with code {code}"

    def close(self) -> None:
        self.channel.close()
        if self.printed >= 0:
            os.close(self.printed)


def first_path(program: Program | None, cwd: str) -> str:
    """Where the program's own modules are; empty where that is not known."""
    mode, target = program[:2] if program is not None else ("", "")
    if mode == "script":
        path = os.path.join(cwd, target)
        return path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
    return cwd if mode in ("module", "code") else ""


class StandbyPool:
    """The zygote's standbys, by pid."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll  # the zygote's
        self._all: dict[int, Standby] = {}
        self._lost = 0  # in a row, without a reason of their own
        self._refused = False  # the warm-up or the script does not do: no more standbys
        self.said: list[str] = []  # lines for the user

    def pids(self) -> set[int]:
        """All of them, those that are not ready or about to end included."""
        return set(self._all)

    def parked(self) -> list[int]:
        """Those that wait, workers that re-enter excepted."""
        return [one.pid for one in self._all.values() if one.ready and not (one.was_worker or one.dropped)]

    def survivors(self) -> set[int]:
        """Workers that wait to re-enter."""
        return {one.pid for one in self._all.values() if one.was_worker and not one.dropped}

    def channels(self) -> list[Channel]:
        return [one.channel for one in self._all.values()]

    def fds(self) -> list[int]:
        """What a fork must close."""
        return [one.printed for one in self._all.values() if one.printed >= 0]

    def deadline(self) -> float | None:
        """When `check` must be called at the latest."""
        times = [one.ready_by for one in self._all.values() if one.ready_by is not None]
        return min(times, default=None)

    # -- making them ------------------------------------------------------------------------------

    def take_in(self, worker: Standby) -> None:
        self._all[worker.pid] = worker
        self._poll.register(worker.channel.fileno(), select.POLLIN)

    def drop_survivors(self) -> None:
        """No worker re-enters after all."""
        for one in self._all.values():
            if one.was_worker:
                self._drop(one)

    def missing(self, plan: StandbyPlan) -> list[int]:
        """The ranks that have none of the kind that is wanted; others are killed."""
        if self._refused or self._lost >= _MOST_LOST:
            return []
        have = set()
        for one in self._all.values():
            if one.dropped or one.was_worker:
                continue
            if one.rank < len(plan.ranks) and one.known.runs_script == plan.ranks[one.rank].runs_script:
                have.add(one.rank)
            else:
                self._drop(one)
        return [rank for rank in range(len(plan.ranks)) if rank not in have]

    def fork(self, plan: StandbyPlan, rank: int, zygote: int) -> Channel | None:
        """Fork a standby: None in the zygote, in the fork its end of the channel."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        keeps = bool(plan.warm_up) or plan.ranks[rank].runs_script
        printed: list[int] = []
        try:
            if keeps:
                printed = [kernel.anonymous_file("phalanx-printed") for _ in (1, 2)]
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            for fd in printed:
                os.close(fd)
            raise
        if pid:
            theirs.close()
            if printed:
                os.close(printed[0])
            one = Standby(rank, pid, Channel(ours), plan, printed[1] if printed else -1)
            self._all[pid] = one
            self._poll.register(one.channel.fileno(), select.POLLIN)
            return None
        try:
            leave_zygote(zygote)
            ours.close()
            if printed:
                for number, fd in zip((1, 2), printed, strict=True):
                    os.dup2(fd, number)
                    os.close(fd)
            for one in self._all.values():
                one.close()
            self._all = {}
            return Channel(theirs)
        except BaseException:  # noqa: BLE001 - a standby exits silently, whatever happened
            os._exit(1)

    # -- watching them ----------------------------------------------------------------------------

    def read(self, ready: set[int]) -> None:
        """Read what standbys have sent."""
        for one in self._all.values():
            if one.channel.fileno() in ready and self._read(one):
                self._poll.unregister(one.channel.fileno())  # it is about to be reaped

    def _read(self, one: Standby) -> bool:
        """Take in its messages; whether its end of the channel is closed."""
        messages, gone = one.channel.pending()
        for message, _ in messages:
            if isinstance(message, StandbyReady):
                one.ready, one.ready_by, one.files = True, None, message.files
                self._lost = 0
            elif isinstance(message, StandbyFailed) and not one.dropped:
                self._refuse(one, message.why)
        return gone

    def check(self, now: float) -> None:
        """Kill those that take too long."""
        for one in self._all.values():
            if one.ready_by is not None and now >= one.ready_by:
                self._refuse(one, f"did not finish within {one.limit:g} s and was killed")

    def lost(self, pid: int, status: int) -> bool:
        """Whether a process that exited was a standby."""
        one = self._forget(pid)
        if one is None:
            return False
        if not one.dropped:
            self._read(one)
        if not one.dropped and not one.was_worker:
            if not one.ready and one.known.runs_script:
                self._refuse(one, one.how_it_ended(status))
            elif not one.ready and one.warm_up:
                self._refuse(one, f"ended its process ({one.how_it_ended(status)})")
            else:
                self._lost += 1
        one.close()
        return True

    def died_at_handover(self) -> None:
        """A standby that was taken was dead."""
        self._lost += 1

    def _refuse(self, one: Standby, why: str) -> None:
        """This warm-up or script does not do: no more of them."""
        if not self._refused:
            if one.known.runs_script:
                program = one.known.program
                what = f"standby: {program[1] if program else ''} before wait_for_rank()"
            else:
                what = f"--warmup {one.warm_up}"
            self.said.append(f"{what}: {why}; restarts go on without standbys")
        self._refused = True
        for other in self._all.values():
            if not other.ready:
                self._drop(other)

    def _drop(self, one: Standby) -> None:
        one.dropped = True
        one.ready_by = None
        try:
            os.kill(one.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        except ProcessLookupError:
            pass

    def drop_all(self) -> None:
        for one in self._all.values():
            self._drop(one)

    def _forget(self, pid: int) -> Standby | None:
        one = self._all.pop(pid, None)
        if one is not None:
            try:
                self._poll.unregister(one.channel.fileno())
            except KeyError:
                pass  # its end of the channel is closed
        return one

    # -- using them -------------------------------------------------------------------------------

    def hand_over(self, order: Handover, fds: list[int], parked: bool) -> Standby | None:
        """Give the standby of a rank its work, or the worker that is `parked`; None if none suits.

        The channel of what is returned is the caller's to close."""
        for one in list(self._all.values()):
            if one.rank != order.worker.rank or one.dropped or one.was_worker != parked:
                continue
            if not parked and not self._suits(one, order):
                self._drop(one)
                continue
            self._forget(one.pid)
            try:
                one.channel.send(order, fds)
            except OSError:
                self._all[one.pid] = one  # it has died, and is about to be reaped
                one.dropped = True
                continue
            return one
        return None

    def _suits(self, one: Standby, order: Handover) -> bool:
        if not one.ready:
            return False
        known, worker = one.known, order.worker
        if known.runs_script and (
            known.program != worker.program
            or one.cwd != order.group.cwd
            or list(known.cpus) != list(worker.cpus)
            or any(worker.env.get(name) != value for name, value in known.env.items())
        ):
            return False
        edited = one.edited()
        if edited:
            line = f"standby: {edited} has changed since it was loaded; starting anew"
            if line not in self.said:
                self.said.append(line)
        return not edited


# -- in the standby -------------------------------------------------------------------------------


def wait_for_handover(channel: Channel, plan: StandbyPlan, rank: int) -> tuple[Handover, list[int]]:
    """Run the warm-up, if there is one, and wait for the hand-over."""
    lower_priority(PRIORITY)
    import fcntl  # noqa: F401 - needed to place descriptors; imported now to make the restart faster

    files: list[OwnFile] = []
    if plan.warm_up:
        known = plan.ranks[rank]
        os.environ.update(known.env)
        if known.cpus:
            os.sched_setaffinity(0, known.cpus)
        first = first_path(known.program, plan.cwd)
        if first and not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path.insert(0, first)  # undone with the rest of sys.path when it becomes a worker
        why = _warm_up(plan.warm_up)
        if why:
            channel.send(StandbyFailed(why))
            os._exit(1)
        from phalanx.helpers.preload.import_recorder import homes

        files = loaded_files(homes())
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                pass  # missing, or closed by the warm-up
    return receive_handover(channel, files)


def receive_handover(channel: Channel, files: list[OwnFile]) -> tuple[Handover, list[int]]:
    """Report that this standby is ready, and wait for its rank."""
    channel.send(StandbyReady(files))
    order, fds = channel.receive()
    channel.close()
    if not isinstance(order, Handover):
        raise EOFError
    return order, fds


def _warm_up(what: str) -> str:
    """Run it; returns why that was not possible."""
    module, _, name = what.partition(":")
    try:
        imported: Any = __import__(module, fromlist=["_"])
        function = getattr(imported, name, None)
        if function is None:
            return f"module {module!r} has no function {name!r}"
        function()
    except BaseException as error:  # noqa: BLE001 - SystemExit too: it is the user's
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ""


def loaded_files(but: tuple[str, ...] = (), main: str = "") -> list[OwnFile]:
    """The files that this process has loaded, `but` those in these directories: an edit makes it stale."""
    paths = [main] if main else []
    for module in list(sys.modules.values()):
        spec: Any = getattr(module, "__dict__", {}).get("__spec__")
        place = spec.origin if getattr(spec, "has_location", False) else None
        if isinstance(place, str) and os.path.isabs(place) and not place.startswith(but):
            paths.append(place)
    found = []
    for path in dict.fromkeys(paths):
        try:
            state = os.stat(path)
        except OSError:
            continue  # in a zip file
        found.append((path, state.st_mtime_ns, state.st_size))
    return found


def _last_words(fd: int) -> str:
    """The last line of text in a file, shortened; after a traceback, with the place that it names last."""
    if fd < 0:
        return ""
    size = os.fstat(fd).st_size
    text = os.pread(fd, 4096, max(0, size - 4096)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    for line in reversed(lines):
        start, _, rest = line.partition('", line ')
        if start.startswith('File "') and not start.startswith('File "<') and rest:
            return f"{lines[-1][:300]} ({start[6:]}:{rest.split(',')[0]})"
    return lines[-1][:300]


def lower_priority(by: int) -> None:
    """Lower this process's priority, if that can be undone: a worker must run at full priority.

    Raising it again takes a privilege or a limit (RLIMIT_NICE); a fork tries it out, because a failed attempt
    cannot be undone.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    trial = os.fork()
    if trial == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, before + by)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(trial, 0)[1] == 0:
        os.setpriority(os.PRIO_PROCESS, 0, before + by)
