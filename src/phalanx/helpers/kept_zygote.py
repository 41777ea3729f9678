"""The zygote between two launches: it waits for the next launch of its script (`--warm-for`).

    job ends ──► kept: no agent, no worker, no terminal ──► adopted by the next launch, or ended

It listens on a socket of the kernel's abstract namespace: it has no file, and ends with the process. Such a
name has no owner, so both sides check the other's user. There is one conversation at a time (messages.py).

It ends by itself when it was idle for the time that the user gave, when a file that it has loaded or a
package directory has changed, when memory is short, and when a launch of the same script cannot use it.
"""

from __future__ import annotations

import _socket
import os
import select
import sys
import time

from phalanx import kernel
from phalanx.helpers.channel import Channel
from phalanx.helpers.messages import (
    Adopt,
    AdoptAnswer,
    Describe,
    EndKept,
    KeptDescription,
    KeptTerms,
    TakeOver,
)
from phalanx.helpers.standby import loaded_files
from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LOOK_EVERY = 2.0  # seconds between two looks at memory and packages
_PATIENCE = 0.5  # for a client that has connected
_PEER = 12  # struct ucred: pid, uid, gid
_LEAST_MEMORY = 0.08  # of all memory, that must be available
_MOST_STALLED = 10.0  # percent of the last ten seconds that tasks were waiting for memory
ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # end it, as any process that serves nobody


class Adoption:
    """A launch that uses the kept zygote."""

    def __init__(self, channel: Channel, fds: list[int], nice: int) -> None:
        self.channel = channel
        self.std, (self.agent, self.tether) = fds[:3], fds[3:]
        self.nice = nice

    def close_fds(self) -> None:
        for fd in (*self.std, self.agent, self.tether):
            os.close(fd)


class KeptZygote:
    """The wait for the next launch."""

    def __init__(self, terms: KeptTerms, listener: _socket.socket) -> None:
        self._terms = terms
        self._listener = listener
        self._since = time.time()
        self._until = time.monotonic() + terms.idle
        self._files = loaded_files()
        self._folders = _package_folders()

    def wait(self, keeper_fd: int, wake_fd: int) -> Adoption | None:
        """Wait for a launch; None: it is time to end."""
        poll = select.poll()
        for fd in (self._listener.fileno(), keeper_fd, wake_fd):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                if now >= self._until or memory_is_short() or self._is_stale():
                    return None
                left = min(self._until - now, _LOOK_EVERY)
                ready = {fd for fd, _ in poll.poll(left * 1000 + 1)}
                if keeper_fd in ready:
                    return None
                if wake_fd in ready:
                    kernel.drain(wake_fd)
                if self._listener.fileno() in ready:
                    over, adoption = self._serve()
                    if over or adoption is not None:
                        return adoption
        finally:
            self._listener.close()

    def _serve(self) -> tuple[bool, Adoption | None]:
        """Answer one client: whether this process has to end, or who uses it."""
        try:
            own: Any = self._listener  # `accept` is of the socket module, which is large
            sock = _socket.socket(fileno=own._accept()[0])
        except OSError:
            return False, None
        if peer_of(sock)[1] != os.geteuid():
            sock.close()
            return False, None
        sock.settimeout(_PATIENCE)
        channel = Channel(sock)
        try:
            message, fds = channel.receive()
            if isinstance(message, Adopt):
                if (message.key, message.marks) != (self._terms.key, self._terms.marks) or self._is_stale():
                    channel.send(AdoptAnswer(False))
                    channel.close()
                    return True, None  # another one takes the name when that launch is over
                # The descriptors come only now: in a message that is not read, they would stay open.
                channel.send(AdoptAnswer(True))
                message, fds = channel.receive()
                if isinstance(message, TakeOver) and len(fds) == 5:
                    sock.settimeout(None)
                    return False, Adoption(channel, fds, message.nice)
            if isinstance(message, Describe):
                channel.send(self._description())
            over = isinstance(message, EndKept)
        except Exception:  # noqa: BLE001 - a client that has given up, or is none of ours
            over = False
        channel.close()
        return over, None

    def _description(self) -> KeptDescription:
        left = max(0.0, self._until - time.monotonic())
        pids = [os.getppid(), os.getpid()]
        return KeptDescription(self._terms.title, pids, self._since, left, len(self._terms.names))

    def _is_stale(self) -> bool:
        """Whether a package has changed since it was loaded."""
        if self._folders != _package_folders():
            return True
        try:
            for path, when, size in self._files:
                found = os.stat(path)
                if (found.st_mtime_ns, found.st_size) != (when, size):
                    return True
        except OSError:
            return True
        return False


def listen(name: str) -> _socket.socket | None:
    """Take the name of a script; None where another process has it, or the system has no such names."""
    try:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        listener.bind(name)
        listener.listen(128)  # while it imports, it accepts nothing
        listener.setblocking(False)
        return listener
    except OSError:
        listener.close()
        return None


def peer_of(sock: _socket.socket) -> tuple[int, int]:
    """Pid and user at the other end."""
    data = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER)
    return int.from_bytes(data[:4], sys.byteorder), int.from_bytes(data[4:8], sys.byteorder)


def _package_folders() -> list[tuple[str, int]]:
    found = []
    for path in sys.path:
        if path.endswith(("site-packages", "dist-packages")):
            try:
                found.append((path, os.stat(path).st_mtime_ns))
            except OSError:
                found.append((path, 0))
    return found


def memory_is_short(proc: str = "/proc") -> bool:
    """Whether others need the memory more."""
    numbers = {}
    for line in kernel.read_text(f"{proc}/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            numbers[name] = int(value.split()[0])
    if numbers.get("MemAvailable", 1) < _LEAST_MEMORY * numbers.get("MemTotal", 0):
        return True
    for line in kernel.read_text(f"{proc}/pressure/memory").splitlines():
        words = line.split()
        if words[0] == "full" and float(words[1].partition("=")[2]) > _MOST_STALLED:
            return True
    return False


# -- the process ------------------------------------------------------------------------------------


def let_go() -> None:
    """Keep nothing of the last launch: streams, directory; end at the usual signals."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    if nowhere > 2:
        os.close(nowhere)
    os.chdir("/")
    for name in ENDING:
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def take_hold(nice: int) -> None:
    """Serve a launch again: survive the signals that are meant for it, at its priority."""
    for name in ENDING:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) != nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        pass  # not permitted: helpers in the background lower theirs only where that can be undone


def use_streams(std: list[int]) -> None:
    """Make these the standard streams, as if the interpreter had been started with them."""
    for number, fd in enumerate(std):
        os.dup2(fd, number)
    for number, stream in enumerate((sys.stdin, sys.stdout)):  # stderr is line-buffered in any case
        own: Any = stream
        if own is not None and not own.write_through and own.line_buffering != os.isatty(number):
            own.reconfigure(line_buffering=os.isatty(number))
