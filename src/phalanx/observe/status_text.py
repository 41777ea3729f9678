"""Formats the state of a job, as an agent reports it, for a person.

The agent may be another user's: no character of its answer reaches the terminal that the terminal would obey.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.group.group import WORDS, Phase
from phalanx.log import printable
from phalanx.observe.duration import duration
from phalanx.observe.snapshot import JobSnapshot, QuarantineSnapshot, WorkerSnapshot
from phalanx.observe.worker_states import ENDED, READY, RUNNING

PHASES = {phase.value: words.status for phase, words in WORDS.items()}
_INCIDENTS = 5
_NODES = 64  # of other machines, in full


def format_job(job: JobSnapshot, width: int = 100, user: int | None = None) -> str:
    """A node of a job (of another `user`), and the other nodes that have answered for it."""
    peers, silent = job.peers, job.silent
    texts = [format_status(job, width, user), *(format_status(one, width) for one in peers[:_NODES])]
    missing = [f"{len(peers) - _NODES} more nodes have answered (--json)"] * (len(peers) > _NODES)
    missing += [f"{silent} node{'s' * (silent > 1)} did not answer"] * (silent > 0)
    return "\n\n".join([*texts, *missing])


def format_status(job: JobSnapshot, width: int = 100, user: int | None = None) -> str:
    """One node: a headline, a row for each of its workers, and the recent incidents."""
    lines = [_headline(job, user)]
    lines += _table(job.workers)
    count = job.standbys.count
    if count:
        lines.append(f"  {count} standby{'s' * (count > 1)}, {_bytes(job.standbys.memory)}")
    ledger = job.ledger
    if any(ledger.seconds.values()):
        measured = (("goodput", ledger.goodput), ("uptime", ledger.uptime))
        lines += [f"  {name} {100 * ratio:.1f} %" for name, ratio in measured if ratio is not None]
    lines += [f"  slow: {line}" for line in job.slow]
    lines += [f"  hang: {line}" for line in job.hangs]
    lines += [f"  quarantined: {quarantine_line(one)}" for one in job.quarantine]
    known = {*job.slow, *job.hangs}
    others = [one for one in job.incidents if one.what not in known]
    for one in others[-_INCIDENTS:]:
        lines.append(f"  {duration(max(0.0, job.now - one.at))} ago: {one.what}")
    if job.logs:
        lines.append(f"  logs: {job.logs}")
    lines = [printable(line.replace("\n", "\\n")) for line in lines]
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def quarantine_line(one: QuarantineSnapshot) -> str:
    """`gpu-7: its device is lost (for another 59 min)`."""
    time = "until removed" if one.left is None else f"for another {duration(max(0.0, one.left))}"
    return f"{one.host}: {one.reason} ({time})"


def quarantine_lines(found: Sequence[QuarantineSnapshot], most: int) -> list[str]:
    """The same for every host that is kept out, and how many there are beyond the first."""
    shown = found if len(found) <= most else found[: most - 1]
    more = len(found) - len(shown)
    return [*map(quarantine_line, shown), *[f"{more} more hosts: see phalanx quarantine"] * (more > 0)]


def _headline(job: JobSnapshot, user: int | None) -> str:
    words = [f"{job.name} (run {job.run}) on {job.host}, pid {job.pid}"]
    if user is not None:
        words.append(f"user {user}")
    waiting = job.waiting_for if job.phase == Phase.JOINING else ""
    took = duration(max(0.0, job.now - job.since))
    words.append(
        f"{waiting} ({took} so far)" if waiting else f"{PHASES.get(job.phase, job.phase)} for {took}"
    )
    if job.restarts:
        words.append(f"restart {job.restarts} of {job.max_restarts}")
    if len(job.nodes) > 1:
        nodes = f"node {job.node + 1} of {len(job.nodes)}"
        words.append(f"{nodes} ({' '.join(job.nodes[:8])}{' …' if len(job.nodes) > 8 else ''})")
        words.append(f"round {job.round}")
    if job.world_size > 0:
        words.append(f"world size {job.world_size}")
    return ", ".join(words)


def _table(workers: Sequence[WorkerSnapshot]) -> list[str]:
    """The columns that are not empty, with their names."""
    if not workers:
        return []
    columns: list[tuple[str, list[str]]] = [
        ("rank", [str(one.rank) for one in workers]),
        ("pid", [str(one.pid) for one in workers]),
        ("state", [_state(one) for one in workers]),
        ("cpu", ["" if one.cpu is None else f"{one.cpu:.2f}" for one in workers]),
        ("memory", ["" if one.memory is None else _bytes(one.memory) for one in workers]),
        ("step", ["" if one.step is None else str(one.step) for one in workers]),
        ("steps/s", ["" if one.rate is None else f"{one.rate:.3g}" for one in workers]),
        ("last beat", ["" if one.quiet is None else f"{one.quiet:.1f} s ago" for one in workers]),
        ("section", [one.section for one in workers]),
        ("gpu", [_gpus(one) for one in workers]),
    ]
    shown = [(name, cells) for name, cells in columns if any(cells)]
    widths = [max(len(name), *map(len, cells)) for name, cells in shown]
    rows = [[name for name, _ in shown], *([cells[i] for _, cells in shown] for i in range(len(workers)))]
    return [
        "  " + "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _gpus(worker: WorkerSnapshot) -> str:
    """`0: 12.3 GB, 97 %` for every device of a worker."""
    return "; ".join(f"{one.index}: {_bytes(one.memory or 0)}, {one.busy or 0:.0f} %" for one in worker.gpus)


def _state(worker: WorkerSnapshot) -> str:
    if worker.state:
        return worker.state
    if not worker.running:  # of an agent of an older version
        return ENDED
    return READY if worker.ready else RUNNING


def _bytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
