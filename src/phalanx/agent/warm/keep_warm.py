"""The agent's side of `--warm-for`: use the zygote that an earlier launch left behind, and leave one behind.

At the start of a job the agent asks for the kept zygote of its script. It waits for the answer for a moment
only: a zygote that is gone, stopped, busy or of another state of things never delays a launch, which then
starts its helpers as usual. At the end of the job it asks the zygote to stay; where that one has not imported
what the script needs (its first launch), it starts another one to stay.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from phalanx import kernel
from phalanx.agent.warm.launch_key import launch_key, name_of
from phalanx.agent.warm.spawner import ClosingHelpers, Spawner
from phalanx.helpers.channel import Channel
from phalanx.helpers.kept_zygote import peer_of
from phalanx.helpers.messages import Adopt, AdoptAnswer, KeptDescription, KeptTerms, TakenOver, TakeOver
from phalanx.helpers.preload.preload_list import names_in
from phalanx.job.environment import socket_scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.agent.warm.import_cache import ImportCache
    from phalanx.core.record import Record

_PATIENCE = 0.05  # seconds that a launch may lose with a kept zygote that does not answer,
_CROWDED = 1.0  # and on a busy machine, where it waits for a processor as everything else does
_TICKS = 3  # hundredths of a second of processor time that an answer takes at most
_STAY = 1.0  # for the zygote to confirm that it stays


class AdoptedHelpers:
    """Keeper and zygote of an earlier launch, from now on this one's."""

    def __init__(self, channel: Channel, keeper: int, keeper_fd: int, tether: int, names: list[str]) -> None:
        self.channel = channel
        self.keeper = keeper
        self.keeper_fd = keeper_fd  # a pidfd: it is not a child, so its number alone proves nothing
        self.tether = tether  # closed by the kernel when this process ends
        self.names = names

    def close(self) -> None:
        for fd in (self.keeper_fd, self.tether):
            os.close(fd)


class KeepWarm:
    """One launch's part: which zygote it may use, and how long it leaves one behind."""

    def __init__(
        self, idle: float, learned: ImportCache, preload: list[str], environ: Mapping[str, str]
    ) -> None:
        self._idle = idle
        self._title = learned.key.partition("|")[0]
        self._learned = learned
        self._preload = preload
        self._name = name_of(learned.key)
        # Now: a job may change some of it, and an end may be too late to look.
        self._key = launch_key(learned.key, preload, environ)
        self._marks = learned.first_lines()  # what it imports before its first worker, and what affects that

    # -- the start --------------------------------------------------------------------------------

    def adopt(self) -> AdoptedHelpers | None:
        """The kept zygote, if there is one that this launch may use."""
        sock = connect(self._name)
        if sock is None:
            return None
        agent = kernel.pidfd(os.getpid())
        if agent is None:
            sock.close()
            return None
        tether_read, tether_write = os.pipe()
        channel = Channel(sock)
        fds: list[int] = []
        try:
            channel.post(Adopt(self._key, self._marks))
            message, fds = self._answer(channel)
            if message == AdoptAnswer(True):
                nice = os.getpriority(os.PRIO_PROCESS, 0)
                channel.post(TakeOver(nice), [0, 1, 2, agent, tether_read])
                message, fds = self._answer(channel)
            if isinstance(message, TakenOver) and len(fds) == 1:
                helpers = AdoptedHelpers(channel, message.keeper, fds[0], tether_write, message.names)
                fds, tether_write = [], -1
                return helpers
        except Exception:  # noqa: BLE001 - gone, not in time, or no answer that makes sense
            pass
        finally:
            for fd in (agent, tether_read, tether_write, *fds):
                if fd >= 0:
                    os.close(fd)
            if tether_write >= 0:
                channel.close()
        return None

    def _answer(self, channel: Channel) -> tuple[Record, list[int]]:
        """The answer to an adoption; TimeoutError unless it comes soon."""
        begin = time.monotonic()
        zygote = peer_of(channel.sock)[0]
        used = _processor_time(zygote)
        while True:
            try:
                return _answer(channel, time.monotonic() + _PATIENCE)
            except TimeoutError:
                fields = kernel.stat_fields(zygote) or ["X"]
                waits = fields[0] == "R" and _processor_time(zygote) <= used + _TICKS
                if not waits or time.monotonic() >= begin + _CROWDED:
                    raise

    # -- the end ----------------------------------------------------------------------------------

    def leave(self, candidates: list[Spawner], kind: str, worth_it: int) -> StayingHelpers | None:
        """Leave a zygote behind: one of these, or a new one; what to wait for, if anything."""
        wanted = self._learned.wanted()
        for helpers in candidates:
            if (
                helpers.how == kind
                and not (helpers.lost or helpers.importing or helpers.in_use)
                and len(wanted - names_in(helpers.preload)) < worth_it
            ):
                helpers.keep(self._terms(helpers.preload))
                return StayingHelpers(helpers)
        if wanted:
            asked_for = [f"*{name}" for name in self._preload]
            helpers = Spawner(kind, preload=[*asked_for, *self._learned.all_lines()], outlives=True)
            helpers.keep(self._terms(helpers.preload))
            helpers.let_go()
        return None

    def _terms(self, names: list[str]) -> KeptTerms:
        return KeptTerms(
            self._name, self._key, self._title, self._idle, self._learned.first_lines(), list(names)
        )


