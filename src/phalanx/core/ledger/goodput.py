"""The goodput ledger: what every second of every rank of a node was spent on.

A rank-second belongs to exactly one of `CATEGORIES`, so the totals of all categories are the ranks times the
time of the job; the ledgers of all nodes add up.

    starting       from the first start of the workers to their first step
    recovering     from an incident to the first step after it, the step that it interrupted included
    hung           from the last heartbeat before a hang to its detection
    recomputed     steps up to the one that was reached before an incident (the step went back)
    checkpointing  in `worker.section("checkpoint")`, from the first step on
    nodes          no round: waiting for other nodes
    slowest        this rank, or this node, has finished, and others have not
    running        everything else, of a node that sends no heartbeats: whether it was progress is not known
    productive     everything else

`GoodputLedger.step` is told each step of the group (`core.group.group`), `totals` may be asked at any time.
Neither needs a sample in between: a board (`worker.board`) has a rank's first and last heartbeat,
the moment at which it passed the step of its predecessor, and the time that it spent on checkpoints. So a
start is booked when it is over, from one look at its boards, and nothing wakes up for the ledger.

What is estimated: where the program does not call `ready()`, its first step began one typical step before its
first heartbeat. A rank that sends no heartbeats is booked like the first one of its node that does; if none
does, it is running from its first line on, imports included, and nothing is known to be recomputed.

Memory is O(ranks). Times are monotonic seconds, always arguments.
"""

from __future__ import annotations

from phalanx.core.group import events
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx.core.ledger.incidents import Incident

PRODUCTIVE, RUNNING, RECOMPUTED, STARTING, RECOVERING, HUNG, CHECKPOINTING, NODES, SLOWEST = CATEGORIES = (
    "productive",
    "running",
    "recomputed",
    "starting",
    "recovering",
    "hung",
    "checkpointing",
    "nodes",
    "slowest",
)
LOST = CATEGORIES[2:]
BY_INCIDENT = (RECOVERING, RECOMPUTED, HUNG)
"""What is also booked to the incident that it was lost to."""

QUICK = 5.0
"""Seconds that a round takes to form again; what is longer is a wait for nodes."""
_KEPT = 200  # incidents with a sum of their own; earlier ones share one
_EARLIER = -1
_UNMARKED = "unmarked"  # a rank that runs, in a start without heartbeats; see `totals`
_ALIVE = ("STARTING", "RUNNING", "REFORMING", "CLEARING", "ENDING")


class RankProgress(Record):
    """What the board of one rank tells; times are 0.0 for what has not happened.

    `saved`: seconds in complete checkpoint sections, all of them; those up to the first heartbeat, up to the
    one that passed the mark, and since the last one. `saving_since`: when the current one began."""

    begun_at: float = 0.0
    ready_at: float = 0.0
    first_at: float = 0.0
    first_step: int | None = None
    beat_at: float = 0.0
    step: int | None = None
    count: int = 0
    passed_at: float = 0.0
    passed_step: int | None = None
    saved: float = 0.0
    saved_by_first: float = 0.0
    saved_by_passed: float = 0.0
    saved_since_beat: float = 0.0
    saving_since: float = 0.0
    ended_at: float = 0.0
    """When it succeeded."""


class StartBounds(Record):
    """One start of the workers, as far as it goes.

    `how`: empty while they run; success, hang, stop (nothing failed) or failure. `left`: when that was
    noticed; `end`: when they were gone. `mark`: the step reached before, `typical`: seconds of a step in an
    earlier start, `quiet_since`: when output was last written before a hang; 0.0 where that is not known."""

    begin: float
    started_at: float
    end: float
    how: str = ""
    left: float = 0.0
    mark: int | None = None
    typical: float = 0.0
    quiet_since: float = 0.0


