"""Structured events of agents, workers and rendezvous, and records of recovered incidents.

A destination is a name: `null` (nothing), `console` (standard error), `file` (JSON lines appended to the file
of `set_file`, else of the variable PHALANX_EVENTS_FILE), or one added with `register`. A sink is a function
that accepts one line of text.

Invariants: nothing is computed for `null` (`record` accepts a function that builds the event on demand);
serialized metadata values are plain (str, int, float, bool, None); a line is written to a file in one write,
so that several agents can share it; a sink that fails does not fail the job: it is reported once on standard
error and then switched off.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from phalanx.core.record import Record
from phalanx.job.environment import EVENTS_FILE, events_file
from phalanx.log import write_stderr
from phalanx.plugins import EVENT_HANDLERS, load, registered

if TYPE_CHECKING:
    import logging

    from phalanx.core.ledger.incidents import Incident

EventMetadataValue: TypeAlias = str | int | float | bool | None
Sink: TypeAlias = Callable[[str], None]

RENDEZVOUS = "dynamic_rendezvous"
"""The destination of rendezvous events, under torch's name; silent until a sink is registered for it."""


_PATIENCE = 1.0  # seconds for the full name of this host


@functools.cache
def host_name() -> str:
    """The full name of this host, as torch's events have it.

    Where DNS is poor it can take a minute to find: then it is the short name, for the whole process."""
    import socket
    import threading

    found: list[str] = []
    look = threading.Thread(target=lambda: found.append(socket.getfqdn(socket.gethostname())), daemon=True)
    look.start()
    look.join(_PATIENCE)
    return found[0] if found else os.uname().nodename


class EventSource(str, Enum):  # not a TextEnum: str() gives "EventSource.AGENT", as in torch
    """The kind of process that reports an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):  # as above
    """The state of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class Event(Record, frozen=False):
    """An event of an agent or a worker; the caller sets `timestamp`, in seconds."""

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = {}

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """The event of a serialized line; an event is returned as it is."""
        if isinstance(data, Event):
            return data
        values = _load(data, "event")
        values["source"] = EventSource[values["source"]]
        return Event(**values)

    def serialize(self) -> str:
        """One line of JSON."""
        metadata = {str(key): plain(value) for key, value in self.metadata.items()}
        return _dump(
            {
                "name": self.name,
                "source": plain(self.source),  # or a plain string
                "timestamp": self.timestamp,
                "metadata": metadata,
            }
        )


