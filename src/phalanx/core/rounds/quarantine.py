"""Which hosts are kept out of a job's rounds for a while, and why.

    ok ──a failed check, a lost device, K root causes within the window──► quarantined
     ▲                                                                          │
     └────────────────────the cool-down is over, or a person removes it────────┘

Invariants
- A node is blamed only for what it caused: the root cause of a failure, not the failures that follow from it.
- A quarantine is never extended silently: an offence during a cool-down begins a new one, with its reason.
- A quarantined node is a spare of last resort. If a round cannot reach its minimum without it, it takes
  part, and the reason says so (`choose`). Where every node is quarantined, none is better than another.
- What a person adds has no end, and only a person removes it.

The leader decides (`core.rounds.rounds`) and keeps one record for each host in the job's store
(`records.HostRecord`), which every node watches (`HostWatch`): so all nodes say the same, and the next
leader goes on from there. Times are the observer's own monotonic clock; what is stored are ages and remaining
times.
"""

from __future__ import annotations

from phalanx.core.record import Record
from phalanx.core.rounds.records import UNTIL_REMOVED, HostRecord, decode_host, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.core.rounds.store_commands import Entry

AT_ONCE = ("check", "device", "unfit", "slow")
"""Offences that need no second one."""
_MOST_NODES = 100_000
_SLACK = 1.0  # seconds by which the leader's clock may be ahead of another observer's
_MOST_OFFENCES = 32  # kept per node
_NAMED = 8
_MOST_LINES = 20  # at a time: a node that joins late learns of all hosts at once
_YEAR = 366 * 86400.0


class QuarantinePolicy(Record):
    """When a node is kept out, and for how long."""

    failures: int = 3
    """Root causes within `window` seconds that lead to a quarantine; 0: none do."""
    window: float = 3600.0
    cooldown: float = 3600.0


def parse_policy(text: str) -> QuarantinePolicy | None:
    """The policy that K:WINDOW:COOLDOWN stands for, the last ones optional; None for off."""
    if text == "off":
        return None
    words = text.split(":")
    defaults = QuarantinePolicy()
    try:
        failures = int(words[0])
        window, cooldown = (
            float(words[place]) if len(words) > place else default
            for place, default in ((1, defaults.window), (2, defaults.cooldown))
        )
    except ValueError:
        failures, window, cooldown = 0, 0.0, 0.0
    if len(words) > 3 or not 1 <= failures <= _MOST_OFFENCES or not (0 < window <= _YEAR >= cooldown > 0):
        raise ValueError(
            f"use K:WINDOW:COOLDOWN (K failures from 1 to {_MOST_OFFENCES}, then seconds), or off"
        )
    return QuarantinePolicy(failures, window, cooldown)


class Offence(Record):
    """Something that a node caused: kind is failure, loss (of the node itself), or one of `AT_ONCE`."""

    node: str
    kind: str
    reason: str


class QuarantineEntry(Record):
    """Why a node is kept out, and until when (None: until a person removes it)."""

    node: str
    reason: str
    since: float
    until: float | None


class Quarantine(Record):
    """The state: who is kept out, and the offences that may lead to it."""

    entries: tuple[QuarantineEntry, ...] = ()
    offences: tuple[tuple[str, float], ...] = ()
    """Node and time of root causes, oldest first."""

    def entry(self, node: str, now: float) -> QuarantineEntry | None:
        """Why a node is kept out now."""
        for one in self.entries:
            if one.node == node and (one.until is None or now < one.until):
                return one
        return None


def record(
    state: Quarantine, offence: Offence, now: float, policy: QuarantinePolicy
) -> tuple[Quarantine, str]:
    """The state after an offence, and a line for people; empty: nothing changes for the node."""
    state = expire(state, now, policy)[0]
    if offence.kind in AT_ONCE:
        return _quarantine(state, offence.node, offence.reason, now, policy)
    if policy.failures <= 0:
        return state, ""
    offences = (*state.offences, (offence.node, now))
    times = [at for node, at in offences if node == offence.node][-_MOST_OFFENCES:]
    kept = (*(one for one in offences if one[0] != offence.node), *((offence.node, at) for at in times))
    state = state.replace(offences=tuple(sorted(kept, key=lambda one: one[1])))
    if len(times) < policy.failures:
        return state, ""
    span = now - times[-policy.failures]
    reason = f"root cause of {policy.failures} failures within {span:.0f} s, the last: {offence.reason}"
    if policy.failures == 1:
        reason = f"root cause of a failure: {offence.reason}"
    state = state.replace(offences=tuple(one for one in state.offences if one[0] != offence.node))
    return _quarantine(state, offence.node, reason, now, policy)


def expire(state: Quarantine, now: float, policy: QuarantinePolicy) -> tuple[Quarantine, tuple[str, ...]]:
    """The state without what is over, and a line for each node that may take part again."""
    over = [one for one in state.entries if one.until is not None and now >= one.until]
    offences = tuple(one for one in state.offences if now - one[1] < policy.window)
    if not over and offences == state.offences:
        return state, ()
    entries = tuple(one for one in state.entries if one not in over)
    lines = tuple(f"{one.node} is no longer quarantined: {now - one.since:.0f} s are over" for one in over)
    return Quarantine(entries, offences), lines


def next_change(state: Quarantine) -> float | None:
    """When the first cool-down ends."""
    return min((one.until for one in state.entries if one.until is not None), default=None)


