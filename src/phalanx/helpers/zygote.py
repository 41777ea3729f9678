"""The helper process that is the parent of every worker: it forks, reaps, signals and kills them.

    agent ──► keeper ──► zygote ──► worker … (each the leader of its own session)

* The zygote signals only its workers' process groups, before it reaps them (so that the number cannot have
  been reused), and its own children, adopted ones included. It never searches for other processes.
* The agent gets a pidfd of every worker, and sees an exit although the zygote is stopped (witness.py).
* At the end of the node's lease it kills the workers: the agent may be stopped (lease_timer.py). If both are
  stopped, the keeper kills the zygote, and the workers with it.
* If agent, keeper or zygote dies, the others kill all remaining processes (docs/design.md has the table).
* All or nothing: workers are forked, set up, and held at a gate; none of them runs the user's program until
  all have arrived there.
* If the agent asked for it at the start, the zygote stops the rest of a group as soon as one worker fails,
  and reports it afterwards; the agent decides what happens next. Not if workers of the group re-enter.
* A recall is a stop that workers may outlive: one that unwinds and parks in time is a standby from then on,
  with its memory, and gets its next place as any standby does (helpers/standby.py, reentry/).
* Single-threaded, standard library only: it must be safe to fork at any time.

A *standby* is a fork made in advance: it waits before the first line of the program, or in it, without rank
or log, until a spawn supplies both (helpers/standby.py).
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import time

from phalanx import kernel
from phalanx.core.group import stop as stops
from phalanx.helpers import messages
from phalanx.helpers.channel import Channel, TooManyFilesError
from phalanx.helpers.fork_setup import WorkerSeat, default_signals, leave_zygote
from phalanx.helpers.forked_worker import ForkedWorker, ReentryLink, StopRequest
from phalanx.helpers.guard import GroupGuard, guards_for
from phalanx.helpers.standby import Standby, StandbyPool, wait_for_handover
from phalanx.rawsignal import signal

TYPE_CHECKING = False  # importing typing would cost more than everything else here together
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from phalanx.core.record import Record
    from phalanx.helpers.kept_zygote import Adoption
    from phalanx.helpers.script_standby import ScriptStandby

    # Runs a worker, with the places of its descriptors, inside a fork of this process; must not return.
    Runner = Callable[[messages.WorkerLaunch, dict[str, int]], NoReturn]

_KILL_TICK = 0.02  # how often SIGKILL is repeated while descendants are being adopted
_LOOK_AGAIN = 0.25  # between two checks of a stop for adopted children: a check may scan /proc
_OWN_GROUP_AFTER = 0.25  # a zygote whose children do not end kills its control group, where it has one
_LONG = 1e6  # seconds; `poll` takes not much more
_TAKE_OVER = 1.0  # seconds for a standby to accept its work; it may be stopped


class Become(Exception):  # not an error: it unwinds the zygote's stack
    """Raised in a fork that becomes a Python program, so that the program runs at the top of the stack."""

    def __init__(
        self, launch: messages.WorkerLaunch, places: dict[str, int], standby: ScriptStandby | None = None
    ) -> None:
        super().__init__()
        self.launch = launch
        self.places = places  # of descriptors, by their names
        self.standby = standby  # it runs the program ahead of its rank


class Zygote:
    """The event loop of the helper process."""

    def __init__(self, channel: Channel, keeper_fd: int, runner: Runner | None = None) -> None:
        self.channel = channel
        self._keeper = Channel(_socket.socket(fileno=keeper_fd))  # it never answers; readable: it has ended
        self.runner = runner
        self.workers: dict[int, ForkedWorker] = {}  # by pid, until reaped
        self.stop: StopRequest | None = None
        self.at_failure: tuple[int, float] | None = None  # signal and grace for the others if one fails
        self.group = 0  # the agent's number for the group: a late answer must not count for the next one
        self._statuses: set[int] = set()  # pipes from workers that are being started
        self._guards: dict[int, GroupGuard] = {}  # by pid, until nothing of the group is left
        self._lease = -1  # a timer: the workers may run until then; -1: without a limit
        self._poll = select.poll()
        self.standbys = StandbyPool(self._poll)
        self._parked: list[int] = []  # as the agent knows it
        self._terms: messages.KeptTerms | None = None  # of a launch that has asked for nothing yet
        self._adopter = -1  # the pidfd of its agent
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the agent or the keeper is gone; then kill all remaining processes."""
        for fd in (self.channel.fileno(), self._keeper.fileno(), self._wake_read):
            self._poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._patience())}
            if self._wake_read in ready:
                kernel.drain(self._wake_read)
            self._reap()
            self._read_workers(ready)
            self.standbys.read(ready)
            self.standbys.check(time.monotonic())
            self._report_standbys()
            if self._keeper.fileno() in ready:
                break
            if self._lease in ready:
                self._fence()
            if self.channel.fileno() in ready and not self._serve():
                break
            if self.stop:
                self._advance(self.stop)
        for guard in self._guards.values():
            guard.fire()
        kill_everything([*self.workers, *self.standbys.pids()])

    def _patience(self) -> float | None:
        now = time.monotonic()
        times = [self.standbys.deadline()]
        if self.stop:
            unwinding, terms = bool(self.stop.recalled), self.stop.terms
            if now >= terms.kill_at and not (unwinding and now < terms.park_by):
                return _KILL_TICK * 1000
            times += [max(terms.kill_at, now + _KILL_TICK), self.stop.look_at]
            times += [terms.park_by] if unwinding else []
        until = min((when for when in times if when is not None), default=None)
        return None if until is None else min(_LONG, max(0.0, until - now)) * 1000 + 1

    def _serve(self) -> bool:
        try:
            message, fds = self.channel.receive()
        except TooManyFilesError:  # only a spawn carries descriptors
            return self._report(messages.SpawnRefused(None, os.strerror(errno.EMFILE)))
        except (EOFError, OSError):
            return self._keep_unused()
        self._forget_terms()
        if isinstance(message, messages.KeptTerms):
            self._poll.unregister(self.channel.fileno())
            return self.keep(message) and self._watch_channel()
        try:
            self._obey(message, fds)
        except ConnectionError:
            return False
        for fd in fds:
            os.close(fd)
        return True

    def _obey(self, message: Record, fds: list[int]) -> None:
        if isinstance(message, messages.SpawnGroup):
            self._spawn(message, fds)
        elif isinstance(message, messages.StopGroup):
            self._stop(message)
        elif isinstance(message, messages.RecallGroup):
            self._recall(message)
        elif isinstance(message, messages.SignalWorkers):
            send = _signal_one if message.alone else _signal_group
            for worker in self.workers.values():
                if worker.rank in message.ranks:
                    send(worker.pid, message.signal)
        elif isinstance(message, messages.StandbyPlan):
            self._fork_standbys(message)

    # -- starting ---------------------------------------------------------------------------------

    def _spawn(self, group: messages.SpawnGroup, fds: list[int]) -> None:
        self.stop = None
        self.group, self.at_failure = group.group, group.at_failure
        self._release_guards()
        self._take_lease(os.dup(fds[group.lease]) if group.lease >= 0 else -1)
        made: list[tuple[ForkedWorker, int]] = []
        refusal: tuple[int, str] | None = None
        alone = group.replace(workers=[])
        orders = [messages.Handover(alone, launch) for launch in group.workers]
        rank = 0
        gate: list[int] = []
        try:
            gate = list(os.pipe())
            for order in orders:
                rank = order.worker.rank
                made.append(self._fork(order, fds, gate))
            for index, (worker, status) in enumerate(made):
                if worker.was_standby and not _took_over(status):
                    # It died while it was waiting, and was not reaped yet.
                    rank = worker.rank
                    self._kill_all([worker.pid])
                    if not worker.reenters:
                        self.standbys.died_at_handover()
                    made[index] = self._fork(orders[index], fds, gate, fresh=True)
        except OSError as error:
            what = str(error.strerror)
            refusal = (rank, what if error.errno == errno.EMFILE else f"cannot fork: {what}")
        refusal = refusal or _first_refusal(made, b"ready")
        if refusal is None:
            self._guards |= guards_for(worker.pid for worker, _ in made if worker.pid not in self._guards)
            self._show_workers(made)
            if self._lease >= 0 and kernel.is_readable(self._lease):
                self._fence()  # this process, or the agent, was stopped meanwhile: none of them runs
            os.write(gate[1], b"g" * len(made))
            refusal = _first_refusal(made, b"")
        for fd in (*gate, *self._statuses):
            os.close(fd)
        self._statuses.clear()
        if refusal is None:
            self.channel.send(messages.WorkersStarted({worker.rank: worker.pid for worker, _ in made}))
            return
        self._kill_all([worker.pid for worker, _ in made])
        self._release_guards()
        self.channel.send(messages.SpawnRefused(*refusal))

    def _show_workers(self, made: list[tuple[ForkedWorker, int]]) -> None:
        """Give the agent its own view of them, before they run: this process may be stopped at any time."""
        watched = kernel.pidfds([os.getpid(), *(worker.pid for worker, _ in made)])
        try:
            if watched:
                self.channel.send(
                    messages.WorkersForked({worker.rank: worker.pid for worker, _ in made}), watched
                )
        finally:
            for fd in watched:
                os.close(fd)

    def _release_guards(self) -> None:
        """Of processes that are gone; workers that re-enter keep theirs."""
        kept = self.standbys.survivors()
        for pid, guard in self._guards.items():
            if pid not in kept:
                guard.release()
        self._guards = {pid: guard for pid, guard in self._guards.items() if pid in kept}

    def _fork_standbys(self, plan: messages.StandbyPlan) -> None:
        """Have one standby of the kind that is wanted for each rank."""
        for rank in self.standbys.missing(plan):
            try:
                channel = self.standbys.fork(plan, rank, os.getpid())
            except OSError:
                break  # out of resources: restarts are slower
            if channel is not None:
                self._be_standby(channel, plan, rank)
        self._report_standbys(always=True)

    def _be_standby(self, channel: Channel, plan: messages.StandbyPlan, rank: int) -> NoReturn:
        """In the fork: wait, then become a worker."""
        try:
            for fd in self._of_this_group():
                os.close(fd)
            self._guards, self._lease = {}, -1
            if plan.ranks[rank].runs_script:
                self._run_script(channel, plan, rank)
            order, fds = wait_for_handover(channel, plan, rank)
        except Become:
            raise
        except BaseException:  # noqa: BLE001 - a standby exits silently, whatever happened
            os._exit(1)
        self._become_worker(order, fds, replays=bool(plan.warm_up))

    def _run_script(self, channel: Channel, plan: messages.StandbyPlan, rank: int) -> NoReturn:
        from phalanx.helpers.script_standby import ScriptStandby
        from phalanx.helpers.standby import PRIORITY, lower_priority

        known = plan.ranks[rank]
        default_signals(plan.ignored)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)
        os.chdir(plan.cwd)
        if known.cpus:
            os.sched_setaffinity(0, known.cpus)
        lower_priority(PRIORITY)
        for fd in self._own_fds() - {-1}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(plan.env)
        os.environ.update(known.env)
        options = known.options.partition(":")[0]  # the tally comes with the hand-over
        launch = messages.WorkerLaunch(rank, program=known.program, options=options)
        raise Become(launch, {}, ScriptStandby(channel, plan, rank))

    def _own_fds(self) -> set[int]:
        """Descriptors of the zygote itself, for a fork to close."""
        ours = {self._wake_read, self._wake_write, self._lease, *self.standbys.fds()}
        links = [worker.channel for worker in self.workers.values() if worker.channel is not None]
        channels = (self.channel, self._keeper, *self.standbys.channels(), *links)
        return ours | {channel.detach() for channel in channels}

    def _report_standbys(self, always: bool = False) -> None:
        """What has changed: the agent shows how many there are."""
        parked = self.standbys.parked()
        if always or parked != self._parked:
            self._parked = parked
            self._report(messages.StandbysParked(parked))
        said, self.standbys.said = self.standbys.said, []
        for line in said:
            self._report(messages.StandbyRemark(line))

    def _of_this_group(self) -> list[int]:
        """Descriptors that a standby, which belongs to the next group, must not keep open."""
        fds = [fd for guard in self._guards.values() for fd in guard.fds()]
        links = [worker.channel for worker in self.workers.values() if worker.channel is not None]
        fds += [channel.detach() for channel in links]
        return fds if self._lease < 0 else [*fds, self._lease]

    def _fork(
        self, order: messages.Handover, fds: list[int], gate: list[int], fresh: bool = False
    ) -> tuple[ForkedWorker, int]:
        """A worker at the gate, and its status pipe: a parked one, a standby, or a fork; `fresh`: a fork."""
        gate_read, gate_write = gate
        status_read, status_write = os.pipe()
        zygote = os.getpid()
        link: ReentryLink | None = None
        launch = order.worker
        try:
            standby = None
            if not fresh:
                standby = self.standbys.hand_over(order, [*fds, gate_read, status_write], parked=True)
            parked = standby is not None
            if not parked and launch.reentry:
                link = ReentryLink()
                launch, fds = link.added(launch, fds)
                order = messages.Handover(order.group, launch)
            came = [*fds, gate_read, status_write]
            if standby is None and launch.program and not fresh:
                standby = self.standbys.hand_over(order, came, parked=False)
            pid = standby.pid if standby is not None else os.fork()
        except OSError:
            os.close(status_read)
            os.close(status_write)
            if link is not None:
                link.close()
            raise
        if pid == 0:
            os.close(status_read)
            os.close(gate_write)  # or this child would keep the gate open for itself
            if link is not None:
                link.ours.close()
                link.theirs.detach()  # one of `fds`, which are closed by their numbers
            leave_zygote(zygote)
            self._become_worker(order, came)
        os.close(status_write)
        channel = standby.channel if standby is not None and parked else None
        if standby is not None and not parked:
            standby.close()
        if link is not None:
            link.theirs.close()
            channel = Channel(link.ours)
        worker = ForkedWorker(launch.rank, pid, channel)
        worker.was_standby, worker.reenters = standby is not None, parked
        self.workers[pid] = worker
        if channel is not None:
            self._poll.register(channel.fileno(), select.POLLIN)
        self._statuses.add(status_read)
        return worker, status_read

    def _become_worker(self, order: messages.Handover, fds: list[int], replays: bool = False) -> NoReturn:
        seat, launch = WorkerSeat(order, fds), order.worker
        try:
            default_signals(order.group.ignored)
            seat.open(replays)
            os.chdir(order.group.cwd)
            if launch.cpus:
                os.sched_setaffinity(0, launch.cpus)
            seat.wait_at_gate()
            env = {**order.group.env, **launch.env}
            if launch.argv:
                os.execve(launch.path, list(launch.argv), env)
            seat.settle(self._own_fds() | self._statuses)
            os.environ.clear()
            os.environ.update(env)
            if self.runner is None:
                raise Become(launch, seat.places)
            self.runner(launch, seat.places)
        except Become:
            raise
        except BaseException as error:  # noqa: BLE001 - the only way out of a forked child is _exit
            seat.fail(error)

    # -- between two launches ---------------------------------------------------------------------

    def keep(self, terms: messages.KeptTerms, listener: _socket.socket | None = None) -> bool:
        """The job is over: wait for the next launch of its script. False: end."""
        from phalanx.helpers.kept_zygote import KeptZygote, let_go, listen

        self.standbys.drop_all()
        if not self.workers:
            kill_everything([])
            self._forget_children()
            listener = listener or listen(terms.name)
        if listener is None:
            return self._report(messages.KeptAnswer(False))
        self._keeper.post(messages.ZygoteKept())
        self._report(messages.KeptAnswer(True))
        self.channel.close()
        let_go()
        while listener is not None:
            adoption = KeptZygote(terms, listener).wait(self._keeper.fileno(), self._wake_read)
            if adoption is None:
                break
            if self._serve_launch(adoption, terms):
                return True
            self._keeper.post(messages.ZygoteKept())  # as before: that launch is gone
            let_go()
            listener = listen(terms.name)
        os._exit(0)

    def _keep_unused(self) -> bool:
        """The launch has not waited for this process, which is kept for the next one; False: end."""
        terms, alive = self._terms, self._adopter >= 0 and not kernel.is_readable(self._adopter)
        self._forget_terms()
        if terms is None or not alive:
            return False
        self._poll.unregister(self.channel.fileno())
        return self.keep(terms) and self._watch_channel()

    def _watch_channel(self) -> bool:
        self._poll.register(self.channel.fileno(), select.POLLIN)
        return True

    def _forget_terms(self) -> None:
        self._terms = None
        if self._adopter >= 0:
            os.close(self._adopter)
        self._adopter = -1

    def _forget_children(self) -> None:
        """Nothing of the last job is left."""
        for pid, status in [*reap(), *((pid, 0) for pid in self.standbys.pids())]:
            self.standbys.lost(pid, status)
        self._release_guards()
        self._take_lease(-1)
        self.stop = self.at_failure = None
        self.group = 0
        self._parked = []
        self.standbys = StandbyPool(self._poll)

    def _serve_launch(self, adoption: Adoption, terms: messages.KeptTerms) -> bool:
        """Belong to another agent from now on; whether it is still there."""
        from phalanx.helpers.kept_zygote import take_hold, use_streams

        above = kernel.pidfd(os.getppid())
        try:
            if above is None:
                os._exit(0)
            self._keeper.post(messages.ZygoteAdopted(adoption.nice), [adoption.agent, adoption.tether])
            take_hold(adoption.nice)
            use_streams(adoption.std)
            adoption.channel.send(messages.TakenOver(os.getppid(), terms.names), [above])
            self._terms, self._adopter = terms, os.dup(adoption.agent)
        except OSError:
            return False
        finally:
            adoption.close_fds()
            if above is not None:
                os.close(above)
        self.channel = adoption.channel
        return True

    # -- watching ---------------------------------------------------------------------------------

    def _reap(self) -> None:
        ended = []
        for pid, status in reap():
            worker = None if self.standbys.lost(pid, status) else self._take_out(pid)
            if worker:
                self._read_worker(worker)  # its last words
                self._end_link(worker)
                ended.append((worker, os.waitstatus_to_exitcode(status), time.time()))
        if self.at_failure and not self.stop and any(code for _, code, _ in ended):
            self._read_workers()  # one may have said a moment ago that it re-enters
            if not any(worker.reenters for worker in self.workers.values()):
                self._stop_others(*self.at_failure)
        for worker, code, when in ended:
            self._report(messages.Exit(worker.rank, worker.pid, code, when, worker.signalled_at))

    def _stop_others(self, sig: int, grace: float) -> None:
        """Stop the other workers after a failure, unless a message from the agent waits: it may be a stop."""
        if not kernel.is_readable(self.channel.fileno()):
            self.at_failure = None
            self.stop = StopRequest(sig, time.monotonic(), grace)
            self._signal_workers(self.stop, kill=False)

    def _take_out(self, pid: int) -> ForkedWorker | None:
        """A worker has ended, or parks."""
        if self.stop:
            self.stop.recalled.discard(pid)
        return self.workers.pop(pid, None)

    def _end_link(self, worker: ForkedWorker, closes: bool = True) -> None:
        """Read no more from this worker."""
        channel, worker.channel = worker.channel, None
        if channel is None:
            return
        try:
            self._poll.unregister(channel.fileno())
        except KeyError:
            pass
        if closes:
            channel.close()

    def _read_workers(self, ready: set[int] | None = None) -> None:
        """Workers report that they re-enter, that they have parked, or that they cannot."""
        for worker in list(self.workers.values()):
            if worker.channel is None or (ready is not None and worker.channel.fileno() not in ready):
                continue
            if self._read_worker(worker):
                self._end_link(worker)
                if worker.reenters:
                    self._on_worker_message(worker, messages.CanReenter(False))

    def _read_worker(self, worker: ForkedWorker) -> bool:
        """Take in what a worker has sent; whether its end of the channel is closed."""
        if worker.channel is None:
            return False
        messages, gone = worker.channel.pending()
        for message, fds in messages:
            for fd in fds:
                os.close(fd)
            self._on_worker_message(worker, message)
        return gone

    def _on_worker_message(self, worker: ForkedWorker, message: Record) -> None:
        if isinstance(message, messages.CanReenter):
            worker.reenters = message.can
            self._report(messages.WorkerReenters(self.group, worker.rank, message.can))
            if self.stop and not message.can:
                self.stop.recalled.discard(worker.pid)  # stopped like the others
        elif isinstance(message, messages.Unfit):
            self._report(messages.WorkerUnfit(self.group, worker.rank, message.why))
        elif (
            isinstance(message, messages.Parked)
            and self.stop
            and worker.pid in self.stop.recalled
            and worker.channel
        ):
            channel = worker.channel
            self._take_out(worker.pid)
            self._end_link(worker, closes=False)
            self.standbys.take_in(Standby(worker.rank, worker.pid, channel))
            self._report(messages.WorkerParked(self.group, worker.rank))

    def _report(self, message: Record) -> bool:
        try:
            self.channel.send(message)
        except OSError:
            return False  # the agent is gone; its closed socket ends the loop
        return True

    def _take_lease(self, lease: int) -> None:
        """Kill the workers at this time; -1: at no time. The keeper does, if this process is stopped."""
        old, self._lease = self._lease, lease
        if old >= 0:
            self._poll.unregister(old)
            os.close(old)
        if lease >= 0:
            self._poll.register(lease, select.POLLIN)
        if old >= 0 or lease >= 0:
            try:
                self._keeper.post(messages.LeaseChanged(), [lease] if lease >= 0 else [])
            except OSError:
                pass  # it has ended, and so does this process

    def _fence(self) -> None:
        """The agent has not renewed the lease in time: it is stopped, and another node may take its place."""
        now, begins = time.monotonic(), self.stop is None
        if self.stop:
            self.stop.hurry(now, 0.0)  # a grace must not outlast the lease
        elif self.workers:
            self.at_failure = None
            self.stop = StopRequest(signal.SIGKILL, now, 0.0)
        if self.stop:
            self._signal_workers(self.stop, kill=True)
        # Until the next start: the timer may stay as it is. Only now: the keeper relies on it.
        self._take_lease(-1)
        if self.stop and begins:
            self._report(messages.WorkersFenced(self.group))

    # -- stopping ---------------------------------------------------------------------------------

    def _stop(self, order: messages.StopGroup) -> None:
        if order.group != self.group:
            return  # for an earlier group, which is gone
        now = self._begin_stop()
        self.standbys.drop_survivors()
        if self.stop:
            self.stop.hurry(now, order.grace)
        else:
            self.stop = StopRequest(order.signal, now, order.grace)

    def _begin_stop(self) -> float:
        self.at_failure = None  # the agent is in charge now
        self._reap()  # workers that have exited by now must not count as stopped
        self._report(messages.GroupStopping(self.group))
        return time.monotonic()

    def _recall(self, order: messages.RecallGroup) -> None:
        """A stop that workers may outlive."""
        if order.group != self.group:
            return
        now = self._begin_stop()
        if self.stop:
            self.stop.hurry(now, order.grace)
            return
        self.stop = StopRequest(order.signal, now, order.grace, order.timeout)
        # First: the end of a large process takes long, and the next round waits for it.
        for worker in [one for one in self.workers.values() if one.rank in order.culprits]:
            worker.signalled_at = time.time()
            _signal_group(worker.pid, signal.SIGKILL)
            self.stop.signalled.add(worker.pid)
        for worker in self.workers.values():
            if worker.rank not in order.culprits and worker.reenters and worker.channel is not None:
                try:
                    worker.channel.post(messages.Recall(order.cause))
                except OSError:
                    continue  # it ends
                worker.signalled_at = time.time()
                self.stop.recalled.add(worker.pid)

    def _kill_late(self, stop: StopRequest) -> None:
        """Workers that have not parked in time."""
        for pid in stop.recalled & self.workers.keys():
            text = f"did not re-enter within {stop.terms.park_by - stop.began:g} s"
            self._report(messages.WorkerUnfit(self.group, self.workers[pid].rank, text))
            _signal_group(pid, signal.SIGKILL)
            stop.signalled.add(pid)
        stop.recalled = set()

    def _advance(self, stop: StopRequest) -> None:
        """Signal new processes, kill after the grace, and report when no process is left."""
        if not self._is_anything_left():
            self._report_stopped([])
            return
        now = time.monotonic()
        if stop.recalled and now >= stop.terms.park_by:
            self._kill_late(stop)
        stop.terms, _ = stops.tick(stop.terms, now)
        kill = stop.terms.stage != stops.SIGNALLED
        self._signal_workers(stop, kill)
        if kill or now >= stop.look_at or not self.workers:
            stop.look_at = now + _LOOK_AGAIN
            late = kill or now >= stop.sweep_at
            for pid in self._adopted():
                if late or pid not in stop.signalled:
                    _signal_one(pid, signal.SIGKILL if late else stop.terms.sig or signal.SIGTERM)
                    stop.signalled.add(pid)
        if kill:
            self._reap()
        if not self._is_anything_left():
            self._report_stopped([])
        elif stop.terms.stage == stops.GIVEN_UP:
            self._report_stopped([kernel.describe(pid) for pid in [*self.workers, *self._adopted()]])

    def _signal_workers(self, stop: StopRequest, kill: bool) -> None:
        workers = [worker for worker in self.workers.values() if worker.pid not in stop.recalled]
        pending = [worker for worker in workers if kill or worker.pid not in stop.signalled]
        for worker in pending:
            worker.signalled_at = worker.signalled_at or time.time()
            _signal_group(worker.pid, signal.SIGKILL if kill else stop.terms.sig)
            stop.signalled.add(worker.pid)
        # A stopped process must receive it too. Not in the loop above: a process that wakes up may take this
        # processor, and delay the signals to the others.
        for worker in pending if not kill else ():
            _signal_group(worker.pid, signal.SIGCONT)
        if kill:
            # What is left of the groups whose leaders are reaped, all of it at once: single processes could
            # fork faster than they are killed.
            for pid in self._guards.keys() - self.workers.keys() - self.standbys.survivors():
                self._guards.pop(pid).fire()

    def _is_anything_left(self) -> bool:
        """Whether a process of the group is left; standbys do not belong to it."""
        if not self.standbys.pids():
            return has_children()
        return bool(self.workers) or bool(self._adopted())

    def _adopted(self) -> list[int]:
        """Descendants of workers whose own parents have exited."""
        known = self.workers.keys() | self.standbys.pids()
        found = [pid for pid in kernel.children() if pid not in known]
        kept = self.standbys.survivors() | (self.stop.recalled if self.stop else set())
        return [pid for pid in found if _session(pid) not in kept] if kept else found

    def _report_stopped(self, unkillable: list[str]) -> None:
        self.stop = None
        self._release_guards()
        self._report(messages.GroupStopped(self.group, unkillable))

    def _kill_all(self, pids: list[int]) -> None:
        """Kill and reap children that never ran user code."""
        for pid in pids:
            _signal_group(pid, signal.SIGKILL)
            _signal_one(pid, signal.SIGKILL)  # it may not have its own session yet
        for pid in pids:
            worker = self.workers.pop(pid, None)
            if worker is not None:
                self._end_link(worker)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                pass


