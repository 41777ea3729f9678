"""Forming rounds: how nodes become one numbered group, and what the elected leader decides.

Everything a job knows is in a few keys below its own prefix (`core.rounds.records` has their values):

    node/<id>             one per node, on the node's lease: its description, and the round it is ready for
    ctl/leader            on the leader's lease: the id of the node that decides
    ctl/round             the round, written by the leader only; every node watches `ctl/`
    ctl/meeting/<round>   where the workers of the round meet, written by its node of rank 0
    ctl/quarantine/<host> why a host is kept out, for how long yet, and what it caused lately; written by the
                          leader, or by any client for a person; outlives the job
    place/<id>            on the node's lease: its place in the round, or why it is refused; only it watches
    members               the members of the last active round: for the leader, status and reports
    result/<round>/<id>   how the workers of a node ended in a round (no lease: outlives the node)
    drain/<id>            a request, by any client, that a node leaves; so is
    close/<job>           a request to end the job that `Round.job` numbers; with a failure, it has failed
    slow/<round>/<host>   why a host of a round is to be replaced, by the node that compares their steps
    status                the leader's current reason, for nodes that wait and want to show why

A round is first *forming*: nodes stop their workers and publish `ready = <its number>`. Then it is *active*:
its members, in rank order, run workers. Then the next one forms, or the job is *closed*.

Rules, each of which the simulator checks:
- No round becomes active while a member of the previous one still holds its lease and has not published that
  its workers are stopped. A node stops by itself when its lease may have run out (core.rounds.participant),
  so two rounds never run at the same time.
- Members are (id, incarnation): the incarnation is the revision that created the node's key. A node that
  slept past its lease has lost its key, so nothing it still believes can match.
- Every write of the leader is conditional on the revision that created `ctl/leader` (its term), and a new
  round also on the round it was decided upon: a leader that was replaced while it slept cannot write.
- Places are written before, or together with, the round that they belong to, and carry its stamp. So a node
  that reads its place after it has seen the round knows whether it is a member.
- A rank is a position in the list of members: unique and contiguous by construction.
- One failed round costs one restart, however many nodes report a failure; a change of members and a round
  that a node asks for cost none. The delay after a failure is the job's: the next round becomes active
  afterwards, so that all its nodes start together, newcomers included. Workers that start earlier would wait
  for the others, and fail.
- A job has succeeded when every member of a round has reported success. A member that is lost before that is
  lost as at any other time, even if all others have reported: its workers may have failed, so the others form
  the next round, with a node in its place or without it, and run their workers again. Ending the job as a
  success was rejected: its exit code would hide the loss.
- Where a launcher starts each node once (`Options.all_nodes`), too few nodes that are present or still to
  come end the job at once. A node that was lost has two leases to return in: its network may have failed.
- A node that cannot start its workers is that node's problem: it leaves, and the others form the next round
  without it. Only where too few nodes are left, or in a fixed job, does its reason end the job.
- A quarantined host (`core.rounds.quarantine`) is in a round only if the round cannot reach its minimum
  without it; its nodes stay as spares. Who caused a failure is decided when the next round becomes active,
  or the job ends: by then all members have reported, and the record is written in the same transaction,
  once. A member that is quarantined, or slow, makes room for a fit spare at a checkpoint, as a preempted
  node does.
- A preempted node leaves after the workers of all nodes have had their grace: the forming round says so
  (`Round.preempted`), and becomes active only when the old workers have stopped, as any other.
- After a store went back in time, no round becomes active for the time of a lease: until then nodes that the
  store has forgotten may run workers.
- A round's number is larger than that of any active round that a present node has seen, whatever the store
  holds: a store that lost its data, or went back in time, cannot make a number mean two things. For the same
  reason its count of restarts is not smaller than what a member knows.
- A record that cannot be read is skipped and named once. A node's key is on its lease: the leader puts one
  that was overwritten back, and one that it has never read counts as absent. Only the leader writes the
  round: one of another term, or before the last one, is foreign, and the leader writes its own again. A
  member that has lost its place makes the round form again.
- A run id may be reused: a node that finds the job of this id closed, and none of its nodes left, begins the
  next one (`begin_again`), which continues the count of rounds, starts its restarts at zero and has a number
  of its own. A node that belongs to a job never becomes part of the next one.

A *fixed* job (`Options.fixed`, the static rendezvous) differs in three ways: every node brings its rank and
gets exactly that one; a round needs all ranks, so that a lost member is waited for and the job ends with a
time-out when it does not return; and a second node of a rank is refused once the first has outlived a lease.

A round of n nodes costs each node one write and two notices, and the leader one notice per node; the bytes of
a round grow linearly. All times are on the leader's own monotonic clock; a new leader counts from
when it saw the round, as any node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from phalanx.core.diagnosis.failures import ranks_text
from phalanx.core.group.ranks import natural_key, offsets
from phalanx.core.group.restarts import decide_for_job
from phalanx.core.rounds import quarantine
from phalanx.core.rounds.causes import (
    MOST_LOST,
    expired,
    judged,
    leads,
    lost_nodes,
    offences_of,
    with_records,
)
from phalanx.core.rounds.leader_view import LeaderView, Options, Seen
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.quarantine import Offence, Quarantine
from phalanx.core.rounds.records import (
    ACTIVE,
    CLOSED,
    FORMAT,
    FORMING,
    Member,
    MemberList,
    NodeInfo,
    Place,
    Result,
    Round,
    encode,
    printable,
)
from phalanx.core.rounds.store_commands import Command, Delete, Put, Txn, When

NO_MORE = "no other node can come"
_RETURN = 2  # leases that a lost node has to return in, where no other can take its place
_NAMED = 8
_SWEPT = 10  # leftover requests that one round removes; etcd allows 128 operations in a transaction


class RoundDecision(NamedTuple):
    """What the leader does now, why, and when to decide again if nothing happens (None: no need).

    Commands are sent in order, the last one when the others have been answered.
    """

    commands: tuple[Command, ...]
    reason: str
    wake_at: float | None = None


def assign_ranks(nodes: list[NodeInfo], before: dict[str, int]) -> list[NodeInfo]:
    """Put nodes in rank order: given ranks first, then those of the last round, then position and name."""
    slots: list[NodeInfo | None] = [None] * len(nodes)
    waiting = sorted(
        nodes, key=lambda n: (n.position < 0, n.position, natural_key(n.name), natural_key(n.id))
    )
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


def decide(now: float, view: LeaderView, options: Options) -> RoundDecision:
    """The leader's next move; a function of what it sees."""
    if view.damaged:
        return _restore(view)
    if view.stolen:
        return _give_back(view)
    if view.round.phase == CLOSED:
        return RoundDecision((), view.round.reason)
    asked = view.closes.get(str(view.round.job))
    if asked is not None:
        failed = any(asked.cause)
        base = view.round._replace(cause=asked.cause) if failed else view.round
        return _close(now, view, "failed" if failed else "closed", asked.reason or "closed on request", base)
    staying = view.staying()
    patience = None
    if options.fixed:
        staying, refusal = _one_per_rank(now, view, options, staying)
        if refusal.commands:
            return refusal
        patience = refusal.wake_at
    over = expired(now, view)
    if over is not None:
        return RoundDecision(over[:1], f"{listing(map(printable, over[1]))} no longer quarantined")
    if view.round.phase == ACTIVE:
        decision = _supervise(now, view, options, staying)
    elif _undrained(view):
        return _publish(view, view.round, view.round.reason)
    else:
        decision = _form(now, view, options, staying)
    times = (patience, quarantine.next_change(view.hosts.state), decision.wake_at)
    return decision._replace(wake_at=min((time for time in times if time is not None), default=None))


