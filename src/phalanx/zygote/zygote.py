"""The helper that is the parent of every worker: it forks them, sees them end, and ends them.

    agent ──► keeper ──► zygote ──► worker … (each the leader of its own session)

* Only what it made: the zygote signals its workers' own process groups while they are unreaped (so
  the number cannot belong to anybody else) and the children it has, adopted ones included. It never
  looks for processes anywhere else.
* Whoever of the three dies, the others clear the field. Agent gone: the zygote's socket closes and
  it kills everything. Zygote gone: workers die by the parent-death signal, and the keeper (keeper.py)
  inherits and kills what they had started. Keeper gone: the zygote kills everything and ends.
* All or nothing: workers are forked, set up, and held at a gate; only when every one of them stands
  there may any of them run the user's program.
* Where the agent said so at the start, the rest of a group is told to stop the moment one fails, and the
  agent hears of it afterwards: what to do next is still decided there.
* Single-threaded, standard library only: it must be safe to fork at any time.

Messages from the agent:  ("spawn", request) ("stop", group, signal, grace) ("park", count, warm-up)
                          ("signal", number, ranks, alone)
Messages to the agent:    ("started", {rank: pid}) ("refused", rank or None, text)
                          ("stopped", group, [text, …]) ("exit", rank, pid, code, when, signalled_at)
                          ("parked", pids)

A *parked* process is a fork made ahead of need: it waits, before the first line of the program and without
rank or environment, until a spawn hands it both (warm/standby.py). The world does not know of it.
"""

from __future__ import annotations

import errno
import os
import select
import time

from phalanx import kernel
from phalanx.warm.standby import StandbyPool
from phalanx.zygote.channel import TooManyFilesError
from phalanx.zygote.rawsignal import signal
from phalanx.zygote.settling import default_signals, in_words, leave_zygote, moved, place

TYPE_CHECKING = False  # importing typing would cost more than everything else here together
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from phalanx.zygote.channel import Channel

    # Runs a worker inside a fork of this process (no exec); must not return.
    Runner = Callable[[dict[str, Any]], NoReturn]

_KILL_TICK = 0.02  # how often SIGKILL is repeated on descendants that are still being adopted
_FIRST_LOOK = 0.05  # adoption is no event, so a stop looks for adopted children: soon,
_LOOK_AGAIN = 0.25  # and then now and then, because a look may cost a scan of /proc
_GIVE_UP = 5.0  # a process that outlives SIGKILL for this long sits in uninterruptible sleep


