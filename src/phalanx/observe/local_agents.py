"""The agents of this machine, as a client sees them: found in the kernel's list, asked over their sockets.

Any user can open a socket of that name. By default only agents of the client's own user are asked; root can
ask those of all users. An answer is limited in size, all answers together in time, and one that does not have
the form of a job is ignored. See agent/status.py for the other side.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from phalanx.job.environment import AGENT_SOCKET, namespace, socket_scope
from phalanx.job.time_budgets import FIND, WORK
from phalanx.kernel import user_of
from phalanx.observe import snapshot
from phalanx.observe.snapshot import JobSnapshot

_LONGEST = 32 << 20  # bytes of one answer: a job of many nodes
_MOST = 500  # agents of one user


class LocalAgent(NamedTuple):
    """An agent that has answered: its socket, its user, and the state of its node."""

    name: str
    user: int
    job: JobSnapshot

    @property
    def other_user(self) -> int | None:
        """Its user, if that is another one."""
        return None if self.user == os.geteuid() else self.user

    @property
    def runs(self) -> bool:
        """Whether its socket still listens, even if it does not answer."""
        return self.name in names(everyone=True)


def find(everyone: bool = False) -> tuple[list[LocalAgent], list[int]]:
    """The agents of this user (or of `everyone`), the oldest job first, and the pids that did not answer."""
    answers, silent = ask(list(names(everyone)), {"ask": "status"}, FIND)
    pids = [name.rpartition("/")[2].partition("-")[0] for name in silent]
    return _decoded(answers), sorted(int(pid) for pid in pids if pid.isdecimal())


def states(known: Sequence[LocalAgent], request: dict[str, Any], patience: float = FIND) -> list[LocalAgent]:
    """The same agents with their states now; those that do not answer are left out."""
    return _decoded(ask([agent.name for agent in known], request, patience)[0])


def _decoded(answers: Sequence[tuple[str, int, bytes]]) -> list[LocalAgent]:
    found = []
    for name, user, data in answers:
        try:
            found.append(LocalAgent(name, user, snapshot.decode(data)))
        except snapshot.READABLE:
            continue
    return sorted(found, key=lambda one: (one.job.since, one.job.pid))


def as_dict(agent: LocalAgent) -> dict[str, Any]:
    """The state of an agent's node as plain values; another user's with the user."""
    job = snapshot.as_json(agent.job)
    return job if agent.other_user is None else {**job, "user": agent.user}


def put(agent: LocalAgent, request: dict[str, Any], patience: float = WORK) -> dict[str, Any]:
    """Put one request to an agent: its answer, or `{"error": ...}`."""
    return put_all([agent], request, patience)[0]


def put_all(
    agents: Sequence[LocalAgent], request: dict[str, Any], patience: float = WORK
) -> list[dict[str, Any]]:
    """Put one request to several agents in parallel: their answers, in this order."""
    found = {agent.name: {"error": f"no answer from pid {agent.job.pid}"} for agent in agents}
    left, end = set(found), time.monotonic() + patience
    while left and time.monotonic() < end:
        answers, _ = ask(sorted(left), request, end - time.monotonic())
        if not answers:
            break
        for name, _, data in answers:
            try:
                answer = json.loads(data)
            except (ValueError, RecursionError):
                answer = None
            # An agent that has received no request in time sends its state: this process was held up.
            if isinstance(answer, dict) and "phase" in answer:
                continue
            left.discard(name)
            if isinstance(answer, dict):
                found[name] = answer
    return [found[agent.name] for agent in agents]


def names(everyone: bool = False) -> Iterator[str]:
    """The sockets of this user's agents, or of all users'."""
    wanted = f"@{AGENT_SOCKET}" if everyone else f"@{AGENT_SOCKET}{socket_scope()}"
    mine = [namespace()]
    try:
        with open("/proc/net/unix", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return
    of_user: dict[str, int] = {}
    for line in lines:
        name = line.rpartition(" ")[2]
        listens = line.split()[3:4] == ["00010000"]  # the flag of a socket that accepts
        if name.startswith(wanted) and name.split("/")[2:3] == mine and listens:
            user = name.removeprefix(f"@{AGENT_SOCKET}").partition("/")[0]
            of_user[user] = of_user.get(user, 0) + 1
            if of_user[user] <= _MOST:
                yield "\0" + name[1:]


def ask(
    sockets: Sequence[str], request: dict[str, Any], patience: float
) -> tuple[list[tuple[str, int, bytes]], list[str]]:
    """Ask all of them at once: sockets, users and complete answers; the sockets that did not answer."""
    question = json.dumps(request).encode() + b"\n"
    end = time.monotonic() + patience
    poll = select.poll()
    asked: dict[int, tuple[socket.socket, str, int, bytearray]] = {}
    answers, silent = [], []
    try:
        for name in sockets:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                peer.connect(name)
                user = user_of(peer)
            except (OSError, ValueError) as error:
                if isinstance(error, BlockingIOError):  # its queue is full
                    silent.append(name)
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
    return answers, silent + [name for _, name, _, _ in asked.values()]


def _is_of(name: str, user: int) -> bool:
    """Whether the socket belongs to the user in its name, and this user may ask for it."""
    claimed = name.removeprefix(f"\0{AGENT_SOCKET}").partition("/")[0]
    return claimed == str(user) and os.geteuid() in (0, user)


def _receive(peer: socket.socket) -> bytes | None:
    try:
        return peer.recv(1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""
