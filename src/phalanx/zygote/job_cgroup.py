"""The last net: a control group for the workers of one set of helpers, ended with `cgroup.kill`.

It catches what the subreapers cannot: descendants of workers that left their session when zygote and keeper
died, and processes that fork faster than they can be killed one by one. It exists where control groups of
version 2 can be written (root outside of most containers, delegated groups), and does nothing elsewhere.

Moving a process waits for the kernel for about 12 ms, so the keeper does it, a second after the start, beside
the work: first the zygote, whose later forks are then inside, and then what it has forked by then. Short jobs
never pay for it.

The name carries the keeper's identity, so that whichever process is left (the keeper, the zygote, the agent,
or the keeper of a later launch) recognizes groups whose keeper is dead, and kills what is in them.
"""

from __future__ import annotations

import os

from phalanx import kernel

_PREFIX = "phalanx"
_ROUNDS = 8  # looks for processes that were forked while others were moved


def base() -> str:
    """The directory of this process's control group; empty where there is none that can be written."""
    where = ""
    for line in kernel.read_text("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            where = line[3:]
    for line in kernel.read_text("/proc/self/mountinfo").splitlines() if where else ():
        fields, _, kind = line.partition(" - ")
        words = fields.split(" ")
        if kind.startswith("cgroup2 ") and (where + "/").startswith(words[3].rstrip("/") + "/"):
            path = words[4] + where[len(words[3].rstrip("/")) :]
            path = path.rstrip("/")
            if _PREFIX + "-" in os.path.basename(path):  # inside of such a group
                path = os.path.dirname(path)
            return path if os.access(path, os.W_OK) else ""
    return ""


def _name(keeper: int, started: str) -> str:
    return f"{_PREFIX}-{_namespaces()}-{keeper}-{started}"


def _namespaces() -> str:
    """Those of pids and of time: in others, the same process has another number, or another start.

    What a keeper of other namespaces has left is none of our business: it may well be alive."""
    found = []
    for kind in ("pid", "time"):
        try:
            found.append(os.readlink(f"/proc/self/ns/{kind}").strip(f"{kind}:[]"))
        except OSError:
            found.append("0")
    return ".".join(found)


def _started(pid: int) -> str:
    """When a process was started, which tells it from another one with the same pid; empty: it is gone."""
    fields = kernel.stat_fields(pid)
    return "" if fields is None or fields[0] in "ZX" else fields[19]


class JobCgroup:
    """The control group of the calling keeper's zygote and workers."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def make(cls, zygote: int) -> JobCgroup | None:
        """Create it and move the zygote and its descendants into it; None where that is not possible."""
        parent = base()
        if not parent:
            return None
        path = os.path.join(parent, _name(os.getpid(), _started(os.getpid())))
        group = cls(path)
        try:
            os.mkdir(path, 0o700)
            _move(path, zygote)
        except OSError:
            remove(path)
            return None
        for _ in range(_ROUNDS):
            outside = group._outside(zygote)
            if not outside:
                break
            for pid in outside:
                try:
                    _move(path, pid)
                except OSError:
                    pass  # it has exited
        return group

    def _outside(self, zygote: int) -> list[int]:
        """Descendants of the zygote that are not in the group; a /proc scan."""
        inside = set(kernel.read_text(os.path.join(self._path, "cgroup.procs")).split())
        parents: dict[str, list[str]] = {}
        for entry in kernel.list_dir("/proc"):
            fields = kernel.stat_fields(entry) if entry.isdigit() else None
            if fields and fields[0] not in "ZX":
                parents.setdefault(fields[1], []).append(entry)
        found, look = [], [str(zygote)]
        while look:
            below = parents.get(look.pop(), [])
            look += below
            found += [int(pid) for pid in below if pid not in inside]
        return found

    def dissolve(self, zygote: int) -> bool:
        """Move the zygote, which is alone in it, back to where it came from; whether the group is gone."""
        try:
            _move(os.path.dirname(self._path), zygote)
        except OSError:
            return False
        return remove(self._path)

    def kill(self) -> None:
        """Kill everything in it, and remove it when it is empty."""
        kill(self._path)
        remove(self._path)


def _move(path: str, pid: int) -> None:
    """Move a process into a control group."""
    fd = os.open(os.path.join(path, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(pid).encode())
    finally:
        os.close(fd)


def kill(path: str) -> None:
    """Kill every process of a control group; no fork escapes."""
    try:
        fd = os.open(os.path.join(path, "cgroup.kill"), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"1")
    except OSError:
        pass
    finally:
        os.close(fd)


def kill_own() -> None:
    """For a zygote that is the last one left: kill everything in its group, itself included."""
    where = kernel.read_text("/proc/self/cgroup").rpartition("0::")[2].strip()
    name = os.path.basename(where)
    parent = base() if name.startswith(_PREFIX + "-") else ""
    if parent:
        kill(os.path.join(parent, name))


def remove(path: str) -> bool:
    """Whether the group is gone; it stays while processes are in it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def sweep(lost: int = 0) -> bool:
    """Kill what is in groups whose keeper is dead; whether none of them is left.

    `lost`: a keeper that the caller has lost; it counts as dead although its process may still be ending."""
    parent = base()
    ours = f"{_PREFIX}-{_namespaces()}-"
    clear = True
    for name in kernel.list_dir(parent) if parent else ():
        if not name.startswith(ours):
            continue
        keeper, _, started = name[len(ours) :].partition("-")
        if keeper.isdigit() and (int(keeper) == lost or _started(int(keeper)) != started):
            path = os.path.join(parent, name)
            kill(path)
            clear = remove(path) and clear
    return clear
