"""The values of a job's keys (see `core.rounds.rounds`): named tuples, and how the store holds them.

Records are JSON, so that people can read them with the store's own tools. Decoding is tolerant, because nodes
of another version, or strangers in a job without a token, may write here: unknown fields are ignored, missing
ones take their default, fields that equal their default are not written, and a record that is not readable is
None. Text comes back without control characters and is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

from phalanx.core.group.ranks import Offsets

FORMING, ACTIVE, CLOSED = "forming", "active", "closed"
_PHASES = (FORMING, ACTIVE, CLOSED)
OUTCOMES = ("succeeded", "failed", "timeout", "closed")

# The newest format of records that this version reads and writes. A change that older versions can ignore (a
# new field) does not change it. The leader uses the newest format that all nodes of a round read, and a node
# that cannot read a round says so and ends.
FORMAT = 1

UNTIL_REMOVED = -1.0

_LONGEST_NAME = 256
_LONGEST_TEXT = 128 << 10
_MOST_SLOTS = 1 << 20
_MOST_WORKERS = 1 << 40
_MOST_SECONDS = 1e10
LONGEST_DELAY = 86400.0  # before a restart: what --restart-delay allows


class NodeInfo(NamedTuple):
    """The description of a node; `rank` and `position` (its index at the scheduler) are -1 when not given."""

    id: str
    name: str
    addr: str = ""
    slots: int = 1
    role: str = "default"
    rank: int = -1
    position: int = -1


class NodeRecord(NamedTuple):
    """The value of a node's key.

    `rounds` is the last active round that it has seen and `restarts` what it knows of them: a store that
    lost its data, or a part, learns both from its nodes. `preempted`: why it is leaving. `format`: the newest
    format of records that the node reads."""

    info: NodeInfo
    ready: int
    leaving: str = ""
    job: int = 1
    rounds: int = 0
    restarts: int = 0
    preempted: bool = False
    format: int = 1


class Member(NamedTuple):
    """A node in an active round; its rank is its position in the list."""

    id: str
    incarnation: int
    name: str
    addr: str
    slots: int
    role: str


class MemberList(NamedTuple):
    """The value of `members`: the members of the round with this stamp and number, by rank."""

    stamp: str
    nodes: tuple[Member, ...]
    number: int = 0


class Result(NamedTuple):
    """How a node's workers ended in a round; `detail` belongs to the shell (a failure report).

    `unfit`: the node could not start them, and leaves. `what`: the failure in a few words. `ranks`: the
    global ranks that it is due to, where they are known. `blameless`: the node only lost a peer, or a person
    asked for the restart. `request`: nothing failed, the node asks for a new round and has counted so many
    restarts; -1: it does not ask. `delay`: seconds before the next round."""

    ok: bool
    detail: str = ""
    unfit: bool = False
    what: str = ""
    ranks: tuple[int, ...] = ()
    blameless: bool = False
    request: int = -1
    delay: float = 0.0


class CloseRequest(NamedTuple):
    """The value of `close/<job>`: why the job is to end, and which failure ends it (`Round.cause`), if one
    does."""

    reason: str = ""
    cause: tuple[str, ...] = ("", "", "")


class HostRecord(NamedTuple):
    """The value of `ctl/quarantine/<host>` (`core.rounds.quarantine`); all times are seconds before or after
    now.

    `reason`: why the host is kept out, empty where it is not; `left`: for how long yet, or UNTIL_REMOVED;
    `age`: for how long it has been out. `offences`: how long ago it was the root cause of a failure."""

    reason: str = ""
    left: float = 0.0
    age: float = 0.0
    offences: tuple[float, ...] = ()


class Place(NamedTuple):
    """A node's place in the round with this stamp, or why the leader refuses the node."""

    stamp: str = ""
    incarnation: int = 0
    rank: int = -1
    first: int = 0
    world_size: int = 0
    role_first: int = 0
    role_world_size: int = 0
    refused: str = ""

    @property
    def offsets(self) -> Offsets:
        """Where the ranks of the node's workers begin."""
        return Offsets(self.first, self.world_size, self.role_first, self.role_world_size)


class Round(NamedTuple):
    """The value of `ctl/round`.

    `nodes` counts the members and `names` has the first few of their names; `stamp` names the activation,
    which the places belong to; `restarts` counts failed rounds so far; `out` lists drained nodes.
    `preempted` names the nodes that are taken away: the workers of the last round save a checkpoint before
    they stop. `lost` has the ids of members of the last round that were gone when it ended, few or none.
    `format`: the format of the records in this round. `delay`: a forming round becomes active after so many
    seconds at the earliest, because workers keep failing.
    """

    number: int = 1
    phase: str = FORMING
    nodes: int = 0
    names: tuple[str, ...] = ()
    restarts: int = 0
    reason: str = "waiting for the first nodes"
    term: int = 0
    stamp: str = ""
    out: tuple[str, ...] = ()
    outcome: str = ""  # of a closed round: succeeded, failed, timeout or closed
    cause: tuple[str, ...] = ("", "", "")  # of the last round that a node ended: its id, name, detail
    job: int = 1  # the number of this job among those that used the run id
    preempted: tuple[str, ...] = ()
    format: int = 1
    lost: tuple[str, ...] = ()
    delay: float = 0.0

    @property
    def stage(self) -> tuple[int, int, int]:
        """Its place among all rounds and their phases."""
        return self.job, self.number, _PHASES.index(self.phase)

    def older_than(self, other: Round) -> bool:
        """Whether this one comes before another: rounds of a store only go forward."""
        return self.stage < other.stage

    def all_names(self) -> tuple[str, ...]:
        """A name for every member, by rank; members beyond the first few are named by their rank."""
        return self.names + tuple(f"node {rank}" for rank in range(len(self.names), self.nodes))


