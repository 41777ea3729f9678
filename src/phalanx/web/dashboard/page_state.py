"""What the page shows, from a snapshot of the job: sections of plain values, each sent when it has changed.

Ranks are columns, so that thousands of them stay small: one letter per rank for its state, and lists of
numbers. What a viewer sees of a single rank (`rank_detail`) is asked for by itself.
"""

from __future__ import annotations

from typing import Any

from phalanx.core.ledger.goodput import CATEGORIES, goodput_line
from phalanx.core.ledger.incidents import Incident
from phalanx.observe.snapshot import IncidentSnapshot, JobSnapshot, WorkerSnapshot, nodes_of, totals_of
from phalanx.observe.status_text import quarantine_lines
from phalanx.observe.worker_states import MARKS, UNKNOWN

RANKS = 16384
"""Ranks that the page shows."""
_INCIDENTS = 50
_QUARANTINED = 20
_MARKED = 300.0  # seconds for which the rank that failed last stays marked
_LONGEST_CAUSE = 32768
_STAGES = ("detect", "stop", "reform", "start", "first_line", "first_step")


def sections(job: JobSnapshot, slow: list[int]) -> dict[str, Any]:
    """Everything but the rates over time."""
    nodes = nodes_of(job)
    return {
        "job": _job(job, nodes),
        "ranks": _ranks(job, nodes, slow),
        "nodes": [_node(node) for node in nodes],
        "quarantine": quarantine_lines(job.quarantine, _QUARANTINED),
        "incidents": [_incident(one) for one in job.records[-_INCIDENTS:]],
        "cause": _cause(job, nodes),
        "goodput": _goodput(job),
    }


def beats(job: JobSnapshot) -> list[tuple[int, int | None, float]]:
    """Rank, step and the time of its last heartbeat, by the clock of its host."""
    return [
        (worker.rank, worker.step, node.now - (worker.quiet or 0.0))
        for node in nodes_of(job)
        for worker in node.workers
    ]


def world_of(job: JobSnapshot) -> int:
    """How many ranks there are, or were in the last round."""
    highest = max((worker.rank for node in nodes_of(job) for worker in node.workers), default=-1)
    return min(RANKS, max(job.world_size, highest + 1, 0))


def _job(job: JobSnapshot, nodes: list[JobSnapshot]) -> dict[str, Any]:
    return {
        "name": job.name,
        "run": job.run,
        "host": job.host,
        "state": job.state,
        "waiting_for": job.waiting_for,
        "round": job.round,
        "since": job.since,
        "restarts": job.restarts,
        "max_restarts": job.max_restarts,
        "world": world_of(job),
        "nodes": len(nodes),
        "silent": job.silent,
        "incidents": job.incident_count,
        "slow": [line for node in nodes for line in node.slow][-5:],
        "hangs": [line for node in nodes for line in node.hangs][-5:],
        "standbys": sum(node.standbys.count for node in nodes),
    }


def _ranks(job: JobSnapshot, nodes: list[JobSnapshot], slow: list[int]) -> dict[str, Any]:
    world = world_of(job)
    letters = [UNKNOWN.letter] * world
    steps: list[int | None] = [None] * world
    of_node = [-1] * world
    for index, node in enumerate(nodes):
        for worker in node.workers:
            if 0 <= worker.rank < world:
                letters[worker.rank] = MARKS.get(worker.state, UNKNOWN).letter
                steps[worker.rank] = worker.step
                of_node[worker.rank] = index
    last = job.records[-1] if job.records else None
    recent = last is not None and last.rank is not None and job.now - last.timestamp < _MARKED
    return {
        "states": "".join(letters),
        "steps": steps,
        "nodes": of_node,
        "slow": slow[:256],
        "failed": [last.rank] if last is not None and recent else [],
    }


def _node(node: JobSnapshot) -> dict[str, Any]:
    return {
        "id": node.id,
        "rank": node.node,
        "host": node.host,
        "pid": node.pid,
        "address": node.address,
        "role": node.role,
        "state": node.state,
        "lease": None if node.lease_age is None else round(node.lease_age, 1),
        "workers": len(node.workers),
        "running": sum(worker.running for worker in node.workers),
        "cpu": _sum(worker.cpu for worker in node.workers),
        "memory": _sum(worker.memory for worker in node.workers),
        "gpu": _sum(gpu.memory for worker in node.workers for gpu in worker.gpus),
        "standbys": node.standbys.count,
        "logs": node.logs,
    }


def _incident(one: IncidentSnapshot) -> dict[str, Any]:
    return {
        "number": one.number,
        "reason": one.reason,
        "trigger": one.trigger,
        "recovery": one.recovery,
        "at": one.timestamp,
        "node": one.node,
        "rank": one.rank,
        "exit_code": one.exit_code,
        "stages": {name: getattr(one, name) for name in _STAGES},
        "total": one.total,
        "over": one.over,
    }


def _cause(job: JobSnapshot, nodes: list[JobSnapshot]) -> dict[str, Any] | None:
    """The last root cause: in one line, and in full from the node that has seen it."""
    last = job.records[-1] if job.records else None
    told = max(nodes, key=lambda node: node.cause_at)
    if last is None and not told.cause:
        return None
    return {
        "at": last.timestamp if last is not None else told.cause_at,
        "headline": last.reason if last is not None else told.cause.strip().partition("\n")[0],
        "text": told.cause[:_LONGEST_CAUSE],
        "host": told.host if told.cause else "",
        "over": last.over if last is not None else False,
    }


def _goodput(job: JobSnapshot) -> dict[str, Any]:
    totals = totals_of(job)
    known = [Incident(one.number, one.reason, one.trigger, one.recovery) for one in job.records]
    return {
        "measure": totals.measure,
        "ratio": totals.ratio,
        "line": goodput_line(totals, known),
        "parts": [[name, round(totals.seconds[name], 2)] for name in CATEGORIES],
    }


def rank_detail(job: JobSnapshot, rank: int, rate: float | None) -> dict[str, Any] | None:
    """Everything about one rank."""
    for node in nodes_of(job):
        for worker in node.workers:
            if worker.rank == rank:
                return _detail(node, worker, rate)
    return None


def _detail(node: JobSnapshot, worker: WorkerSnapshot, rate: float | None) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "host": node.host,
        "node": node.node,
        "pid": worker.pid,
        "state": worker.state,
        "uptime": worker.uptime,
        "cpu": worker.cpu,
        "memory": worker.memory,
        "gpus": [[gpu.index, gpu.memory, gpu.total, gpu.busy] for gpu in worker.gpus[:16]],
        "step": worker.step,
        "rate": worker.rate if rate is None else rate,
        "quiet": worker.quiet,
        "section": worker.section,
        "last_line": worker.last_line,
    }


def _sum(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None
