"""The job as its leader sees it: what the records in the store say, kept up to date change by change.

What follows from it is decided in `core.rounds.rounds`, by functions of this view. Records that cannot be
read are skipped and named: another version of the package, or another program, may have written them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.core.rounds.quarantine import HostWatch, QuarantinePolicy
from phalanx.core.rounds.records import (
    ACTIVE,
    CloseRequest,
    Member,
    MemberList,
    NodeRecord,
    Result,
    Round,
    decode_close,
    decode_members,
    decode_node,
    decode_place,
    decode_result,
    decode_round,
    printable,
)
from phalanx.core.rounds.store_commands import Change, Entry

_MOST_SKIPPED = 64
_LONGEST_KEY = 256
_LONGEST_REASON = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """What the job was started with; times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    all_nodes: int = 0  # that were started, each once; 0: not known, or a lost one is started again
    max_restarts: int | None = 3  # None: the nodes count them
    join_timeout: float = 600.0
    last_call: float = 2.0  # once the minimum is reached for the first time
    settle: float = 0.2  # how long newcomers of a running job are gathered
    ttl: float = 6.0
    linger: float = 1.0  # how long a node may take to reconnect after it closed its connection
    store_grace: float = 60.0
    fixed: bool = False
    batch: int = 100  # places in one transaction
    prefix: str = ""
    quarantine: QuarantinePolicy | None = None  # None: no failure leads to one


class Seen(NamedTuple):
    """A node as the leader sees it: `at` is when its record last changed, `since` when it appeared."""

    record: NodeRecord
    incarnation: int
    at: float
    since: float
    lease: int = 0

    @property
    def name(self) -> str:
        """The node's name."""
        return self.record.info.name

    @property
    def rank(self) -> int:
        """The rank that was given to the node."""
        return self.record.info.rank


