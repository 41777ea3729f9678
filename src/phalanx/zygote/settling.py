"""First steps of a fork of the zygote: how it gets its session, its descriptors and its signals."""

from __future__ import annotations

import os

from phalanx import kernel
from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def leave_zygote(zygote: int) -> None:
    """First steps of a fork: a session of its own, and an end with the zygote's end."""
    os.setsid()
    kernel.die_with_parent()
    if os.getppid() != zygote:  # it died before the line above took effect
        os._exit(127)
    signal.set_wakeup_fd(-1)


def in_words(error: BaseException, spec: dict[str, Any]) -> str:
    if isinstance(error, OSError):
        name = error.filename or (spec["argv"] or [""])[0]
        where = os.fsdecode(name) if isinstance(name, bytes | str) else ""
        hint = ""
        if error.errno == 8:  # ENOEXEC
            hint = " (not a program for this machine, or a script without a '#!' line)"
        return f"{where}: {error.strerror}{hint}" if where else str(error.strerror)
    return f"{type(error).__name__}: {error}"


def _above(fd: int, floor: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)


def moved(fd: int, floor: int) -> int:
    moved = _above(fd, floor)
    os.close(fd)
    return moved


def place(std: list[int], extra: list[tuple[str, int, int]]) -> dict[str, int]:
    """Put the standard descriptors at 0-2 and the extra ones at their numbers (-1: any), inheritable."""
    floor = max([3, *(target + 1 for _, _, target in extra)])
    # First out of the way of all targets, so that no dup2 overwrites a source still needed.
    sources = [_above(fd, floor) for fd in (*std, *(fd for _, fd, _ in extra))]
    places = {}
    names = ["0", "1", "2", *(name for name, _, _ in extra)]
    targets = [0, 1, 2, *(target for _, _, target in extra)]
    for name, source, target in zip(names, sources, targets, strict=True):
        if target < 0:
            places[name] = source
            continue
        os.dup2(source, target)
        os.close(source)
        places[name] = target
    return places


def default_signals(ignored: list[int]) -> None:
    """Start from the defaults, but for what the agent itself was told to ignore (nohup's SIGHUP)."""
    for sig in signal.valid_signals():
        if sig in (signal.SIGKILL, signal.SIGSTOP):
            continue
        if sig in ignored:
            signal.signal(sig, signal.SIG_IGN)
        elif signal.getsignal(sig) not in (signal.SIG_DFL, None):
            signal.signal(sig, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
