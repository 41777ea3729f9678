"""Which rank, which collective: what the recorded operations of all ranks say about a hang.

torch numbers the collectives of every process group, and each rank records those that it has entered and
those that it has left. `explain` joins the records of all ranks by group and number. It is pure, and it
answers as far as its input goes: a rank without a record is *silent*, which is not the same as missing.

A group is *blocked* at the lowest number that a rank has entered and not left. At that number each member

    waits     has entered it, and has not left it
    left      has completed it
    lacks     has not entered it; so it is what the others wait for, unless it waits in another group itself
    is silent has no record: it did not answer, it is stopped, or it has exited

The verdict, the first that holds:

1. *mismatch*: the members have entered different operations, or the same one with other types or sizes.
2. *stopped*, *dead*: a member is stopped by a signal, or has exited.
3. *slow*: the member that lacks was the last to come to most of the recent operations, and is not later than
   usual.
4. *ahead*: fewer members wait than lack it.
5. *missing*: a member lacks it, and waits nowhere else.
6. *device*, *network*: all that lack it wait in other groups, and one of these lacks nobody: it is there.
7. *mismatch of groups*: all that lack it wait in other groups, in a circle.
8. *silent*: members without a record are all that could be missing.
9. *device*: the group has one member, which can only wait for its own device.
10. *unhealthy*, *network*: all members are in the same operation.

No verdict (None) where no rank waits in a collective: then the stacks have to tell.

A group numbers the operations of each library by themselves. Where the recorder of a library does not notice
what completes, no rank can have left what another has not entered; of the rest, nothing is known (`notes`).
"""

from __future__ import annotations

from phalanx.core.diagnosis.failures import ranks_text
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_UNEVEN = ("all_to_all", "alltoall", "scatter", "gather", "send", "recv", "barrier", "coalesced")
"""Operations whose members may have different sizes; all_gather is decided by its library."""
_ENOUGH = 3  # operations that all members have left, to say who comes last
_RECENT = 5  # of them: a rank may have become slow a moment ago
_USUALLY = 0.6  # of those
_LATE = 0.1  # seconds: who comes last by less is not slow; nodes do not read at exactly the same moment
_EVER = float("inf")
_AS_USUAL = 4.0  # times its usual delay: a slow rank is not yet missing
_REASONS = {
    "mismatch": "in another collective than the others",
    "stopped": "stopped by a signal",
    "slow": "the others wait for it",
    "missing": "the others wait for it",
    "ahead": "ahead of the others",
    "silent": "no answer",
    "device": "waits for its device",
    "unhealthy": "its backend has failed",
}
_OF_THE_PROGRAM = ("mismatch", "missing", "ahead")


class Operation(Record):
    """One operation of a group, as one rank recorded it."""

    number: int
    name: str
    done: bool = False
    inputs: tuple[tuple[int, ...], ...] = ()
    """The sizes of its tensors."""
    types: tuple[str, ...] = ()
    age: float | None = None
    """Seconds since the rank entered it, when its record was read: all are read at the same moment."""
    library: str = ""
    """gloo, nccl, …"""
    peer: int | None = None
    """The other rank of a send or recv; such an operation is no collective, and has a number of its own."""


class GroupTrace(Record):
    """What one rank has recorded of one process group."""

    name: str
    label: str
    """What people call it; empty for the default group."""
    members: tuple[int, ...]
    """Empty: not known; then those that have records."""
    operations: tuple[Operation, ...] = ()
    """The latest ones, in the order in which they were entered."""
    entered: int = 0
    """The highest number of a collective that was entered, although its record may be gone."""
    uncompleted: tuple[str, ...] = ()
    """Libraries whose recorder does not notice what completes: none of their operations is `done`."""


