"""Why a worker exited, as the machine shows it: evidence of OOM kills and of a full /dev/shm.

A SIGKILL does not identify its sender, but the kernel's out-of-memory killer leaves traces. `explain` claims
no more than the traces prove:

- the kernel log names the pid: certain;
- the counter of OOM kills went up since the snapshot, in the worker's own memory cgroup (probable) or
  machine-wide (possible);
- nothing: the text says so, and names what could not be read.

`snapshot()` reads a few small kernel files. The import of this module reads nothing, and no function raises.
"""

from __future__ import annotations

import os
import time

from phalanx.core.diagnosis.exit_status import signal_label
from phalanx.core.record import Record
from phalanx.kernel import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SIGKILL = 9
_INIT_PID_NAMESPACE = "pid:[4026531836]"
_KMSG_LIMIT = 20_000
_UNLIMITED = 1 << 60  # bytes; version 1 writes a number where there is no limit
# printk uses the scheduler's clock, which drifts a little from CLOCK_MONOTONIC.
_KMSG_SLACK_US = 2_000_000


class Snapshot(Record):
    """OOM kill counters at one moment: by cgroup file (nearest first), and machine-wide."""

    cgroups: dict[str, int] = {}
    machine: int | None = None
    monotonic_us: int = 0


# ---------------------------------------------------------------- counters


def snapshot(pid: int | None = None) -> Snapshot:
    """The counters that an OOM kill of this process (or of `pid`) would change; takes under a millisecond."""
    who = "self" if pid is None else str(pid)
    counters = {path: count for path in _counter_files(who) if (count := _oom_kills(path)) is not None}
    return Snapshot(counters, _oom_kills("/proc/vmstat"), time.monotonic_ns() // 1000)


def memory_limit(counters: Iterable[str]) -> str:
    """The smallest memory limit of the control groups with these counters, in words; empty: none is known."""
    found = []
    for path in counters:
        folder = os.path.dirname(path)
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(os.path.join(folder, name)).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                found.append(int(text))
    return f" of {min(found) / (1 << 20):.0f} MiB" if found else ""


def _oom_kills(path: str) -> int | None:
    for line in read_text(path).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.isdigit():
            return int(count)
    return None


def _counter_files(who: str) -> list[str]:
    """`memory.events` (v2) and `memory.oom_control` (v1) of the process's cgroup and of those above it."""
    mounts = _cgroup_mounts()
    files: list[str] = []
    for line in read_text(f"/proc/{who}/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            kind, name = "v2", "memory.events"
        elif "memory" in controllers.split(","):
            kind, name = "v1", "memory.oom_control"
        else:
            continue
        if kind not in mounts:
            continue
        point, root = mounts[kind]
        # In a container, the mount may show a part of the tree, or a tree that the path is relative to.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        folder = os.path.normpath(point + "/" + inside.strip("/"))
        while folder.startswith(point):
            files.append(os.path.join(folder, name))
            if folder == point:
                break
            folder = os.path.dirname(folder)
    return files


def _cgroup_mounts() -> dict[str, tuple[str, str]]:
    mounts: dict[str, tuple[str, str]] = {}
    for line in read_text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(" ")[-1].split(",")):
            words = left.split(" ")
            key = "v2" if kind == "cgroup2" else "v1"
            mounts.setdefault(key, (_unescape(words[4]), _unescape(words[3])))
    return mounts


def _unescape(path: str) -> str:
    # mountinfo writes blanks, tabs, newlines and backslashes in octal.
    if "\\" not in path:
        return path
    import re

    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), path)


# ---------------------------------------------------------------- the kernel's log


def oom_lines(since_us: int, path: str = "/dev/kmsg") -> list[str] | None:
    """The kernel's lines about OOM kills since then; None if the log is not readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found: list[str] = []
    try:
        for _ in range(_KMSG_LIMIT):
            try:
                record = os.read(fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten during the read; the next read continues after the gap
            if not record:
                break
            head, _, text = record.decode("utf-8", "replace").partition(";")
            fields = head.split(",")
            stamp = int(fields[2]) if len(fields) > 2 and fields[2].isdigit() else 0
            if stamp + _KMSG_SLACK_US >= since_us and ("Killed process" in text or "oom-kill:" in text):
                found.append(text.split("\n", 1)[0])
    except OSError:
        return None
    finally:
        os.close(fd)
    return found


def _names_pid(line: str, pid: int) -> bool:
    import re

    return re.search(rf"Killed process {pid} |[, ]pid={pid}[, ]", line + " ") is not None


def _memory_of(line: str) -> str:
    import re

    found = re.search(r"anon-rss:(\d+)kB", line)
    return f", using {int(found[1]) / 1024:.0f} MiB" if found else ""


# ---------------------------------------------------------------- the verdict


def explain(code: int, pid: int, before: Snapshot | None = None) -> str:
    """What the machine shows about this exit, as certain as the evidence; empty if there is none."""
    if code in (-SIGKILL, 128 + SIGKILL):
        return _explain_kill(pid, before or Snapshot())
    number = -code if code < 0 else code - 128
    if number > 0 and signal_label(number) == "SIGBUS":
        return _explain_bus_error()
    return ""


def _explain_kill(pid: int, before: Snapshot) -> str:
    log = oom_lines(before.monotonic_us)
    named = [line for line in log or [] if _names_pid(line, pid)]
    if named:
        held = next((text for line in named if (text := _memory_of(line))), "")
        limited = any("emory cgroup" in line or "CONSTRAINT_MEMCG" in line for line in named)
        size = memory_limit(before.cgroups)
        where = f"its cgroup's memory limit{size}" if limited else "the end of the machine's memory"
        if _own_pid_namespace():
            # The log uses pids of the outermost namespace, where this number may be another process.
            return f"probably out of memory: the kernel log names pid {pid} as killed at {where}{held}"
        return f"out of memory: the kernel killed pid {pid} at {where}{held} (kernel log)"
    grown = [path for path, count in before.cgroups.items() if (_oom_kills(path) or 0) > count]
    if grown:
        near = grown[0] == next(iter(before.cgroups))
        if near:
            return (
                "probably out of memory: the kernel's count of OOM kills in its cgroup went up "
                f"({os.path.dirname(grown[0])}{_with_limit(before)})"
            )
        return (
            "possibly out of memory: the OOM killer killed a process in an enclosing cgroup "
            f"({os.path.dirname(grown[0])}), maybe this one"
        )
    now = _oom_kills("/proc/vmstat")
    if now is not None and before.machine is not None and now > before.machine:
        return "possibly out of memory: the OOM killer killed a process on this machine, maybe this one"
    if before.machine is None and not before.cgroups:
        return "SIGKILL from outside Phalanx; cannot check for an OOM kill here"
    unread = "" if log is not None else " (the kernel log is not readable)"
    return f"SIGKILL from outside Phalanx; no sign of an OOM kill{unread}"


def _with_limit(before: Snapshot) -> str:
    size = memory_limit(before.cgroups)
    return f", with a limit{size}" if size else ""


def _own_pid_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") != _INIT_PID_NAMESPACE
    except OSError:
        return True


def _explain_bus_error() -> str:
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return ""
    size, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    if size and free < max(size // 100, 1 << 20):
        return f"/dev/shm is full ({size >> 20} MiB, {free >> 10} KiB free): a common cause of SIGBUS"
    return ""