def _held(now: float, view: LeaderView, state: Quarantine, decision: RoundDecision) -> RoundDecision:
    return decision._replace(commands=with_records(now, view, state, decision.commands))


def begin_again(found: Round, mod: int, leader: int, options: Options, remaining: int) -> Txn:
    """The request of a newcomer that finds no leader, or a closed job, and `remaining` nodes of it.

    With nodes left the reply only shows whether the round is still this one. With none left, the first
    newcomer begins again; the others see its round. It must not do so over a leader that was elected since it
    looked: from then on only the leader's rounds count. `leader`: the revision of the leader's key, as known.
    A job that was not closed keeps its number: some of its nodes may be alive, and return when they reach the
    store again."""
    still = When(options.prefix + "ctl/round", "mod", mod)
    if remaining:
        return Txn((still,))
    over = found.phase == CLOSED
    ended = f"the previous one with this id ended: {found.outcome} ({found.reason})"
    reason = f"a new job; {ended}" if over else "begun anew: all nodes had gone"
    fresh = Round(found.number + 1, reason=reason, job=found.job + over)
    ranges = ("result/", "slow/", "drain/", "close/", "ctl/meeting/")
    deletes = tuple(Delete(options.prefix + name, prefix=True) for name in ranges)
    singles = tuple(Delete(options.prefix + name) for name in ("members", "status"))
    guards = (still, When(options.prefix + "ctl/leader", "mod", leader))
    return Txn(guards, (Put(options.prefix + "ctl/round", encode(fresh)),), deletes + singles)