class RankTrace(Record):
    """What one rank has recorded."""

    rank: int
    groups: tuple[GroupTrace, ...] = ()
    unrecorded: tuple[str, ...] = ()
    """Backends that it has, and of which there is no record."""
    unhealthy: tuple[str, ...] = ()
    """Backends that have failed or were aborted in its process, by torch's health check."""


class Explanation(Record):
    """The verdict: what kind of hang, the ranks to look at first, and the same as text."""

    kind: str
    ranks: tuple[int, ...]
    what: str
    """About these ranks."""
    then: str = ""
    """About the others."""
    group: str = ""
    operation: str = ""
    number: int = 0
    waiting: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    """Further groups that are blocked, most likely as a consequence: one line each."""

    @property
    def text(self) -> str:
        return f"{self.what}; {self.then}" if self.then else self.what

    @property
    def reason(self) -> str:
        """In a few words, for the stacks of these ranks."""
        return _REASONS.get(self.kind, "")

    @property
    def signature(self) -> str:
        """What identifies a hang that the program causes; empty: a machine or the network may be at fault."""
        if self.kind not in _OF_THE_PROGRAM:
            return ""
        return f"hang, {self.kind}: {self.operation} #{self.number} of {group_text(self.group)}"


class _Blocked:
    """A group at the number at which it is blocked."""

    def __init__(
        self, label: str, members: tuple[int, ...], traces: Mapping[int, GroupTrace], number: int
    ) -> None:
        self.label, self.members, self.number, self.traces = label, members, number, traces
        self.at: dict[int, Operation] = {}
        for rank, trace in traces.items():
            for one in trace.operations:
                # Of several (coalesced) operations with one number, one that is not complete.
                if one.peer is None and one.number == number and (rank not in self.at or not one.done):
                    self.at[rank] = one
        self.waiting = tuple(sorted(rank for rank, one in self.at.items() if not one.done))
        lacks = [rank for rank, trace in traces.items() if trace.entered < number and rank not in self.at]
        self.lacking = tuple(sorted(lacks))
        self.left = tuple(sorted(set(traces) - set(self.waiting) - set(self.lacking)))
        self.silent = tuple(sorted(set(members) - set(traces)))
        names = [one.name for one in self.at.values()]
        self.name = max(sorted(set(names)), key=names.count, default="a collective")

    @property
    def what(self) -> str:
        """`all_reduce #812 of group tp`."""
        return f"{self.name} #{self.number} of {group_text(self.label)}"

    def explanation(self, kind: str, ranks: Collection[int], what: str, then: str = "") -> Explanation:
        return Explanation(
            kind, tuple(sorted(ranks)), what, then, self.label, self.name, self.number, self.waiting
        )

    def who_waits(self, apart: Collection[int]) -> str:
        """`the other 63 wait`, or which ranks do if some of the others do not."""
        others = set(self.members) - set(apart)
        if set(self.waiting) == others and len(others) > 1:
            return f"the other {len(others)} wait"
        return f"{ranks_text(self.waiting)} {'waits' if len(self.waiting) == 1 else 'wait'}"


def explain(
    traces: Mapping[int, RankTrace],
    *,
    stopped: Collection[int] = (),
    exited: Collection[int] = (),
) -> Explanation | None:
    """The verdict over the records of all ranks that have answered; None if no rank waits in a collective."""
    blocked = _blocked_groups(traces)
    if not blocked:
        return _explain_pairs(traces, stopped, exited)
    found = (
        _first(blocked, _mismatch)
        or _first(blocked, lambda one: _absent(one, stopped, exited))
        or _missing(blocked)
        or _innermost(blocked)
        or _circle(blocked)
        or _first(blocked, _silent)
        or _unhealthy(blocked[0], traces)
        or _network(blocked[0])
    )
    others = tuple(
        f"{one.who_waits(one.lacking)} in {one.what}"
        for one in blocked
        if one.what not in found.what + found.then
    )
    return found.replace(others=others)


def group_text(label: str) -> str:
    """`group tp`, or `the default group`."""
    return f"group {label}" if label else "the default group"


