"""The last net: a control group for one zygote and all that it forks, ended with `cgroup.kill`.

It catches what the subreapers cannot: descendants of workers that left their session when zygote and keeper
died, and processes that fork faster than they can be killed one by one. It exists where control groups of
version 2 can be written (root outside of most containers, delegated groups), and does nothing elsewhere.

Workers are inside from their first instruction. Moving a process waits for the kernel for about 15 ms, which
a launch cannot spare, so the keeper creates the zygote in the group (`CLONE_INTO_CGROUP`).

The name carries the keeper's identity, so that whichever process is left (the keeper, the zygote, the agent,
or the keeper of a later launch) recognizes groups whose keeper is dead, and kills what is in them.
"""

from __future__ import annotations

import os

from phalanx import kernel

_PREFIX = "phalanx"


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
    def make(cls) -> JobCgroup | None:
        """None where that is not possible."""
        parent = base()
        if not parent:
            return None
        path = os.path.join(parent, _name(os.getpid(), _started(os.getpid())))
        try:
            os.mkdir(path, 0o700)
        except OSError:
            return None
        return cls(path)

    def fork(self) -> int:
        """As os.fork, with the child in the group.

        Python and libc do not know of a process that is cloned by a system call: it only forks another one,
        which the caller, a subreaper, adopts."""
        read, write = os.pipe()
        group = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        middle = kernel.clone_into(group)
        if middle == 0:
            pid = _fork_on(write)
        elif middle > 0:
            os.waitpid(middle, 0)
        for fd in (group, write):
            os.close(fd)
        if middle > 0:
            pid = int(os.read(read, 16) or -1)
        os.close(read)
        if middle < 0 or pid < 0:  # clone3 is not permitted here, say
            pid = os.fork()
            if pid == 0:
                _write(self._path, "cgroup.procs", b"0")
        return pid

    def is_gone(self) -> bool:
        """Remove it if nothing is left in it, else kill what is."""
        return remove(self._path) or kill(self._path)


def _fork_on(answer: int) -> int:
    """In the middle process: fork the one that counts, and exit; returns in that one, when it is adopted."""
    middle = os.getpid()
    try:
        pid = os.fork()
        if pid:
            os.write(answer, str(pid).encode())
    except BaseException:  # noqa: BLE001 - the caller finds no answer
        os._exit(1)
    if pid:
        os._exit(0)
    while os.getppid() == middle:
        os.sched_yield()
    return 0


def _write(path: str, file: str, text: bytes) -> bool:
    try:
        fd = os.open(os.path.join(path, file), os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, text) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def kill(path: str) -> bool:
    """Kill every process of a control group, and remove it when it is empty; whether it is gone.

    Twice: on some kernels, a fork that is under way escapes a kill, but not one of a frozen group. The kill
    comes first, because the caller may be killed at any time: a frozen zygote kills nothing."""
    for file in ("cgroup.kill", "cgroup.freeze", "cgroup.kill"):
        _write(path, file, b"1")
    return remove(path)


def kill_own() -> None:
    """For a zygote that is the last one left: leave its group, and kill everything in it."""
    name = os.path.basename(kernel.read_text("/proc/self/cgroup").rpartition("0::")[2].strip())
    parent = base() if name.startswith(_PREFIX + "-") else ""
    if parent and _write(parent, "cgroup.procs", b"0"):  # a process that freezes itself kills nothing
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
            clear = kill(path) and clear
    return clear
