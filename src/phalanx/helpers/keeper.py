"""The keeper: the parent of the zygote, which kills what a dead agent or zygote leaves behind.

It is idle during normal operation. When the agent is gone, the keeper kills the zygote's control group
(job_cgroup.py). Where there is none, the zygote gets a moment to kill all processes, and so it does at the
end of the node's lease. When the zygote is gone (or takes too long, or is stopped), the keeper kills every
process that has become its own child: it is a subreaper, so it adopts descendants of dead workers, however
often they forked or called setsid. It is forked from the same small interpreter as the zygote and shares its
pages.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from phalanx import kernel
from phalanx.helpers.channel import Channel
from phalanx.helpers.job_cgroup import JobCgroup, sweep
from phalanx.helpers.launch_watch import LaunchWatch
from phalanx.helpers.messages import KeptTerms, LeaseChanged, PreloadDone, ZygoteKept
from phalanx.helpers.zygote import Become, Zygote, has_children, kill_everything, reap
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from phalanx.helpers.lease_timer import LeaseWitness
    from phalanx.helpers.zygote import Runner

CLEAR_NOW = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # as in spawner.py, which is too large to import here

_IMPORT_LIMIT = 60.0  # seconds for one module
_ZYGOTE_GRACE = 0.3  # for the zygote's clean-up after the agent's death; the total limit is one second

# Stopping a whole control group (systemd, a scheduler) signals keeper and zygote as well. They must survive
# it: the agent receives the same signal and gives the workers their grace.
_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTSTP")


# Not `phalanx`: `pkill phalanx` must not end the agent and both of these at the same moment.
KEEPER = "worker-keeper"
ZYGOTE = "worker-zygote"

_OOM_SCORE = -900  # the keeper is small, and cleans up after all others


def main(sock_fd: int, agent: int, runner: Runner | None = None, wishes_fd: int | None = None) -> Become:
    """The helper process: fork the zygote, then wait for its end or the agent's.

    `wishes_fd`: a file with the modules to preload (PreloadList). Returns only in a fork of the zygote that
    becomes a Python program.
    """
    try:
        return _main(sock_fd, agent, runner, wishes_fd)
    except Become as worker:
        return worker.with_traceback(None)
    except BaseException:  # noqa: BLE001 - cannot be reported; the agent sees its socket close
        os._exit(1)


def _main(sock_fd: int, agent: int, runner: Runner | None, wishes_fd: int | None) -> NoReturn:
    os.set_inheritable(sock_fd, False)  # in a worker, it would hide the agent's death
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    kernel.become_subreaper()
    kernel.wake_at_parent_death()  # a stopped keeper could not kill what a dead agent leaves behind
    # Without an agent, it is made for the next launch, and outlives the one that makes it.
    terms = None if agent else _terms(sock_fd)
    agent_fd = kernel.pidfd(agent) if agent else None
    if agent and os.getppid() != agent:  # it died before the descriptor was open
        os._exit(0)
    # `end` closes when this process exits: the zygote polls `ours`.
    end, ours = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    launch = LaunchWatch(end, agent_fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGCHLD, CLEAR_NOW):
        signal.signal(number, _ignore)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    wishes = PreloadList(wishes_fd)
    while True:
        reports, reports_write = os.pipe()
        net = LastNet()
        if net.zygote == 0:
            signal.set_wakeup_fd(-1)
            launch.close()
            for fd in (wake_read, wake_write, reports):
                os.close(fd)
            _be_zygote(sock_fd, ours.detach(), runner, wishes, reports_write, terms)
        os.close(reports_write)
        kernel.set_name(KEEPER)
        adjust_oom_score(_OOM_SCORE)
        sweep()
        again = ZygoteWatch(net, launch, wake_read, reports, wishes, sock_fd).wait()
        os.close(reports)
        net.close()
        if not again:
            break
    kill_everything([])
    os._exit(0)


def _be_zygote(
    sock_fd: int,
    keeper_fd: int,
    runner: Runner | None,
    wishes: PreloadList,
    reports: int,
    terms: KeptTerms | None,
) -> NoReturn:
    kernel.become_subreaper()  # not inherited over fork, like the next one
    kernel.wake_at_parent_death()
    kernel.set_name(ZYGOTE)
    if wishes.failed:
        adjust_oom_score(0)  # forked by a keeper that has lowered its own
    channel = Channel(_socket.socket(fileno=sock_fd))
    listener = None
    if terms is not None:
        from phalanx.helpers.kept_zygote import listen

        listener = listen(terms.name)  # before the imports: it can be seen, and it is the only one
        if listener is None:
            os._exit(0)
    if wishes.lines:
        from phalanx.helpers.preload.preload import preload

        def report(line: str) -> None:
            os.write(reports, line.encode() + b"\n")

        preload(wishes.lines, wishes.log, report)
    if wishes.asked:
        try:
            channel.send(PreloadDone())
        except OSError:
            pass  # the agent is gone; where this process is to outlive it, its message waits to be read
    wishes.close()
    os.close(reports)
    zygote = Zygote(channel, keeper_fd, runner)
    if terms is None or zygote.keep(terms, listener):
        zygote.run()
    os._exit(0)


def _terms(sock_fd: int) -> KeptTerms:
    """What the launch that made these helpers has left them with."""
    from phalanx.helpers.kept_zygote import let_go

    channel = Channel(_socket.socket(fileno=sock_fd))
    terms, _ = channel.receive()
    channel.detach()
    let_go()
    assert isinstance(terms, KeptTerms)
    return terms


class LastNet:
    """A zygote, forked on construction, and its control group, where there is one."""

    def __init__(self) -> None:
        self._group = JobCgroup.make()
        self.zygote = os.fork() if self._group is None else self._group.fork()
        self.grace = _ZYGOTE_GRACE if self._group is None else 0.0  # the group ends all of them at once

    def close(self) -> None:
        """The zygote is gone: kill what is left."""
        if self._group is not None and not self._group.is_gone():
            kill_everything([])  # reap what was adopted: the group cannot be removed before
            self._group.is_gone()


def adjust_oom_score(score: int) -> None:
    """Change this process's rank for the OOM killer, where that is permitted."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, str(score).encode())
    except OSError:
        pass
    finally:
        os.close(fd)


