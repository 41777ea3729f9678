"""Incidents: what interrupted a job, how it recovered, and what each stage of the recovery took.

`observe(book, seen)` takes one step of `core.group.group` after the other (with its times, which are
arguments) and returns the next book; `reached` adds what only the workers can tell: their first line and
first step. Nothing here has a clock, and a book is a value: it can be made later from steps that were kept.

The stages of a recovery, by the moments at their ends:

    failed ──► detected ──┬─► stopped ──┬──► started ──► first line ──► first step
                          └─► re-formed ┘

Stop and re-form run in parallel from the moment of detection. An incident is *over* when the workers have
reached their first step (their first line, in a job that sends no heartbeats), when the next one comes, or
with the job. A change of members while a recovery is under way prolongs it: it is not an incident of its own.
"""

from __future__ import annotations

from phalanx.core.group import events
from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.core.group.group import GroupState

RESTART = "restart"
"""Workers were stopped and started again."""
REENTRY = "re-entry"
"""Workers went on in the same processes."""
MEMBERSHIP = "membership"
"""A new round with other nodes, which uses no restart."""
END = "end"
"""The job ended with it."""

KEPT = 200
"""Incidents kept with their records; `IncidentBook.count` counts all."""

STAGES = ("failed", "detected", "stopped", "reformed", "started", "first_line", "first_step")
DURATIONS = ("detect", "stop", "reform", "start", "first_line", "first_step")
"""The names of the stages in an `Incident`, in order."""

TRIGGERS: dict[type, str] = {
    events.WorkerFailed: "failure",
    events.PeerFailed: "peer failure",
    events.Hang: "hang",
    events.Uninterruptible: "uninterruptible",
    events.MembershipChanged: "membership",
    events.RoundOver: "membership",
    events.StartFailed: "start",
    events.RestartRequested: "request",
}
"""What opens an incident, and what it is called in the record."""

_GENTLE = frozenset({"membership", "preemption", "request"})
"""Nothing failed: while a recovery is under way, these only prolong it."""
_ENDS, _RUNS = ("ENDING", "DONE"), ("STARTING", "RUNNING")


class Incident(Record):
    """One incident; durations are seconds, None for a stage that was not reached.

    `reason`: what happened and what was decided, in words. `trigger`: a value of `TRIGGERS`, `preemption` or
    `request`. `recovery`: restart, re-entry, membership or end. `round` and `attempt`: the round that it
    ended, and the restarts used with it. `timestamp`: of the failure, by the wall clock. `node`, `rank`,
    `pid`, `exit_code`: of the root cause, where it is known. `total` runs from the failure to the first
    line, `first_step` from the first line to the first step. `how`: which workers kept their process, in
    words. `quarantined`: the host that is kept out after it, and why."""

    number: int
    reason: str
    trigger: str = "failure"
    recovery: str = RESTART
    round: int = 0
    attempt: int = 0
    timestamp: float = 0.0
    node: str = ""
    rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    detect: float | None = None
    stop: float | None = None
    reform: float | None = None
    start: float | None = None
    first_line: float | None = None
    first_step: float | None = None
    total: float | None = None
    over: bool = False
    how: str = ""
    quarantined: str = ""


class Culprit(Record):
    """The worker that failed first; `failed_at` by the wall clock."""

    rank: int
    pid: int | None = None
    exit_code: int | None = None
    failed_at: float = 0.0
    node: str = ""


class GroupStep(Record):
    """One step of the group: its event and reason, the state after it, and whether it had commands.

    `now`: the monotonic clock, `wall`: the other one. `node`: this node's name. `beats`: how many workers of
    this node had sent a heartbeat by then. `how`: of workers that are started, which of them kept their
    process, in words."""

    event: events.Event
    state: GroupState
    acts: bool
    reason: str
    now: float
    wall: float
    node: str = ""
    culprit: Culprit | None = None
    beats: int = 0
    how: str = ""


class OpenIncident(Record):
    """The incident at hand, and the moments reached so far (monotonic)."""

    incident: Incident
    marks: tuple[tuple[str, float], ...] = ()
    beats: int = 0
    """How many workers must send a heartbeat for the first step; 0: none did before."""

    def at(self, stage: str) -> float | None:
        """When a stage was reached."""
        return dict(self.marks).get(stage)

    def mark(self, stage: str, when: float) -> OpenIncident:
        """With the moment of a stage; only the first one counts."""
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; use one of {', '.join(STAGES)}")
        return self if self.at(stage) is not None else self.replace(marks=(*self.marks, (stage, when)))

    def record(self, over: bool = False) -> Incident:
        """The incident with the durations known by now."""
        at = dict(self.marks)
        ready = max((at[s] for s in ("stopped", "reformed") if s in at), default=None)
        running = at.get("first_line", at.get("started"))
        return self.incident.replace(
            detect=_span(at.get("failed"), at.get("detected")),
            stop=_span(at.get("detected"), at.get("stopped")),
            reform=_span(at.get("detected"), at.get("reformed")),
            start=_span(ready if ready is not None else at.get("detected"), at.get("started")),
            first_line=_span(at.get("started"), at.get("first_line")),
            first_step=_span(running, at.get("first_step")),
            total=_span(at.get("failed", at.get("detected")), at.get("first_line")),
            over=over,
        )


