"""Which nodes are kept out of a job for a while, and why.

    ok ──a failed check, a lost device, K root causes within the window──► quarantined
     ▲                                                                          │
     └────────────────────the cool-down is over, or a person removes it────────┘

Invariants
- A node is blamed only for what it caused: the root cause of a failure, not the failures that follow from it.
- A quarantine is never extended silently: an offence during a cool-down begins a new one, with its reason.
- A quarantined node is a spare of last resort. If a round cannot reach its minimum without it, it takes
  part, and the reason says so (`choose`).
- What a person adds has no end, and only a person removes it.

Times are the observer's own monotonic clock; what is stored or sent are ages.
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AT_ONCE = ("check", "device")
"""Offences that need no second one."""
_MOST_NODES = 100_000
_MOST_OFFENCES = 32  # kept per node


class QuarantinePolicy(Record):
    """When a node is kept out, and for how long."""

    failures: int = 3
    """Root causes within `window` seconds that lead to a quarantine; 0: none do."""
    window: float = 3600.0
    cooldown: float = 3600.0


class Offence(Record):
    """Something that a node caused: kind is check, device or failure."""

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
    state = state.replace(offences=tuple(one for one in state.offences if one[0] != offence.node))
    return _quarantine(state, offence.node, reason, now, policy)


def add(state: Quarantine, node: str, reason: str, now: float) -> tuple[Quarantine, str]:
    """A person keeps a node out, until a person removes it."""
    entry = QuarantineEntry(node, reason, now, None)
    return _with(state, entry), f"{node} is quarantined: {reason}"


def remove(state: Quarantine, node: str) -> tuple[Quarantine, str]:
    """A person lets a node in again; its offences are forgotten."""
    if not any(one.node == node for one in state.entries):
        return state, ""
    entries = tuple(one for one in state.entries if one.node != node)
    offences = tuple(one for one in state.offences if one[0] != node)
    return Quarantine(entries, offences), f"{node} is no longer quarantined: removed"


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
    state: Quarantine, nodes: Sequence[str], minimum: int, maximum: int, now: float
) -> tuple[tuple[str, ...], str]:
    """Which of these nodes form a round, in their order, and why one that is quarantined is among them."""
    fit = [node for node in nodes if state.entry(node, now) is None]
    chosen = fit[:maximum]
    if len(chosen) >= minimum:
        return tuple(chosen), ""
    entries = {node: entry for node in nodes if (entry := state.entry(node, now)) is not None}
    # Those that a person has added last; of the others, the one that has been out for the longest time first.
    spares = sorted(entries, key=lambda node: (entries[node].until is None, entries[node].since))
    needed = spares[: minimum - len(chosen)]
    if len(chosen) + len(needed) < minimum:
        return (), ""
    taken = {*chosen, *needed}
    reason = (
        f"{', '.join(needed)}: quarantined, but the job needs {minimum} nodes and has {len(chosen)} others"
    )
    return tuple(node for node in nodes if node in taken), reason


def describe(state: Quarantine, now: float) -> Mapping[str, str]:
    """Node → reason and time left, for `status`."""
    found = {}
    for one in state.entries:
        if one.until is None:
            found[one.node] = one.reason
        elif now < one.until:
            found[one.node] = f"{one.reason} (for another {one.until - now:.0f} s)"
    return found


def _quarantine(
    state: Quarantine, node: str, reason: str, now: float, policy: QuarantinePolicy
) -> tuple[Quarantine, str]:
    held = state.entry(node, now)
    if held is not None and held.until is None:
        return state, ""  # by a person, which outlasts any cool-down
    entry = QuarantineEntry(node, reason, now, now + policy.cooldown)
    return _with(state, entry), f"{node} is quarantined for {policy.cooldown:.0f} s: {reason}"


def _with(state: Quarantine, entry: QuarantineEntry) -> Quarantine:
    others = tuple(one for one in state.entries if one.node != entry.node)
    return state.replace(entries=(*others, entry)[-_MOST_NODES:])
