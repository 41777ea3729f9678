"""Forming rounds: how nodes become one numbered group, and what the elected leader decides.

Everything a job knows lies in a few keys below its own prefix:

    node/<id>             one per node, on the node's lease: who it is, and which round it is ready for
    ctl/leader            on the leader's lease: the id of the node that decides
    ctl/round             the round, written by the leader alone; every node watches `ctl/`
    members               the last active round's members, for a new leader's memory (nobody watches it)
    result/<round>/<id>   how the workers of a node ended in a round (no lease: outlives the node)
    drain/<id>            a request that anybody may write; so is
    close/<job>           a request to end the job that `Round.job` numbers
    status                the leader's present reason, for those who wait and want to show why

A round is first *forming*: nodes stop what they run and say so by `ready = <its number>`. Then it is
*active*: its members, in rank order, run workers. Then the next one forms, or the job is *closed*.

Rules, each of which the simulator checks:
- No round becomes active while a member of the one before still has its lease and has not said that
  its workers are stopped. A node stops by itself when its lease may have run out (core.member), so
  two rounds never run at the same time.
- Members are (id, incarnation): the incarnation is the revision that made the node's key. A node
  that slept past its lease has lost its key, so nothing it still believes can match.
- Every write of the leader is conditional on the revision that made `ctl/leader` (its term) and on
  the round it decided upon: a leader that was replaced while it slept cannot write.
- A rank is a position in the list of members: unique and contiguous by construction.
- One failed round costs one restart, however many nodes report a failure; membership costs none.
- An id may be used again: a node that finds the job of this id closed, and no node of it left, begins
  the next one (`begin_again`), which goes on counting rounds, counts its restarts from none and has a number
  of its own. A node that belongs to a job never becomes part of the next one.

A round of n nodes costs each node one write and one notice, and the leader one notice per node.
All times are the leader's own monotonic clock; a new leader starts its waits again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from phalanx.core.store_commands import Change, Command, Delete, Put, Txn, When

FORMING, ACTIVE, CLOSED = "forming", "active", "closed"
LOST = "lost before they reported: "  # and who, at the end of the reason of a job that succeeded without them


@dataclass(frozen=True, slots=True)
class Options:
    """What the person who started the job asked for; times in seconds."""

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 3
    join_timeout: float = 600.0
    last_call: float = 2.0  # once min nodes are here for the first time
    settle: float = 0.2  # newcomers of a running job are gathered this long
    ttl: float = 6.0
    linger: float = 1.0  # how long a node that hung up may take to come back
    store_grace: float = 60.0
    prefix: str = ""


class NodeInfo(NamedTuple):
    """Who a node is; `rank` and `position` (its index at the scheduler) are -1 when not given."""

    id: str
    name: str
    addr: str = ""
    slots: int = 1
    role: str = "default"
    rank: int = -1
    position: int = -1


class NodeRecord(NamedTuple):
    """The value of a node's key."""

    info: NodeInfo
    ready: int
    leaving: str = ""
    job: int = 1


class Seen(NamedTuple):
    """A node as the leader sees it: `at` is when its record last changed, by the leader's clock."""

    record: NodeRecord
    incarnation: int
    at: float


class Member(NamedTuple):
    """A node in an active round; its rank is its place in the list."""

    id: str
    incarnation: int
    name: str
    addr: str
    slots: int
    role: str


class Result(NamedTuple):
    """How a node's workers ended in a round; `detail` is the shell's own (a failure report)."""

    ok: bool
    detail: str = ""


class Round(NamedTuple):
    """The value of `ctl/round`; `restarts` counts failed rounds so far, `out` names drained nodes."""

    number: int = 1
    phase: str = FORMING
    members: tuple[Member, ...] = ()
    restarts: int = 0
    reason: str = "waiting for the first nodes"
    term: int = 0
    out: tuple[str, ...] = ()
    outcome: str = ""  # of a closed round: succeeded, failed, timeout or closed
    cause: tuple[str, str, str] = ("", "", "")  # of a failed round: node id, name, detail
    job: int = 1  # how many jobs have had this id, with this one

    def rank_of(self, node: str, incarnation: int) -> int:
        """The rank of a node, or -1: not a member, or only an earlier incarnation was."""
        members = self.members
        for rank in range(len(members)):
            if members[rank].id == node:
                return rank if members[rank].incarnation == incarnation else -1
        return -1


class RoundDecision(NamedTuple):
    """What the leader does now, why, and when to ask again if nothing happens (None: no need)."""

    commands: tuple[Command, ...]
    reason: str
    wake_at: float | None = None


