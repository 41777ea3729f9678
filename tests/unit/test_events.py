"""Events: torch's types and names, destinations, and the record of an incident."""

from __future__ import annotations

import enum
import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.core.ledger.incidents import Incident, OpenIncident
from phalanx.job.environment import EVENTS_FILE
from phalanx.observe import events
from phalanx.observe.events import (
    Event,
    EventSource,
    NodeState,
    RdzvEvent,
    construct_and_record_rdzv_event,
    get_logging_handler,
    record,
    record_incident,
    record_rdzv_event,
)


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(EVENTS_FILE, raising=False)
    monkeypatch.setattr(events, "_sinks", dict(events._sinks))
    monkeypatch.setattr(events, "_broken", set())
    yield
    events.set_file(None)


@pytest.fixture
def lines() -> list[str]:
    """What reaches a destination called `list`."""
    seen: list[str] = []
    events.register("list", seen.append)
    return seen


def test_an_event_survives_its_line() -> None:
    event = Event(
        "worker.failed", EventSource.WORKER, 12, {"pid": 3, "ok": False, "x": None, "f": 0.5, "s": "é"}
    )
    assert "\n" not in event.serialize()
    assert str(event) == event.serialize()
    assert Event.deserialize(event.serialize()) == event
    assert Event.deserialize(event) is event
    assert json.loads(event.serialize())["source"] == "WORKER"


def test_a_rendezvous_event_survives_its_line() -> None:
    event = RdzvEvent(
        "join", "run1", "hello", "host", 5, NodeState.RUNNING, "h:1", rank=2, error_trace="t\nu"
    )
    assert RdzvEvent.deserialize(event.serialize()) == event
    assert RdzvEvent.deserialize(event) is event
    assert str(event) == event.serialize()


def test_a_source_may_be_plain_text() -> None:
    event = Event("e", "AGENT")  # type: ignore[arg-type]
    assert Event.deserialize(event.serialize()) == Event("e", EventSource.AGENT)
    meeting = RdzvEvent("e", "run1", "", "host", 5, "INIT")  # type: ignore[arg-type]
    assert RdzvEvent.deserialize(meeting.serialize()).node_state is NodeState.INIT


def test_garbage_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid event"):
        Event.deserialize("[1, 2]")


class Color(enum.Enum):
    RED = "red"


def test_metadata_becomes_plain() -> None:
    numpy = pytest.importorskip("numpy")
    odd: dict[str, Any] = {
        "enum": Color.RED,
        "source": EventSource.AGENT,
        "path": pathlib.PurePosixPath("a/b"),
        "nan": float("nan"),
        "inf": float("-inf"),
        "np": numpy.int64(7),
        "npf": numpy.float32(0.5),
        "list": [1],
        "bool": True,
    }
    line = Event("e", EventSource.AGENT, metadata=odd).serialize()
    assert json.loads(line)["metadata"] == {
        "enum": "red",
        "source": "AGENT",
        "path": "a/b",
        "nan": "nan",
        "inf": "-inf",
        "np": 7,
        "npf": 0.5,
        "list": "[1]",
        "bool": True,
    }


def test_nothing_is_computed_for_null(lines: list[str]) -> None:
    def build() -> Event:
        raise AssertionError("built for nobody")

    record(build)
    record(build, "null")
    with pytest.raises(AssertionError, match="built for nobody"):
        record(build, "list")