def _restore(view: LeaderView) -> RoundDecision:
    """The round was overwritten or deleted: write it again; where it was never read, begin the next one."""
    if view.read:
        return _publish(view, view.round, view.round.reason)
    known = [seen.record for seen in view.nodes.values()]
    base = view.round._replace(
        number=max([view.round.number, view.members.number, *(max(r.rounds, r.ready) for r in known)]),
        job=max((r.job for r in known), default=1),
        restarts=max((r.restarts for r in known), default=0),
    )
    return _reform(view, "the record of the last round was not readable", base)


def _give_back(view: LeaderView) -> RoundDecision:
    """The key of a node was overwritten: put it back on the node's lease; if that is over, delete it."""
    node, mod = next(iter(view.stolen.items()))
    seen, key = view.nodes[node], f"{view.options.prefix}node/{node}"
    guards = (*leads(view), When(key, "mod", mod))
    put = Put(key, encode(seen.record), seen.lease)
    reason = f"the record of {seen.name} was overwritten"
    return RoundDecision((Txn(guards, (put,)),), reason)


def _after(view: LeaderView, number: int) -> int:
    """The number of a round: later than every active round that a present node has seen."""
    return max(number, 1 + max((seen.record.rounds for seen in view.nodes.values()), default=0))


def _undrained(view: LeaderView) -> bool:
    """Whether a drained node has not been notified: the round carries the notice."""
    return not view.drains.isdisjoint(view.nodes.keys() - set(view.round.out))


def _one_per_rank(
    now: float, view: LeaderView, options: Options, staying: dict[str, Seen]
) -> tuple[dict[str, Seen], RoundDecision]:
    """The nodes of a fixed job that hold their ranks, and the refusal of those that never will.

    A second node of a rank waits as long as a lease, in which the first may turn out to be dead."""
    members = {m.id for m in view.members.nodes if view.present(m)}
    holders: dict[int, str] = {}
    puts: list[Put] = []
    reason, wake = "", None
    for node in sorted(staying, key=lambda i: (i not in members, staying[i].incarnation)):
        seen = staying[node]
        if not 0 <= seen.rank < options.max_nodes:
            why = f"node rank {seen.rank} of {options.max_nodes}: ranks go from 0 to {options.max_nodes - 1}"
        elif holders.setdefault(seen.rank, node) == node:
            continue
        else:
            holder = staying[holders[seen.rank]].record.info
            due = seen.since + options.ttl + options.linger
            if now < due:
                wake = due if wake is None else min(due, wake)
                continue
            where = f" ({holder.addr})" if holder.addr else ""
            why = (
                f"node rank {seen.rank} is taken by {holder.name}{where}: "
                "two nodes were given the same --node-rank"
            )
        puts.append(Put(f"{options.prefix}place/{node}", encode(Place(refused=why)), seen.lease))
        reason = f"refused {seen.name}: {why}"
    kept = {node: staying[node] for node in holders.values()}
    if not puts:
        return kept, RoundDecision((), "", wake)
    return kept, RoundDecision((Txn(leads(view), tuple(puts[: options.batch])),), reason)