def is_waiting(trace: RankTrace) -> bool:
    """Whether a rank has entered an operation that it has not left, as far as that is recorded."""
    return any(
        not one.done and one.library not in group.uncompleted
        for group in trace.groups
        for one in group.operations
    )


def notes(traces: Mapping[int, RankTrace], silent: Collection[int] = ()) -> list[str]:
    """What the records leave open, and what torch's health check says: a line each.

    `silent`: ranks that serve torch's handlers, none of which has answered."""
    lines = (
        [f"collectives: not recorded on {ranks_text(silent)} (no flight recorder answered)"] if silent else []
    )
    for library in sorted({name for trace in traces.values() for name in trace.unrecorded}):
        ranks = [rank for rank, trace in traces.items() if library in trace.unrecorded]
        lines.append(
            f"{library}: not recorded on {ranks_text(ranks)} (none called, recorder off, or CUDA graphs)"
        )
    latest: dict[str, list[int]] = {}
    for rank, trace in sorted(traces.items()):
        for group in trace.groups:
            last = {one.library: one for one in group.operations if one.library in group.uncompleted}
            for one in last.values():
                what = f"{one.library}: the last is {one.name} #{one.number} of {group_text(group.label)}"
                latest.setdefault(what, []).append(rank)
    lines += [
        f"{what} on {ranks_text(ranks)}; whether it completed is not recorded"
        for what, ranks in latest.items()
    ]
    for library in sorted({name for trace in traces.values() for name in trace.unhealthy}):
        ranks = [rank for rank, trace in traces.items() if library in trace.unhealthy]
        lines.append(f"{library}: failed or was aborted on {ranks_text(ranks)}, by torch's health check")
    return lines


def _blocked_groups(traces: Mapping[int, RankTrace]) -> list[_Blocked]:
    """The groups in which a rank waits, those with the most waiting ranks first."""
    joined: dict[tuple[str, tuple[int, ...]], dict[int, GroupTrace]] = {}
    for rank, trace in traces.items():
        for group in trace.groups:
            if rank in group.members or not group.members:
                joined.setdefault((group.name, group.members), {})[rank] = group
    found = []
    for (_, listed), known in sorted(joined.items()):
        members = listed or tuple(sorted(known))
        for each in map(_settled, _by_library(known)):
            pending = [
                one.number
                for group in each.values()
                for one in group.operations
                if not one.done and one.peer is None
            ]
            if pending:
                label = next(iter(known.values())).label
                found.append(_Blocked(label, members, each, min(pending)))
    return sorted(found, key=lambda one: -len(one.waiting))


def _by_library(known: dict[int, GroupTrace]) -> list[dict[int, GroupTrace]]:
    """The traces of a group for each library in it, as in `cpu:gloo,cuda:nccl`: each counts by itself."""
    libraries = sorted({one.library for group in known.values() for one in group.operations})
    if len(libraries) < 2:
        return [known]
    found = []
    for library in libraries:
        traces = {}
        for rank, group in known.items():
            own = tuple(one for one in group.operations if one.library == library)
            entered = max((one.number for one in own if one.peer is None), default=0)
            uncompleted = tuple(name for name in group.uncompleted if name == library)
            traces[rank] = group.replace(operations=own, entered=entered, uncompleted=uncompleted)
        found.append(traces)
    return found


def _settled(known: dict[int, GroupTrace]) -> dict[int, GroupTrace]:
    """The traces with an answer to what is done, where a recorder does not notice what completes."""
    if not any(group.uncompleted for group in known.values()):
        return known
    least = min(group.entered for group in known.values())
    at_least = {one.name for group in known.values() for one in group.operations if one.number == least}
    if len(at_least) > 1:  # of those, none completes
        least -= 1
    return {
        rank: group.replace(
            operations=tuple(
                one.replace(done=one.peer is not None or one.number <= least) for one in group.operations
            )
        )
        for rank, group in known.items()
    }


