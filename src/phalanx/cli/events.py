"""`phalanx logs RUN --events [-f] [--json]`: what happened to a run, running or finished, line by line.

Read from `events.jsonl` beside its logs (observe/event_file.py); a running job without logs tells its last
ones itself.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.cli.logs import LogReader, WrittenLog
from phalanx.log import printable
from phalanx.observe.local_agents import LocalAgent
from phalanx.observe.log_layout import EVENTS
from phalanx.observe.snapshot import RunFile

_POLL = 0.3
_LOOK = 2.0


def show_events(run: RunFile, agents: Sequence[LocalAgent], follow: bool, as_json: bool) -> int:
    """Print the events, and follow."""
    for event in _events(run, agents[-1] if agents else None, follow):
        print(json.dumps(event) if as_json else in_words(event), flush=follow)
    return 0


def _events(run: RunFile, agent: LocalAgent | None, follow: bool) -> Iterator[dict[str, Any]]:
    path = os.path.join(run.logs, EVENTS) if run.logs else ""
    if agent is not None and not follow and not os.path.isfile(path):
        for note in agent.job.incidents:
            yield {"time": note.at, "host": agent.job.host, "kind": "note", "text": note.what}
        return
    reader, look_at, ended = LogReader(WrittenLog(path, 0, 0, 0, "")), 0.0, False
    while True:
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _LOOK
            ended = not follow or agent is None or not agent.runs
        for line in reader.lines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event
        if ended:
            return
        select.select([], [], [], _POLL)


def in_words(event: dict[str, Any]) -> str:
    """One line for a person."""
    at = event.get("time")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if _is_time(at) else "?"
    if event.get("kind") != "incident":
        text = str(event.get("text", ""))
    else:
        stages = [
            f"{label} {event[name]:.3f} s"
            for name, label in (
                ("detect", "detected in"),
                ("stop", "stopped in"),
                ("reform", "re-formed in"),
                ("start", "started in"),
                ("first_line", "first line after"),
                ("first_step", "first step after"),
            )
            if isinstance(event.get(name), int | float)
        ]
        text = f"incident {event.get('number')} ({event.get('recovery')}): {event.get('reason')}"
        text += f" [{', '.join(stages)}]" if stages else ""
    return printable(f"{when} {event.get('host', '')}: {text}".replace("\n", "\\n"))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e11
