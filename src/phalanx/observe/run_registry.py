"""The runs of this user: where their logs are, and how they ended.

    $XDG_STATE_HOME/phalanx/runs/<machine>/<begin>-<sum of the run id>-<pid>.json     (or ~/.local/state)

With PHALANX_NAMESPACE the directory is `runs@<namespace>`. One small file per node of a run, private to the
user; written two seconds after the workers have started, when nothing waits for it, and again at the end. A
run that was killed stays as it was at first. Of each machine the newest `KEPT` stay: on a home directory that
machines share, a job of many nodes does not push out the history of others. Files are checked before they are
believed (`trusted_files`): they must be this user's, and what does not have the form of a run is skipped.
"""

from __future__ import annotations

import os

from phalanx.job.environment import namespace
from phalanx.trusted_files import open_trusted, write_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from phalanx.observe.snapshot import RunFile

KEPT = 200
_MACHINES = 1000  # those that wrote last: pods have a new name every time
_LONGEST = 1 << 16
_APART = 60_000  # milliseconds between the first and the last node of a run to begin


def directory(environ: Mapping[str, str]) -> str | None:
    """Where the runs of this namespace are; None without a home directory."""
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".local", "state")
    apart = namespace(environ)
    return os.path.join(base, "phalanx", f"runs@{apart}" if apart else "runs")


def this_machine() -> str:
    """The name of this machine, as it names a directory."""
    return os.uname().nodename.replace("/", "_")[:64].lstrip(".") or "unnamed"


def note(environ: Mapping[str, str], run: dict[str, Any], machine: str = "") -> None:
    """Write what is known of a run (`RunFile`); a disk that cannot be written to is no reason to complain."""
    import json
    import zlib

    folder = directory(environ)
    if folder is None:
        return
    top, folder = folder, os.path.join(folder, machine or this_machine())
    name = f"{int(run['since'] * 1000):015d}-{zlib.crc32(run['run'].encode()):08x}-{run['pid']}.json"
    try:
        if not os.path.isdir(folder):
            _forget_machines(top)
        write_trusted(os.path.join(folder, name), json.dumps(run).encode()[:_LONGEST])
        for old in sorted(os.listdir(folder))[:-KEPT]:
            os.unlink(os.path.join(folder, old))
    except OSError:
        pass


def _forget_machines(top: str) -> None:
    """Make room for one more: remove the records of those that have not written for longest."""
    others = [os.path.join(top, name) for name in _names(top)]
    for folder in sorted(others, key=lambda path: -os.lstat(path).st_mtime)[_MACHINES - 1 :]:
        for name in _names(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def runs(environ: Mapping[str, str], machine: str = "") -> list[RunFile]:
    """The oldest first: all that began on this machine, and one record of each run that began elsewhere."""
    from phalanx.observe.snapshot import decode_run

    folder, machine = directory(environ) or "", machine or this_machine()
    records = [(name, one) for one in _names(folder) for name in _names(os.path.join(folder, one))]
    found = []
    for name, of in chosen(records, machine):
        try:
            fd = open_trusted(os.path.join(folder, of, name))
        except OSError:
            continue
        with open(fd, "rb") as file:
            run = decode_run(file.read(_LONGEST + 1))
        if run is not None:
            run.machine = of
            found.append(run)
    return found


def chosen(records: Sequence[tuple[str, str]], machine: str) -> list[tuple[str, str]]:
    """Of records (name and machine), those of `machine`, and one of each run of other machines, by begin.

    Records of one run id by different machines, begun within a minute, are the nodes of one run."""
    groups: list[dict[str, str]] = []  # machine -> name, the first that began first
    latest: dict[str, dict[str, str]] = {}  # by the sum of the run id
    for name, of in sorted(records):
        begin, _, rest = name.partition("-")
        group = latest.get(run := rest.partition("-")[0], {})
        began = next(iter(group.values()), "").partition("-")[0]
        if not begin.isdecimal():
            continue
        if not group or of in group or int(begin) - int(began) > _APART:
            group = latest[run] = {}
            groups.append(group)
        group[of] = name
    own = [(group[machine], machine) for group in groups if machine in group]
    others = [(name, of) for group in groups if machine not in group for of, name in [*group.items()][:1]]
    return sorted(own[-KEPT:] + others[-KEPT:])


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