@pytest.mark.untraced
def test_null_imports_nothing() -> None:
    """Neither json nor logging are loaded for an agent whose events go nowhere."""
    code = (
        "import sys\n"
        "from phalanx.observe import events as e\n"
        "e.record(e.Event('a', e.EventSource.AGENT))\n"
        "e.construct_and_record_rdzv_event('r', 'm', e.NodeState.INIT)\n"
        "print([m for m in ('json', 'logging', 'socket', 'traceback') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_console_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    record(Event("hello", EventSource.AGENT), "console")
    out, err = capsys.readouterr()
    assert out == ""
    assert Event.deserialize(err).name == "hello"


def test_file_takes_one_line_each(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(EVENTS_FILE, str(path))
    record(Event("a", EventSource.AGENT, metadata={"text": "two\nlines"}), "file")
    record(Event("b", EventSource.AGENT), "file")
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["a", "b"]
    other = tmp_path / "other.jsonl"
    events.set_file(other)
    record(Event("c", EventSource.AGENT), "file")
    assert Event.deserialize(other.read_text()).name == "c"


@pytest.mark.parametrize("where", [None, "missing/dir/file"])
def test_a_file_that_cannot_be_written_is_told_once_and_costs_nothing(
    where: str | None, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events.set_file(None if where is None else tmp_path / where)
    for _ in range(3):
        record(Event("a", EventSource.AGENT), "file")
    err = capsys.readouterr().err
    assert err.count("events: file is switched off") == 1
    assert (EVENTS_FILE if where is None else "No such file") in err


def test_an_unknown_destination_names_the_known_ones() -> None:
    for call in (lambda: record(Event("a", EventSource.AGENT), "nope"), lambda: get_logging_handler("nope")):
        with pytest.raises(KeyError, match=r"'nope'; use one of null, console, file"):
            call()
    assert {"null", "console", "file"} <= set(events._sinks)


def test_rendezvous_events_are_silent_until_registered(lines: list[str]) -> None:
    construct_and_record_rdzv_event("run", "nobody listens", NodeState.INIT)
    events.register(events.RENDEZVOUS, lines.append)
    construct_and_record_rdzv_event("run", "joined", NodeState.RUNNING, master_endpoint="h:1", rank=1)
    try:
        raise RuntimeError("lost")
    except RuntimeError:
        construct_and_record_rdzv_event("run", "oops", NodeState.FAILED, name="mine", hostname="h", pid=9)
    record_rdzv_event(RdzvEvent("x", "run", "direct", "h", 1, NodeState.SUCCEEDED))
    joined, failed, direct = map(RdzvEvent.deserialize, lines)
    expected = "test_events.py:test_rendezvous_events_are_silent_until_registered"
    assert (joined.name, joined.rank, joined.error_trace) == (expected, 1, "")
    assert joined.hostname
    assert joined.pid
    assert (failed.name, failed.hostname, failed.pid) == ("mine", "h", 9)
    assert "RuntimeError: lost" in failed.error_trace
    assert direct.message == "direct"


def test_a_logging_handler_writes_to_the_destination(lines: list[str]) -> None:
    assert isinstance(get_logging_handler(), logging.NullHandler)
    handler = get_logging_handler("list")
    handler.handle(logging.LogRecord("n", logging.INFO, "f", 1, "hello %s", ("you",), None))
    assert lines == ["hello you"]


def test_an_incident_with_its_recovery_budget(lines: list[str]) -> None:
    marks = OpenIncident(
        Incident(
            1, "rank 3 exit code 1; restart 1 of 3", "failure", "restart", 4, 1, rank=3, pid=70, exit_code=1
        )
    )
    for stage, at in [
        ("failed", 10.0),
        ("detected", 10.002),
        ("reformed", 10.010),
        ("stopped", 10.050),
        ("started", 10.060),
        ("first_line", 10.100),
        ("first_line", 99.0),
    ]:
        marks = marks.mark(stage, at)
    record_incident(marks.record(over=True), "list")
    event = Event.deserialize(lines[0])
    assert event.name == "incident"
    assert event.metadata["reason"] == "rank 3 exit code 1; restart 1 of 3"
    names = ("detect_ms", "stop_ms", "reform_ms", "start_ms", "first_line_ms", "first_step_ms", "total_ms")
    assert [event.metadata[name] for name in names] == [2.0, 48.0, 8.0, 10.0, 40.0, None, 100.0]
    assert (event.metadata["kind"], event.metadata["recovery"]) == ("failure", "restart")


def test_an_incident_that_did_not_recover_has_no_times_for_what_never_came() -> None:
    incident = OpenIncident(Incident(1, "x")).mark("detected", 5.0).mark("stopped", 4.0).record()
    assert (incident.stop, incident.reform, incident.total) == (0.0, None, None)
    with pytest.raises(ValueError, match="unknown stage 'nap'"):
        OpenIncident(Incident(1, "x")).mark("nap", 1.0)


def test_torchs_names_are_where_torch_has_them() -> None:
    import phalanx.elastic.events as package
    from phalanx.elastic.events import api, handlers

    functions = (construct_and_record_rdzv_event, get_logging_handler, record, record_rdzv_event)
    assert all(getattr(package, function.__name__) is function for function in functions)
    for name in ("Event", "EventSource", "NodeState", "RdzvEvent", "EventMetadataValue"):
        assert getattr(package, name) is getattr(events, name)
    for name in ("Event", "EventSource", "NodeState", "RdzvEvent"):
        assert getattr(api, name) is getattr(events, name)
    assert handlers.get_logging_handler is get_logging_handler
    assert [s.value for s in EventSource] == ["AGENT", "WORKER"]
    assert [s.value for s in NodeState] == ["INIT", "RUNNING", "SUCCEEDED", "FAILED"]