def _first(blocked: list[_Blocked], look: Callable[[_Blocked], Explanation | None]) -> Explanation | None:
    for one in blocked:
        found = look(one)
        if found is not None:
            return found
    return None


# ---- mismatch ----------------------------------------------------------------------------------------


def _mismatch(blocked: _Blocked) -> Explanation | None:
    aspects: tuple[Callable[[Operation], str], ...] = (_operation, _types, _sizes)
    for describe in aspects:
        found: dict[str, list[int]] = {}
        for rank, one in sorted(blocked.at.items()):
            found.setdefault(describe(one), []).append(rank)
        found.pop("", None)
        if len(found) > 1:
            return _differing(blocked, found, describe is not _operation)
    return None


def _differing(blocked: _Blocked, found: dict[str, list[int]], same_name: bool) -> Explanation:
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))
    (usual, most), *rest = ordered
    where = f"#{blocked.number} of {group_text(blocked.label)}"
    prefix = f"{blocked.name} with " if same_name else ""

    def calls(items: list[tuple[str, list[int]]]) -> str:
        return ", ".join(
            f"{ranks_text(ranks)} {'calls' if len(ranks) == 1 else 'call'} {prefix}{what}"
            for what, ranks in items
        )

    if len(most) > len(rest[0][1]):
        few = [rank for _, ranks in rest for rank in ranks]
        others = f"the other {len(most)}" if len(most) > 1 else ranks_text(most)
        then = f"with {usual}" if same_name else f"call {usual}"
        return blocked.explanation("mismatch", few, f"{calls(rest)} as {where}, {others} {then}")
    everyone = [rank for ranks in found.values() for rank in ranks]
    return blocked.explanation("mismatch", everyone, f"the ranks disagree on {where}: {calls(ordered)}")


def _operation(one: Operation) -> str:
    return one.name


def _types(one: Operation) -> str:
    return " and ".join(sorted({word.lower() for word in one.types}))


def _sizes(one: Operation) -> str:
    """The number of elements: two shapes with the same number match."""
    uneven = any(word in one.name for word in _UNEVEN) and "all_gather" not in one.name
    if uneven or not one.inputs or (one.library != "gloo" and "all_gather" in one.name):
        return ""
    total = 0
    for shape in one.inputs:
        count = 1
        for size in shape:
            count *= size
        total += count
    return f"{total} element{'' if total == 1 else 's'}"


# ---- a member that is not there ----------------------------------------------------------------------


def _absent(blocked: _Blocked, stopped: Collection[int], exited: Collection[int]) -> Explanation | None:
    waiting = set(blocked.waiting)
    ranks = [rank for rank in blocked.members if rank in stopped]
    if ranks:
        is_stopped = f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped by a signal"
        return blocked.explanation(
            "stopped", ranks, is_stopped, f"{blocked.who_waits(ranks)} in {blocked.what}"
        )
    ranks = [rank for rank in blocked.members if rank in exited and rank not in waiting]
    if not ranks:
        return None
    has_exited = f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} exited"
    if len(ranks) > len(waiting):
        text = f"{ranks_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in {blocked.what}"
        return blocked.explanation("ahead", waiting, text, has_exited)
    return blocked.explanation("dead", ranks, has_exited, f"{blocked.who_waits(ranks)} in {blocked.what}")


def _missing(blocked: list[_Blocked]) -> Explanation | None:
    """The ranks that others wait for, and that wait nowhere themselves."""
    waiting = {rank for one in blocked for rank in one.waiting}
    for one in blocked:
        roots = [rank for rank in one.lacking if rank not in waiting]
        if not roots:
            continue
        if len(roots) > len(one.waiting):
            return _ahead(one, roots)
        return _slow(one, roots) or _never_entered(one, roots)
    return None