class Become(Exception):  # not an error: how a fork leaves the zygote's stack
    """Raised in a fork that is to run a Python program: at the top of the stack, as the interpreter would."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        self.spec = spec


class ForkedWorker:
    """One child that runs user code."""

    __slots__ = ("parked", "pid", "rank", "signalled_at")

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.parked = False
        self.signalled_at = 0.0


class StopRequest:
    """A stop in progress: when patience ends, and who has been told already."""

    __slots__ = ("give_up_at", "kill_at", "look_at", "sig", "told")

    def __init__(self, sig: int, now: float, grace: float) -> None:
        self.sig = sig
        self.kill_at = now + grace
        self.give_up_at = self.kill_at + _GIVE_UP
        self.look_at = now + (_FIRST_LOOK if sig else grace)  # signal 0: they leave by themselves
        self.told: set[int] = set()

    def hurry(self, now: float, grace: float) -> None:
        """Asked again: patience can only get shorter."""
        self.kill_at = min(self.kill_at, now + grace)
        self.give_up_at = self.kill_at + _GIVE_UP


class Zygote:
    """The event loop of the helper process."""

    def __init__(self, channel: Channel, keeper_fd: int, runner: Runner | None = None) -> None:
        self.channel = channel
        self.keeper_fd = keeper_fd
        self.runner = runner
        self.workers: dict[int, ForkedWorker] = {}  # by pid, until reaped
        self.stop: StopRequest | None = None
        self.at_failure: tuple[int, float] | None = None  # the signal and grace for the others
        self.group = 0  # groups are numbered by the agent: an answer must not be taken for the next one's
        self._statuses: set[int] = set()  # pipes to workers that are being started
        self.lot = StandbyPool()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the agent or the keeper is gone; then leave nothing behind."""
        poll = select.poll()
        for fd in (self.channel.fileno(), self.keeper_fd, self._wake_read):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience())}
            if self._wake_read in ready:
                _drain(self._wake_read)
            self._reap()
            if self.keeper_fd in ready:
                break
            if self.channel.fileno() in ready and not self._serve():
                break
            if self.stop:
                self._advance(self.stop)
        self._clear_the_field()

    def _patience(self) -> float | None:
        if not self.stop:
            return None
        now = time.monotonic()
        if now < self.stop.kill_at:
            return (min(self.stop.kill_at, self.stop.look_at) - now) * 1000 + 1
        return _KILL_TICK * 1000

    def _serve(self) -> bool:
        try:
            message, fds = self.channel.receive()
        except TooManyFilesError:  # only a start carries any
            return self._tell(("refused", None, os.strerror(errno.EMFILE)))
        except (EOFError, OSError):
            return False
        try:
            if message[0] == "spawn":
                self._spawn(message[1], fds)
            elif message[0] == "stop":
                self._stop(message[1], message[2], message[3])
            elif message[0] == "signal":
                self._signal(message[1], set(message[2]), message[3])
            elif message[0] == "park":
                self._park(message[1], message[2])
        except Become:
            raise  # in the fork; its descriptors are settled
        except (BrokenPipeError, ConnectionError):
            served = False
        else:
            served = True
        for fd in fds:
            os.close(fd)
        return served

    # -- starting ---------------------------------------------------------------------------------

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        self.stop = None
        self.group = request["group"]
        self.at_failure = request["at_failure"]
        made: list[tuple[ForkedWorker, int]] = []
        refusal: tuple[int, str] | None = None
        specs = request["workers"]
        rank = 0
        gate: list[int] = []
        try:
            gate_read, gate_write = gate = list(os.pipe())
            for spec in specs:
                rank = spec["rank"]
                made.append(self._fork(request, spec, fds, gate_read, gate_write))
            for index, (worker, status) in enumerate(made):
                if worker.parked and not _is_there(status):
                    # It died while it was parked, and nobody had noticed yet.
                    rank = worker.rank
                    self._kill_all([worker.pid])
                    self.lot.failures += 1
                    made[index] = self._fork(request, specs[index], fds, gate_read, gate_write, fresh=True)
        except OSError as error:
            what = str(error.strerror)
            refusal = (rank, what if error.errno == errno.EMFILE else f"cannot fork: {what}")
        refusal = refusal or _first_refusal(made, b"ready")
        if refusal is None:
            os.write(gate_write, b"g" * len(made))
            refusal = _first_refusal(made, b"")
        for fd in (*gate, *self._statuses):
            os.close(fd)
        self._statuses.clear()
        if refusal is None:
            self.channel.send(("started", {worker.rank: worker.pid for worker, _ in made}))
            return
        self._kill_all([worker.pid for worker, _ in made])
        self.channel.send(("refused", *refusal))

    def _park(self, count: int, warm_up: str) -> None:
        """Have this many forks waiting."""
        self.lot.warm_up = warm_up
        while len(self.lot.parked) < count and self.lot.failures < 3:
            try:
                handover = self.lot.park(os.getpid())
            except OSError:
                break  # no room for it; restarts are slower then, and nothing else
            if handover is None:
                continue
            # In the fork, once it is needed.
            request, spec, fds, gate_read, status = handover
            self._in_fork(request, spec, fds, gate_read, status)
        self._tell(("parked", list(self.lot.parked)))

    def _fork(
        self,
        request: dict[str, Any],
        spec: dict[str, Any],
        fds: list[int],
        gate_read: int,
        gate_write: int,
        fresh: bool = False,
    ) -> tuple[ForkedWorker, int]:
        status_read, status_write = os.pipe()
        zygote = os.getpid()
        try:
            parked = 0
            if spec["program"] and not fresh:
                parked = self.lot.hand_over(request, spec, fds, gate_read, status_write)
            pid = parked or os.fork()
        except OSError:
            os.close(status_read)
            os.close(status_write)
            raise
        if pid == 0:
            os.close(status_read)
            os.close(gate_write)  # else this child would keep the gate open for itself
            leave_zygote(zygote)
            self._in_fork(request, spec, fds, gate_read, status_write)
        os.close(status_write)
        worker = ForkedWorker(spec["rank"], pid)
        worker.parked = parked > 0
        self.workers[pid] = worker
        self._statuses.add(status_read)
        return worker, status_read

    def _in_fork(
        self, request: dict[str, Any], spec: dict[str, Any], fds: list[int], gate_read: int, status_write: int
    ) -> NoReturn:
        floor = max([3, *(target + 1 for _, _, target in spec["fds"])])
        try:
            # Our own two must not be where a descriptor of the worker is going to be put.
            gate_read, status_write = moved(gate_read, floor), moved(status_write, floor)
            self._become_worker(request, spec, fds, gate_read, status_write)
        except Become:
            raise
        except BaseException as error:  # noqa: BLE001 - the only way out of a forked child is _exit
            _say(status_write, in_words(error, spec))
        os._exit(127)

    def _become_worker(
        self,
        request: dict[str, Any],
        spec: dict[str, Any],
        fds: list[int],
        gate_read: int,
        status: int,
    ) -> NoReturn:
        default_signals(request["ignored"])
        std = [fds[index] for index in request["std"]]
        if spec["stdin"]:
            std[0] = os.open(spec["stdin"], os.O_RDONLY | os.O_CLOEXEC)
        for number, key in ((1, "stdout"), (2, "stderr")):
            if spec[key]:
                std[number] = os.open(spec[key], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        spec["places"] = place(std, [(name, fds[i], target) for name, i, target in spec["fds"]])
        os.chdir(request["cwd"])
        if spec["cpus"]:
            os.sched_setaffinity(0, spec["cpus"])
        _say(status, "ready")
        if os.read(gate_read, 1) != b"g":
            os._exit(127)
        if spec["argv"]:
            os.execve(spec["path"], spec["argv"], {**request["env"], **spec["env"]})
        # What an exec would have closed. Descriptors of the process that asked for "fork" stay open.
        ours = {self.keeper_fd, self._wake_read, self._wake_write, gate_read, status}
        ours |= {channel.detach() for channel in (self.channel, *self.lot.parked.values())}
        for fd in (ours | set(fds) | self._statuses) - set(spec["places"].values()) - {0, 1, 2, -1}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["env"])
        os.environ.update(spec["env"])
        if self.runner is None:
            raise Become(spec)
        self.runner(spec)

    # -- watching ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            worker = None if self.lot.lost(pid) else self.workers.pop(pid, None)
            if worker:
                ended.append((worker, os.waitstatus_to_exitcode(status), time.time()))
        if self.at_failure and not self.stop and any(code for _, code, _ in ended):
            self._stop_others(*self.at_failure)
        for worker, code, when in ended:
            self._tell(("exit", worker.rank, worker.pid, code, when, worker.signalled_at))

    def _stop_others(self, sig: int, grace: float) -> None:
        """One failed: tell the others, unless the agent has just said something, which may be about them."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        if not poll.poll(0):
            self.at_failure = None
            self.stop = StopRequest(sig, time.monotonic(), grace)
            self._signal_workers(self.stop, kill=False)

    def _tell(self, message: tuple[Any, ...]) -> bool:
        try:
            self.channel.send(message)
        except OSError:
            return False  # the agent is gone; its closed socket ends the loop in a moment
        return True

    # -- stopping ---------------------------------------------------------------------------------

    def _signal(self, sig: int, ranks: set[int], alone: bool) -> None:
        send = _signal_one if alone else _signal_group
        for worker in self.workers.values():
            if worker.rank in ranks:
                send(worker.pid, sig)

    def _stop(self, group: int, sig: int, grace: float) -> None:
        if group != self.group:
            return  # of the group before; it is gone
        self.at_failure = None  # from here on the agent says how
        self._reap()  # who is gone by now was not stopped by us, and must not be told so
        now = time.monotonic()
        if self.stop:
            self.stop.hurry(now, grace)
        else:
            self.stop = StopRequest(sig, now, grace)

    def _advance(self, stop: StopRequest) -> None:
        """Tell who has not been told, kill who outstayed, and answer once nobody is left."""
        if not self._anybody():
            self._stopped([])
            return
        now = time.monotonic()
        kill = now >= stop.kill_at
        self._signal_workers(stop, kill)
        if kill or now >= stop.look_at or not self.workers:
            stop.look_at = now + _LOOK_AGAIN
            for pid in self._adopted():
                if kill or pid not in stop.told:
                    _signal_one(pid, signal.SIGKILL if kill else stop.sig or signal.SIGTERM)
                    stop.told.add(pid)
        if kill:
            self._reap()
        if not self._anybody():
            self._stopped([])
        elif now >= stop.give_up_at:
            self._stopped([kernel.describe(pid) for pid in [*self.workers, *self._adopted()]])

    def _signal_workers(self, stop: StopRequest, kill: bool) -> None:
        untold = [worker for worker in self.workers.values() if kill or worker.pid not in stop.told]
        for worker in untold:
            worker.signalled_at = worker.signalled_at or time.time()
            _signal_group(worker.pid, signal.SIGKILL if kill else stop.sig)
            stop.told.add(worker.pid)
        # One that is stopped must hear it too. Not in the loop above: whom we wake may take the processor
        # from us, and the others would wait for their signal until it is gone.
        for worker in untold if not kill else ():
            _signal_group(worker.pid, signal.SIGCONT)

    def _anybody(self) -> bool:
        """Whether anything of the group is left; parked processes are not of it."""
        if not self.lot.parked:
            return _has_children()
        return bool(self.workers) or bool(self._adopted())

    def _adopted(self) -> list[int]:
        """Descendants of workers whose own parents are gone: ours by inheritance."""
        known = self.workers.keys() | self.lot.parked.keys()
        return [pid for pid in kernel.children() if pid not in known]

    def _stopped(self, unkillable: list[str]) -> None:
        self.stop = None
        self._tell(("stopped", self.group, unkillable))

    def _kill_all(self, pids: list[int]) -> None:
        """End children that never ran user code, and forget them."""
        for pid in pids:
            _signal_group(pid, signal.SIGKILL)
            _signal_one(pid, signal.SIGKILL)  # it may not have its own session yet
        for pid in pids:
            self.workers.pop(pid, None)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass

    def _clear_the_field(self) -> None:
        kill_everything([*self.workers, *self.lot.parked])


def kill_everything(sessions: list[int]) -> None:
    """SIGKILL to every child, and to those that are adopted on the way, until there is none."""
    give_up_at = time.monotonic() + _GIVE_UP
    for pid in sessions:
        _signal_group(pid, signal.SIGKILL)
    poll = select.poll()
    while time.monotonic() < give_up_at:
        for pid in kernel.children():
            _signal_one(pid, signal.SIGKILL)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
        poll.poll(2)  # a pause between rounds of killing, not a wait for an event: adoption has none


def _is_there(status: int) -> bool:
    """Whether a parked process took what it was handed; waits for its word, which is left in the pipe."""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll())


def _first_refusal(made: list[tuple[ForkedWorker, int]], expected: bytes) -> tuple[int, str] | None:
    for worker, status in made:
        said = os.read(status, 4096)
        if said != expected:
            return worker.rank, said.decode(errors="replace") or "ended while it was being set up"
    return None


def _signal_group(pid: int, sig: int) -> None:
    try:
        os.killpg(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


def _signal_one(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _say(fd: int, text: str) -> None:
    try:
        os.write(fd, text.encode(errors="replace")[:4000])
    except OSError:
        pass


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _nothing(_signum: int, _frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
