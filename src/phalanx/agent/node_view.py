"""This node as an `observe.snapshot.JobSnapshot`, read from the agent when asked.

Nothing here is kept up to date: boards, /proc and log files are read at the moment of the question. It must
not take long, because the owner's loop answers; what does (devices) is read before, by a process of its own.
"""

from __future__ import annotations

import os
import time

from phalanx.core.group.group import WORDS
from phalanx.observe.log_layout import tail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from phalanx.agent.agent import Agent
    from phalanx.agent.gpu_probe import Figures
    from phalanx.observe.snapshot import JobSnapshot, StandbySnapshot, WorkerSnapshot
    from phalanx.observe.train_status import TrainProgress

_TICKS = float(os.sysconf("SC_CLK_TCK"))
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TAIL = 2048  # bytes of a log that are read for its last line
_LINE = 300  # characters of it
_LONGEST_CAUSE = 32768  # characters of the report of a failure
_RECORDS = 50  # incidents in a snapshot


class NodeView:
    """The view of one agent; remembers the last look at the processors' time, for the share since then."""

    def __init__(self, agent: Agent, since: float) -> None:
        """`since`: when the agent began, by the wall clock."""
        self._agent, self._since = agent, since
        self._cpu: dict[int, tuple[float, float]] = {}  # pid -> when, seconds of processor time

    def snapshot(self, devices: Figures | None = None) -> JobSnapshot:
        """The node now; `devices`: those that each process uses, where they were read."""
        from phalanx.observe import snapshot as schema

        agent = self._agent
        group, state, place = agent.get_worker_group(), agent.state, agent.nodes.place()
        current = state.round
        findings = agent.supervision.incidents.findings
        history = agent.history
        cause, cause_at = agent.record.cause()
        return schema.JobSnapshot(
            run=agent.run_id,
            name=agent.record.job_name,
            host=agent.host,
            pid=os.getpid(),
            since=self._since,
            now=time.time(),
            phase=state.phase.value,
            state=self._state(place),
            waiting_for=agent.waiting_for,
            id=place.get("id", ""),
            address=place.get("address", ""),
            role=group.spec.role,
            lease_age=place.get("lease_age"),
            round=0 if current is None else current.number,
            nodes=[] if current is None else list(current.members),
            node=-1 if current is None else current.node_rank,
            restarts=state.attempt,
            max_restarts=agent.restart_policy.max_restarts,
            world_size=max((worker.world_size for worker in group.workers), default=0),
            workers=self.workers(devices or {}),
            standbys=self._standbys(),
            slow=[one["summary"] for one in findings if one["kind"] == "straggler"],
            hangs=[one["summary"] for one in findings if one["kind"] == "hang"],
            incidents=[schema.NoteSnapshot(at, line) for at, line in agent.record.notes],
            incident_count=history.incident_count,
            records=[schema.IncidentSnapshot(**one.as_dict()) for one in history.incidents()[-_RECORDS:]],
            ledger=schema.LedgerSnapshot(**history.totals().as_dict()),
            logs=agent.run_dir or "",
            quarantine=[schema.QuarantineSnapshot(**one) for one in place.get("quarantine", [])],
            cause=cause[:_LONGEST_CAUSE],
            cause_at=cause_at,
        )

    def _state(self, place: dict[str, Any]) -> str:
        state = WORDS[self._agent.state.phase].state
        return "spare" if state == "waiting" and place.get("spare") else state

    def workers(self, devices: Figures) -> list[WorkerSnapshot]:
        """The workers of this node now."""
        from phalanx.observe import worker_states as states
        from phalanx.observe.snapshot import GpuSnapshot, WorkerSnapshot

        agent = self._agent
        context, detector = agent.context, agent.supervision.detector
        if context is None:
            return []
        pids, running, now = context.pids(), context.running, time.monotonic()
        boards = agent.supervision.snapshots()
        rates = {} if detector is None else detector.rates
        found, seen = [], {}
        for worker in agent.get_worker_group().workers:
            rank, pid = worker.local_rank, pids.get(worker.local_rank)
            board = boards[rank] if rank < len(boards) else None
            lives = rank in running
            beats = lives and board is not None and board.count > 0
            ready = lives and board is not None and bool(board.ready_at or board.count)
            process = _process(pid) if lives and pid else None
            uptime = cpu = memory = None
            state = states.ENDED if not context.exit_code(rank) else states.FAILED
            if lives:
                state = states.READY if ready else states.RUNNING if context.started else states.STARTING
            if process is not None and pid is not None:
                letter, used, uptime, memory = process
                seen[pid] = now, used
                before, spent = self._cpu.get(pid, (now - max(uptime, 1e-3), 0.0))
                cpu = round(max(0.0, used - spent) / max(now - before, 1e-3), 3)
                if letter in "Tt":
                    state = states.STOPPED
            if board is not None and state == states.READY and "checkpoint" in board.section.split("/"):
                state = states.CHECKPOINTING
            found.append(
                WorkerSnapshot(
                    rank=worker.global_rank,
                    local_rank=rank,
                    role_rank=worker.role_rank,
                    pid=pid,
                    running=lives,
                    ready=ready,
                    state=state,
                    uptime=uptime,
                    cpu=cpu,
                    memory=memory,
                    gpus=[GpuSnapshot(**one) for one in devices.get(pid, [])] if pid and lives else [],
                    step=board.step if beats and board is not None else None,
                    rate=rates.get(worker.global_rank),
                    quiet=now - board.beat_at if beats and board is not None else None,
                    section=board.section if lives and board is not None else "",
                    last_line=last_line(context.stdouts.get(rank, ""), context.stderrs.get(rank, "")),
                )
            )
        self._cpu = seen
        return found

    def _standbys(self) -> StandbySnapshot:
        from phalanx.observe.snapshot import StandbySnapshot

        pids = self._agent.helpers.parked
        return StandbySnapshot(len(pids), list(pids), memory_of(pids))


def _process(pid: int) -> tuple[str, float, float, int] | None:
    """State, processor seconds, age and resident bytes of a process; None if it is gone."""
    from phalanx.kernel import stat_fields

    fields = stat_fields(pid)
    if fields is None:
        return None
    try:
        used = (int(fields[11]) + int(fields[12])) / _TICKS
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS
        return fields[0], used, max(0.0, age), int(fields[21]) * _PAGE
    except (IndexError, ValueError):
        return None


def last_line(*paths: str) -> str:
    """The last line of the file that was written to last; empty where output goes to the console."""
    newest, found = -1.0, ""
    for path in paths:
        try:
            written = os.stat(path).st_mtime
        except OSError:
            continue
        if written > newest:
            lines = tail(path, _TAIL).replace("\r", "\n").split("\n")
            words = [line for line in lines if line.strip()]
            if words:
                newest, found = written, words[-1].strip()[:_LINE]
    return found


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


def train_progress(agent: Agent) -> TrainProgress | None:
    """For the status of a TrainJob; None: another node reports, or no worker has told of a step."""
    from phalanx.observe.train_status import TrainProgress

    group = agent.get_worker_group()
    boards = agent.supervision.snapshots() or agent.supervision.final
    steps = [board.step for board in boards if board.count and board.step is not None]
    if group.group_rank or not steps:
        return None
    agent.history.settle()
    nodes, ranks = group.group_world_size or 1, [worker.world_size for worker in group.workers]
    goodput = agent.history.totals().ratio
    return TrainProgress(time.time(), min(steps), agent.attempt, nodes, max(ranks, default=0), goodput)
