"""Parked processes: forks of the zygote made ahead of need, so that a restart costs a message.

A parked process waits for a hand-over: the request, its own part of it, and the descriptors. It may run
a warm-up first (`module:function`, to open a device, say). It has no rank, writes no log, and belongs to
no group; when it dies it is forgotten, and when the zygote goes it goes too.
"""

from __future__ import annotations

import _socket
import os

from phalanx.zygote.channel import Channel
from phalanx.zygote.settling import leave_zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Handover = tuple[dict[str, Any], dict[str, Any], list[int], int, int]


class StandbyPool:
    """The zygote's parked processes."""

    def __init__(self) -> None:
        self.parked: dict[int, Channel] = {}
        self.failures = 0  # in a row; a warm-up that always fails must not be tried for ever
        self.warm_up = ""

    def descriptors(self) -> set[int]:
        return {channel.fileno() for channel in self.parked.values()}

    def park(self, zygote: int) -> Handover | None:
        """Fork one. None in the zygote; the hand-over in the fork, when its time has come."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid:
            theirs.close()
            self.parked[pid] = Channel(ours)
            return None
        try:
            leave_zygote(zygote)
            ours.close()
            for fd in self.descriptors():
                os.close(fd)
            self.parked.clear()
            return _wait(Channel(theirs), self.warm_up)
        except BaseException:  # noqa: BLE001 - a parked process ends quietly, whatever it was
            os._exit(1)

    def hand_over(
        self, request: dict[str, Any], spec: dict[str, Any], fds: list[int], gate_read: int, status: int
    ) -> int:
        """Give a parked process its work; its pid, or 0 when there is none to be had."""
        while self.parked:
            pid, channel = self.parked.popitem()
            try:
                channel.send(("go", request, spec), [*fds, gate_read, status])
            except OSError:
                continue  # it has died; the next one then
            finally:
                channel.close()
            self.failures = 0
            return pid
        return 0

    def lost(self, pid: int) -> bool:
        """Whether a process that ended was a parked one."""
        channel = self.parked.pop(pid, None)
        if channel is None:
            return False
        channel.close()
        self.failures += 1
        return True


def _wait(channel: Channel, warm_up: str) -> Handover:
    step_back(5)  # the workers that run now have the machine
    import fcntl  # noqa: F401 - settling needs it, and then every millisecond is one of a restart

    if warm_up:
        _run(warm_up)
    (_, request, spec), fds = channel.receive()
    channel.close()
    *given, gate_read, status = fds
    return request, spec, given, gate_read, status


def step_back(by: int) -> None:
    """A lower priority, where it can be taken back: a worker that comes of this is to have its full one.

    It can with a privilege, or a limit that says so (RLIMIT_NICE). A trial tells, in a fork, because for
    who may not go back there is no way back.
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


def _run(warm_up: str) -> None:
    module, _, name = warm_up.partition(":")
    imported: Any = __import__(module, fromlist=["_"])
    getattr(imported, name)()
