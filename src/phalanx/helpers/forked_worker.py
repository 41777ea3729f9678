"""What the zygote knows of one worker, and of a stop or a recall that is under way."""

from __future__ import annotations

import _socket
import os

from phalanx.helpers.channel import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FIRST_LOOK = 0.05  # adoption raises no event: a stop checks for adopted children, first after this time
REENTRY = "PHALANX_REENTRY"  # as in bootstrap.py and reentry/
REENTRY_FD = 17  # in an executed worker
GIVE_UP = 5.0  # a process that survives SIGKILL for this long is in uninterruptible sleep


class ForkedWorker:
    """One child that runs user code."""

    __slots__ = ("channel", "pid", "rank", "reenters", "signalled_at", "was_standby")

    def __init__(self, rank: int, pid: int, channel: Channel | None = None) -> None:
        self.rank = rank
        self.pid = pid
        self.channel = channel  # for re-entry
        self.reenters = False  # it can be recalled
        self.was_standby = False
        self.signalled_at = 0.0


class StopRequest:
    """A stop in progress: its deadlines, and the processes that were signalled."""

    __slots__ = (
        "began",
        "give_up_at",
        "kill_at",
        "look_at",
        "park_by",
        "recalled",
        "sig",
        "signalled",
        "sweep_at",
    )

    def __init__(self, sig: int, now: float, grace: float, patience: float = 0.0) -> None:
        self.sig = sig
        self.began = now
        self.kill_at = now + grace
        self.park_by = now + patience
        self.recalled: set[int] = set()  # workers that are to park until then
        # What dead workers left behind: those that re-enter wait for it no longer than for each other.
        self.sweep_at = self.park_by if patience else self.kill_at
        self.give_up_at = max(self.kill_at, self.park_by) + GIVE_UP
        self.look_at = now + (_FIRST_LOOK if sig else grace)  # signal 0: they exit by themselves
        self.signalled: set[int] = set()

    def hurry(self, now: float, grace: float) -> None:
        """A second request can only shorten the grace; nothing parks any more."""
        self.recalled = set()
        self.kill_at = min(self.kill_at, now + grace)
        self.sweep_at = min(self.sweep_at, self.kill_at)
        self.give_up_at = self.kill_at + GIVE_UP


class ReentryLink:
    """The connection by which a worker can be told to re-enter."""

    def __init__(self) -> None:
        self.ours, self.theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)

    def added(self, spec: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """The worker's own end among its descriptors, and in its environment."""
        file = os.fstat(self.theirs.fileno())
        number = REENTRY_FD if spec["argv"] else -1
        place = ("reentry", len(fds), number)
        value = f"{REENTRY_FD},{file.st_dev},{file.st_ino},{spec['reentry']}"
        added = {"fds": [*spec["fds"], place], "env": {**spec["env"], REENTRY: value}}
        return {**spec, **added}, [*fds, self.theirs.fileno()]

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
