"""Kernel services that Python does not offer.

The parent-death signal, the child subreaper and pidfds exist on Linux only. Elsewhere the calls do nothing
and return False; docs/design.md lists the consequences.
"""

from __future__ import annotations

import os
import sys

from phalanx.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_SYS_CLONE3 = 435  # on all architectures
_CLONE_INTO_CGROUP = 0x200000000

_UCRED = 12  # bytes: pid, uid, gid

_TFD_TIMER_ABSTIME = 1
_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_CLOCK_BOOTTIME = 7

_libc_prctl: Callable[..., int] | None = None
_libc_settime: Callable[..., int] | None = None


def _prctl(option: int, arg: int | bytes) -> bool:
    global _libc_prctl
    if not LINUX:
        return False
    if _libc_prctl is None:
        _libc_prctl = _find("prctl")
    return bool(_libc_prctl(option, arg, 0, 0, 0) == 0)


def _find(name: str) -> Callable[..., int]:
    """A function of libc, looked up in the process itself: a search for the library's name would fork."""
    try:
        import _ctypes  # imported on first use; the rest of ctypes takes longer than a fork

        itself: Any = None
        address = _ctypes.dlsym(_ctypes.dlopen(itself, 0), name)
        return lambda *args: _ctypes.call_function(address, args)
    except (ImportError, AttributeError, OSError):
        import ctypes

        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return function


def system_call(number: int, *args: int | bytes) -> int:
    """A system call by its number; -1 where it fails."""
    return int(_find("syscall")(number, *args)) if LINUX else -1


def clone_into(group: int) -> int:
    """A plain clone of this process in the control group of a descriptor: 0 in the child; -1: not permitted.

    libc and Python take the child for its parent: it may fork and exit, and nothing else."""
    words = (_CLONE_INTO_CGROUP, 0, 0, 0, int(signal.SIGCHLD), 0, 0, 0, 0, 0, group)
    args = b"".join(word.to_bytes(8, sys.byteorder) for word in words)
    return system_call(_SYS_CLONE3, args, len(args))


def die_with_parent() -> bool:
    """Make the kernel kill this process when the *thread* that forked it exits."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wake_at_parent_death() -> bool:
    """Make the kernel continue this process, should it be stopped, when its parent exits."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def become_subreaper() -> bool:
    """Adopt descendants whose parents die, instead of init."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> bool:
    """Set the short name that `ps -o comm` and `top` show (15 bytes)."""
    return _prctl(_PR_SET_NAME, name.encode()[:15])


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` exits; None if the kernel does not support it."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def pidfds(pids: list[int]) -> list[int]:
    """A pidfd for each; none where the kernel has no such thing or descriptors are short."""
    fds: list[int] = []
    for pid in pids:
        fd = pidfd(pid)
        if fd is None:
            for opened in fds:
                os.close(opened)
            return []
        fds.append(fd)
    return fds


def timer() -> int:
    """A descriptor that becomes readable when the time of `set_timer` has come; -1 where there is none."""
    return _find("timerfd_create")(_CLOCK_BOOTTIME, _TFD_FLAGS) if LINUX else -1


def set_timer(fd: int, when: float) -> None:
    """Set the time (CLOCK_BOOTTIME), which makes the descriptor unreadable until then; infinity: never."""
    global _libc_settime
    if _libc_settime is None:
        _libc_settime = _find("timerfd_settime")
    nanoseconds = 0 if when == float("inf") else max(1, int(when * 1e9))
    words = (0, 0, *divmod(nanoseconds, 1_000_000_000))
    _libc_settime(fd, _TFD_TIMER_ABSTIME, b"".join(word.to_bytes(8, sys.byteorder) for word in words), None)


def children() -> list[int]:
    """The pids of this process's children, adopted ones included.

    From the kernel's own list if it has one, else from a scan of /proc. A child keeps its pid until this
    process reaps it, so none of these numbers can belong to another process.
    """
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children", encoding="ascii") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        pass
    parents = {entry: stat_fields(entry) for entry in list_dir("/proc") if entry.isdigit()}
    return [int(pid) for pid, fields in parents.items() if fields and int(fields[1]) == me]


def stat_fields(pid: str | int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name, which may contain blanks and brackets."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split() or None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or by a debugger."""
    fields = stat_fields(pid)
    return fields is not None and fields[0] in "Tt"


def is_readable(fd: int) -> bool:
    """Whether a descriptor has something to read, now."""
    import select  # a file of its own, which not all that import this module need

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def read_text(path: str) -> str:
    """A small file of /proc or /sys; empty if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def list_dir(path: str) -> list[str]:
    """The sorted names in a directory; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def describe(pid: int) -> str:
    """`pid 123 (python, state D)`."""
    fields = stat_fields(pid)
    if not fields:
        return f"pid {pid} (gone)"
    name = read_text(f"/proc/{pid}/comm").strip() or "?"
    return f"pid {pid} ({name}, state {fields[0]})"


def copy_above(fd: int, floor: int) -> int:
    """A duplicate of a descriptor, under a free number from `floor` on."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)


def anonymous_file(name: str) -> int:
    """A file in memory (or unlinked on disk) that exists as long as its descriptors."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def replay(kept: list[int]) -> None:
    """Write what these files hold to stdout and stderr, and close them."""
    for number, fd in zip((1, 2), kept, strict=False):
        at = 0
        try:
            while data := os.pread(fd, 1 << 16, at):
                at += os.write(number, data)
        except OSError:
            pass  # closed, or a full disk
        os.close(fd)


def drain(fd: int) -> None:
    """Read all that a non-blocking descriptor has."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def user_of(peer: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    import socket

    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED)
    return int.from_bytes(data[4:8], sys.byteorder)