def _supervise(now: float, view: LeaderView, options: Options, staying: dict[str, Seen]) -> RoundDecision:
    """An active round: failures first, then the end, then losses, then newcomers."""
    current, members = view.round, view.members.nodes
    if view.members.stamp != current.stamp:
        return _reform(view, "the list of members is not readable")
    ids = {m.id for m in members}
    results = {node: r for node, r in view.results.get(current.number, {}).items() if node in ids}
    ended = sorted((mod, node, r) for node, (mod, r) in results.items() if not r.ok)
    failed = [one for one in ended if one[2].request < 0]
    unfit = {node for _, node, r in failed if r.unfit}
    if failed and (
        len(unfit) < len(failed) or options.fixed or len(staying.keys() - unfit) < options.min_nodes
    ):
        first = next(((node, r) for _, node, r in failed if not r.unfit), failed[0][1:])
        return _after_failure(now, view, options, *first)
    if unfit:
        names = [view.label(m, rank) for rank, m in enumerate(members) if m.id in unfit]
        return _reform(view, f"{listing(names)} cannot start workers and leaves")
    if ended:
        restarts = max(current.restarts, *(r.request for _, _, r in ended))
        _, node, result = ended[0]
        cause = (node, _name_of(view, node), result.detail)
        return _reform(view, f"{cause[1]}: {result.what}", current._replace(restarts=restarts, cause=cause))
    pending = [(m, rank) for rank, m in enumerate(members) if m.id not in results]
    lost = [view.label(m, rank) for m, rank in pending if not view.present(m)]
    if results and not pending:
        return _close(now, view, "succeeded", f"workers of {count(len(results), 'node')} succeeded")
    if lost:
        alone = ", which had not reported success" if len(lost) == len(pending) and results else ""
        return _reform(view, f"lost {listing(lost)}{alone}")
    leaving = [(m, view.label(m, rank)) for m, rank in pending if m.id not in staying]
    if leaving:
        preempted = tuple(name for m, name in leaving if view.nodes[m.id].record.preempted)
        what = "preempted" if preempted else "leaving"
        return _reform(view, f"{listing(name for _, name in leaving)} {what}", preempted=preempted[:_NAMED])
    astray = [view.label(m, rank) for m, rank in pending if staying[m.id].record.ready > current.number]
    if astray:
        return _reform(view, f"{listing(astray)} did not find its place in round {current.number}")
    kept_out = view.kept_out(now)
    waiting = {i: s for i, s in staying.items() if i not in ids and s.record.ready > current.number}
    newcomers = {i: s for i, s in waiting.items() if options.fixed or s.name not in kept_out}
    room = options.max_nodes - len(members)
    if newcomers and room > 0 and not results:
        joined = listing(s.name for s in newcomers.values())
        settled = min(s.at for s in newcomers.values()) + options.settle
        if len(newcomers) >= room or now >= settled:
            return _reform(view, f"{joined} joined")
        return RoundDecision((), f"{joined} joined, re-forming in {settled - now:.1f} s", settled)
    if newcomers and not results and not options.fixed:
        swap = _swap(now, view, kept_out, newcomers)
        if swap is not None:
            return swap
    if _undrained(view):
        return _publish(view, current, current.reason)
    spares = f", {count(len(newcomers), 'spare')}" if newcomers else ""
    if len(waiting) > len(newcomers):
        spares += f", quarantined: {listing(s.name for i, s in waiting.items() if i not in newcomers)}"
    return RoundDecision((), f"round {current.number}: {count(len(members), 'node')} running{spares}")


