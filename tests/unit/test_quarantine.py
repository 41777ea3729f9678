"""The quarantine of nodes: golden traces, and what holds in any order of events.

A trace in `quarantine/` is a script: `>` lines with a time and what happens; below each, the lines for people
and then who is out. `policy` sets failures, window and cool-down.

    python -m tests.unit.test_quarantine    writes the traces anew; read the difference before you commit it
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core import quarantine
from phalanx.core.quarantine import Offence, Quarantine, QuarantinePolicy

TRACES = Path(__file__).parent / "quarantine"


def replay(text: str) -> str:
    """The script with what the policy answers."""
    state, policy = Quarantine(), QuarantinePolicy()
    written: list[str] = []
    for line in text.splitlines():
        if line.startswith("policy "):
            failures, window, cooldown = line.split()[1:]
            policy = QuarantinePolicy(int(failures), float(window), float(cooldown))
        if not line.startswith(">"):
            if not line.startswith("  "):
                written.append(line)
            continue
        _, time, what, *words = line.split()
        now = float(time)
        lines: tuple[str, ...] = ()
        match what:
            case "check" | "device" | "failure":
                state, said = quarantine.record(
                    state, Offence(words[0], what, " ".join(words[1:])), now, policy
                )
                lines = (said,)
            case "add":
                state, said = quarantine.add(state, words[0], " ".join(words[1:]), now)
                lines = (said,)
            case "remove":
                state, said = quarantine.remove(state, words[0])
                lines = (said,)
            case "time":
                state, lines = quarantine.expire(state, now, policy)
            case "round":
                chosen, why = quarantine.choose(state, words[2:], int(words[0]), int(words[1]), now)
                lines = (f"round of {' '.join(chosen) or 'nobody'}", why)
        written.append(line)
        written += [f"  {one}" for one in lines if one]
        written += [f"  out: {node}: {why}" for node, why in quarantine.describe(state, now).items()]
    return "\n".join(written) + "\n"


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.txt")), ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    assert replay(path.read_text()) == path.read_text()


names = st.sampled_from(["a", "b", "c", "d"])
events = st.lists(
    st.tuples(st.floats(0, 50), st.sampled_from(["check", "device", "failure", "add", "remove"]), names),
    max_size=30,
)


@given(events, st.integers(0, 4), st.integers(1, 4))
def test_in_any_order(happened: list[tuple[float, str, str]], failures: int, minimum: int) -> None:
    """A node is out only for a reason that was said; a round is as large as it must be and can be."""
    state, policy, now = Quarantine(), QuarantinePolicy(failures, 60.0, 40.0), 0.0
    out: set[str] = set()
    for after, what, node in happened:
        now += after
        state, lines = quarantine.expire(state, now, policy)
        out -= {line.split()[0] for line in lines}
        if what == "add":
            state, said = quarantine.add(state, node, "by hand", now)
        elif what == "remove":
            state, said = quarantine.remove(state, node)
        else:
            state, said = quarantine.record(state, Offence(node, what, "why"), now, policy)
        if said:
            (out.discard if "no longer" in said else out.add)(node)
        assert set(quarantine.describe(state, now)) == out
        chosen, why = quarantine.choose(state, "abcd", minimum, 4, now)
        assert len(chosen) >= minimum
        assert len(chosen) == max(minimum, 4 - len(out))
        assert bool(why) == (4 - len(out) < minimum)
        assert list(chosen) == sorted(chosen)
        due = quarantine.next_change(state)
        assert due is None or due > now


if __name__ == "__main__":
    for path in sorted(TRACES.glob("*.txt")):
        path.write_text(replay(path.read_text()))
