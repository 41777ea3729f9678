"""The stream of what happened in a run: each thing once, as a typed event, to all that subscribed.

    owner loop ──► RunRecord ──► Stream ──► the user's lines and reasons
                                     ├──► JobHistory (incidents, the ledger), which adds IncidentChanged
                                     ├──► the last notes, the report of the last failure
                                     ├──► --notify, --otel, /metrics
                                     └──► events.jsonl; events and metrics in torch's form

A subscriber takes the events that concern it and ignores the others. It must not wait. What nobody asked for
has no subscriber, so nothing is imported or computed for it. Subscribers are called in the order of their
subscription: an event that one of them adds reaches all before the next one gets the event that caused it.

Status, the page, the summary of a run and a TrainJob's status are no subscribers: they read the agent when
somebody asks (agent/node_view.py, run_summary.py, train_status.py).
"""

from __future__ import annotations

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol, TypeAlias

    from phalanx.agent.workers.result import RunResult
    from phalanx.core.group.events import Command, Event, Finish
    from phalanx.core.group.group import GroupState
    from phalanx.core.ledger.incidents import Incident


class StepTaken(Record):
    """The core has decided about an event; `result`: how the workers are or ended."""

    event: Event
    state: GroupState
    commands: Sequence[Command]
    reason: str
    result: RunResult


class WorkersRunning(Record):
    """The workers run. Seconds that their ranks and their start took; `recovery`: which of them kept their
    process, in words."""

    attempt: int
    placed_in: float
    started_in: float
    recovery: str = ""


class NoteWritten(Record):
    """One line for a person; `at` by the wall clock."""

    at: float
    line: str


class HostQuarantined(Record):
    """A host is kept out, most often because of the incident at hand."""

    line: str


class HangWarned(Record):
    """A hang about which nothing is done (`--on-hang warn`)."""

    summary: str


class IncidentChanged(Record):
    """An incident has opened, or is over (`incident.over`); `node_rank`: of this node, in its round."""

    incident: Incident
    node_rank: int | None


class Settled(Record):
    """Nothing recovers now: there is time for a disk."""


class RunEnded(Record):
    """The run is over. `finish`: None after an error of the agent itself; `workers_recorded`: a subclass of
    the agent has recorded the last states of its workers, and the totals."""

    finish: Finish | None
    result: RunResult
    attempt: int
    workers_recorded: bool


if TYPE_CHECKING:
    Happened: TypeAlias = (
        StepTaken
        | WorkersRunning
        | NoteWritten
        | HostQuarantined
        | HangWarned
        | IncidentChanged
        | Settled
        | RunEnded
    )

    class Subscriber(Protocol):
        """Takes what happens, in the thread where it happens."""

        def take(self, happened: Happened, /) -> None:
            """One event; most subscribers need a few kinds only."""


class Stream:
    """The events of one agent, passed on as they come."""

    def __init__(self) -> None:
        self.subscribers: list[Subscriber] = []
        self._stirred = False

    def publish(self, happened: Happened) -> None:
        """Pass on what has happened."""
        self._stirred = True
        for subscriber in self.subscribers:
            subscriber.take(happened)

    def settle(self) -> None:
        """Nothing recovers now; cheap where nothing has happened since."""
        if self._stirred:
            self._stirred = False
            for subscriber in self.subscribers:
                subscriber.take(Settled())