class StayingHelpers:
    """Helpers that were asked to stay: let go when they confirm it, ended when they do not."""

    def __init__(self, helpers: Spawner) -> None:
        self.helpers = helpers
        self._until = time.monotonic() + _STAY
        self._closing: ClosingHelpers | None = None

    def fds(self) -> list[int]:
        """Readable when `reap` has something to take in."""
        return [self.helpers.fileno()] if self._closing is None else self._closing.fds()

    def deadline(self) -> float:
        """When `reap` must be called at the latest."""
        return self._until if self._closing is None else self._closing.deadline()

    def reap(self) -> bool:
        """Whether this process has nothing more to do with them; never waits."""
        if self._closing is not None:
            return self._closing.reap()
        self.helpers.catch_up()
        if self.helpers.kept:
            self.helpers.let_go()
            return True
        if self.helpers.kept is False or self.helpers.lost:
            return self._end()
        if time.monotonic() >= self._until:
            self.hurry()
        return False

    def hurry(self) -> None:
        """Do not wait for the answer."""
        if self._closing is None:
            self._end()
        if self._closing is not None:
            self._closing.hurry()

    def _end(self) -> bool:
        self._closing = self.helpers.begin_close()
        return self._closing is None or self._closing.reap()


# -- other clients ----------------------------------------------------------------------------------


def connect(name: str) -> _socket.socket | None:
    """A connection to the kept zygote of that name, if it is this user's; never waits."""
    try:
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        sock.setblocking(False)
        sock.connect(name)
        if peer_of(sock)[1] == os.geteuid():
            return sock
    except OSError:
        pass  # there is none, or it does not accept
    sock.close()
    return None


def ask(name: str, message: Record, patience: float) -> KeptDescription | None:
    """What a kept zygote answers: its description, or nothing but the end of the connection."""
    sock = connect(name)
    return None if sock is None else converse(sock, message, patience)


def converse(sock: _socket.socket, message: Record, patience: float) -> KeptDescription | None:
    """The same over a connection, which is closed."""
    channel = Channel(sock)
    try:
        channel.post(message)
        answer, _ = _answer(channel, time.monotonic() + patience)
        return answer if isinstance(answer, KeptDescription) else None
    except Exception:  # noqa: BLE001 - gone, not in time, or no answer that makes sense
        return None
    finally:
        channel.close()


def names() -> list[str]:
    """The kept zygotes of this user, from the kernel's own list."""
    prefix = f"@phalanx-kept/{socket_scope()}"
    lines = kernel.read_text("/proc/net/unix").splitlines()
    words = [line.split() for line in lines if prefix in line]
    # The flag of a socket that accepts: the connection of one that is in use has the same name.
    return sorted(
        "\0" + word[-1][1:] for word in words if word[3] == "00010000" and word[-1].startswith(prefix)
    )


def _processor_time(pid: int) -> int:
    """In ticks, of which a second has a hundred almost everywhere."""
    fields = kernel.stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _answer(channel: Channel, until: float) -> tuple[Record, list[int]]:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        if channel.unsent:
            channel.flush()
            poll.modify(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.unsent else 0))
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError
        messages, gone = channel.pending()
        if messages:
            return messages[0]
        if gone:
            raise EOFError
