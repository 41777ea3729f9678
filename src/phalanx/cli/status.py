"""`phalanx status [RUN] [--json]`: the state of this user's jobs on this machine.

It asks the agents; see agent/status.py. RUN selects jobs by the beginning of their run id or by the name of
their script. The exit code is 1 when there is none.

Any user can open a socket of that name, and root asks all users: an answer is limited in size, all answers
together in time, and one that does not have the form of a job is ignored. Root sees which user answered.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from phalanx.agent.status import PREFIX, user_of
from phalanx.cli.store import Parser
from phalanx.observe.status_text import format_status

_PATIENCE = 5.0  # seconds, for all answers together
_LONGEST = 2 << 20  # bytes of one answer
_MOST = 500  # agents of one user

Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class WorkerStatus(msgspec.Struct):
    """A worker, as agent/status.py reports it; fields that an agent of another version lacks are empty."""

    rank: Count
    local_rank: Count = 0
    pid: Count | None = None
    running: bool = False
    ready: bool = False
    step: Count | None = None
    rate: Seconds | None = None
    quiet: Seconds | None = None
    section: str = ""


class StandbyStatus(msgspec.Struct):
    """The standby processes of a job."""

    count: Count = 0
    pids: list[Count] = []
    memory: Count = 0


class IncidentStatus(msgspec.Struct):
    """A line of the job's recent history."""

    at: Seconds
    what: str


class JobStatus(msgspec.Struct):
    """The answer of an agent."""

    run: str
    name: str
    host: str
    pid: Count
    since: Seconds
    now: Seconds
    phase: str
    waiting_for: str = ""
    round: Count = 0
    nodes: list[str] = []
    node: Count = -1
    restarts: Count = 0
    max_restarts: Count = 0
    world_size: Count = 0
    workers: list[WorkerStatus] = []
    standbys: StandbyStatus = msgspec.field(default_factory=StandbyStatus)
    slow: list[str] = []
    hangs: list[str] = []
    incidents: list[IncidentStatus] = []
    logs: str = ""


def main(argv: Sequence[str]) -> int:
    """Find the agents, ask them, print."""
    parser = Parser(
        prog="phalanx status",
        description="The state of this user's jobs on this machine: workers, steps, stragglers, incidents.",
    )
    parser.add_argument("run", nargs="?", default="", help="a run id, or its beginning, or a script's name")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(argv)
    found = [job for job in jobs() if _is_meant(job, options.run)]
    if options.json:
        print(json.dumps(found, indent=2))
    elif found:
        width = shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 100_000
        print("\n\n".join(format_status(job, width) for job in found))
    else:
        what = f"no job {options.run!r}" if options.run else "no job"
        print(f"phalanx status: {what} of this user runs on this machine", file=sys.stderr)
    return 0 if found else 1


def _is_meant(job: dict[str, Any], word: str) -> bool:
    return str(job["run"]).startswith(word) or job["name"] == word


def jobs() -> list[dict[str, Any]]:
    """The answers of all agents of this user (of all users, for root), the oldest job first."""
    found = [job for user, data in _answers(list(_names())) if (job := _read(user, data)) is not None]
    return sorted(found, key=lambda job: (job["since"], job["pid"]))


def _names() -> Iterator[str]:
    me = os.geteuid()
    wanted = f"@{PREFIX}" if me == 0 else f"@{PREFIX}{me}/"
    try:
        with open("/proc/net/unix", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return
    of_user: dict[str, int] = {}
    for line in lines:
        name = line.rpartition(" ")[2]
        listens = line.split()[3:4] == ["00010000"]  # the flag of a socket that accepts
        if name.startswith(wanted) and listens:
            user = name.removeprefix(f"@{PREFIX}").partition("/")[0]
            of_user[user] = of_user.get(user, 0) + 1
            if of_user[user] <= _MOST:
                yield "\0" + name[1:]


def _answers(names: Sequence[str]) -> list[tuple[int, bytes]]:
    """Ask all of them at once: the users and their complete answers."""
    end = time.monotonic() + _PATIENCE
    poll = select.poll()
    asked: dict[int, tuple[socket.socket, int, bytearray]] = {}
    answers = []
    try:
        for name in names:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                peer.connect(name)
                user = user_of(peer)
            except (OSError, ValueError):  # gone, or its queue is full
                peer.close()
                continue
            if _is_of(name, user):
                asked[peer.fileno()] = (peer, user, bytearray())
                poll.register(peer, select.POLLIN)
            else:
                peer.close()
        while asked and (left := end - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                peer, user, data = asked[fd]
                more = _receive(peer)
                if more is None:
                    continue
                data += more
                if not more or len(data) > _LONGEST:
                    poll.unregister(fd)
                    peer.close()
                    del asked[fd]
                    if not more:
                        answers.append((user, bytes(data)))
    finally:
        for peer, _, _ in asked.values():
            peer.close()
    return answers


def _is_of(name: str, user: int) -> bool:
    """Whether the socket belongs to the user in its name, and this user may ask for it."""
    claimed = name.removeprefix(f"\0{PREFIX}").partition("/")[0]
    return claimed == str(user) and os.geteuid() in (0, user)


def _receive(peer: socket.socket) -> bytes | None:
    try:
        return peer.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _read(user: int, data: bytes) -> dict[str, Any] | None:
    """An answer, or None if it is not the state of a job."""
    try:
        job: dict[str, Any] = msgspec.to_builtins(msgspec.json.decode(data, type=JobStatus))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return job if user == os.geteuid() else {**job, "user": user}
