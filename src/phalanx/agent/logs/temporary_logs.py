"""Temporary log directories: made for one run, and not left to pile up.

    <temporary directory>/phalanx_<pid of the launcher>_<unique>

The records of failures that a run has recovered from are removed when it succeeds. Output stays, and so do
the logs of a failed run, for a person to read. Each later run removes those that have not been written to for
`--log-retention` (a week) and whose launcher is gone, at its end, when nothing waits for it. Only directories
of this user, directly in the temporary directory and with such a name, are looked at.
"""

from __future__ import annotations

import os
import time

from phalanx.agent.logs.specs import KEPT
from phalanx.kernel import stat_fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "phalanx"


def remove_old(parent: str, kept: float = KEPT) -> None:
    """Remove what runs of this user that are over since `kept` seconds have left in `parent`."""
    now = time.time()
    try:
        with os.scandir(parent) as entries:
            found = [one for one in entries if _launcher(one.name) and one.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in found:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        # Else nothing in it need be read.
        old = status.st_uid == os.geteuid() and status.st_mtime < now - kept
        if old and stat_fields(_launcher(entry.name)) is None and _last_write(entry.path) < now - kept:
            remove(entry.path)


def remove(directory: str) -> None:
    """Remove a directory and all that is in it; what cannot be removed stays."""
    for folder, folders, files in os.walk(directory, topdown=False):
        for name in files:
            _quietly(os.unlink, os.path.join(folder, name))
        for name in folders:
            path = os.path.join(folder, name)
            _quietly(os.unlink if os.path.islink(path) else os.rmdir, path)
    _quietly(os.rmdir, directory)


def _launcher(name: str) -> int:
    """The launcher's pid in a name; 0 for any other name."""
    parts = name.split("_")
    return int(parts[1]) if len(parts) == 3 and parts[0] == _NAME and parts[1].isdecimal() else 0


def _last_write(directory: str) -> float:
    latest = 0.0
    for folder, _, files in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            try:
                latest = max(latest, os.lstat(path).st_mtime)
            except OSError:
                pass  # removed meanwhile
    return latest


def _quietly(call: Callable[[str], None], path: str) -> None:
    try:
        call(path)
    except OSError:
        pass
