"""The keeper stands between agent and zygote and inherits whatever either of them leaves behind.

It does nothing at all while things go well. When the agent is gone it gives the zygote a moment to
clear the field; when the zygote is gone (or took too long) it kills every process that has become
its own child: it is a subreaper too, so descendants of dead workers come to it, however often they
forked or called setsid. It is forked from the same small interpreter and shares its pages.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from phalanx.processes import kernel
from phalanx.processes.channel import Channel
from phalanx.processes.zygote import Become, Zygote, clear_the_field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from phalanx.processes.zygote import Runner

CLEAR_NOW = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # from the agent: the zygote hangs, end it

_ZYGOTE_GRACE = 0.3  # for the zygote's own clean-up once the agent is gone; the promise is one second

# Somebody who stops a whole control group (systemd, a scheduler) signals these two as well. They must
# not die of it: the agent gets the same signal and gives the workers their grace.
_NOT_FOR_US = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "SIGTSTP")


def main(sock_fd: int, agent: int, runner: Runner | None = None) -> dict[str, Any]:
    """The body of the helper process: fork the zygote, then keep watch.

    Returns in one case only: in a fork of the zygote that is to run a Python program, with its spec.
    """
    try:
        return _main(sock_fd, agent, runner)
    except Become as worker:
        return worker.spec
    except BaseException:  # noqa: BLE001 - there is nobody left to tell; the agent sees its socket close
        os._exit(1)


def _main(sock_fd: int, agent: int, runner: Runner | None) -> NoReturn:
    os.set_inheritable(sock_fd, False)  # a worker that held it would keep the agent from being missed
    for name in _NOT_FOR_US:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    kernel.become_subreaper()
    agent_fd = kernel.pidfd(agent)
    if os.getppid() != agent:  # it died before the descriptor was open
        os._exit(0)
    ours, theirs = os.pipe()  # closes when this process ends: the zygote watches `ours`
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGCHLD, CLEAR_NOW):
        signal.signal(number, _nothing)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    zygote = os.fork()
    if zygote == 0:
        signal.set_wakeup_fd(-1)
        for fd in (theirs, wake_read, wake_write, agent_fd):
            if fd is not None:
                os.close(fd)
        kernel.become_subreaper()  # not inherited over fork
        kernel.set_name("phalanx-zygote")
        Zygote(Channel(socket.socket(fileno=sock_fd)), ours, runner).run()
        os._exit(0)
    os.close(sock_fd)
    os.close(ours)
    kernel.set_name("phalanx-keeper")
    _watch(zygote, agent_fd, wake_read)
    clear_the_field([])
    os._exit(0)


def _nothing(_signum: int, _frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


def close_others(last: int) -> None:
    """Close every descriptor above `last`: what the agent happened to have open is not for its workers."""
    for entry in os.listdir("/proc/self/fd" if kernel.LINUX else "/dev/fd"):
        if int(entry) > last:
            try:
                os.close(int(entry))
            except OSError:
                pass  # the one of this very listing


def _watch(zygote: int, agent_fd: int | None, wake_read: int) -> None:
    """Return once the zygote is gone, by itself or because the agent is gone and it was too slow."""
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    if agent_fd is not None:
        poll.register(agent_fd, select.POLLIN)
    kill_at: float | None = None
    while True:
        patience = None if kill_at is None else max(0.0, kill_at - time.monotonic()) * 1000
        ready = {fd for fd, _ in poll.poll(patience)}
        if agent_fd is not None and agent_fd in ready:
            poll.unregister(agent_fd)
            kill_at = time.monotonic() + _ZYGOTE_GRACE
        elif kill_at is not None and time.monotonic() >= kill_at:
            os.kill(zygote, signal.SIGKILL)
            kill_at = None
        if wake_read in ready and CLEAR_NOW in os.read(wake_read, 4096):
            kill_at = time.monotonic()
        if _is_gone(zygote):
            return


def _is_gone(zygote: int) -> bool:
    """Reap whatever ended; True when the zygote was among it."""
    gone = False
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return gone
        gone = gone or pid == zygote
