"""Where an agent tells how its job is: a socket of this machine, for its own user, answered by its loop.

Who connects is sent one JSON object and the end of the stream. There is nothing to ask for and nothing to
change. The socket has a name in the kernel and none in the file system (Linux's abstract namespace): a killed
agent leaves nothing behind. `phalanx status` finds it in the kernel's own list. Such a name has no
owner and no mode: both sides look at who the other is.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx.agent.local import LocalElasticAgent

PREFIX = "phalanx/"
_BUFFER = 1 << 20  # an answer is never waited for: what does not fit is lost
_PEER = 12  # struct ucred: pid, uid, gid
_AT_ONCE = 16  # answers between two looks at the workers, however many ask


class StatusSocket:
    """Listens until it is closed; where the system has no such sockets, nobody is told anything."""

    def __init__(self, tell: Callable[[], dict[str, Any]]) -> None:
        import socket

        self._tell = tell
        self._socket: socket.socket | None = None
        if not hasattr(socket, "SO_PEERCRED"):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A random part, for two agents in different containers may have one pid and one network.
            listener.bind(f"\0{PREFIX}{os.geteuid()}/{os.getpid()}-{os.urandom(4).hex()}")
            listener.listen(16)
            self._socket = listener
        except OSError:
            listener.close()

    def fds(self) -> list[int]:
        """Readable when somebody asks."""
        return [] if self._socket is None else [self._socket.fileno()]

    def answer(self) -> None:
        """Tell those who have asked by now; never waits."""
        for _ in range(_AT_ONCE):
            if self._socket is None:
                return
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                if user_of(peer) in (os.geteuid(), 0):
                    self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        import json
        import socket

        try:
            peer.setblocking(False)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            peer.send(json.dumps(self._tell()).encode())
        except OSError:
            pass  # it has gone, or is slow; it may ask again
        except Exception as error:  # noqa: BLE001 - a question must never end the job, but our fault is told
            from phalanx.log import warn

            warn(f"status: no answer, because of {type(error).__name__}: {error}")

    def close(self) -> None:
        """Nobody is told any more; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def user_of(peer: socket.socket) -> int:
    """The user at the other end."""
    import socket

    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER)
    return int.from_bytes(data[4:8], sys.byteorder)


# ---- what is told ------------------------------------------------------------------------------------


def snapshot(agent: LocalElasticAgent, since: float) -> dict[str, Any]:
    """The job as this agent sees it, as plain values; `since`: when the agent began, by the wall clock."""
    group, state = agent.get_worker_group(), agent._state
    current = state.round
    incidents = agent.supervision.incidents if agent.supervision is not None else None
    findings = incidents.findings if incidents is not None else []
    return {
        "run": agent._rdzv_handler.get_run_id(),
        "name": agent.job_name,
        "host": agent._host,
        "pid": os.getpid(),
        "since": since,
        "now": time.time(),
        "phase": state.phase.value,
        "waiting_for": agent._waiting_for(),
        "round": 0 if current is None else current.number,
        "nodes": [] if current is None else list(current.members),
        "node": -1 if current is None else current.node_rank,
        "restarts": state.attempt,
        "max_restarts": agent.restart_policy.max_restarts,
        "world_size": max((worker.world_size for worker in group.workers), default=0),
        "workers": _workers(agent),
        "standbys": _standbys(agent),
        "slow": [one["summary"] for one in findings if one["kind"] == "straggler"],
        "hangs": [one["summary"] for one in findings if one["kind"] == "hang"],
        "incidents": [{"at": at, "what": line} for at, line in agent.notes],
        "logs": agent.run_dir or "",
    }


def _workers(agent: LocalElasticAgent) -> list[dict[str, Any]]:
    detector = agent.supervision.detector if agent.supervision is not None else None
    context = agent._context
    if context is None:
        return []
    pids, running = context.pids(), context.running
    beats = {} if detector is None else {beat.rank: beat for beat in detector.beats()}
    now = time.monotonic()
    told = []
    for worker in agent.get_worker_group().workers:
        beat = beats.get(worker.global_rank)
        told.append(
            {
                "rank": worker.global_rank,
                "local_rank": worker.local_rank,
                "pid": pids.get(worker.local_rank),
                "running": worker.local_rank in running,
                "ready": beat is not None and bool(beat.ready_at or beat.count),
                "step": None if beat is None else beat.step,
                "rate": None if detector is None else detector.rates.get(worker.global_rank),
                "quiet": now - beat.beat_at if beat is not None and beat.count else None,
                "section": "" if beat is None else beat.section,
            }
        )
    return told


def _standbys(agent: LocalElasticAgent) -> dict[str, Any]:
    pids = agent.helpers.parked if agent.helpers is not None else ()
    return {"count": len(pids), "pids": list(pids), "memory": memory_of(pids)}


def memory_of(pids: Iterable[int]) -> int:
    """Bytes that these processes use, what they share counted in shares; 0 where that cannot be told."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, ValueError):
            continue
    return total