def choose(
    state: Quarantine, hosts: Sequence[str], minimum: int, maximum: int, now: float
) -> tuple[tuple[int, ...], str]:
    """Which of these nodes, given by their hosts, form a round, and why a quarantined one is among them.

    By position and in their order; empty: they are too few."""
    entries = {host: entry for host in hosts if (entry := state.entry(host, now)) is not None}
    fit = [number for number, host in enumerate(hosts) if host not in entries]
    if len(fit) >= minimum:
        return tuple(fit[:maximum]), ""
    if len(hosts) < minimum:
        return (), ""
    if not fit:
        return tuple(range(min(len(hosts), maximum))), "every node is quarantined, so none is kept out"
    # Those that a person has added last; of the others, the one that has been out for the longest time first.
    spares = [number for number, host in enumerate(hosts) if host in entries]
    spares.sort(key=lambda n: (entries[hosts[n]].until is None, entries[hosts[n]].since))
    needed = sorted(spares[: minimum - len(fit)])
    named = list(dict.fromkeys(hosts[number] for number in needed))
    names = ", ".join(named[:_NAMED]) + f" and {len(named) - _NAMED} more" * (len(named) > _NAMED)
    others = f"{len(fit)} other{'s' * (len(fit) > 1)}"
    reason = f"{names}: quarantined, but the job needs {minimum} nodes and has {others}"
    return tuple(sorted((*fit, *needed))), reason


def restore(state: Quarantine, host: str, found: HostRecord | None, now: float) -> Quarantine:
    """The state with what the store holds about a host; None: nothing."""
    entries = tuple(one for one in state.entries if one.node != host)
    offences = tuple(one for one in state.offences if one[0] != host)
    if found is None:
        return Quarantine(entries, offences)
    if found.reason:
        until = None if found.left == UNTIL_REMOVED else now + found.left
        entries = (*entries, QuarantineEntry(host, found.reason, now - found.age, until))[-_MOST_NODES:]
    times = [(host, now - age) for age in found.offences[-_MOST_OFFENCES:]]
    return Quarantine(entries, tuple(sorted((*offences, *times), key=lambda one: one[1])))


def record_of(state: Quarantine, host: str, now: float) -> HostRecord | None:
    """What the store holds about a host from now on; None: nothing."""
    entry = state.entry(host, now)
    ages = tuple(round(now - at, 3) for node, at in state.offences if node == host)
    if entry is None:
        return HostRecord(offences=ages) if ages else None
    left = UNTIL_REMOVED if entry.until is None else round(entry.until - now, 3)
    return HostRecord(entry.reason, left, round(max(0.0, now - entry.since), 3), ages)


def failed_check(why: str, policy: QuarantinePolicy) -> HostRecord | None:
    """What a node that failed its check writes about its own host before it leaves."""
    state, _ = record(Quarantine(), Offence("", "check", why), 0.0, policy)
    return record_of(state, "", 0.0)


class HostWatch:
    """What one observer knows of the hosts' records; `lines` are for people, each with the host kept out.

    A record counts once, by its revision, however often and through however many watches it is reported: so
    a time that began to run is not set again."""

    def __init__(self) -> None:
        self.state = Quarantine()
        self.mods: dict[str, int] = {}
        self.present: dict[str, int] = {}  # the revision of each record that the store holds
        self.unreadable: set[str] = set()
        self.lines: list[tuple[str, str]] = []

    def learn(self, now: float, host: str, entry: Entry, deleted: bool = False) -> None:
        """Take in the record of a host; if it is not readable, what was known stays."""
        if entry.mod <= self.mods.get(host, 0):
            return
        self.mods[host] = entry.mod
        self.present[host] = 0 if deleted else entry.mod
        found = None if deleted else decode_host(entry.value)
        if found is None and not deleted:
            self.unreadable.add(host)
        else:
            self.unreadable.discard(host)
            self._take(now, host, found)

    def only(self, now: float, hosts: set[str]) -> None:
        """The store holds records about these hosts and no others."""
        known = {
            *self.mods,
            *(one.node for one in self.state.entries),
            *(one[0] for one in self.state.offences),
        }
        for host in sorted(known - hosts):
            self.present[host] = 0
            self._take(now, host, None)

    def reset(self) -> None:
        """The store went back in time: whatever it holds counts again."""
        self.mods.clear()
        self.present.clear()

    def _take(self, now: float, host: str, found: HostRecord | None) -> None:
        name = printable(host)  # a key, which no decoder has seen
        before = next((one for one in self.state.entries if one.node == host), None)
        self.state = restore(self.state, host, found, now)
        after = self.state.entry(host, now)
        if after is not None and (before is None or before.reason != after.reason):
            left = "" if after.until is None else f" for {after.until - now:.0f} s"
            self.lines.append((f"{name} is quarantined{left}: {after.reason}", host))
        elif before is not None and after is None:
            over = before.until is not None and now >= before.until - _SLACK
            why = "its time is over" if over else "removed"
            self.lines.append((f"{name} is no longer quarantined: {why}", ""))

    def news(self) -> list[tuple[str, str]]:
        """The lines since the last call, each with the host that is kept out from now on; empty: none."""
        lines, self.lines = self.lines, []
        if len(lines) > _MOST_LINES:
            rest = len(lines) - _MOST_LINES
            lines[_MOST_LINES:] = [(f"… and {rest} lines about other hosts: see phalanx quarantine", "")]
        return lines


def _quarantine(
    state: Quarantine, node: str, reason: str, now: float, policy: QuarantinePolicy
) -> tuple[Quarantine, str]:
    held = state.entry(node, now)
    if held is not None and held.until is None:
        return state, ""  # by a person, which outlasts any cool-down
    entry = QuarantineEntry(node, reason, now, now + policy.cooldown)
    others = tuple(one for one in state.entries if one.node != entry.node)
    state = state.replace(entries=(*others, entry)[-_MOST_NODES:])
    return state, f"{node} is quarantined for {policy.cooldown:.0f} s: {reason}"
