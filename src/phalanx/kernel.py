"""The few kernel services that Python does not offer, each with what happens where they are missing.

Linux only: the parent-death signal, the child subreaper and pidfds. Elsewhere the calls are no-ops
that return False, and docs/design.md says what is weaker there. ctypes is the price of having no
compiled extension; it is loaded on first use, because the zygote is the only one that always needs it.
"""

from __future__ import annotations

import os
import sys

from phalanx.zygote.rawsignal import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc_prctl: Callable[..., int] | None = None


def _prctl(option: int, arg: int | bytes) -> bool:
    global _libc_prctl
    if not LINUX:
        return False
    if _libc_prctl is None:
        _libc_prctl = _find("prctl")
    return bool(_libc_prctl(option, arg, 0, 0, 0) == 0)


def _find(name: str) -> Callable[..., int]:
    """A function of libc. The process itself is a handle on it: no name to guess, no search that forks."""
    try:
        import _ctypes  # the part of ctypes that calls; the rest of it takes longer than a fork

        itself: Any = None
        address = _ctypes.dlsym(_ctypes.dlopen(itself, 0), name)
        return lambda *args: _ctypes.call_function(address, args)
    except (ImportError, AttributeError, OSError):
        import ctypes

        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return function


def die_with_parent(sig: int = signal.SIGKILL) -> bool:
    """Ask the kernel to signal this process when the *thread* that forked it ends."""
    return _prctl(_PR_SET_PDEATHSIG, int(sig))


def become_subreaper() -> bool:
    """Inherit descendants whose own parents die, instead of losing them to init."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> bool:
    """The short name `ps -o comm` and `top` show (15 bytes)."""
    return _prctl(_PR_SET_NAME, name.encode()[:15])


def pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` ends; None where the kernel has none to give."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def children() -> list[int]:
    """The pids whose parent is this process, adopted ones included; never anybody else's.

    The kernel's own list where it is compiled in, a scan of /proc otherwise. A child that this
    process has not waited for keeps its pid, so none of these numbers can be somebody else's.
    """
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children", encoding="ascii") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        pass
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    return [int(entry) for entry in entries if entry.isdigit() and _parent_of(entry) == me]


def _parent_of(pid: str) -> int | None:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def stat_fields(pid: str | int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the name, which may itself hold blanks and brackets."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            line = stat.read().decode("ascii", "replace")
    except OSError:
        return None
    return line.rpartition(")")[2].split() or None


def describe(pid: int) -> str:
    """`pid 123 (python, state D)`: enough for a person to go and look."""
    fields = stat_fields(pid)
    if not fields:
        return f"pid {pid} (gone)"
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            name = comm.read().strip()
    except OSError:
        name = "?"
    return f"pid {pid} ({name}, state {fields[0]})"


def anonymous_file(name: str) -> int:
    """A file that lives in memory (or on no path at all) and dies with its descriptors."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        import tempfile

        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
