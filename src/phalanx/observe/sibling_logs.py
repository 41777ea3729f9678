"""The other nodes of a run that has ended, where their logs are in the same directory (a shared `--log-dir`).

Each node has a directory `<run id>_<unique>` with a `summary.json`; those of one run have the same id and
overlap in time. The files must be this user's.
"""

from __future__ import annotations

import os

from phalanx.observe.log_layout import SUMMARY
from phalanx.observe.snapshot import RunFile, decode_run

_MOST = 4096  # nodes
_LONGEST = 1 << 22  # bytes of a summary


def siblings(run: RunFile) -> list[RunFile]:
    """The other nodes of this run, by host; their paths are those of this machine."""
    folder, own = os.path.split(run.logs.rstrip("/"))
    prefix = own.rpartition("_")[0] + "_"
    found: list[RunFile] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and entry.name != own and len(found) < _MOST:
                    other = _read(os.path.join(entry.path, SUMMARY))
                    if other is not None and _is_same(run, other):
                        other.logs = entry.path
                        found.append(other)
    except OSError:
        pass
    return sorted(found, key=lambda one: (one.host, one.pid))


def _read(path: str) -> RunFile | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return decode_run(file.read(_LONGEST)) if os.fstat(fd).st_uid == os.geteuid() else None
    except OSError:
        return None


def _is_same(one: RunFile, other: RunFile) -> bool:
    end, other_end = one.until or float("inf"), other.until or float("inf")
    return one.run == other.run and one.since <= other_end and other.since <= end


def elsewhere(runs: list[RunFile], node: str) -> str:
    """Words about nodes that took part and whose logs are not here; empty: there are none."""
    here = {run.host for run in runs}
    missing = [name for name in runs[0].nodes if name not in here and node in ("", "all", name)]
    if not missing:
        return ""
    names = " ".join(missing[:8]) + f" and {len(missing) - 8} more" * (len(missing) > 8)
    return (
        f"the logs of {names} are on those machines: run phalanx logs {runs[0].run} there; "
        "a --log-dir that all nodes share has them in one place"
    )