class RdzvEvent(Record, frozen=False):
    """An event of a rendezvous."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """The event of a serialized line; an event is returned as it is."""
        if isinstance(data, RdzvEvent):
            return data
        values = _load(data, "rendezvous event")
        values["node_state"] = NodeState[values["node_state"]]
        return RdzvEvent(**values)

    def serialize(self) -> str:
        """One line of JSON."""
        return _dump({**self.as_dict(), "node_state": plain(self.node_state)})


def incident_event(incident: Incident) -> Event:
    """An incident as an event of the agent: its durations in milliseconds, and what opened it as `kind`.

    Stop and re-form run in parallel from the moment of detection, so the stages add up to more than
    `total_ms`, which runs from the failure to the first line of user code."""
    values = incident.as_dict()
    metadata: dict[str, EventMetadataValue] = {
        "number": values["number"],
        "reason": values["reason"],
        "kind": values["trigger"],
        **{name: values[name] for name in ("recovery", "round", "attempt", "node", "rank", "pid")},
        "exit_code": values["exit_code"],
        "timestamp": values["timestamp"],
        "how": values["how"],
        "quarantined": values["quarantined"],
    }
    for name in ("detect", "stop", "reform", "start", "first_line", "first_step", "total"):
        value = values[name]
        metadata[f"{name}_ms"] = None if value is None else round(value * 1000, 3)
    return Event("incident", EventSource.AGENT, int(incident.timestamp), metadata)


# ---- destinations ------------------------------------------------------------------------------------


def _console(line: str) -> None:
    # Look the stream up for each line: it may have been replaced.
    write_stderr(f"{line}\n", styled=True)


def _file(line: str) -> None:
    path = _path or events_file()
    if not path:
        raise ValueError(f"no file for events: set {EVENTS_FILE} or call set_file()")
    # Opened for each line: events are rare, a file that was moved is created again, and no descriptor can
    # leak into workers.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview((line + "\n").encode("utf-8", "backslashreplace"))
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


_path: str | None = None
_broken: set[str] = set()
_sinks: dict[str, Sink | None] = {"null": None, "console": _console, "file": _file, RENDEZVOUS: None}
registered[EVENT_HANDLERS[0]] = _sinks


def set_file(path: str | os.PathLike[str] | None) -> None:
    """Set the path of the `file` destination; None: use the variable."""
    global _path
    _path = None if path is None else os.fspath(path)
    _broken.discard("file")


def register(name: str, sink: Sink | None) -> None:
    """Add or replace a destination; None makes it silent."""
    _sinks[name] = sink
    _broken.discard(name)


def choose(name: str) -> None:
    """Make sure that a destination exists: a built-in or registered one, or a plug-in; else ValueError.

    A plug-in is a function that takes a line, a `logging.Handler`, or something that makes one.
    """
    if name in _sinks:
        return
    found = load(name, EVENT_HANDLERS)
    made = found() if isinstance(found, type) else found
    register(name, _passing_on(made) if hasattr(made, "handle") else made)


def _passing_on(handler: logging.Handler) -> Sink:
    """The sink for a logging handler."""
    import logging

    def emit(line: str) -> None:
        handler.handle(logging.LogRecord("phalanx.events", logging.INFO, "", 0, line, None, None))

    return emit


def _sink(destination: str) -> Sink | None:
    try:
        return _sinks[destination]
    except KeyError:
        known = ", ".join(_sinks)
        raise KeyError(f"unknown event handler {destination!r}; use one of {known}") from None


def _send(destination: str, sink: Sink, line: str) -> None:
    """Write a line; a destination that fails is reported once and then switched off."""
    if destination in _broken:
        return
    try:
        sink(line)
    except Exception as error:  # noqa: BLE001 - a sink must not fail the job
        _broken.add(destination)
        write_stderr(f"phalanx: events: {destination} is switched off: {error}\n")


def record(event: Event | Callable[[], Event], destination: str = "null") -> None:
    """Send an event, or the result of a function that builds it, to a destination."""
    sink = _sink(destination)
    if sink is None:
        return
    if not isinstance(event, Event):
        event = event()
    _send(destination, sink, event.serialize())


def record_incident(incident: Incident, destination: str = "null") -> None:
    record(lambda: incident_event(incident), destination)


def record_rdzv_event(event: RdzvEvent) -> None:
    """Send a rendezvous event to the sink registered for `RENDEZVOUS`."""
    sink = _sinks[RENDEZVOUS]
    if sink is not None:
        _send(RENDEZVOUS, sink, event.serialize())


def construct_and_record_rdzv_event(
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Build and send a rendezvous event; the name defaults to the caller's file and function."""
    if _sinks[RENDEZVOUS] is None:
        return
    if not name:
        code = sys._getframe(1).f_code
        name = f"{os.path.basename(code.co_filename)}:{code.co_name}"
    trace = ""
    if node_state is NodeState.FAILED and sys.exc_info()[0] is not None:
        import traceback

        trace = traceback.format_exc()
    record_rdzv_event(
        RdzvEvent(
            name=name,
            run_id=run_id,
            message=message,
            hostname=hostname or host_name(),
            pid=os.getpid() if pid is None else pid,
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=trace,
        )
    )


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """A logging handler that writes each message to a destination."""
    import logging

    found = _sink(destination)
    if found is None:
        return logging.NullHandler()
    sink: Sink = found

    class SinkHandler(logging.Handler):
        """Passes each formatted record to the sink."""

        def emit(self, record: logging.LogRecord) -> None:
            _send(destination, sink, self.format(record))

    return SinkHandler()


def plain(value: Any) -> EventMetadataValue:
    """The value for JSON: enums by value, numbers of other libraries as numbers, else text."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or type(value) in (str, bool, int):
        return value  # type: ignore[no-any-return]  # narrowed by the exact types above
    if isinstance(value, float):
        # NaN and the infinities are not valid JSON.
        return float(value) if value - value == 0 else str(value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain(value.item())
    return str(value)


def _dump(values: dict[str, Any]) -> str:
    import json

    return json.dumps(values)


def _load(data: str, what: str) -> dict[str, Any]:
    import json

    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError(f"{data[:80]!r} is not a valid {what}: expected a JSON object")
    return values