class IncidentBook(Record):
    """All incidents of an agent: how many there were, the last ones that are over, and the one at hand."""

    count: int = 0
    closed: tuple[Incident, ...] = ()
    current: OpenIncident | None = None

    def incidents(self) -> tuple[Incident, ...]:
        """The kept ones, the one at hand last."""
        return self.closed if self.current is None else (*self.closed, self.current.record())

    def quarantined(self, line: str) -> IncidentBook:
        """The one at hand made a host be kept out."""
        if self.current is None:
            return self
        incident = self.current.incident.replace(quarantined=line)
        return self.replace(current=self.current.replace(incident=incident))

    def close(self) -> IncidentBook:
        """The one at hand is over."""
        if self.current is None:
            return self
        return self.replace(closed=(*self.closed, self.current.record(over=True))[-KEPT:], current=None)


def observe(book: IncidentBook, step: GroupStep) -> IncidentBook:
    """The book after one step of the group."""
    event, current = step.event, book.current
    # Without commands it changed nothing: old news. Nor did a request that was refused.
    unchanged = not step.acts or step.state.phase in _RUNS
    trigger = "" if unchanged else trigger_of(event)
    if trigger and not _prolongs(current, trigger):
        return _open(book.close(), step, trigger)
    if current is None:
        return book
    match event:
        case events.Stopped():
            current = current.mark("stopped", step.now)
        case events.RoundReady():
            current = current.mark("reformed", step.now)
        case events.Started():
            current = current.mark("started", step.now)
            if step.how:
                current = current.replace(incident=current.incident.replace(recovery=REENTRY, how=step.how))
        case _:
            pass
    if step.state.phase in _ENDS and current.incident.recovery != END and current.at("started") is None:
        current = current.replace(incident=current.incident.replace(recovery=END))
    return book.replace(current=current)


def reached(
    book: IncidentBook, first_line: float | None, first_steps: tuple[float, ...] = ()
) -> IncidentBook:
    """The book with what the workers of the last start have reached: when all had their first line, and
    the first step of each that has had one; the incident is closed where nothing more is to come."""
    current = book.current
    if current is None or current.at("started") is None:
        return book
    if first_line is not None:
        current = current.mark("first_line", first_line)
    complete = first_line is not None and not current.beats
    if current.beats and len(first_steps) >= current.beats:
        current = current.mark("first_step", max(first_steps))
        complete = True
    book = book if current is book.current else book.replace(current=current)
    return book.close() if complete else book


def trigger_of(event: events.Event) -> str:
    """What an event opens an incident as; empty for those that open none."""
    if isinstance(event, events.RoundOver) and event.preempted:
        return "preemption"
    return TRIGGERS.get(type(event), "")


def _prolongs(current: OpenIncident | None, trigger: str) -> bool:
    return current is not None and current.at("started") is None and trigger in _GENTLE


def _open(book: IncidentBook, step: GroupStep, trigger: str) -> IncidentBook:
    state, culprit, wall = step.state, step.culprit, step.wall
    number = book.count + 1
    recovery = MEMBERSHIP if trigger in ("membership", "preemption") else RESTART
    incident = Incident(
        number,
        step.reason,
        trigger,
        END if state.phase in _ENDS else recovery,
        state.round.number if state.round is not None else 0,
        state.attempt,
        wall,
        step.event.node if isinstance(step.event, events.PeerFailed) else step.node,
    )
    marks: tuple[tuple[str, float], ...] = (("detected", step.now),)
    if culprit is not None:
        node = culprit.node or incident.node
        # It has the wall clock's time. The distance from now holds for both clocks.
        before = max(0.0, wall - culprit.failed_at)
        marks = (("failed", step.now - before), *marks)
        incident = incident.replace(
            node=node,
            rank=culprit.rank,
            pid=culprit.pid,
            exit_code=culprit.exit_code,
            timestamp=culprit.failed_at,
        )
    return book.replace(count=number, current=OpenIncident(incident, marks, step.beats))


def _span(begin: float | None, end: float | None) -> float | None:
    """Seconds between two moments; never negative, because they come from different threads."""
    return None if begin is None or end is None else round(max(0.0, end - begin), 6)
