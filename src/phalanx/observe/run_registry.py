"""The runs of this user on this machine: where their logs are, and how they ended.

    $XDG_STATE_HOME/phalanx/runs/<begin>-<pid>.json      (~/.local/state by default)

One small file per run, private to the user; written two seconds after the workers have started, when nothing
waits for it, and again at the end. A run that was killed stays as it was at first. The newest `KEPT` stay.
What is read is checked as every file that is believed (`trusted_files`): it must be this user's, and what
does not have the form of a run is skipped. The names of the files are not taken from the run.
"""

from __future__ import annotations

import os

from phalanx.trusted_files import open_trusted, write_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from phalanx.observe.snapshot import RunFile

KEPT = 200
_LONGEST = 1 << 16


def directory(environ: Mapping[str, str]) -> str | None:
    """Where the runs are; None without a home directory."""
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".local", "state")
    return os.path.join(base, "phalanx", "runs")


def note(environ: Mapping[str, str], run: dict[str, Any]) -> None:
    """Write what is known of a run (`RunFile`); a disk that cannot be written to is no reason to complain."""
    import json

    folder = directory(environ)
    if folder is None:
        return
    name = f"{int(run['since'] * 1000):015d}-{run['pid']}.json"
    try:
        write_trusted(os.path.join(folder, name), json.dumps(run).encode()[:_LONGEST])
        for old in sorted(os.listdir(folder))[:-KEPT]:
            os.unlink(os.path.join(folder, old))
    except OSError:
        pass


def runs(environ: Mapping[str, str]) -> list[RunFile]:
    """All of them, the oldest first."""
    from phalanx.observe.snapshot import decode_run

    folder = directory(environ)
    if folder is None:
        return []
    try:
        names = sorted(os.listdir(folder))[-KEPT:]
    except OSError:
        return []
    found = []
    for name in names:
        try:
            fd = open_trusted(os.path.join(folder, name))
        except OSError:
            continue
        with open(fd, "rb") as file:
            run = decode_run(file.read(_LONGEST + 1))
        if run is not None:
            found.append(run)
    return found
