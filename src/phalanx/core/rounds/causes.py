"""Who caused the failures of a round, and how the leader keeps that: for `rounds`, by `quarantine`.

Every write is conditional on the term of the leader and on the records that it was decided upon, because a
person may write them at any time. What the members of a round have reported counts once: the transaction that
makes the next round active, or ends the job, also holds the records.

A failure that is due to a device (`core.diagnosis.failures.tells_of_lost_device`) is its host's alone, and
is enough to keep it out.

A *lost* node is a member whose key is gone (its lease ran out: agent killed, machine frozen or off the
network) before it has reported how its workers ended, or that they are stopped for the next round. Its host
is the cause of the round's end, even if others have reported failures: those of ranks that lost a peer come
first, and not all of them are recognized. It is not the cause
- if the node left on purpose: leaving, drained, preempted, or ended with its workers;
- if the leader cannot tell, because it did not see the node go: it was elected while the next round was
  forming, or it has reached the store again only a moment ago. The store, its host or the network failed;
- if more than half of the hosts are lost at once, or very many: that is the network, or the power.
Rejected: to blame nobody where a loss and a failure come together. A host that dies takes its peers'
connections with it, so there nearly always is such a failure.
"""

from __future__ import annotations

from phalanx.core.diagnosis.failures import tells_of_lost_device
from phalanx.core.group.ranks import offsets
from phalanx.core.rounds import quarantine
from phalanx.core.rounds.quarantine import Offence, Quarantine, QuarantinePolicy
from phalanx.core.rounds.records import HostRecord, Member, Result, encode
from phalanx.core.rounds.store_commands import Command, Delete, Put, Txn, When

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.rounds.leader_view import LeaderView

HOSTS = "ctl/quarantine/"
_MOST = 10  # records in one transaction, beside a round of 100 places; etcd allows 128 operations
MOST_LOST = 2 * _MOST + 1  # ids that a round keeps: enough to see that they are too many


def expired(now: float, view: LeaderView) -> tuple[Txn, list[str]] | None:
    """The end of cool-downs, and of which hosts: their records go, which tells all nodes."""
    over = [one.node for one in view.hosts.state.entries if one.until is not None and now >= one.until]
    if not over:
        return None
    over = over[:_MOST]
    guards = (When(_key(view, host), "mod", view.hosts.present.get(host, 0)) for host in over)
    return Txn((*leads(view), *guards), deletes=tuple(Delete(_key(view, host)) for host in over)), over


def _key(view: LeaderView, host: str) -> str:
    return f"{view.options.prefix}{HOSTS}{host}"


def leads(view: LeaderView) -> tuple[When, ...]:
    """The condition of every write of the leader."""
    return (When(view.options.prefix + "ctl/leader", "create", view.term),)


def offences_of(view: LeaderView) -> list[Offence]:
    """What the hosts of the last round have caused, as far as its nodes have reported."""
    members = view.members.nodes
    by_id = {m.id: m for m in members}
    results = view.results.get(view.members.number, {})
    failed = sorted((mod, node, r) for node, (mod, r) in results.items() if not r.ok and node in by_id)
    found = [Offence(by_id[node].name, "unfit", _what(r)) for _, node, r in failed if r.unfit]
    broken = {by_id[node].name: r for _, node, r in failed if not r.unfit and tells_of_lost_device(r.what)}
    found += [Offence(host, "device", _what(r)) for host, r in broken.items()]
    gone = [by_id[node].name for node in lost_nodes(view)]
    if gone:
        hosts = dict.fromkeys(gone)
        many = 2 * len(hosts) > len({m.name for m in members}) or len(hosts) > _MOST
        return found if many else found + [Offence(host, "loss", "its node was lost") for host in hosts]
    if broken:
        return found  # whoever reported first: the others lost a peer, in whatever words
    first = next(((by_id[node], r) for _, node, r in failed if not (r.unfit or r.blameless)), None)
    if first is not None:
        member, result = first
        named = _hosts_of(members, result.ranks) or {member.name}
        if len(named) == 1:  # of several hosts, none is known to be the cause
            found.append(Offence(named.pop(), "failure", _what(result)))
    return found


def lost_nodes(view: LeaderView) -> list[str]:
    """The members of the last round that are lost, by id and in the order of their ranks."""
    results = view.results.get(view.members.number, {})
    return [
        m.id
        for m in view.members.nodes
        if m.id not in results and (m.id in view.round.lost or not (m.id in view.left or view.present(m)))
    ]


def _what(result: Result) -> str:
    return result.what or ("cannot start workers" if result.unfit else "its workers failed")


def _hosts_of(members: tuple[Member, ...], ranks: tuple[int, ...]) -> set[str]:
    """The hosts of these workers."""
    places = offsets((m.role, m.slots) for m in members) if ranks else ()
    return {
        m.name
        for m, place in zip(members, places, strict=False)
        if any(place.first <= rank < place.first + m.slots for rank in ranks)
    }


def judged(now: float, view: LeaderView, offences: list[Offence]) -> Quarantine:
    """The quarantine after these offences."""
    policy, state = view.options.quarantine, view.hosts.state
    for offence in offences:
        if policy is not None or offence.kind == "slow":
            state = quarantine.record(state, offence, now, policy or QuarantinePolicy())[0]
    return state


def with_records(
    now: float, view: LeaderView, state: Quarantine, commands: tuple[Command, ...]
) -> tuple[Command, ...]:
    """The commands, with the records of the hosts for which this state is news, in the last transaction."""
    *batches, main = commands
    assert isinstance(main, Txn)
    news: dict[str, HostRecord] = {}
    left: dict[str, HostRecord] = {}  # written again with what is left of it, for a job that begins again
    for host in sorted({one.node for one in state.entries} | {host for host, _ in state.offences}):
        fresh = quarantine.record_of(state, host, now)
        if fresh is not None and fresh != quarantine.record_of(view.hosts.state, host, now):
            news[host] = fresh
        elif fresh is not None and fresh.left > 0:
            left[host] = fresh
    chosen = list({**news, **left}.items())[:_MOST]
    # Guarded: a person may have written it in the meantime.
    guards = (When(_key(view, host), "mod", view.hosts.present.get(host, 0)) for host, _ in chosen)
    puts = (Put(_key(view, host), encode(found)) for host, found in chosen)
    main = main._replace(when=(*main.when, *guards), puts=(*main.puts, *puts))
    return (*batches, main)