def _session(pid: int) -> int:
    """The worker whose session a process is in."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def kill_everything(sessions: list[int]) -> None:
    """Send SIGKILL to every child, including those adopted meanwhile, until none is left."""
    give_up_at = time.monotonic() + stops.UNKILLABLE
    own_group_at: float | None = time.monotonic() + _OWN_GROUP_AFTER
    for pid in sessions:
        _signal_group(pid, signal.SIGKILL)
    poll = select.poll()
    while time.monotonic() < give_up_at:
        for pid in kernel.children():
            _signal_one(pid, signal.SIGKILL)
        for _ in reap():
            pass
        if not has_children():
            return
        if own_group_at is not None and time.monotonic() >= own_group_at:
            from phalanx.helpers.job_cgroup import kill_own

            own_group_at = None
            kill_own()  # they fork faster than they can be killed
        poll.poll(2)  # a pause: adoption raises no event to wait for


def reap() -> Iterator[tuple[int, int]]:
    """Reap the children that have exited: their pids and statuses."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _took_over(status: int) -> bool:
    """Whether a standby accepted its work; waits for its message, which stays in the pipe."""
    poll = select.poll()
    poll.register(status, select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(_TAKE_OVER * 1000))


def _first_refusal(made: list[tuple[ForkedWorker, int]], expected: bytes) -> tuple[int, str] | None:
    for worker, status in made:
        answer = os.read(status, 4096)
        if answer != expected:
            return worker.rank, answer.decode(errors="replace") or "exited during set-up"
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


def has_children() -> bool:
    """Whether this process has children, exited ones included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _ignore(_signum: int, _frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