def _swap(
    now: float, view: LeaderView, kept_out: set[str], newcomers: dict[str, Seen]
) -> RoundDecision | None:
    """Replace members that are quarantined, or slow, by fit spares: at a checkpoint, at no restart."""
    hosts = dict.fromkeys(m.name for m in view.members.nodes)
    number, here = view.round.number, {s.name for s in newcomers.values()}
    slow = {host: why for host, (at, why) in view.slow.items() if at == number and host in hosts}
    slow = {host: why for host, why in slow.items() if host not in kept_out and host not in here}
    nodes = len(newcomers)
    going: list[str] = []
    for host in sorted(hosts, key=lambda name: (name not in kept_out, natural_key(name))):
        size = sum(m.name == host for m in view.members.nodes)
        if (host in kept_out or host in slow) and size <= nodes:
            going.append(host)
            nodes -= size
    if not going or len(going) == len(hosts):
        return None
    why = ", ".join(
        f"{host} ({'quarantined' if host in kept_out else slow[host]})" for host in going[:_NAMED]
    )
    reason = f"{listing(here)} in the place of {why}"
    decision = _reform(view, reason, preempted=tuple(going[:_NAMED]))
    offences = [Offence(host, "slow", slow[host]) for host in going if host in slow]
    return _held(now, view, judged(now, view, offences), decision)


def _name_of(view: LeaderView, node: str) -> str:
    found = ((rank, m) for rank, m in enumerate(view.members.nodes) if m.id == node)
    return next((view.label(m, rank) for rank, m in found), node)


def _after_failure(
    now: float, view: LeaderView, options: Options, node: str, result: Result
) -> RoundDecision:
    name = _name_of(view, node)
    failed = view.round._replace(cause=(node, name, result.detail))
    if result.unfit:
        return _close(
            now, view, "failed", f"{name} cannot start workers, and the job cannot run without it", failed
        )
    failure = NodeFailure.read(result.detail)
    if failure.final:
        return _close(now, view, "failed", failure.ending_of(name), failed)
    verdict = decide_for_job(view.round.restarts, options.max_restarts)
    if not verdict.restart:
        return _close(now, view, "failed", f"workers on {name} failed, {verdict.reason}", failed)
    failed = failed._replace(restarts=view.round.restarts + 1, delay=result.delay)
    left = "" if options.max_restarts is None else f", {count(verdict.remaining, 'restart')} left"
    return _reform(view, f"workers on {name} failed{left}", failed)