def _never_entered(one: _Blocked, roots: list[int]) -> Explanation:
    text = f"{ranks_text(roots)} never entered {one.what}"
    last = {_last(one.traces[rank]) for rank in roots}
    if len(last) == 1 and (words := last.pop()):
        text += f" (last was {words})"
    return one.explanation("missing", roots, text, f"{one.who_waits(one.lacking)} in it")


def _last(trace: GroupTrace) -> str:
    for one in reversed(trace.operations):
        if one.peer is None and one.number == trace.entered:
            return f"{one.name} #{one.number}"
    return ""


def _ahead(one: _Blocked, roots: list[int]) -> Explanation:
    is_ahead = f"{ranks_text(one.waiting)} {'is' if len(one.waiting) == 1 else 'are'} ahead"
    others = (
        f"the other {len(roots)}" if len(roots) == len(one.members) - len(one.waiting) else ranks_text(roots)
    )
    last = {_last(one.traces[rank]) for rank in roots}
    words = last.pop() if len(last) == 1 else ""
    after = f" (their last was {words})" if words else ""
    return one.explanation(
        "ahead", one.waiting, f"{is_ahead}: in {one.what}, which {others} have not entered{after}"
    )


def _slow(one: _Blocked, roots: list[int]) -> Explanation | None:
    """Whether the one rank that lacks was usually the last, and is not yet later than usual."""
    if len(roots) != 1:
        return None
    (rank,) = roots
    ages: dict[int, dict[int, float]] = {}  # number -> rank -> seconds since it entered
    now = 0.0
    for member, trace in one.traces.items():
        for entered, age in _aligned(trace, one.traces[rank]):
            if entered.done:
                ages.setdefault(entered.number, {})[member] = age
            elif entered.number == one.number:
                now = max(now, age)
    latest = (ages[number] for number in sorted(ages, reverse=True))
    known = [found for found in latest if rank in found and len(found) > 1][:_RECENT]
    late = [max(found.values()) - found[rank] for found in known if min(found, key=found.__getitem__) == rank]
    if len(known) < _ENOUGH or len(late) < _USUALLY * len(known):
        return None
    usual = sorted(late)[len(late) // 2]
    if usual < _LATE or now > _AS_USUAL * usual:
        return None
    text = (
        f"rank {rank} is slow: it comes to {one.what} last, as to {len(late)} of the last {len(known)}, "
        f"by {usual:.2g} s"
    )
    return one.explanation("slow", roots, text, f"{one.who_waits(one.lacking)} in it")


def _aligned(trace: GroupTrace, base: GroupTrace) -> list[tuple[Operation, float]]:
    """The collectives of a rank with their ages at the moment at which those of `base` were read.

    Two nodes read at nearly the same moment, unless one of them is overloaded: then all operations of its
    ranks seem to be older, or younger. The operations themselves limit by how much, because no rank comes to
    one before all have come to the one before it. Where programs run ahead of their operations that does not
    hold; if it shows, nothing is known."""
    theirs, mine = (
        {each.number: each.age for each in found.operations if each.peer is None and each.age is not None}
        for found in (trace, base)
    )
    least = max((theirs[n + 1] - age for n, age in mine.items() if n + 1 in theirs), default=-_EVER)
    most = min((theirs[n - 1] - age for n, age in mine.items() if n - 1 in theirs), default=_EVER)
    later = min(max(0.0, least), most) if least <= most else 0.0
    return [
        (each, each.age - later) for each in trace.operations if each.peer is None and each.age is not None
    ]


def _innermost(blocked: list[_Blocked]) -> Explanation | None:
    """All that lack an operation wait in other groups: one of these in which nobody is missing."""
    for outer in blocked:
        for inner in blocked:
            if not inner.lacking and not inner.silent and set(inner.waiting) & set(outer.lacking):
                apart = set(outer.waiting) - set(inner.waiting)
                if apart:
                    verb = "waits" if len(apart) == 1 else "wait"
                    return _network(inner).replace(then=f"{ranks_text(apart)} {verb} in {outer.what}")
    return None


def _circle(blocked: list[_Blocked]) -> Explanation | None:
    """All that lack an operation wait in another group: for ranks that wait for them."""
    first = next((one for one in blocked if one.lacking), None)
    if first is None or any(one.silent for one in blocked):
        return None
    second = next(one for one in blocked if one is not first and set(one.waiting) & set(first.lacking))
    here = set(first.waiting) - set(second.waiting) or set(first.waiting)
    there = set(second.waiting) & set(first.lacking)
    text = (
        f"the ranks are in different groups: {ranks_text(here)} in {first.what}, "
        f"{ranks_text(there)} in {second.what}"
    )
    few = there if len(there) < len(here) else here if len(here) < len(there) else here | there
    return first.explanation("mismatch", few, text)


def _silent(blocked: _Blocked) -> Explanation | None:
    if not blocked.silent:
        return None
    verb = "does" if len(blocked.silent) == 1 else "do"
    who = f"{ranks_text(blocked.silent)} {verb} not answer"
    waits = f"{blocked.who_waits(blocked.silent)} in {blocked.what}"
    return blocked.explanation("silent", blocked.silent, who, waits)


def _unhealthy(blocked: _Blocked, traces: Mapping[int, RankTrace]) -> Explanation | None:
    found = {rank: traces[rank].unhealthy for rank in blocked.waiting if traces[rank].unhealthy}
    if not found or len(found) == len(blocked.members):
        return None
    names = " and ".join(sorted({name for names in found.values() for name in names}))
    text = f"{names} has failed on {ranks_text(found)}"
    return blocked.explanation("unhealthy", found, text, f"{blocked.who_waits(found)} in {blocked.what}")


def _network(blocked: _Blocked) -> Explanation:
    if len(blocked.members) == 1:
        text = (
            f"{ranks_text(blocked.members)} is in {blocked.what}, as its only member: "
            "its device has not finished what comes before it"
        )
        return blocked.explanation("device", blocked.members, text)
    if blocked.left:
        verb = "has" if len(blocked.left) == 1 else "have"
        are = "is" if len(blocked.waiting) == 1 else "are"
        text = (
            f"{ranks_text(blocked.waiting)} {are} still in {blocked.what}, which {ranks_text(blocked.left)} "
            f"{verb} left: look at the network between them"
        )
        return blocked.explanation("network", blocked.waiting, text)
    text = f"all {len(blocked.waiting)} ranks are in {blocked.what}: look at the network between them"
    return blocked.explanation("network", blocked.waiting, text)


# ---- send and recv -----------------------------------------------------------------------------------


def _explain_pairs(
    traces: Mapping[int, RankTrace], stopped: Collection[int], exited: Collection[int]
) -> Explanation | None:
    """A send or recv whose peer is in no such operation."""
    pending = [
        (rank, group.label, one)
        for rank, trace in sorted(traces.items())
        for group in trace.groups
        for one in group.operations
        if one.peer is not None and not one.done
    ]
    waiting = {rank for rank, _, _ in pending}
    for rank, label, one in pending:
        peer = one.peer
        assert peer is not None
        if peer in waiting:
            continue
        what = f"{one.name} #{one.number} of {group_text(label)}"
        direction = "to" if one.name.startswith("send") else "from"
        text = f"rank {rank} waits in {what} {direction} rank {peer}"
        kind, why = "missing", "which is in no send or recv"
        if peer in stopped:
            kind, why = "stopped", "which is stopped by a signal"
        elif peer in exited:
            kind, why = "dead", "which has exited"
        elif peer not in traces:
            kind, why = "silent", "which does not answer"
        return Explanation(
            kind, (peer,), f"{text}, {why}", "", label, one.name, one.number, tuple(sorted(waiting))
        )
    return None
