"""The log files of one run on this node, and nothing else on its disk.

A name is that of a log or a part of one (`log_layout.parse_name`), and every part of the way is opened
without following links: a worker that replaced its log by a link, or a client with `..`, gets nothing.
"""

from __future__ import annotations

import os

from phalanx.observe import log_layout

LONGEST = 4 << 20
"""Bytes of a file that are shown: its end."""
MOST = 2000
"""Files in the list."""
_WAY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def read_end(directory: str, name: str) -> bytes | None:
    """The end of a log file, without the hole where its parts were; None for what is not one."""
    log = log_layout.parse_name(name)
    if not directory or log is None:
        return None
    opened: list[int] = []
    try:
        opened.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for folder in log.folders:
            opened.append(os.open(folder, _WAY, dir_fd=opened[-1]))
        opened.append(log_layout.open_log(log.file, opened[-1]))
        return log_layout.read_end(opened[-1], LONGEST)[0]
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def list_files(directory: str) -> list[dict[str, object]]:
    """Names and sizes (without holes), the newest start first."""
    found: list[dict[str, object]] = []
    logs = log_layout.list_logs(directory, parts=True) if directory else []
    for log in sorted(logs, key=lambda one: (one.attempt, one.again), reverse=True)[:MOST]:
        try:
            fd = log_layout.open_log(os.path.join(directory, log.name))
        except OSError:
            continue
        found.append({"name": log.name, "size": os.fstat(fd).st_size - log_layout.data_at(fd, 0)})
        os.close(fd)
    return found
