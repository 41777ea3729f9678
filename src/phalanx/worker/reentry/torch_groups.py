"""torch's process groups at a re-entry: aborted, so that the main thread returns, then destroyed.

NCCL and other backends have an abort of their own. gloo has none: an operation ends with an error when a
connection of its group does. So its connections are shut down, and nothing else: gloo's listener must stay,
because without it gloo ends the process; sockets of the program and of the store are not gloo's.

Which ones are gloo's is known from its own threads: each waits in `epoll_wait` (its name is gloo_tcp_loop);
the kernel tells for which epoll descriptor, and what is in it. Rejected: ports from the keys in the store,
which cannot be read while the main thread waits for an answer of it; the sockets that are new after
`init_process_group`, which are not all of it (lazy connections, groups made elsewhere).
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_THREAD = "gloo_tcp_loop"
_MAPS = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config",
    "pg_to_tag", "tags_to_pg", "pg_coalesce_state", "pg_flight_recorder_hooks",
)  # fmt: skip
"""What torch keeps about groups; the last one from 2.15 on."""
_TRIES = 20  # a thread that is not in a system call is looked at again
_restore: Callable[[], None] | None = None  # the messages of torch's libraries


def abort() -> None:
    """Free whatever waits in a collective; called in a thread of its own, again and again until it has."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is not None and _has_others_than_gloo(c10d):
            _mute()
            c10d._abort_process_group()
    finally:
        shut_gloo()


def _has_others_than_gloo(c10d: Any) -> bool:
    """By the configurations of the groups (`cpu:gloo,cuda:nccl`): NCCL alone has several names."""
    if getattr(c10d.GroupMember, "WORLD", None) is None:
        return False
    configs = ",".join(map(str, list(c10d._world.pg_backend_config.values())))
    return any(part.rpartition(":")[2] != "gloo" for part in configs.split(",") if part)


def _mute() -> None:
    """NCCL's monitor looks for the round's store, which is gone, and writes a native stack of it."""
    global _restore
    if _restore is None:
        from phalanx.worker.torch_messages import errors_only

        _restore = errors_only()


def destroy() -> None:
    """Destroy all process groups, also those that an abort has left in disorder."""
    global _restore
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:
        _destroy(c10d)
    if _restore is not None:
        _restore()
        _restore = None


def _destroy(c10d: Any) -> None:
    if c10d.GroupMember.WORLD is not None:
        c10d.destroy_process_group()
    # A set-up that was interrupted has counted its group: the next one would have another name than in a new
    # process, and wait for the others under it.
    world = c10d._world
    for name in _MAPS:
        getattr(world, name, {}).clear()
    world.group_count = 0
    c10d._unregister_all_process_groups()


# ---- gloo's connections ------------------------------------------------------------------------------


def shut_gloo() -> int:
    """Shut gloo's connections down; how many there were."""
    count = 0
    for poll in _gloo_polls():
        for fd, inode in _watched(poll):
            count += _shut(fd, inode)
    return count


def _gloo_polls() -> set[int]:
    """The epoll descriptors that gloo's threads wait for."""
    found: set[int] = set()
    waiting = [
        task for task in os.listdir("/proc/self/task") if _read(f"task/{task}/comm").strip() == _THREAD
    ]
    for attempt in range(_TRIES):
        for task in list(waiting):
            fd = _awaited(task)
            if fd is not None:
                found.add(fd)
                waiting.remove(task)
        if not waiting:
            break
        time.sleep(0.0005 * (attempt + 1))
    return found


def _awaited(task: str) -> int | None:
    """The first argument of the system call that a thread is in, if it is an epoll descriptor."""
    words = _read(f"task/{task}/syscall").split()
    try:
        fd = int(words[1], 16)
        return fd if "eventpoll" in os.readlink(f"/proc/self/fd/{fd}") else None
    except (IndexError, ValueError, OSError):
        return None  # running, or ended


def _watched(poll: int) -> Iterator[tuple[int, int]]:
    """The descriptors in an epoll instance, and the files that they were then."""
    for line in _read(f"fdinfo/{poll}").splitlines():
        words = line.replace(":", " ").split()
        if words[:1] == ["tfd"] and "ino" in words:
            yield int(words[1]), int(words[words.index("ino") + 1], 16)


def _shut(fd: int, inode: int) -> bool:
    try:
        file = os.fstat(fd)
        if file.st_ino != inode or not stat.S_ISSOCK(file.st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # not a socket, or not connected
    return True


def _read(path: str) -> str:
    try:
        with open(f"/proc/self/{path}") as file:
            return file.read()
    except OSError:
        return ""
