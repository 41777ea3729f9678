"""The model of a job: what an agent tells of its node, and the whole job put together from its nodes.

Everything that shows a job (`phalanx status`, its live view, a page) reads these types. An agent fills one
`JobSnapshot` about its own node (`agent.node_view`); with `peers` it also has those of the other nodes. All
numbers are bounded and all sizes limited by whoever reads them, because any process may answer in a job's
name; text is what others sent, and is escaped where it is shown.

Unknown fields are ignored and missing ones take their defaults, so that versions can differ.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from phalanx.core.ledger.goodput import CATEGORIES, GoodputTotals

Count = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class GpuSnapshot(msgspec.Struct):
    """A device that a worker uses: its memory there in bytes, and how busy the device is, in percent."""

    index: Count = 0
    name: str = ""
    memory: Count | None = None
    total: Count | None = None
    busy: Seconds | None = None


class WorkerSnapshot(msgspec.Struct):
    """A worker; fields that an agent of another version lacks are empty.

    `state`: one of `observe.worker_states`. `quiet`: seconds since the last heartbeat. `cpu`: processors in
    use since the last look, else since the start. `memory`: resident bytes."""

    rank: Count
    local_rank: Count = 0
    role_rank: Count = -1
    pid: Count | None = None
    running: bool = False
    ready: bool = False
    state: str = ""
    uptime: Seconds | None = None
    cpu: Seconds | None = None
    memory: Count | None = None
    gpus: list[GpuSnapshot] = []
    step: Count | None = None
    rate: Seconds | None = None
    quiet: Seconds | None = None
    section: str = ""
    last_line: str = ""


class StandbySnapshot(msgspec.Struct):
    """The standby processes of a node."""

    count: Count = 0
    pids: list[Count] = []
    memory: Count = 0


class NoteSnapshot(msgspec.Struct):
    """A line of the node's recent history."""

    at: Seconds
    what: str


class IncidentSnapshot(msgspec.Struct):
    """`core.ledger.incidents.Incident`, field by field."""

    number: Count
    reason: str = ""
    trigger: str = ""
    recovery: str = ""
    round: Count = 0
    attempt: Count = 0
    timestamp: Seconds = 0.0
    node: str = ""
    rank: Count | None = None
    pid: Count | None = None
    exit_code: Count | None = None
    detect: Seconds | None = None
    stop: Seconds | None = None
    reform: Seconds | None = None
    start: Seconds | None = None
    first_line: Seconds | None = None
    first_step: Seconds | None = None
    total: Seconds | None = None
    over: bool = False
    how: str = ""
    quarantined: str = ""


class QuarantineSnapshot(msgspec.Struct):
    """A host that is kept out; `left`: seconds until it may take part again, None: until it is removed."""

    host: str
    reason: str = ""
    left: Seconds | None = None


class LedgerSnapshot(msgspec.Struct):
    """`core.ledger.goodput.GoodputTotals`: rank-seconds by category, and by incident."""

    ranks: Count = 0
    goodput: Seconds | None = None
    seconds: dict[str, Seconds] = {}
    lost: dict[str, dict[str, Seconds]] = {}
    uptime: Seconds | None = None  # instead of goodput, where no rank has sent a heartbeat


class JobSnapshot(msgspec.Struct):
    """A node of a job, as its agent sees it.

    `state`: waiting, spare, forming, starting, running, finished, ending. `lease_age`: seconds since the
    store last confirmed that this node is there. `nodes`: the names of the round's members. `notes`: lines;
    `records`: the incidents themselves. `cause`: the report of the last failure or
    hang that this node saw, and when. `peers`: the other nodes, where they were asked for; `silent`: how
    many of them did not answer."""

    run: str
    name: str
    host: str
    pid: Count
    since: Seconds
    now: Seconds
    phase: str
    state: str = ""
    waiting_for: str = ""
    id: str = ""
    address: str = ""
    role: str = ""
    lease_age: Seconds | None = None
    round: Count = 0
    nodes: list[str] = []
    node: Count = -1
    restarts: Count = 0
    max_restarts: Count = 0
    world_size: Count = 0
    workers: list[WorkerSnapshot] = []
    standbys: StandbySnapshot = msgspec.field(default_factory=StandbySnapshot)
    slow: list[str] = []
    hangs: list[str] = []
    incidents: list[NoteSnapshot] = []
    incident_count: Count = 0
    records: list[IncidentSnapshot] = []
    ledger: LedgerSnapshot = msgspec.field(default_factory=LedgerSnapshot)
    logs: str = ""
    cause: str = ""
    cause_at: Seconds = 0.0
    quarantine: list[QuarantineSnapshot] = []
    peers: list[JobSnapshot] = []
    silent: Count = 0


class RunFile(msgspec.Struct):
    """A run in the registry (`observe.run_registry`) and, complete, in the `summary.json` of its logs.

    `outcome`: empty while it runs (or if it was killed), then succeeded, failed, stopped or left. `why`: what
    ended it, if that was not its workers. `ranks`: the global ranks of this node's workers, by local rank.
    `nodes`: the names of the nodes of its last round, where there were several."""

    run: str
    name: str
    host: str
    pid: Count
    since: Seconds
    logs: str = ""
    until: Seconds | None = None
    outcome: str = ""
    exit_code: Count | None = None
    why: str = ""
    restarts: Count = 0
    ranks: list[Count] = []
    nodes: list[str] = []
    goodput: LedgerSnapshot | None = None
    line: str = ""
    incidents: list[IncidentSnapshot] = []
    machine: str = ""  # where it began, by the name of its directory


READABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What `decode` raises for what is not a snapshot."""


def decode(data: bytes) -> JobSnapshot:
    """An answer of an agent; `READABLE` otherwise."""
    return msgspec.json.decode(data, type=JobSnapshot)


def decode_run(data: bytes) -> RunFile | None:
    """A run of the registry; None for anything else."""
    try:
        return msgspec.json.decode(data, type=RunFile)
    except READABLE:
        return None


def as_json(snapshot: JobSnapshot) -> dict[str, Any]:
    """As plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    return plain


def nodes_of(job: JobSnapshot) -> list[JobSnapshot]:
    """All nodes that are known, by rank; those without one (spares) last."""
    return sorted((job, *job.peers), key=lambda one: (one.node < 0, one.node, one.host, one.pid))


def workers_of(job: JobSnapshot) -> list[tuple[JobSnapshot, WorkerSnapshot]]:
    """All workers that are known with their nodes, by rank."""
    found = [(node, worker) for node in nodes_of(job) for worker in node.workers]
    return sorted(found, key=lambda pair: pair[1].rank)


def totals_of(job: JobSnapshot) -> GoodputTotals:
    """The ledger of the whole job, as far as its nodes are known; incidents are those of the node asked.

    A spare's time is not the job's: it counts once it is in a round."""
    several = bool(job.peers)
    total: GoodputTotals | None = None
    for node in (job, *job.peers):
        if several and not node.workers and node.state in ("spare", "waiting"):
            continue
        seconds = {name: float(node.ledger.seconds.get(name, 0.0)) for name in CATEGORIES}
        lost = {int(n): dict(parts) for n, parts in node.ledger.lost.items() if n.lstrip("-").isdecimal()}
        one = GoodputTotals(node.ledger.ranks, seconds, lost)
        total = one if total is None else total + one
    return total if total is not None else GoodputTotals(0, dict.fromkeys(CATEGORIES, 0.0), {})