def _form(now: float, view: LeaderView, options: Options, staying: dict[str, Seen]) -> RoundDecision:
    """A forming round: wait for the old workers to stop, then for enough nodes, then a last call."""
    number = view.round.number
    stopping = [seen for seen in _previous(view) if seen.record.ready < number]
    here = {i: s for i, s in staying.items() if s.record.ready >= number}
    not_before = view.since + view.round.delay
    deadline = not_before + options.join_timeout
    low, high = options.min_nodes, options.max_nodes
    if len(here) >= low and not stopping and now >= max(not_before, view.quiet_until):
        coming = len(staying) > len(here)
        state = judged(now, view, offences_of(view))
        chosen, needed = _chosen(now, view, state, here)
        if len(chosen) >= high:
            return _activate(now, view, options, here, state, chosen, needed)
        first = max(view.since, sorted(here[i].at for i in chosen)[low - 1]) + options.last_call
        again = view.since + options.settle if coming else now
        close_at = again if view.members.nodes else first
        if now >= close_at:
            return _activate(now, view, options, here, state, chosen, needed)
        names = listing(here[i].name for i in chosen)
        room = f"room for {count(high - len(chosen), 'more', 'more')}"
        text = (
            f"{len(chosen)} of {low} to {high} nodes here ({names}), {room}, last call {close_at - now:.0f} s"
        )
        return RoundDecision((), text, close_at)
    text, missing = _waiting(here, stopping, options)
    if now < view.quiet_until:
        return RoundDecision((), f"{text}, waiting for nodes that the store forgot to stop", view.quiet_until)
    if now < not_before:
        return RoundDecision((), f"{text}, back-off for {not_before - now:.0f} s", not_before)
    after = f"; before that: {view.round.reason}" if view.members.nodes else ""
    if now >= deadline and options.fixed and missing:
        these = ", ".join(map(str, missing))
        text += f"; node {these} of {high} did not come within {options.join_timeout:g} s{after}"
        return _close(now, view, "timeout", text)
    gone = min(options.all_nodes, len(view.ever)) - len(staying)
    if options.all_nodes and options.all_nodes - gone < low:
        deadline = min(deadline, view.lost_at + _RETURN * options.ttl)
        if now >= deadline:
            gone_of = f"{gone} of the {count(options.all_nodes, 'node')} that were started"
            text += f"; {NO_MORE}: {gone_of} {'is' if gone == 1 else 'are'} gone{after}"
            return _close(now, view, "timeout", text)
    if now >= deadline:
        return _close(now, view, "timeout", f"{text}; gave up after {options.join_timeout:.0f} s{after}")
    return RoundDecision((), f"{text}, {deadline - now:.0f} s left", deadline)


def _previous(view: LeaderView) -> list[Seen]:
    """The nodes that may still run workers of an earlier round."""
    if view.members_mod and not view.members.stamp:  # not readable: any node may
        return list(view.nodes.values())
    return [view.nodes[m.id] for m in view.members.nodes if view.present(m)]


def _waiting(here: dict[str, Seen], stopping: list[Seen], options: Options) -> tuple[str, list[int]]:
    """What the round waits for, and the ranks of a fixed job that are missing."""
    low, high = options.min_nodes, options.max_nodes
    wanted = str(low) if low == high else f"{low} to {high}"
    names = f" ({listing(s.name for s in here.values())})" if here else ""
    text = f"{len(here)} of {wanted} nodes here{names}"
    if stopping:
        text += f", workers still stopping on {listing(s.name for s in stopping)}"
    if options.fixed:
        ranks = {s.rank for s in (*here.values(), *stopping)}
        missing = [rank for rank in range(high) if rank not in ranks]
        if missing:
            text += f", waiting for {ranks_text(missing).replace('rank', 'node')}"
        return text, missing
    short = low - len(here) - len(stopping)
    return text + (f", waiting for {short} more" if short > 0 else ""), []


def _chosen(now: float, view: LeaderView, state: Quarantine, here: dict[str, Seen]) -> tuple[list[str], str]:
    """The nodes of the next round, and why a quarantined one is among them."""
    before = {m.id for m in view.members.nodes}
    # Members of the last round stay members; then nodes in the order of their arrival.
    nodes = sorted(here, key=lambda i: (i not in before, here[i].incarnation))
    options = view.options
    if not state.entries:
        return nodes[: options.max_nodes], ""
    hosts = [here[i].name for i in nodes]
    found, needed = quarantine.choose(state, hosts, options.min_nodes, options.max_nodes, now)
    return [nodes[position] for position in found], "" if options.fixed else needed