# Values are JSON so that a person can read them in the store with the store's own tools.


def encode(value: tuple[Any, ...]) -> bytes:
    """A record as the store holds it."""
    import json

    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def decode_node(value: bytes) -> NodeRecord:
    """The record of a node."""
    import json

    info, *rest = json.loads(value)
    return NodeRecord(NodeInfo(*info), *rest)


def decode_members(value: bytes) -> tuple[Member, ...]:
    """The list under `members`."""
    import json

    return tuple(Member(*m) for m in json.loads(value))


@lru_cache(maxsize=2)  # participants of one process (a simulation, a test) see the same bytes
def decode_round(value: bytes) -> Round:
    """The record under `ctl/round`."""
    import json

    number, phase, members, restarts, reason, term, out, outcome, cause, *job = json.loads(value)
    ranked = tuple(Member(*m) for m in members)
    return Round(number, phase, ranked, restarts, reason, term, tuple(out), outcome, tuple(cause), *job)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in which node2 comes before node10."""
    from itertools import groupby

    runs = ((number, "".join(chars)) for number, chars in groupby(name, lambda c: c in "0123456789"))
    return tuple((0, int(text), text) if number else (1, 0, text) for number, text in runs)


def assign_ranks(nodes: list[NodeInfo], before: dict[str, int]) -> list[NodeInfo]:
    """Put nodes in rank order: given ranks first, then those of the last round, then position and name."""
    slots: list[NodeInfo | None] = [None] * len(nodes)
    waiting = sorted(nodes, key=lambda n: (n.position < 0, n.position, natural(n.name), natural(n.id)))
    for wanted in ({n.id: n.rank for n in nodes}, before):
        left = []
        for node in waiting:
            rank = wanted.get(node.id, -1)
            if 0 <= rank < len(slots) and slots[rank] is None:
                slots[rank] = node
            else:
                left.append(node)
        waiting = left
    rest = iter(waiting)
    return [slot if slot is not None else next(rest) for slot in slots]


@dataclass(slots=True)
class LeaderView:
    """The job's keys as the leader knows them, kept up to date by `learn`."""

    options: Options
    term: int
    nodes: dict[str, Seen] = field(default_factory=dict)
    round: Round = Round()  # noqa: RUF009 - immutable
    round_mod: int = 0
    since: float = 0.0  # when this round record was first seen
    previous: tuple[Member, ...] = ()
    previous_mod: int = 0
    results: dict[int, dict[str, tuple[int, Result]]] = field(default_factory=dict)
    drains: set[str] = field(default_factory=set)
    closes: dict[str, str] = field(default_factory=dict)  # job -> why it is to end

    def learn(self, now: float, changes: tuple[Change, ...], reset: bool = False) -> None:
        """Take in what a watch over the whole prefix told."""
        if reset:
            known, self.nodes = self.nodes, {}
            self.results, self.drains, self.closes = {}, set(), {}
            if not self.round_mod:
                self.since = now
        for entry, deleted in changes:
            kind, _, rest = entry.key.removeprefix(self.options.prefix).partition("/")
            if kind == "node" and deleted:
                self.nodes.pop(rest, None)
            elif kind == "node":
                record = decode_node(entry.value)
                old = known.get(rest) if reset else self.nodes.get(rest)
                same = old is not None and old.record == record and old.incarnation == entry.create
                self.nodes[rest] = Seen(record, entry.create, old.at if old and same else now)
            elif kind == "ctl" and rest == "round" and not deleted and entry.mod > self.round_mod:
                self.round, self.round_mod, self.since = decode_round(entry.value), entry.mod, now
            elif kind == "members" and not deleted and entry.mod > self.previous_mod:
                self.previous, self.previous_mod = decode_members(entry.value), entry.mod
            elif kind == "result":
                self._learn_result(rest, entry.mod, entry.value, deleted)
            elif kind == "drain":
                (self.drains.discard if deleted else self.drains.add)(rest)
            elif kind == "close" and deleted:
                self.closes.pop(rest, None)
            elif kind == "close":
                self.closes[rest] = entry.value.decode(errors="replace")

    def _learn_result(self, rest: str, mod: int, value: bytes, deleted: bool) -> None:
        import json

        number, _, node = rest.partition("/")
        if deleted:
            self.results.get(int(number), {}).pop(node, None)
        else:
            self.results.setdefault(int(number), {})[node] = (mod, Result(*json.loads(value)))

    def present(self, member: Member) -> bool:
        """Whether a member still holds the key it became a member with."""
        seen = self.nodes.get(member.id)
        return seen is not None and seen.incarnation == member.incarnation

    def staying(self) -> dict[str, Seen]:
        """The nodes of this job that are here and are not about to leave."""
        gone, job = self.drains.union(self.round.out), self.round.job
        return {
            i: s
            for i, s in self.nodes.items()
            if not s.record.leaving and i not in gone and s.record.job == job
        }


