"""The log files of one run on this node, and nothing else on its disk.

A name is `attempt_K/RANK/stdout.log` or the like. It is checked against that form, and every part of the way
is opened without following links: a worker that replaced its log by a link, or a client with `..`, gets
nothing.
"""

from __future__ import annotations

import os
import re

LONGEST = 4 << 20
"""Bytes of a file that are shown: its end."""
MOST = 2000
"""Files in the list."""
_NAME = re.compile(
    r"(attempt_\d{1,9}(?:\.\d{1,9})?)/(\d{1,9})/((?:stdout|stderr)\.log(?:\.\d{6})?)", re.ASCII
)
_WAY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_KIND, _REGULAR = 0o170000, 0o100000


def read_end(directory: str, name: str) -> bytes | None:
    """The end of a log file; None for what is not one."""
    found = _NAME.fullmatch(name)
    if not directory or found is None:
        return None
    opened: list[int] = []
    try:
        opened.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in found.groups()[:-1]:
            opened.append(os.open(part, _WAY, dir_fd=opened[-1]))
        opened.append(os.open(found[3], _FILE, dir_fd=opened[-1]))
        status = os.fstat(opened[-1])
        if status.st_mode & _KIND != _REGULAR:
            return None
        return os.pread(opened[-1], LONGEST, max(0, status.st_size - LONGEST))
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)


def list_files(directory: str) -> list[dict[str, object]]:
    """Names and sizes, the newest start first."""
    if not directory:
        return []
    found: list[dict[str, object]] = []
    attempts = [name for name in _names(directory) if name.startswith("attempt_")]
    for attempt in sorted(attempts, key=_number, reverse=True):
        for rank in sorted(filter(str.isdecimal, _names(os.path.join(directory, attempt))), key=int):
            for file in sorted(_names(os.path.join(directory, attempt, rank))):
                name = f"{attempt}/{rank}/{file}"
                if _NAME.fullmatch(name) and len(found) < MOST:
                    try:
                        size = os.lstat(os.path.join(directory, name)).st_size
                    except OSError:
                        continue
                    found.append({"name": name, "size": size})
    return found


def _number(name: str) -> tuple[float, ...]:
    parts = name.removeprefix("attempt_").split(".")
    return tuple(float(part) for part in parts if part.isdecimal())


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
