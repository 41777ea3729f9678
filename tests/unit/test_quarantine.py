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

from phalanx.core.rounds import quarantine
from phalanx.core.rounds.quarantine import HostWatch, Offence, Quarantine, QuarantinePolicy
from phalanx.core.rounds.records import UNTIL_REMOVED, HostRecord, decode_host, encode
from phalanx.core.rounds.store_commands import Entry

TRACES = Path(__file__).parent / "quarantine"


def add(state: Quarantine, node: str, reason: str, now: float) -> tuple[Quarantine, str]:
    """A person keeps a node out: the record is the store's."""
    held = quarantine.restore(state, node, HostRecord(reason, UNTIL_REMOVED), now)
    return held, f"{node} is quarantined: {reason}"


def remove(state: Quarantine, node: str) -> tuple[Quarantine, str]:
    """A person lets a node in again; its offences are forgotten."""
    held = any(one.node == node for one in state.entries)
    said = f"{node} is no longer quarantined: removed" if held else ""
    return (quarantine.restore(state, node, None, 0.0) if held else state), said


def describe(state: Quarantine, now: float) -> dict[str, str]:
    """Node → reason and time left."""
    left = {
        one.node: "" if one.until is None else f" (for another {one.until - now:.0f} s)"
        for one in state.entries
        if one.until is None or now < one.until
    }
    return {one.node: one.reason + left[one.node] for one in state.entries if one.node in left}


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
            case "check" | "device" | "failure" | "loss":
                state, said = quarantine.record(
                    state, Offence(words[0], what, " ".join(words[1:])), now, policy
                )
                lines = (said,)
            case "add":
                state, said = add(state, words[0], " ".join(words[1:]), now)
                lines = (said,)
            case "remove":
                state, said = remove(state, words[0])
                lines = (said,)
            case "time":
                state, lines = quarantine.expire(state, now, policy)
            case "round":
                found, why = quarantine.choose(state, words[2:], int(words[0]), int(words[1]), now)
                lines = (f"round of {' '.join(words[2:][one] for one in found) or 'nobody'}", why)
        written.append(line)
        written += [f"  {one}" for one in lines if one]
        written += [f"  out: {node}: {why}" for node, why in describe(state, now).items()]
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
            state, said = add(state, node, "by hand", now)
        elif what == "remove":
            state, said = remove(state, node)
        else:
            state, said = quarantine.record(state, Offence(node, what, "why"), now, policy)
        if said:
            (out.discard if "no longer" in said else out.add)(node)
        assert set(describe(state, now)) == out
        chosen, why = quarantine.choose(state, "abcd", minimum, 4, now)
        assert len(chosen) >= minimum
        assert len(chosen) == (4 if len(out) == 4 else max(minimum, 4 - len(out)))
        assert bool(why) == (4 - len(out) < minimum)
        assert list(chosen) == sorted(chosen)
        due = quarantine.next_change(state)
        assert due is None or due > now
        # What the store holds is enough for another leader, whatever its clock shows.
        other, offset = Quarantine(), 1000.0
        for host in "abcd":
            held = quarantine.record_of(state, host, now)
            other = quarantine.restore(other, host, decode_host(encode(held)) if held else None, now + offset)
        left = {one.node: -1.0 if one.until is None else one.until for one in state.entries}
        again = {one.node: -1.0 if one.until is None else one.until - offset for one in other.entries}
        assert again == pytest.approx(left, abs=0.01)
        assert sorted(host for host, _ in other.offences) == sorted(host for host, _ in state.offences)


def test_a_watch_takes_each_record_once_and_says_each_change_once() -> None:
    watch = HostWatch()
    held = Entry("", encode(HostRecord("lost its device", 30.0)), mod=7)
    watch.learn(100.0, "a", held)
    watch.learn(110.0, "a", held)  # through another watch, or again after a reconnect
    assert describe(watch.state, 110.0) == {"a": "lost its device (for another 20 s)"}
    watch.learn(111.0, "a", Entry("", b"[", mod=8))
    assert watch.unreadable == {"a"}  # what was known stays
    assert describe(watch.state, 111.0)
    watch.learn(112.0, "a", Entry("", mod=9), deleted=True)
    watch.learn(113.0, "a", held)  # late
    assert not describe(watch.state, 113.0)
    watch.learn(120.0, "b", Entry("", encode(HostRecord("by hand", -1.0)), mod=10))
    watch.only(121.0, {"a", "c"})
    watch.learn(130.0, "c", Entry("", encode(HostRecord("slow", 5.0)), mod=11))
    watch.learn(135.0, "c", Entry("", mod=12), deleted=True)
    assert [line for line, _ in watch.lines] == [
        "a is quarantined for 30 s: lost its device",
        "a is no longer quarantined: removed",
        "b is quarantined: by hand",
        "b is no longer quarantined: removed",
        "c is quarantined for 5 s: slow",
        "c is no longer quarantined: its time is over",
    ]


def test_many_lines_at_once_are_cut_short_and_none_has_a_control_character() -> None:
    watch = HostWatch()
    for number in range(50):
        watch.learn(0.0, f"n{number}\x1b[31m", Entry("", encode(HostRecord("lost\x07", 5.0)), mod=number + 1))
    lines = [line for line, _ in watch.news()]
    assert len(lines) == 21
    assert lines[0] == "n0\\x1b[31m is quarantined for 5 s: lost\\x07"
    assert "and 30 lines about other hosts" in lines[-1]
    assert not watch.news()


@pytest.mark.parametrize(
    "value",
    [b"", b"7", b'{"left":NaN}', b'{"left":-2}', b'{"left":1e99}', b'{"reason":7}', b'{"offences":[-1]}'],
)
def test_records_that_are_not_readable(value: bytes) -> None:
    assert decode_host(value) is None
    assert decode_host(b'{"reason":"x","left":1,"colour":"green"}') == HostRecord("x", 1.0)


if __name__ == "__main__":
    for path in sorted(TRACES.glob("*.txt")):
        path.write_text(replay(path.read_text()))