class GoodputTotals(Record):
    """Rank-seconds by category; `lost`: those of `BY_INCIDENT`, by incident.

    Number 0 is the end of a job that nothing had happened to, -1 all incidents before the last 200."""

    ranks: int
    seconds: Mapping[str, float]
    lost: Mapping[int, Mapping[str, float]]

    @property
    def total(self) -> float:
        """All rank-seconds."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The part that was not lost; 1.0 before anything was booked."""
        total = self.total
        return (self.seconds[PRODUCTIVE] + self.seconds[RUNNING]) / total if total > 0 else 1.0

    @property
    def measure(self) -> str:
        """What the ratio is: `goodput`, or `uptime` if no rank has sent a heartbeat."""
        return "uptime" if self.seconds[RUNNING] > 0.0 == self.seconds[PRODUCTIVE] else "goodput"

    def as_dict(self) -> dict[str, Any]:
        """Rounded, as plain values."""
        return {
            "ranks": self.ranks,
            self.measure: round(self.ratio, 6),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "lost": {
                str(number): {name: round(value, 3) for name, value in parts.items()}
                for number, parts in self.lost.items()
            },
        }

    def __add__(self, other: GoodputTotals) -> GoodputTotals:
        """Of both nodes together; incidents are those of the first, because each node numbers its own.

        What both lost to incidents is spread over them as on the first."""
        seconds = {name: self.seconds[name] + other.seconds[name] for name in CATEGORIES}
        grown = {name: seconds[name] / self.seconds[name] for name in BY_INCIDENT if self.seconds[name] > 0.0}
        lost = {
            number: {name: value * grown.get(name, 1.0) for name, value in parts.items()}
            for number, parts in self.lost.items()
        }
        return GoodputTotals(self.ranks + other.ranks, seconds, lost)


def read_totals(found: object) -> GoodputTotals | None:
    """What `as_dict` made, from another process; None for anything else."""
    if not isinstance(found, dict):
        return None
    ranks, seconds, lost = found.get("ranks"), _figures(found.get("seconds"), CATEGORIES), found.get("lost")
    if type(ranks) is not int or not 0 <= ranks < 1 << 32 or seconds is None or not isinstance(lost, dict):
        return None
    by_incident = {}
    for number, parts in list(lost.items())[: _KEPT + 2]:
        figures = _figures(parts, BY_INCIDENT)
        if figures is None or not number.lstrip("-").isdecimal() or len(number) > 18:
            return None
        by_incident[int(number)] = figures
    return GoodputTotals(ranks, seconds, by_incident)


def _figures(found: object, names: Sequence[str]) -> dict[str, float] | None:
    if not isinstance(found, dict):
        return None
    figures = {name: found.get(name, 0.0) for name in names}
    if all(type(value) in (int, float) and 0.0 <= value < 1e15 for value in figures.values()):
        return {name: float(value) for name, value in figures.items()}
    return None


# ---- one rank in one start ---------------------------------------------------------------------------


def typical_step(rank: RankProgress) -> float:
    """Seconds between two heartbeats with steps of one, without checkpoints; 0.0 if there were not two."""
    between = rank.saved - rank.saved_since_beat - rank.saved_by_first
    steps = rank.count - 1
    if rank.step is not None and rank.first_step is not None and rank.step > rank.first_step:
        steps = rank.step - rank.first_step
    return max(0.0, rank.beat_at - rank.first_at - between) / steps if steps > 0 else 0.0


def split(rank: RankProgress, start: StartBounds) -> dict[str, float]:
    """What one rank spent a start on, in seconds; the sum is the length of the start.

    The time up to the first step is booked as `STARTING`; the ledger knows whether it recovers."""
    until = min(start.end, rank.ended_at) if rank.ended_at else start.end
    parts = dict.fromkeys(CATEGORIES, 0.0)
    parts[SLOWEST] = start.end - until
    if rank.count:
        _split_steps(parts, rank, start, until)
    else:
        _split_unmarked(parts, rank, start, until)
    return _exactly(parts, start.end - start.begin)


def _split_unmarked(parts: dict[str, float], rank: RankProgress, start: StartBounds, until: float) -> None:
    line = min(max(rank.begun_at or start.started_at, start.begin), until)
    parts[STARTING] = line - start.begin
    saved = rank.saved + (until - rank.saving_since if rank.saving_since and not start.how else 0.0)
    parts[CHECKPOINTING] = min(saved, until - line)
    # What came after the end was noticed is lost; how much work was, nobody knows.
    left = until if start.how in ("", "success") else min(max(start.left, line), until)
    parts[RECOVERING] = until - left
    if start.how == "hang" and start.quiet_since:
        parts[HUNG] = left - min(max(start.quiet_since, line), left)
        left -= parts[HUNG]
    parts[_UNMARKED] = max(0.0, left - line - parts[CHECKPOINTING])


