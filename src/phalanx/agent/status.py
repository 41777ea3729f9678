"""The status of a job: a socket of this machine, for its own user, answered by the agent's loop.

A client that connects gets one JSON object and the end of the stream; it sends nothing. The socket has a name
in the kernel and none in the file system (Linux's abstract namespace): a killed agent leaves nothing behind.
`phalanx status` finds it in the kernel's own list. Such a name has no owner and no mode: both sides check the
other's user.
"""

from __future__ import annotations

import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from typing import Any

    from phalanx.agent.torch_agent import LocalElasticAgent
    from phalanx.core.group import Phase

PREFIX = "phalanx/"
_BUFFER = 1 << 20  # an answer is never waited for: what does not fit is lost
_PEER = 12  # struct ucred: pid, uid, gid
_QUICK = 0.05  # seconds in which a start mostly is over
_AT_ONCE = 16  # answers between two looks at the workers, however many ask


class StatusSocket:
    """Listens from the loop's first wait until it is closed; where the system has no such sockets, never."""

    def __init__(self, tell: Callable[[], dict[str, Any]]) -> None:
        self._tell = tell
        self._socket: socket.socket | None = None
        self._open_at: float | None = 0.0  # None: it has been opened

    def _open(self) -> None:
        import socket

        self._open_at = None
        if not hasattr(socket, "SO_PEERCRED"):
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A random part: two agents in different containers may have one pid and one network.
            listener.bind(f"\0{PREFIX}{os.geteuid()}/{os.getpid()}-{os.urandom(4).hex()}")
            listener.listen(16)
            self._socket = listener
        except OSError:
            listener.close()

    def fds(self, phase: Phase) -> list[tuple[int, int]]:
        """Readable when a client connects. Opened in the first wait, but not in the way of a quick start."""
        if self._open_at is not None:
            if phase != "STARTING":
                self._open()
            elif not self._open_at:
                self._open_at = time.monotonic() + _QUICK
        return [] if self._socket is None else [(self._socket.fileno(), select.POLLIN)]

    def deadline(self, phase: Phase) -> float | None:
        return self._open_at

    def look(self, phase: Phase, now: float) -> None:
        if self._open_at and now >= self._open_at:
            self._open()
        self.answer()

    def answer(self) -> None:
        """Answer the clients that have connected by now; never waits."""
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
            pass  # the client has gone, or is slow; it may ask again
        except Exception as error:  # noqa: BLE001 - a request must never end the job, but the fault is reported
            from phalanx.log import warn

            warn(f"status: no answer, because of {type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._open_at = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def user_of(peer: socket.socket) -> int:
    """The user at the other end."""
    import socket

    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER)
    return int.from_bytes(data[4:8], sys.byteorder)


# ---- the answer --------------------------------------------------------------------------------------


def snapshot(agent: LocalElasticAgent, since: float) -> dict[str, Any]:
    """The job as this agent sees it, as plain values; `since`: when the agent began, by the wall clock."""
    group, state = agent.get_worker_group(), agent.state
    current = state.round
    findings = agent.supervision.incidents.findings
    return {
        "run": agent._rdzv_handler.get_run_id(),
        "name": agent.job_name,
        "host": agent.host,
        "pid": os.getpid(),
        "since": since,
        "now": time.time(),
        "phase": state.phase.value,
        "waiting_for": agent.waiting_for,
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
    detector = agent.supervision.detector
    context = agent._pcontext
    if context is None:
        return []
    pids, running = context.pids(), context.running
    beats = {} if detector is None else {beat.rank: beat for beat in detector.beats()}
    now = time.monotonic()
    found = []
    for worker in agent.get_worker_group().workers:
        beat = beats.get(worker.global_rank)
        found.append(
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
    return found


def _standbys(agent: LocalElasticAgent) -> dict[str, Any]:
    pids = agent.helpers.parked
    return {"count": len(pids), "pids": list(pids), "memory": memory_of(pids)}


def memory_of(pids: Iterable[int]) -> int:
    """Bytes that these processes use, shared pages counted in shares; 0 where that is not known."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except (OSError, ValueError):
            continue
    return total