def encode(value: Any) -> bytes:
    """A record as the store holds it."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def _plain(value: Any) -> Any:
    if isinstance(value, MemberList):
        # Arrays: there may be thousands.
        return {"stamp": value.stamp, "number": value.number, "nodes": value.nodes}
    if hasattr(value, "_field_defaults"):
        defaults = value._field_defaults
        return {
            name: _plain(one)
            for name, one in zip(value._fields, value, strict=True)
            if name not in defaults or one != defaults[name]
        }
    return value


def decode_node(value: bytes) -> NodeRecord | None:
    record: NodeRecord | None = _decoded(NodeRecord, value)
    if record is None or not 0 < record.info.slots <= _MOST_SLOTS or record.format < 1:
        return None
    return record if min(record.ready, record.job, record.rounds, record.restarts) >= 0 else None


def decode_members(value: bytes) -> MemberList | None:
    try:
        found = json.loads(value)
        nodes = tuple(_member(*item) for item in found["nodes"])
        return MemberList(_text(found["stamp"]), nodes, max(0, _int(found.get("number", 0))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _member(id: str, incarnation: int, name: str, addr: str, slots: int, role: str, *_more: Any) -> Member:
    return Member(_name(id), _int(incarnation), _name(name), _name(addr), _int(slots), _name(role))


@lru_cache(maxsize=2)  # participants of one process (a simulation, a test) see the same bytes
def decode_round(value: bytes) -> Round | None:
    record: Round | None = _decoded(Round, value)
    if record is None or len(record.cause) != 3 or record.phase not in _PHASES:
        return None
    if (record.phase == CLOSED and record.outcome not in OUTCOMES) or (
        record.phase == ACTIVE and not record.stamp
    ):
        return None
    counted = record.restarts >= 0 and 0 <= record.nodes <= _MOST_SLOTS and len(record.names) <= _MOST_SLOTS
    counted = counted and 0 <= record.delay <= LONGEST_DELAY
    return record if counted and min(record.number, record.job, record.format) > 0 else None


def decode_place(value: bytes) -> Place | None:
    place: Place | None = _decoded(Place, value)
    if place is None or place.refused:
        return place
    sizes = ((place.first, place.world_size), (place.role_first, place.role_world_size))
    fits = all(0 <= first <= size <= _MOST_WORKERS for first, size in sizes)
    return place if fits and place.rank >= 0 and place.stamp else None


def decode_result(value: bytes) -> Result | None:
    """How the workers of a node ended."""
    record: Result | None = _decoded(Result, value)
    return record if record is None or 0 <= record.delay <= LONGEST_DELAY else None


def decode_close(value: bytes) -> CloseRequest:
    """A request to end the job; a text that is no record is its reason."""
    record: CloseRequest | None = _decoded(CloseRequest, value)
    if record is None or not record.reason or len(record.cause) != 3:
        return CloseRequest(printable(value.decode(errors="replace")))
    return record


def decode_host(value: bytes) -> HostRecord | None:
    """What is held against a host."""
    record: HostRecord | None = _decoded(HostRecord, value)
    if record is None or (record.left < 0 and record.left != UNTIL_REMOVED):
        return None
    return record if min((record.age, *record.offences)) >= 0 else None


def printable(text: str, *, lines: bool = False) -> str:
    """The text with its control characters escaped, so that a terminal shows them and does not obey them."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def _decoded(kind: Any, value: bytes) -> Any:
    try:
        return _record(kind, json.loads(value))
    except (ValueError, TypeError, RecursionError):
        return None


def _record(kind: Any, found: Any) -> Any:
    if not isinstance(found, dict):
        raise TypeError
    return kind(**{name: read(found[name]) for name, read in _readers(kind) if name in found})


@lru_cache
def _readers(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, _READERS[hint]) for name, hint in get_type_hints(kind).items())


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) > 1 << 62:
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _MOST_SECONDS:
        raise TypeError
    return float(value)


def _many_seconds(value: Any) -> tuple[float, ...]:
    if type(value) is not list:
        raise TypeError
    return tuple(map(_seconds, value))


def _ranks(value: Any) -> tuple[int, ...]:
    if type(value) is not list:
        raise TypeError
    return tuple(map(_int, value))


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return printable(value[:_LONGEST_TEXT])[:_LONGEST_TEXT]


def _name(value: Any) -> str:
    return _text(value)[:_LONGEST_NAME]


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise TypeError
    return tuple(map(_text, value))


def _info(value: Any) -> NodeInfo:
    found: NodeInfo = _record(NodeInfo, value)
    return found._replace(
        id=_name(found.id), name=_name(found.name), addr=_name(found.addr), role=_name(found.role)
    )


_READERS: dict[Any, Callable[[Any], Any]] = {
    int: _int,
    bool: _bool,
    str: _text,
    float: _seconds,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _ranks,
    tuple[float, ...]: _many_seconds,
    NodeInfo: _info,
}