def _activate(
    now: float,
    view: LeaderView,
    options: Options,
    here: dict[str, Seen],
    state: Quarantine,
    chosen: list[str],
    needed: str,
) -> RoundDecision:
    """Make the round active with the chosen nodes; `needed`: why a quarantined one is among them."""
    before = {m.id: rank for rank, m in enumerate(view.members.nodes)}
    ranked = assign_ranks([here[i].record.info for i in chosen], before)
    members = tuple(Member(n.id, here[n.id].incarnation, n.name, n.addr, n.slots, n.role) for n in ranked)
    stamp, prefix = f"{view.term}.{view.round_mod}.{view.failed_writes}", options.prefix
    names = tuple(m.name for m in members[:_NAMED])
    known = [here[m.id].record for m in members]
    fresh = view.round._replace(
        number=_after(view, view.round.number),
        phase=ACTIVE,
        nodes=len(members),
        names=names,
        stamp=stamp,
        preempted=(),
        lost=(),
        delay=0.0,
        format=min(FORMAT, *(r.format for r in known)),
        # The store may have lost its data, or a part of it, which its nodes have seen.
        restarts=max(view.round.restarts, *(r.restarts for r in known)),
    )
    spares = [s for i, s in here.items() if i not in chosen]
    out = [s.name for s in spares if state.entry(s.name, now) is not None]
    reason = f"round {fresh.number} with {count(len(members), 'node')}: {listing(m.name for m in members)}"
    reason += f"; {count(len(spares) - len(out), 'spare')}" if len(spares) > len(out) else ""
    reason += f"; quarantined: {listing(out)}" if out else ""
    reason += f"; {needed}" if needed else ""
    decision = _publish(view, fresh, reason)
    main = decision.commands[0]
    assert isinstance(main, Txn)
    found = offsets((m.role, m.slots) for m in members)
    places = [
        Put(
            f"{prefix}place/{m.id}",
            encode(Place(stamp, m.incarnation, rank, *found[rank].as_dict().values())),
            here[m.id].lease,
        )
        for rank, m in enumerate(members)
    ]
    stale = [Delete(f"{prefix}drain/{i}") for i in sorted(view.drains - set(view.nodes))]
    # Places first: a watch reports them before the round, and large rounds need several transactions.
    if len(places) <= options.batch:
        together, batches = places, []
    else:
        together, batches = [], [places[i : i + options.batch] for i in range(0, len(places), options.batch)]
    main = main._replace(
        puts=(
            *together,
            Put(prefix + "members", encode(MemberList(stamp, members, fresh.number))),
            *main.puts,
        ),
        deletes=(
            Delete(prefix + "result/", prefix=True),
            Delete(prefix + "slow/", prefix=True),
            *stale[:_SWEPT],
        ),
    )
    commands = (*(Txn(leads(view), tuple(batch)) for batch in batches), main)
    return _held(now, view, state, decision._replace(commands=commands))


def _reform(
    view: LeaderView, reason: str, base: Round | None = None, preempted: tuple[str, ...] = ()
) -> RoundDecision:
    base = base or view.round
    number = _after(view, base.number + 1)
    lost = tuple(lost_nodes(view)[:MOST_LOST])
    forming = base._replace(number=number, phase=FORMING, preempted=preempted, lost=lost)
    return _publish(view, forming, reason)


def _close(
    now: float, view: LeaderView, outcome: str, reason: str, base: Round | None = None
) -> RoundDecision:
    closed = (base or view.round)._replace(phase=CLOSED, outcome=outcome)
    return _held(now, view, judged(now, view, offences_of(view)), _publish(view, closed, reason))


def _publish(view: LeaderView, new: Round, reason: str) -> RoundDecision:
    out = tuple(sorted(view.drains.intersection(view.nodes)))
    new = new._replace(reason=reason, term=view.term, out=out)
    if new.phase != ACTIVE:
        new = new._replace(nodes=0, names=(), stamp="")
    key = view.options.prefix + "ctl/round"
    guards = (*leads(view), When(key, "mod", view.round_mod))
    return RoundDecision((Txn(guards, (Put(key, encode(new)),)),), reason)


def count(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listing(names: Any) -> str:
    """Names in natural order, cut short when they are many."""
    ordered = list(names)
    if len(ordered) <= 64:  # natural order costs too much for thousands, of which few are shown
        return " ".join(sorted(ordered, key=natural_key)[:_NAMED]) + _more(len(ordered) - _NAMED)
    return " ".join(sorted(sorted(ordered)[:_NAMED], key=natural_key)) + _more(len(ordered) - _NAMED)


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""