def decide(now: float, view: LeaderView, options: Options) -> RoundDecision:
    """The leader's next move, from nothing but what it sees."""
    if view.round.phase == CLOSED:
        return RoundDecision((), view.round.reason)
    asked = view.closes.get(str(view.round.job))
    if asked is not None:
        return _close(view, "closed", asked or "closed on request")
    if view.round.phase == ACTIVE:
        return _watch_over(now, view, options)
    if _untold(view):
        return _publish(view, view.round, view.round.reason)
    return _form(now, view, options)


def begin_again(found: Round, mod: int, options: Options, remaining: int) -> Txn:
    """What a newcomer asks who finds no leader, or the end of a job, and so many nodes of it still there.

    With some of them left the answer only says whether the round is still this one. With none left, whoever
    is first begins anew; the others see its round. A job that was not closed keeps its number: some of its
    nodes may be alive, and come back when they reach the store again."""
    still = (When(options.prefix + "ctl/round", "mod", mod),)
    if remaining:
        return Txn(still)
    over = found.phase == CLOSED
    ended = f"the one before it with this id ended: {found.outcome} ({found.reason})"
    reason = f"a new job; {ended}" if over else "begun anew: all nodes had gone"
    fresh = Round(found.number + 1, reason=reason, job=found.job + over)
    ranges = tuple(Delete(options.prefix + name, prefix=True) for name in ("result/", "drain/", "close/"))
    singles = tuple(Delete(options.prefix + name) for name in ("members", "status"))
    return Txn(still, (Put(options.prefix + "ctl/round", encode(fresh)),), ranges + singles)


def _untold(view: LeaderView) -> bool:
    """Whether a node is to leave and has not been told: the round is the only way to tell anybody."""
    return not view.drains.isdisjoint(view.nodes.keys() - set(view.round.out))


def _watch_over(now: float, view: LeaderView, options: Options) -> RoundDecision:
    """An active round: failures first, then the end, then who went, then who came."""
    current = view.round
    results = view.results.get(current.number, {})
    failed = sorted((mod, node, r) for node, (mod, r) in results.items() if not r.ok)
    if failed:
        return _after_failure(view, options, failed[0][1], failed[0][2])
    names = {m.id: m.name for m in current.members}
    pending = [m for m in current.members if m.id not in results]
    lost = [m.name for m in pending if not view.present(m)]
    if len(lost) == len(pending) and results:
        late = f"; {LOST}{listing(lost)}" if lost else ""
        return _close(view, "succeeded", f"workers of {count(len(results), 'node')} succeeded{late}")
    if lost:
        return _reform(view, f"lost {listing(lost)}")
    staying = view.staying()
    leaving = [m.name for m in pending if m.id not in staying]
    if leaving:
        return _reform(view, f"{listing(leaving)} leaving")
    newcomers = {i: s for i, s in staying.items() if i not in names and s.record.ready > current.number}
    room = options.max_nodes - len(names)
    if newcomers and room > 0 and not results:
        joined = listing(s.record.info.name for s in newcomers.values())
        settled = min(s.at for s in newcomers.values()) + options.settle
        if len(newcomers) >= room or now >= settled:
            return _reform(view, f"{joined} joined")
        return RoundDecision((), f"{joined} joined, re-forming in {settled - now:.1f} s", settled)
    if _untold(view):
        return _publish(view, current, current.reason)
    spares = f", {count(len(newcomers), 'spare')}" if newcomers else ""
    return RoundDecision((), f"round {current.number}: {count(len(names), 'node')} running{spares}")


def _after_failure(view: LeaderView, options: Options, node: str, result: Result) -> RoundDecision:
    name = next((m.name for m in view.round.members if m.id == node), node)
    restarts = view.round.restarts + 1
    failed = view.round._replace(restarts=restarts, cause=(node, name, result.detail))
    if restarts > options.max_restarts:
        allowed = options.max_restarts
        used = f"no restart left ({allowed} of {allowed} used)" if allowed else "no restarts allowed"
        failed = failed._replace(restarts=options.max_restarts)
        return _close(view, "failed", f"workers on {name} failed, {used}", failed)
    left = options.max_restarts - restarts
    return _reform(view, f"workers on {name} failed, {count(left, 'restart')} left", failed)