def _split_steps(parts: dict[str, float], rank: RankProgress, start: StartBounds, until: float) -> None:
    beat = min(max(rank.beat_at, start.begin), until)
    first = min(max(rank.first_at or beat, start.begin), beat)
    line = min(max(rank.begun_at or start.started_at, start.begin), first)
    if line < rank.ready_at <= first:
        begin = rank.ready_at
    else:
        begin = max(line, first - (typical_step(rank) or start.typical))
    parts[STARTING] = begin - start.begin
    saved = max(0.0, rank.saved - rank.saved_since_beat - rank.saved_by_first)  # between first and last
    again, passed = _recomputed(rank, start.mark, begin, beat)
    if again >= beat and not passed:
        saved_again = saved
    elif rank.passed_at and again > begin:
        saved_again = min(saved, max(0.0, rank.saved_by_passed - rank.saved_by_first))
    else:
        saved_again = saved * (again - begin) / (beat - begin) if beat > begin else 0.0
    parts[RECOMPUTED] = max(0.0, again - begin - saved_again)
    parts[PRODUCTIVE] = max(0.0, beat - again - (saved - saved_again))
    parts[CHECKPOINTING] = saved
    # The tail: what came after the last heartbeat.
    tail, saved = until - beat, min(rank.saved_since_beat, until - beat)
    parts[CHECKPOINTING] += saved
    tail -= saved
    if start.how in ("", "success"):
        saving = min(tail, until - rank.saving_since) if rank.saving_since else 0.0
        parts[CHECKPOINTING] += saving
        parts[PRODUCTIVE if passed else RECOMPUTED] += tail - saving
    elif start.how == "failure":
        parts[RECOVERING] += tail
    else:  # up to `left` it hung, or made progress that was not in vain
        late = min(tail, max(0.0, until - max(start.left, beat)))
        parts[HUNG if start.how == "hang" else PRODUCTIVE] += tail - late
        parts[RECOVERING] += late


def _recomputed(rank: RankProgress, mark: int | None, begin: float, beat: float) -> tuple[float, bool]:
    """Until when the rank repeated steps, and whether it is past them."""
    if mark is None or rank.step is None or rank.first_step is None:
        return begin, True
    before = rank.first_step - 1
    if mark <= before:
        return begin, True
    if rank.passed_at:
        return _at_step(mark, before, begin, rank.passed_step, min(rank.passed_at, beat)), True
    if rank.step < mark:
        return beat, False
    return _at_step(mark, before, begin, rank.step, beat), True


def _at_step(mark: int, before: int, begin: float, step: int | None, at: float) -> float:
    """When the mark was reached on the way from `before` to `step`, at an even pace."""
    if step is None or step <= mark or step <= before:
        return at
    return begin + max(0.0, at - begin) * (mark - before) / (step - before)


def _exactly(parts: dict[str, float], total: float) -> dict[str, float]:
    """The parts, so that they add up: clocks of several processes may be a moment apart."""
    parts = {name: max(0.0, value) for name, value in parts.items()}
    found = sum(parts.values())
    if found <= 0.0:
        return {**parts, STARTING: max(0.0, total)}
    return {name: value * max(0.0, total) / found for name, value in parts.items()}


# ---- the ledger --------------------------------------------------------------------------------------


