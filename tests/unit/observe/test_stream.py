"""The stream of what happened: order, and what each subscriber makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.workers.result import RunResult
from phalanx.core.group.events import WorkerState
from phalanx.core.ledger.incidents import Incident
from phalanx.observe.event_file import EventFile
from phalanx.observe.log_layout import EVENTS
from phalanx.observe.notifier import JobNames, Notifier
from phalanx.observe.stream import (
    HangWarned,
    HostQuarantined,
    IncidentChanged,
    NoteWritten,
    RunEnded,
    Settled,
    Stream,
    WorkersRunning,
)
from phalanx.observe.trace_sender import TraceSender

NAMES = JobNames("train.py", "job7", "a1")
FAILURE = Incident(1, "rank 1 failed", "failure")
OVER = FAILURE.replace(over=True)
END = RunEnded(None, RunResult(WorkerState.FAILED), 0, False)


class Recorder:
    """Remembers what it takes; adds events of its own."""

    def __init__(self, stream: Stream, **adds: Any) -> None:
        self.taken: list[str] = []
        self._stream, self._adds = stream, adds

    def take(self, happened: Any) -> None:
        name = type(happened).__name__
        self.taken.append(name)
        if name in self._adds:
            self._stream.publish(self._adds[name])


def test_what_a_subscriber_adds_comes_first_to_those_behind_it() -> None:
    stream = Stream()
    before, after = Recorder(stream, RunEnded=IncidentChanged(OVER, 0)), Recorder(stream)
    stream.subscribers += [before, after]
    stream.publish(END)
    assert before.taken == ["RunEnded", "IncidentChanged"]
    assert after.taken == ["IncidentChanged", "RunEnded"]


def test_it_settles_once_after_something_has_happened() -> None:
    stream = Stream()
    stream.subscribers.append(seen := Recorder(stream))
    stream.settle()
    assert seen.taken == []
    stream.publish(NoteWritten(1.0, "a line"))
    stream.settle()
    stream.settle()
    assert seen.taken == ["NoteWritten", "Settled"]


def test_lines_of_the_file_wait_until_nothing_recovers(tmp_path: Path) -> None:
    file = EventFile(lambda: str(tmp_path), lambda: "a1")
    path = tmp_path / EVENTS
    for happened in (
        NoteWritten(1.0, "restart 1 of 3"),
        IncidentChanged(FAILURE, 0),
        IncidentChanged(OVER, 0),
    ):
        file.take(happened)
    assert not path.exists()
    file.take(Settled())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["kind"], one["host"]) for one in lines] == [("note", "a1"), ("incident", "a1")]
    assert lines[0]["text"] == "restart 1 of 3"
    assert lines[1]["reason"] == "rank 1 failed"
    file.take(NoteWritten(2.0, "the last one"))
    file.take(END)
    assert json.loads(path.read_text().splitlines()[-1])["text"] == "the last one"


def test_without_a_directory_lines_wait_for_one() -> None:
    file = EventFile(lambda: None, lambda: "a1")
    file.take(NoteWritten(1.0, "early"))
    file.take(Settled())
    assert [line["text"] for line in file._lines] == ["early"]


class Unsent(Notifier):
    """Keeps its messages."""

    def __init__(self) -> None:
        super().__init__("true", NAMES)
        self.sent: list[dict[str, Any]] = []

    def put(self, body: bytes) -> None:
        self.sent.append(json.loads(body))


def test_a_recovery_is_reported_after_a_failure_only() -> None:
    notifier = Unsent()
    start = WorkersRunning(1, 0.0, 0.0)
    changes = (FAILURE, FAILURE.replace(trigger="membership"), OVER)
    for happened in (start, *(IncidentChanged(one, 0) for one in changes), start, start):
        notifier.take(happened)
    assert [one["event"] for one in notifier.sent] == ["failure", "recovery"]
    notifier.take(HangWarned("rank 3 is silent"))
    notifier.take(HostQuarantined("a2"))
    assert [one["reason"] for one in notifier.sent if one["event"] == "hang"] == ["rank 3 is silent"]


@pytest.mark.parametrize(
    ("incident", "node_rank", "count"),
    [
        (FAILURE, 1, 0),
        (OVER, 1, 1),
        (OVER.replace(trigger="peer failure"), 0, 0),
        (OVER.replace(trigger="membership"), 1, 0),
        (OVER.replace(trigger="membership"), 0, 1),
        (OVER.replace(trigger="membership"), None, 1),
    ],
)
def test_one_node_sends_the_trace(
    monkeypatch: pytest.MonkeyPatch, incident: Incident, node_rank: int | None, count: int
) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(TraceSender, "put", lambda _self, body: sent.append(body))
    TraceSender(NAMES).take(IncidentChanged(incident, node_rank))
    assert len(sent) == count
    assert all(json.loads(body)["incident"] == incident.as_dict() for body in sent)
