"""Files that become code, secrets or settings here: only this user and root may have written them.

A file is trusted if this user or root owns it and no other user can write to it, and if the same holds for
every directory on the way to it. A sticky directory (/tmp) may be writable by all: other users can add files
to it, but cannot replace those of this user. What is checked is what was opened, not what has its name.
"""

from __future__ import annotations

import errno
import os

_KIND, _REGULAR, _DIRECTORY = 0o170000, 0o100000, 0o040000  # of st_mode; `stat` itself is slow to import
_BY_OTHERS = 0o022
_STICKY = 0o1000


def open_trusted(path: str, *, follow: bool = False) -> int:
    """A descriptor to read a trusted file; OSError otherwise. `follow`: the file may be a symbolic link."""
    if follow:
        path = os.path.realpath(path)
    check_directory(os.path.dirname(os.path.abspath(path)))
    # Without O_NONBLOCK, the opening of a named pipe would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_mode & _KIND != _REGULAR:
            raise PermissionError(errno.EACCES, "is not a regular file", path)
        _check(path, found, sticky_is_safe=False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_directory(path: str) -> None:
    """Raise OSError unless only this user and root decide which files are there."""
    # Both ways to it: a link may stand in a directory of its own, and lead to one with other parents.
    for way in {os.path.abspath(path), os.path.realpath(path)}:
        while True:
            found = os.stat(way)
            if found.st_mode & _KIND != _DIRECTORY:
                raise NotADirectoryError(errno.ENOTDIR, "is not a directory", way)
            _check(way, found, sticky_is_safe=True)
            parent = os.path.dirname(way)
            if parent == way:
                break
            way = parent


def make_directory(path: str) -> None:
    """Create a directory and its missing parents, for this user only whatever the umask."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        try:
            os.mkdir(one, 0o700)
        except FileExistsError:
            pass  # created at the same time; whoever did it, its owner is checked when it is used


def write_trusted(path: str, data: bytes) -> None:
    """Replace a file at once, in a directory that is checked first; OSError if that is not possible."""
    directory = os.path.dirname(os.path.abspath(path))
    make_directory(directory)
    check_directory(directory)
    scratch = f"{path}.{os.urandom(8).hex()}"
    fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(scratch, path)
    except OSError:
        try:
            os.unlink(scratch)
        except OSError:
            pass
        raise


def _check(path: str, found: os.stat_result, *, sticky_is_safe: bool) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EACCES, f"belongs to another user (uid {found.st_uid})", path)
    if found.st_mode & _BY_OTHERS and not (sticky_is_safe and found.st_mode & _STICKY):
        mode = f"mode {found.st_mode & 0o7777:o}"
        raise PermissionError(errno.EACCES, f"can be written by others ({mode})", path)
