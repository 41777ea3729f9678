"""What is known of the jobs that were submitted: a directory for each in the user's home, for `status`.

`~/.phalanx/slurm/JOB/` holds `job.json` (what was submitted), `attempts.jsonl` (how each attempt ended) and
the outcomes of the agents of each attempt. The home of a cluster is shared by its nodes; where it is not,
status knows less, and everything else works.
"""

from __future__ import annotations

import json
import os
import time

from phalanx.log import printable
from phalanx.trusted_files import make_directory, open_trusted, write_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_LONGEST = 1 << 20
_KEPT = 30 * 86400.0  # seconds


def records_directory(environ: Mapping[str, str]) -> str:
    """Where the records of this user are."""
    return os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".phalanx", "slurm")


def job_key(environ: Mapping[str, str]) -> str:
    """The job's name over all its attempts: JOB, or JOB_TASK of an array."""
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else environ["SLURM_JOB_ID"]


class JobRecord:
    """The directory of one job."""

    def __init__(self, directory: str, key: str) -> None:
        self.key = key
        self.path = os.path.join(directory, key)

    def _make(self) -> None:
        if not os.path.isabs(self.path):
            raise FileNotFoundError(2, "this user has no home directory")
        make_directory(self.path)

    def outcomes(self, attempt: int) -> str:
        """The directory for the outcomes of an attempt's agents, made if need be."""
        self._make()
        path = os.path.join(self.path, f"attempt{attempt}")
        make_directory(path)
        return path

    def describe(self, what: Mapping[str, Any]) -> None:
        """Write what was submitted."""
        self._make()
        write_trusted(os.path.join(self.path, "job.json"), json.dumps(what).encode())

    def add_attempt(self, what: Mapping[str, Any]) -> None:
        """Add how an attempt ended; the first word on an attempt counts."""
        if any(known.get("attempt") == what.get("attempt") for known in self.attempts()):
            return
        line = json.dumps(what).encode() + b"\n"
        path = os.path.join(self.path, "attempts.jsonl")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def description(self) -> dict[str, Any]:
        """What was submitted; empty where that is not known."""
        found = _objects(os.path.join(self.path, "job.json"))
        return found[0] if found else {}

    def attempts(self) -> list[dict[str, Any]]:
        """How the attempts ended, in order."""
        return _objects(os.path.join(self.path, "attempts.jsonl"))


def all_records(directory: str) -> list[JobRecord]:
    """The records of this user's jobs, the oldest first."""
    try:
        names = [name for name in os.listdir(directory) if name[:1].isdigit()]
    except OSError:
        return []
    return [JobRecord(directory, name) for name in sorted(names, key=lambda n: (int(_leading(n)), n))]


def forget_old(directory: str) -> None:
    """Remove records of jobs that nothing was heard of for a month."""
    import shutil

    for record in all_records(directory):
        try:
            if time.time() - os.stat(record.path).st_mtime > _KEPT:
                shutil.rmtree(record.path)
        except OSError:
            pass


def _leading(name: str) -> str:
    return name[: len(name) - len(name.lstrip("0123456789"))]


def _objects(path: str) -> list[dict[str, Any]]:
    """The JSON objects of a file, one on each line, with texts that are fit for a terminal."""
    try:
        with open(open_trusted(path), "rb") as file:
            lines = file.read(_LONGEST).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict):
            found.append({k: printable(v) if isinstance(v, str) else v for k, v in one.items()})
    return found
