"""The table of a stop: golden traces.

A trace in `stops/` is a script (`>` lines: time and call; `=` begins a new stop) and, below each
call, the stop and the actions. `python tests/unit/test_stop.py` writes the answers again; read the difference
before you keep it.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from phalanx.core.group import stop as stops
from phalanx.core.group.stop import Stop

TRACES = pathlib.Path(__file__).parent / "stops"


def replay(script: str) -> str:
    """The script with the full answer below each call."""
    stop: Stop | None = None
    out = []
    for line in script.splitlines():
        if line.startswith("= "):
            stop = None
        if line.startswith(("#", "= ")):
            out.append(line)
        if not line.startswith("> "):
            continue
        time, _, call = line[2:].partition(" ")
        name, _, args = call.partition("(")
        first: list[object] = [] if name == "signal_workers" else [stop]
        when = [] if name == "respond" else [float(time)]
        rest = [json.loads(word.lower()) for word in args[:-1].split(", ") if word]
        answer = getattr(stops, name)(*first, *when, *rest)
        stop, actions = answer if isinstance(answer, tuple) else (answer, ())
        out += [line, f"  {_shown(stop)}" + f": {', '.join(actions)}" * bool(actions)]
    return "\n".join(out) + "\n"


def _shown(stop: Stop) -> str:
    text = f"{stop.stage} {stop.sig} kill_at={stop.kill_at:g} due={stop.due:g}"
    text += f" sign_by={stop.sign_by:g}" * (stop.sign_by != stops.NEVER)
    return text + f" park_by={stop.park_by:g}" * (stop.park_by != 0) + " cleared" * stop.cleared


@pytest.mark.parametrize("name", sorted(path.stem for path in TRACES.glob("*.txt")))
def test_golden_trace(name: str) -> None:
    text = (TRACES / f"{name}.txt").read_text()
    assert replay(text) == text


def test_the_traces_take_every_arrow_of_the_table() -> None:
    taken = set()
    for path in TRACES.glob("*.txt"):
        before = ""
        for line in path.read_text().splitlines():
            if line.startswith("= "):
                before = ""
            elif line.startswith("  "):
                (stage,) = re.findall(r"^  (\w+)", line)
                taken.add((before, stage))
                before = stage
    arrows = {(stage, row.then) for stage, row in stops.TABLE.items() if stage != stops.GIVEN_UP}
    assert arrows | {(stops.ASKED, stops.BYPASSED)} <= taken


def test_a_stop_ends_in_a_bounded_time() -> None:
    """Whoever does not respond: from any stage, the table leads to GIVEN_UP."""
    for begin in (stops.ask(None, 0.0, 15, 30.0, True)[0], stops.signal_workers(0.0, 15, 30.0, 60.0)[0]):
        stop, now = begin, 0.0
        for _ in stops.TABLE:
            now = stops.deadline(stop)
            if stop.stage == stops.GIVEN_UP:
                break
            stop, _actions = stops.tick(stop, now)
        assert stop.stage == stops.GIVEN_UP


if __name__ == "__main__":
    for path in TRACES.glob("*.txt"):
        path.write_text(replay(path.read_text()))
