"""The agents of this machine, as a client sees them: found in the kernel's list, asked over their sockets.

Any user can open a socket of that name, and root asks all users: an answer is limited in size, all answers
together in time, and one that does not have the form of a job is ignored. See agent/status.py for the other
side.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.agent.status import PREFIX, user_of
from phalanx.observe import snapshot
from phalanx.observe.snapshot import JobSnapshot

_PATIENCE = 5.0  # seconds, for all answers together
_LONGEST = 32 << 20  # bytes of one answer: a job of many nodes
_MOST = 500  # agents of one user
_TRIES = 5


class LocalAgent(NamedTuple):
    """An agent that has answered: its socket, its user, and what it told."""

    name: str
    user: int
    job: JobSnapshot


def agents(run: str = "", request: dict[str, Any] | None = None) -> list[LocalAgent]:
    """The agents of this user (of all users, for root) with this run, the oldest job first.

    `run`: the beginning of a run id, or the name of a script; empty: all."""
    found = []
    for name, user, data in ask(list(names()), request or {"ask": "status"}):
        try:
            job = snapshot.decode(data)
        except snapshot.READABLE:
            continue
        if job.run.startswith(run) or job.name == run:
            found.append(LocalAgent(name, user, job))
    return sorted(found, key=lambda one: (one.job.since, one.job.pid))


def as_dict(agent: LocalAgent) -> dict[str, Any]:
    """What an agent told, as plain values; another user's with the user."""
    job = snapshot.as_json(agent.job)
    return job if agent.user == os.geteuid() else {**job, "user": agent.user}


def put(agent: LocalAgent, request: dict[str, Any], patience: float = 30.0) -> dict[str, Any]:
    """Put one request to an agent: its answer, or `{"error": ...}`."""
    for _ in range(_TRIES):
        for _, _, data in ask([agent.name], request, patience):
            try:
                found = json.loads(data)
            except (ValueError, RecursionError):
                continue
            # An agent that heard nothing in time tells its state: this process was held up, or the agent is
            # of a version that knows no requests.
            if isinstance(found, dict) and ("phase" not in found or request.get("ask") == "status"):
                return found
    return {"error": "the agent did not answer, or is of an older version"}


def names() -> Iterator[str]:
    """The sockets of agents."""
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


def ask(
    sockets: Sequence[str], request: dict[str, Any], patience: float = _PATIENCE
) -> list[tuple[str, int, bytes]]:
    """Ask all of them at once: sockets, users and complete answers."""
    question = json.dumps(request).encode() + b"\n"
    end = time.monotonic() + patience
    poll = select.poll()
    asked: dict[int, tuple[socket.socket, str, int, bytearray]] = {}
    answers = []
    try:
        for name in sockets:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                peer.connect(name)
                user = user_of(peer)
            except (OSError, ValueError):  # gone, or its queue is full
                peer.close()
                continue
            if _is_of(name, user):
                try:
                    peer.send(question)
                except OSError:
                    pass  # one that hears no questions may have answered and closed already
                asked[peer.fileno()] = (peer, name, user, bytearray())
                poll.register(peer, select.POLLIN)
            else:
                peer.close()
        while asked and (left := end - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                peer, name, user, data = asked[fd]
                more = _receive(peer)
                if more is None:
                    continue
                data += more
                if not more or len(data) > _LONGEST:
                    poll.unregister(fd)
                    peer.close()
                    del asked[fd]
                    if not more:
                        answers.append((name, user, bytes(data)))
    finally:
        for peer, *_ in asked.values():
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