@dataclass(slots=True)
class LeaderView:
    """The job's keys as the leader knows them, kept up to date by `learn`; unreadable ones are skipped."""

    options: Options
    term: int
    nodes: dict[str, Seen] = field(default_factory=dict)
    round: Round = Round()  # noqa: RUF009 - immutable
    round_mod: int = 0
    since: float = 0.0  # when the round was first seen in its phase
    members: MemberList = MemberList("", ())  # noqa: RUF009 - immutable
    members_mod: int = 0
    results: dict[int, dict[str, tuple[int, Result]]] = field(default_factory=dict)
    drains: set[str] = field(default_factory=set)
    closes: dict[str, CloseRequest] = field(default_factory=dict)  # by job
    refused: set[str] = field(default_factory=set)
    failed_writes: int = 0  # part of the stamp: places of a decision that failed must not match the next one
    quiet_until: float = 0.0  # no round becomes active before: nodes that the store forgot may run workers
    stolen: dict[str, int] = field(default_factory=dict)  # node whose key was overwritten -> its `mod`
    damaged: bool = False  # the store has no round, or not the one that was written last
    complete: bool = False  # everything has been read once
    read: bool = False  # `round` is from the store; else it is what the node knew before it led
    skipped: dict[str, None] = field(default_factory=dict)  # keys of records that are not readable
    remarks: list[str] = field(default_factory=list)  # lines about them that nobody has seen yet
    left: set[str] = field(default_factory=set)  # members that went on purpose, or nobody knows how
    ever: set[str] = field(default_factory=set)  # every node that this leader has known
    lost_at: float = float("-inf")  # when a node went that had not announced it
    unsure_until: float = 0.0  # a node that goes before may have been lost with the store, or its network
    hosts: HostWatch = field(default_factory=HostWatch)  # the node's own, which has watched for longer
    slow: dict[str, tuple[int, str]] = field(default_factory=dict)  # host -> round and why

    def learn(self, now: float, changes: tuple[Change, ...], reset: bool = False) -> None:
        """Take in the changes that a watch over the whole prefix reported."""
        known, first = self.nodes, reset and not self.complete
        if reset:
            self.nodes = {}
            self.results, self.drains, self.closes, self.refused = {}, set(), {}, set()
            self.stolen, self.slow = {}, {}
            key = self.options.prefix + "ctl/round"
            if self.round_mod and not any(c.entry.key == key for c in changes):
                self.damaged, self.round_mod = True, 0
        for entry, deleted in changes:
            kind, _, rest = entry.key.removeprefix(self.options.prefix).partition("/")
            if kind == "node" and deleted:
                gone = self.nodes.pop(rest, None)
                if gone is not None and not gone.record.leaving:
                    self.lost_at = now
                if gone is None or self._went_on_purpose(now, gone):
                    self.left.add(rest)
                self.stolen.pop(rest, None)
                self.refused.discard(rest)
            elif kind == "node":
                self._learn_node(now, rest, entry, known.get(rest))
            elif kind == "ctl" and rest == "round" and entry.mod > self.round_mod:
                self._learn_round(now, entry, deleted)
            elif kind == "ctl" and rest.startswith("quarantine/"):
                host = rest.removeprefix("quarantine/")
                self.hosts.learn(now, host, entry, deleted)
                if host in self.hosts.unreadable:
                    self._skip(entry.key)
            elif kind == "members" and not rest and entry.mod > self.members_mod:
                found = None if deleted else decode_members(entry.value)
                self.members, self.members_mod = found or MemberList("", ()), entry.mod
                self.ever.update(m.id for m in self.members.nodes)
                self.left = set()
                if found is None and not deleted:
                    self._skip(entry.key)
            elif kind == "place" and not deleted:
                self._learn_place(rest, entry)
            elif kind == "result":
                self._learn_result(rest, entry, deleted)
            elif kind == "slow":
                self._learn_slow(rest, entry, deleted)
            elif kind == "drain":
                (self.drains.discard if deleted else self.drains.add)(rest)
            elif kind == "close" and deleted:
                self.closes.pop(rest, None)
            elif kind == "close":
                self.closes[rest] = decode_close(entry.value)
        if reset and not (known.keys() <= self.nodes.keys() and all(map(self.present, self.members.nodes))):
            self.lost_at = now
        if reset and not (first and self.round.phase == ACTIVE and now >= self.unsure_until):
            # How these went cannot be told. (A node that leaves an active round says so, which ends it.)
            self.left.update(m.id for m in self.members.nodes if not self.present(m))
        if first:
            self.complete = True
            # A round ran here, and its record is gone: nodes that count as ready for it may run workers.
            ran = self.members_mod > 0 or self.round.term > 0
            self.damaged = self.damaged or (ran and not self.round_mod)

    def _went_on_purpose(self, now: float, gone: Seen) -> bool:
        """Whether a node left, or may have; not if it was lost while it ran workers, or stopped them."""
        record, current = gone.record, self.round
        asked = record.info.id in self.drains or record.info.id in current.out
        stopped = current.phase != ACTIVE and record.ready >= current.number
        return bool(record.leaving or record.preempted or asked or stopped or now < self.unsure_until)

    def _skip(self, key: str) -> None:
        if key not in self.skipped and len(self.skipped) < _MOST_SKIPPED:
            self.skipped[key] = None
            shown = printable(key[:_LONGEST_KEY])
            self.remarks.append(
                f"the record {shown} is ignored: another version of phalanx, or another program, wrote it"
            )

    def _learn_round(self, now: float, entry: Entry, deleted: bool) -> None:
        current = None if deleted else decode_round(entry.value)
        self.round_mod = 0 if deleted else entry.mod
        foreign = current is not None and (
            current.term != self.term if self.complete else current.older_than(self.round)
        )
        if current is None or foreign:
            self.damaged = True
            if not deleted:
                self._skip(entry.key)
        else:
            if current.stage != self.round.stage:
                self.since = now
            self.round, self.damaged, self.read = current, False, True

    def _learn_place(self, node: str, entry: Entry) -> None:
        if entry.value.startswith(b'{"stamp":') and b"refused" not in entry.value:
            return  # as this version writes it: there may be thousands
        place = decode_place(entry.value)
        if place is None:
            self._skip(entry.key)
        elif place.refused:
            self.refused.add(node)

    def _learn_node(self, now: float, node: str, entry: Entry, old: Seen | None) -> None:
        record = decode_node(entry.value) if entry.lease else None
        if old is not None and old.incarnation != entry.create:
            old = None
        if record is None or record.info.id != node:
            self._skip(entry.key)
            if old is not None:  # it holds its lease, and may run workers
                self.nodes[node] = old
                if not entry.lease:
                    self.stolen[node] = entry.mod
            return
        self.stolen.pop(node, None)
        at, since = (now, now) if old is None else (old.at if old.record == record else now, old.since)
        self.nodes[node] = Seen(record, entry.create, at, since, entry.lease)
        self.ever.add(node)

    def _learn_result(self, rest: str, entry: Entry, deleted: bool) -> None:
        number, _, node = rest.partition("/")
        valid = number.isascii() and number.isdigit() and len(number) <= 18
        result = None if deleted else decode_result(entry.value)
        if deleted and valid:
            self.results.get(int(number), {}).pop(node, None)
        elif result is not None and valid:
            self.results.setdefault(int(number), {})[node] = (entry.mod, result)
        elif not deleted:
            self._skip(entry.key)

    def _learn_slow(self, rest: str, entry: Entry, deleted: bool) -> None:
        number, _, host = rest.partition("/")
        if deleted:
            self.slow.pop(host, None)
        elif number.isascii() and number.isdigit() and len(number) <= 18:
            why = printable(entry.value[:_LONGEST_REASON].decode(errors="replace"))
            self.slow[host] = int(number), why

    def kept_out(self, now: float) -> set[str]:
        """The hosts that are quarantined now."""
        return {one.node for one in self.hosts.state.entries if one.until is None or now < one.until}

    def present(self, member: Member) -> bool:
        """Whether a member still holds the key it became a member with."""
        seen = self.nodes.get(member.id)
        return seen is not None and seen.incarnation == member.incarnation

    def staying(self) -> dict[str, Seen]:
        """The nodes of this job that are present and are not about to leave."""
        gone, job = self.drains.union(self.round.out, self.refused), self.round.job
        return {
            i: s
            for i, s in self.nodes.items()
            if not s.record.leaving and i not in gone and s.record.job == job
        }

    def label(self, member: Member, rank: int) -> str:
        """A member's name for people; in a fixed job its rank is what people know it by."""
        return f"node {rank} ({member.name})" if self.options.fixed else member.name