def _form(now: float, view: LeaderView, options: Options) -> RoundDecision:
    """A forming round: wait for the old workers to stop, then for enough nodes, then a last call."""
    number = view.round.number
    stopping = [
        view.nodes[m.id].record.info.name
        for m in view.previous
        if view.present(m) and view.nodes[m.id].record.ready < number
    ]
    staying = view.staying()
    here = {i: s for i, s in staying.items() if s.record.ready >= number}
    deadline = view.since + options.join_timeout
    low, high = options.min_nodes, options.max_nodes
    if len(here) >= low and not stopping:
        if len(here) >= high:
            return _activate(view, options, here)
        first = max(view.since, sorted(s.at for s in here.values())[low - 1]) + options.last_call
        coming = len(staying) > len(here)
        again = view.since + options.settle if coming else now
        close_at = again if view.previous else first
        if now >= close_at:
            return _activate(view, options, here)
        names = listing(s.record.info.name for s in here.values())
        room = f"room for {count(high - len(here), 'more', 'more')}"
        text = (
            f"{len(here)} of {low} to {high} nodes here ({names}), {room}, last call {close_at - now:.0f} s"
        )
        return RoundDecision((), text, close_at)
    text = _waiting(here, stopping, low, high)
    if now >= deadline:
        return _close(view, "timeout", f"{text}; gave up after {options.join_timeout:.0f} s")
    return RoundDecision((), f"{text}, {deadline - now:.0f} s left", deadline)


def _waiting(here: dict[str, Seen], stopping: list[str], low: int, high: int) -> str:
    wanted = str(low) if low == high else f"{low} to {high}"
    names = f" ({listing(s.record.info.name for s in here.values())})" if here else ""
    text = f"{len(here)} of {wanted} nodes here{names}"
    if stopping:
        text += f", workers still stopping on {listing(stopping)}"
    missing = low - len(here) - len(stopping)
    return text + (f", waiting for {missing} more" if missing > 0 else "")


def _activate(view: LeaderView, options: Options, here: dict[str, Seen]) -> RoundDecision:
    before = {m.id: rank for rank, m in enumerate(view.previous)}
    # Members of the last round stay members; after them whoever came first.
    chosen = sorted(here, key=lambda i: (i not in before, here[i].incarnation))[: options.max_nodes]
    ranked = assign_ranks([here[i].record.info for i in chosen], before)
    members = tuple(Member(n.id, here[n.id].incarnation, n.name, n.addr, n.slots, n.role) for n in ranked)
    spares = len(here) - len(members)
    reason = (
        f"round {view.round.number} with {count(len(members), 'node')}: {listing(m.name for m in members)}"
    )
    reason += f"; {count(spares, 'spare')}" if spares else ""
    fresh = view.round._replace(phase=ACTIVE, members=members)
    decision = _publish(view, fresh, reason)
    assert isinstance(decision.commands[0], Txn)
    prefix = options.prefix
    puts = (*decision.commands[0].puts, Put(prefix + "members", encode(members)))
    gone = tuple(Delete(f"{prefix}drain/{i}") for i in sorted(view.drains - set(view.nodes)))
    deletes = (Delete(prefix + "result/", prefix=True), *gone)
    return decision._replace(commands=(decision.commands[0]._replace(puts=puts, deletes=deletes),))


def _reform(view: LeaderView, reason: str, base: Round | None = None) -> RoundDecision:
    forming = (base or view.round)._replace(number=view.round.number + 1, phase=FORMING, members=())
    return _publish(view, forming, reason)


def _close(view: LeaderView, outcome: str, reason: str, base: Round | None = None) -> RoundDecision:
    closed = (base or view.round)._replace(phase=CLOSED, members=(), outcome=outcome)
    return _publish(view, closed, reason)


def _publish(view: LeaderView, new: Round, reason: str) -> RoundDecision:
    out = tuple(sorted(view.drains.intersection(view.nodes)))
    new = new._replace(reason=reason, term=view.term, out=out)
    leader, key = view.options.prefix + "ctl/leader", view.options.prefix + "ctl/round"
    guards = (When(leader, "create", view.term), When(key, "mod", view.round_mod))
    return RoundDecision((Txn(guards, (Put(key, encode(new)),)),), reason)


def count(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listing(names: Any, limit: int = 8) -> str:
    """Names in natural order, cut short when they are many."""
    ordered = list(names)
    if len(ordered) <= 64:  # natural order costs too much for thousands, of which few are shown
        return " ".join(sorted(ordered, key=natural)[:limit]) + _more(len(ordered) - limit)
    return " ".join(sorted(sorted(ordered)[:limit], key=natural)) + _more(len(ordered) - limit)


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""