class PreloadList:
    """What the zygote imports, and the log of it: one file, from the agent."""

    def __init__(self, fd: int | None) -> None:
        self.lines: list[str] = []
        self.asked = fd is not None
        self.failed = False
        self._fd = -1 if fd is None else fd
        if fd is None:
            return
        from phalanx.helpers.preload.preload_log import PreloadLog

        size = os.fstat(fd).st_size
        words, *self.lines = os.pread(fd, size, 0).decode("utf-8", "surrogateescape").split("\n")
        os.lseek(fd, size, os.SEEK_SET)
        os.set_inheritable(fd, False)
        self.log = PreloadLog(fd, size)
        if words.endswith(" nice"):
            from phalanx.helpers.standby import lower_priority

            lower_priority(10)

    def give_up(self) -> None:
        """No process is left that imports: the next zygote imports nothing."""
        self.failed = True
        self.lines = []

    def close(self) -> None:
        """In the zygote: workers must not write into it."""
        if self._fd >= 0:
            os.close(self._fd)


def _ignore(_signum: int, _frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


def close_others(last: int) -> None:
    """Close every descriptor above `last`: workers must not inherit what the agent has open."""
    for entry in os.listdir("/proc/self/fd" if kernel.LINUX else "/dev/fd"):
        if int(entry) > last:
            try:
                os.close(int(entry))
            except OSError:
                pass  # the descriptor of this listing


class ZygoteWatch:
    """The wait for the end of one zygote, and the reasons to end it."""

    def __init__(
        self,
        net: LastNet,
        launch: LaunchWatch,
        wake_read: int,
        reports: int,
        wishes: PreloadList,
        sock_fd: int,
    ) -> None:
        self._net = net
        self._launch = launch
        self._wake_read = wake_read
        self._reports = reports
        self._wishes = wishes
        self._sock_fd = sock_fd
        self._importing = bool(wishes.lines)
        self._late_at = time.monotonic() + _IMPORT_LIMIT
        self._kill_at: float | None = None  # the agent is gone
        self._agent: int | None = None  # as it is polled
        self._lease: LeaseWitness | None = None
        self._poll = select.poll()
        for fd in (wake_read, reports, launch.fileno()):
            self._poll.register(fd, select.POLLIN)
        self._watch_agent()

    def wait(self) -> bool:
        """Wait until it has ended, or has to; True if another one should be forked, which imports nothing."""
        while True:
            ready = {fd for fd, _ in self._poll.poll(self._patience())}
            if self._reports in ready:
                self._read_import_reports()
            agent = self._agent
            if self._launch.fileno() in ready:
                # Before a look at the agent: it may have gone because its zygote is kept.
                self._read_zygote_reports()
            elif agent is not None and agent in ready:
                self._poll.unregister(agent)
                self._agent = None
                self._kill_at = time.monotonic() + self._net.grace
            if self._wake_read in ready and CLEAR_NOW in os.read(self._wake_read, 4096):
                self._kill_at = time.monotonic()
            now = time.monotonic()
            if self._importing and now >= self._late_at:
                # The module takes too long: end the zygote; another one imports nothing.
                self._late_at = now + _IMPORT_LIMIT
                self._wishes.log.write("late")
                os.kill(self._net.zygote, signal.SIGKILL)
            ended = {pid for pid, _ in reap()}
            gone = self._net.zygote in ended or not has_children()
            if gone and self._importing and self._kill_at is None:
                self._wishes.give_up()
                return True
            if (gone and not self._importing) or (self._kill_at is not None and now >= self._kill_at):
                return False
            if not gone and self._lease is not None and self._lease.is_over(self._net.zygote):
                return False

    def _patience(self) -> float | None:
        """For `poll`."""
        lease = None if self._lease is None else self._lease.due
        times = [when for when in (self._kill_at, lease) if when is not None]
        times += [self._late_at] if self._importing else []
        return max(0.0, min(times) - time.monotonic()) * 1000 + 0.999 if times else None

    def _watch_agent(self) -> None:
        """Of the launch that is served now."""
        if self._agent is not None:
            self._poll.unregister(self._agent)
        self._agent = self._launch.agent if self._kill_at is None else None
        if self._agent is not None:
            self._poll.register(self._agent, select.POLLIN)

    def _read_import_reports(self) -> None:
        """How the imports go."""
        text = os.read(self._reports, 1 << 16)
        self._late_at = time.monotonic() + _IMPORT_LIMIT  # per module, not for all of them
        if b"done" in text:
            self._importing = False
        if not text:
            self._poll.unregister(self._reports)

    def _read_zygote_reports(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            self._poll.unregister(agent)  # `read` may close it
        reports, gone = self._launch.read()
        for report, fds in reports:
            if isinstance(report, LeaseChanged):
                if self._lease is None:
                    from phalanx.helpers.lease_timer import LeaseWitness

                    self._lease = LeaseWitness(self._poll)
                self._lease.take(fds)
            elif isinstance(report, ZygoteKept) and self._sock_fd >= 0:
                os.close(self._sock_fd)
                self._sock_fd = -1
        if gone:
            self._poll.unregister(self._launch.fileno())
        self._watch_agent()