class GoodputLedger:
    """The rank-seconds of one node, from `now` on."""

    def __init__(self, ranks: int, now: float) -> None:
        self.ranks = ranks
        self._since = now  # where the part that is not booked yet begins
        self._seconds = dict.fromkeys((*CATEGORIES, _UNMARKED), 0.0)
        self._lost: dict[int, dict[str, float]] = {}
        self._unmarked: dict[int, float] = {}  # of the start after an incident
        self._phase = "NEW"
        self._rounds = 0
        self._started_at = 0.0
        self._left: tuple[str, float] = ("", 0.0)  # how and when the workers of this start were left
        self._incident = 0  # the one that the next start, or the current one, recovers from
        self._ends_with = 0  # the one that ended the current start
        self._quiet_since = 0.0
        self.marks: list[int | None] = [None] * ranks
        """The step that each rank had reached before the start at hand."""
        self._typical = [0.0] * ranks
        self._beats = False

    def step(
        self,
        event: events.Event,
        phase: str,
        now: float,
        incident: int,
        look: Callable[[], Sequence[RankProgress]],
        quiet_since: float = 0.0,
    ) -> None:
        """One step of the group led to `phase`; `incident`: the one at hand or 0; `look` reads the boards.

        `quiet_since`: of a hang, when the workers last wrote output, where that is known."""
        self._quiet_since = quiet_since or self._quiet_since
        before, self._phase = self._phase, phase
        now = max(now, self._since)
        if isinstance(event, events.RoundReady) and self._rounds == 0 and event.round.number > 1:
            self._since = now  # a spare, or a late node: what it waited for was not this job's loss
        if before in _ALIVE:
            self._leave(event, phase, now, incident)
            closes = isinstance(event, events.Stopped | events.StartFailed | events.AllSucceeded)
            if closes or phase not in _ALIVE:
                self._close(now, look())
                self._incident = incident
                if phase == "STARTING":
                    self._open()
        else:
            self._book_wait(before, now)
            if phase in _ALIVE:
                self._incident = incident or self._incident
                self._open()
        self._rounds += isinstance(event, events.RoundReady)
        if isinstance(event, events.Started):
            self._started_at = now

    def totals(self, now: float, look: Callable[[], Sequence[RankProgress]]) -> GoodputTotals:
        """Everything up to now; what is not over yet as it looks now."""
        book = self._copy()
        if self._phase in _ALIVE:
            book._close(max(now, self._since), look())
        elif self._phase != "DONE":
            book._book_wait(self._phase, max(now, self._since))
        seconds = dict(book._seconds)
        lost = {number: dict(parts) for number, parts in book._lost.items()}
        running = seconds.pop(_UNMARKED)
        if not book._beats:
            seconds[RUNNING] += running
        else:  # other starts of this job had steps: these workers did not get that far
            for number, value in book._unmarked.items():
                seconds[RECOVERING if number else STARTING] += value
                if number:
                    _add(lost, number, RECOVERING, value)
        return GoodputTotals(self.ranks, seconds, lost)

    # -- booking ------------------------------------------------------------------------------------

    def _copy(self) -> GoodputLedger:
        twin = GoodputLedger(self.ranks, self._since)
        twin.__dict__.update(self.__dict__)
        twin._seconds, twin._unmarked = dict(self._seconds), dict(self._unmarked)
        twin._lost = {number: dict(parts) for number, parts in self._lost.items()}
        twin.marks, twin._typical = list(self.marks), list(self._typical)
        return twin

    def _open(self) -> None:
        self._started_at, self._left, self._ends_with, self._quiet_since = 0.0, ("", 0.0), 0, 0.0

    def _leave(self, event: events.Event, phase: str, now: float, incident: int) -> None:
        """Remember what ended the start at hand, once."""
        if self._left[0] or phase in ("STARTING", "RUNNING"):
            return
        how = "failure"
        if isinstance(event, events.AllSucceeded):
            how = "success"
        elif isinstance(event, events.Hang | events.Uninterruptible):
            how = "hang"
        elif isinstance(event, events.Signal):
            how = "stop"
        self._left, self._ends_with = (how, now), incident

    def _book_wait(self, phase: str, now: float) -> None:
        """No worker is alive in this phase."""
        span, self._since = now - self._since, now
        if phase == "BARRIER":
            self._add(SLOWEST, span * self.ranks)
        elif self._rounds == 0 or (phase == "NEW"):
            self._add(NODES, span * self.ranks)
        else:
            quick = min(span, QUICK) if phase == "JOINING" else span
            self._add(RECOVERING, quick * self.ranks, self._incident)
            self._add(NODES, (span - quick) * self.ranks)

    def _close(self, now: float, boards: Sequence[RankProgress]) -> None:
        """Book the start at hand, from its begin to now."""
        begin, self._since = self._since, now
        boards = [*boards[: self.ranks], *[RankProgress()] * (self.ranks - len(boards))]
        parts = []
        for rank, board in enumerate(boards):
            bounds = StartBounds(
                begin,
                self._started_at or now,
                now,
                *self._left,
                self.marks[rank],
                self._typical[rank],
                self._quiet_since,
            )
            parts.append(split(board, bounds))
        leader = next((one for one, board in zip(parts, boards, strict=True) if board.count), None)
        self._beats |= leader is not None
        for rank, board in enumerate(boards):
            self._book(parts[rank] if board.count or leader is None else leader)
            if board.count:
                self._learn(rank, board)

    def _learn(self, rank: int, board: RankProgress) -> None:
        mark = self.marks[rank]
        if board.step is not None and (mark is None or board.passed_at or board.step >= mark):
            self.marks[rank] = board.step
        self._typical[rank] = typical_step(board) or self._typical[rank]

    def _book(self, parts: Mapping[str, float]) -> None:
        for name, value in parts.items():
            if name == STARTING and self._incident:
                self._add(RECOVERING, value, self._incident)
            elif name == RECOMPUTED:
                self._add(name, value, self._incident)
            elif name in (RECOVERING, HUNG):
                self._add(name, value, self._ends_with)
            elif name == _UNMARKED:
                self._seconds[name] += value
                number = self._incident
                self._unmarked[number] = self._unmarked.get(number, 0.0) + value
                if len(self._unmarked) > _KEPT:
                    self._unmarked[number] += self._unmarked.pop(min(key for key in self._unmarked if key))
            else:
                self._add(name, value)

    def _add(self, category: str, value: float, incident: int | None = None) -> None:
        self._seconds[category] += value
        if incident is None or value < 1e-6:
            return
        _add(self._lost, incident, category, value)
        if len(self._lost) > _KEPT:
            oldest = min(number for number in self._lost if number > 0)
            for name, lost in self._lost.pop(oldest).items():
                _add(self._lost, _EARLIER, name, lost)


