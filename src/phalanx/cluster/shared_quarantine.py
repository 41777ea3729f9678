"""Quarantine beyond one job: a directory that jobs share (`--quarantine-dir`), and `--quarantine-hook`.

    DIR/<host>.json    {"host": …, "reason": …, "until": seconds since 1970 or null, "run_id": …}

The leader of a job writes the file of a host that its job keeps out, and runs the hook. A node that joins a
job reads the file of its own host only: if it is there and its time is not over, the node brings the record
into its job. So a new job begins with the findings of others, nothing polls, and running jobs are left alone.
Writing and the hook run in a thread that the job never waits for (`observe.outbox`). Files come from others:
they are bounded and checked. A host name that could be an option or a path is not used.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

from phalanx.core.rounds.records import UNTIL_REMOVED, HostRecord
from phalanx.observe.outbox import Outbox, Undelivered

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}")
_LONGEST = 1 << 14
_LONGEST_REASON = 1000
_YEAR = 366 * 86400.0
_SAME = 60.0  # seconds: a time that was brought from the directory and has run on is not a new one


def path_of(directory: str, host: str) -> str:
    """The file of a host; ValueError for what cannot be a host's name."""
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not the name of a host")
    return os.path.join(directory, f"{host}.json")


def read_host(directory: str, host: str) -> HostRecord | None:
    """What is held against a host now; None: nothing."""
    try:
        fd = os.open(path_of(directory, host), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = json.loads(file.read(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("reason"), str):
        return None
    reason, until, run = found["reason"][:_LONGEST_REASON], found.get("until"), found.get("run_id")
    by = f" (run {run[:64]})" if isinstance(run, str) and run and f"(run {run})" not in reason else ""
    if until is None:
        return HostRecord(f"{reason}{by}", UNTIL_REMOVED)
    if not isinstance(until, int | float) or not 0.0 < (left := until - time.time()) <= _YEAR:
        return None
    return HostRecord(f"{reason}{by}", round(left, 3))


def read_all(directory: str) -> Iterator[tuple[str, HostRecord]]:
    """All hosts that are kept out now; OSError if the directory cannot be read."""
    for name in sorted(os.listdir(directory)):
        host, dot, kind = name.rpartition(".")
        record = read_host(directory, host) if dot and kind == "json" else None
        if record is not None:
            yield host, record


def write_host(directory: str, host: str, reason: str, left: float | None, run_id: str = "") -> None:
    """Hold something against a host, for `left` seconds (None: until it is removed)."""
    path = path_of(directory, host)
    until = None if left is None else time.time() + left
    draft = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
        json.dump({"host": host, "reason": reason[:_LONGEST_REASON], "until": until, "run_id": run_id}, file)
    os.replace(draft, path)


class QuarantinePost(Outbox):
    """Tells the directory and the hook of the hosts that a job keeps out."""

    def __init__(self, directory: str, hook: str, run_id: str) -> None:
        super().__init__("--quarantine-hook" if hook else "--quarantine-dir", "host")
        self._directory, self._hook, self._run_id = directory, hook, run_id

    def tell(self, entry: dict[str, Any]) -> None:
        """`entry`: host, reason and left; returns at once."""
        self.put(json.dumps({**entry, "run_id": self._run_id}).encode())

    def deliver(self, body: bytes) -> None:
        entry = json.loads(body)
        host, left = str(entry["host"]), entry["left"]
        if not _NAME.fullmatch(host):
            raise Undelivered(f"{host!r} is not the name of a host", final=True)
        if self._directory:
            known = read_host(self._directory, host)
            if known is not None and _covers(known.left, left):
                return  # this job has it from there
            try:
                write_host(self._directory, host, str(entry["reason"]), left, self._run_id)
            except OSError as error:
                raise Undelivered(f"{self._directory}: {error.strerror}") from None
        if self._hook and (code := self.run(["/bin/sh", "-c", self._hook, "sh", host], body)):
            raise Undelivered(f"the command failed with exit code {code}")


def _covers(known: float, left: float | None) -> bool:
    """Whether a host that is kept out for `known` seconds is so for `left`, too."""
    return known == UNTIL_REMOVED or (left is not None and known >= left - _SAME)
