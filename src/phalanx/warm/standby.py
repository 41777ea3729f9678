"""Standbys: forks of the zygote made in advance, so that a restart costs a message.

A standby waits for a hand-over: the request, its own part of it, and the descriptors. It may run a warm-up
first (`module:function`, for example to open a device). It has no rank, writes no log, and belongs to no
group. If it dies, it is forgotten; it dies with the zygote.
"""

from __future__ import annotations

import _socket
import os

from phalanx.zygote.channel import Channel
from phalanx.zygote.fork_setup import leave_zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Handover = tuple[dict[str, Any], dict[str, Any], list[int], int, int]


class StandbyPool:
    """The zygote's standbys."""

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}  # by pid
        self.failures = 0  # in a row: a warm-up that always fails is not retried for ever
        self.warm_up = ""

    def fork(self, zygote: int, not_its: list[int]) -> Handover | None:
        """Fork a standby. None in the zygote; in the fork, the hand-over, when its turn has come.

        `not_its`: descriptors that it closes.
        """
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid:
            theirs.close()
            self.channels[pid] = Channel(ours)
            return None
        try:
            leave_zygote(zygote)
            ours.close()
            for fd in not_its:
                os.close(fd)
            for channel in self.channels.values():
                os.close(channel.fileno())
            self.channels.clear()
            return _wait(Channel(theirs), self.warm_up)
        except BaseException:  # noqa: BLE001 - a standby exits silently, whatever happened
            os._exit(1)

    def hand_over(
        self, request: dict[str, Any], spec: dict[str, Any], fds: list[int], gate_read: int, status: int
    ) -> int:
        """Give a standby its work; returns its pid, or 0 if there is none."""
        while self.channels:
            pid, channel = self.channels.popitem()
            try:
                channel.send(("go", request, spec), [*fds, gate_read, status])
            except OSError:
                continue  # it has died: try the next one
            finally:
                channel.close()
            self.failures = 0
            return pid
        return 0

    def lost(self, pid: int) -> bool:
        """Whether a process that exited was a standby."""
        channel = self.channels.pop(pid, None)
        if channel is None:
            return False
        channel.close()
        self.failures += 1
        return True


def _wait(channel: Channel, warm_up: str) -> Handover:
    lower_priority(5)  # the running workers come first
    import fcntl  # noqa: F401 - needed to place descriptors; imported now to make the restart faster

    if warm_up:
        module, _, name = warm_up.partition(":")
        imported: Any = __import__(module, fromlist=["_"])
        getattr(imported, name)()
    (_, request, spec), fds = channel.receive()
    channel.close()
    *given, gate_read, status = fds
    return request, spec, given, gate_read, status


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
