"""What the zygote knows of one worker, and of a stop or a recall that is under way."""

from __future__ import annotations

import _socket
import os

from phalanx.core.group.stop import hurry, signal_workers
from phalanx.helpers.channel import Channel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.helpers.messages import WorkerLaunch

_FIRST_LOOK = 0.05  # adoption raises no event: a stop checks for adopted children, first after this time
REENTRY = "PHALANX_REENTRY"  # as in bootstrap.py and reentry/
REENTRY_FD = 17  # in an executed worker


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
    """A stop in progress, and the processes that were signalled."""

    __slots__ = ("began", "look_at", "recalled", "signalled", "sweep_at", "terms")

    def __init__(self, sig: int, now: float, grace: float, patience: float = 0.0) -> None:
        self.terms, _ = signal_workers(now, sig, grace, patience)
        self.began = now
        self.recalled: set[int] = set()  # workers that are to park
        # What dead workers left behind: those that re-enter wait for it no longer than for each other.
        self.sweep_at = self.terms.park_by if patience else self.terms.kill_at
        self.look_at = now + (_FIRST_LOOK if sig else grace)  # signal 0: they exit by themselves
        self.signalled: set[int] = set()

    def hurry(self, now: float, grace: float) -> None:
        """A second request can only shorten the grace; nothing parks any more."""
        self.recalled = set()
        self.terms = hurry(self.terms, now, grace)
        self.sweep_at = min(self.sweep_at, self.terms.kill_at)


class ReentryLink:
    """The connection by which a worker can be told to re-enter."""

    def __init__(self) -> None:
        self.ours, self.theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)

    def added(self, launch: WorkerLaunch, fds: list[int]) -> tuple[WorkerLaunch, list[int]]:
        """The worker's own end among its descriptors, and in its environment."""
        file = os.fstat(self.theirs.fileno())
        place = ("reentry", len(fds), REENTRY_FD if launch.argv else -1)
        value = f"{REENTRY_FD},{file.st_dev},{file.st_ino},{launch.reentry}"
        env = {**launch.env, REENTRY: value}
        return launch.replace(fds=[*launch.fds, place], env=env), [*fds, self.theirs.fileno()]

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