def _add(lost: dict[int, dict[str, float]], incident: int, category: str, value: float) -> None:
    parts = lost.setdefault(incident, dict.fromkeys(BY_INCIDENT, 0.0))
    parts[category] += value


# ---- in words ----------------------------------------------------------------------------------------

_LOSSES = ("restart", "re-entry", "hang", "nodes", "end")
_SMALL = 0.005
"""Losses without an incident below this share are left out of the line."""


def losses(totals: GoodputTotals, incidents: Sequence[Incident]) -> list[tuple[str, int, float]]:
    """What time was lost to, how often, and wall seconds (of an average rank), in the order of the line."""
    ranks = max(1, totals.ranks)
    kinds = {one.number: _kind(one) for one in incidents}
    found: dict[str, list[float]] = {name: [0, 0.0] for name in _LOSSES}
    for kind in kinds.values():
        found[kind][0] += 1
    for number, parts in totals.lost.items():
        found[kinds.get(number, "restart" if number else "end")][1] += sum(parts.values()) / ranks
    rows = [(name, int(count), lost) for name, (count, lost) in found.items() if count or lost > 0.0]
    others = (CHECKPOINTING, STARTING, NODES, SLOWEST)
    return rows + [(f"{name}:", 0, totals.seconds[name] / ranks) for name in others]


def _kind(incident: Incident) -> str:
    if incident.trigger in ("hang", "uninterruptible"):
        return "hang"
    return {"re-entry": "re-entry", "membership": "nodes", "end": "end"}.get(incident.recovery, "restart")


def goodput_line(totals: GoodputTotals, incidents: Sequence[Incident]) -> str:
    """`goodput 97.3 %: 41 s lost to 3 restarts, 12 s to a hang`; without heartbeats, `uptime`."""
    words = {
        "restart": ("a restart", "restarts"),
        "re-entry": ("a re-entry", "re-entries"),
        "hang": ("a hang", "hangs"),
        "nodes": ("a change of nodes", "changes of nodes"),
        "end": ("the end of the job", "failures"),
        f"{CHECKPOINTING}:": ("checkpoints", ""),
        f"{STARTING}:": ("starting", ""),
        f"{NODES}:": ("waiting for nodes", ""),
        f"{SLOWEST}:": ("waiting for the slowest", ""),
    }
    wall = totals.total / max(1, totals.ranks)
    told: list[str] = []
    for name, count, lost in losses(totals, incidents):
        one, many = words[name]
        if count == 0 and lost < _SMALL * wall:
            continue
        to = one if count < 2 else f"{count} {many}"
        told.append(f"{seconds(lost)}{' lost' * (not told)} to {to}")
    line = f"{totals.measure} {100 * totals.ratio:.1f} %"
    return f"{line}: {', '.join(told)}" if told else line


def seconds(value: float) -> str:
    """`41 s`, `0.3 s`, `2 min 5 s`, `3 h 2 min`."""
    if value < 9.95:
        return f"{value:.1f} s" if value >= 0.05 else "0 s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
