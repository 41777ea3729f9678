"""The checker finds what it has to find in recorded life signs, and nothing in healthy ones."""

from __future__ import annotations

import pytest

from tests.chaos.invariants import (
    AgentExit,
    CpuSample,
    Disturbance,
    LifeSigns,
    ProcessSeen,
    StatusAnswer,
    answers,
    console_complete,
    endings,
    idle,
    is_complete,
    log_complete,
    nothing_left,
    numbered_line,
    one_world,
    ranks,
    whole,
)


def worker(
    world: str, rank: int, begin: float, end: float, size: int = 2, node: str = "", pid: int = 0
) -> LifeSigns:
    beats = tuple(begin + step * 0.1 for step in range(round((end - begin) * 10) + 1))
    return LifeSigns(node or f"n{rank}", pid or 100 * ord(world[0]) + rank, world, rank, size, beats)


A_THEN_B = [worker("a", 0, 0, 5), worker("a", 1, 0, 5), worker("b", 0, 5.5, 9), worker("b", 1, 5.6, 9)]
SLOW_A = [worker("a", 0, 0, 5), worker("a", 1, 0, 7), *A_THEN_B[2:]]
STOPPED = Disturbance("agent-stop", "n1", 4, 6.5)
ALL_STOPPED = [STOPPED._replace(fault=f"{what}-stop") for what in ("agent", "zygote", "keeper")]
FROZEN = STOPPED._replace(fault="node-freeze")


@pytest.mark.parametrize(
    ("signs", "disturbances", "found"),
    [
        pytest.param(A_THEN_B, [], [], id="one after the other"),
        pytest.param(SLOW_A, [], ["rank 1/2 of world a on n1 (pid 9701) ran for 1.50 s"], id="overlap"),
        pytest.param(SLOW_A, [STOPPED], ["for 1.50 s"], id="agent stopped"),
        pytest.param(
            SLOW_A, [STOPPED, STOPPED._replace(fault="zygote-stop")], ["for 1.50 s"], id="zygote, too"
        ),
        pytest.param(SLOW_A, ALL_STOPPED, [], id="all of them"),
        pytest.param(SLOW_A, [FROZEN], [], id="node frozen"),
        pytest.param(SLOW_A, [FROZEN._replace(node="n0")], ["for 1.50 s"], id="another node frozen"),
        pytest.param(SLOW_A, [FROZEN._replace(end=5.0)], ["for 1.50 s"], id="continued long ago"),
        pytest.param(SLOW_A, [FROZEN._replace(fault="cut")], ["for 1.50 s"], id="a cut"),
    ],
)
def test_one_world(signs: list[LifeSigns], disturbances: list[Disturbance], found: list[str]) -> None:
    violations = one_world(signs, disturbances)
    assert len(violations) == len(found)
    for violation, text in zip(violations, found, strict=True):
        assert text in violation.text
        assert violation.pids == (9701, 9800)


@pytest.mark.parametrize(
    ("signs", "found"),
    [
        pytest.param(A_THEN_B, [], id="healthy"),
        pytest.param([*A_THEN_B, worker("b", 1, 6, 9, pid=5)], ["rank 1 exists 2 times"], id="twice"),
        pytest.param([*A_THEN_B[:3], worker("b", 2, 6, 9)], ["rank 2 of 2"], id="out of range"),
        pytest.param([*A_THEN_B[:3], worker("b", 1, 6, 9, size=3)], ["sizes [2, 3]"], id="sizes"),
    ],
)
def test_ranks(signs: list[LifeSigns], found: list[str]) -> None:
    violations = ranks(signs)
    assert len(violations) == len(found)
    assert all(text in violation.text for violation, text in zip(violations, found, strict=True))


@pytest.mark.parametrize(
    ("signs", "disturbances", "finished", "missing"),
    [
        pytest.param([worker("a", 0, 0, 20), worker("a", 1, 0, 20)], [], 99, False, id="healthy"),
        pytest.param([worker("a", 0, 0, 20), worker("a", 1, 0, 5)], [], 99, True, id="lost"),
        pytest.param([worker("a", 0, 0, 20)], [], 99, True, id="never started"),
        pytest.param([worker("a", 0, 0, 20), worker("a", 1, 0, 15)], [], 99, False, id="lost just now"),
        pytest.param([worker("a", 0, 15, 20)], [], 99, False, id="still starting"),
        pytest.param([worker("a", 0, 0, 20), worker("a", 1, 0, 5)], [], 4, False, id="asked to finish"),
        pytest.param([worker("a", 0, 0, 9), worker("a", 1, 0, 5)], [], 99, False, id="over"),
        pytest.param(
            [worker("a", 0, 0, 20), worker("a", 1, 0, 5)],
            [Disturbance("worker-stop", "n1", 5, 18)], 99, False, id="stopped",
        ),
        pytest.param(
            [worker("a", 0, 0, 20), worker("a", 1, 0, 5)],
            [Disturbance("zygote-stop", "n1", 4, 19)], 99, True, id="a stopped zygote excuses nothing",
        ),
    ],
)  # fmt: skip
def test_whole(
    signs: list[LifeSigns], disturbances: list[Disturbance], finished: float, missing: bool
) -> None:
    violations = whole(signs, disturbances, now=20, within=8, finished=finished)
    assert [violation.invariant for violation in violations] == ["whole world"] * missing


def test_complete() -> None:
    assert is_complete(A_THEN_B, 2, now=9.1)
    assert not is_complete(A_THEN_B, 3, now=9.1)
    assert not is_complete(A_THEN_B, 2, now=12)
    assert not is_complete(A_THEN_B, 2, now=5.7)  # two worlds
    assert not is_complete(A_THEN_B[:3], 2, now=9.1)


def log(pid: int, *numbers: int) -> str:
    return "".join(numbered_line(pid, number) + "\n" for number in numbers)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(log(7, 1, 2, 3), "", id="all"),
        pytest.param(log(7, 1, 2, 3, 4), "", id="one more than recorded"),
        pytest.param(log(7, 1, 2), "2 lines", id="the last one missing"),
        pytest.param(log(7, 1, 3), "line 2", id="one missing"),
        pytest.param(log(7, 1, 2, 2, 3), "line 3", id="doubled"),
        pytest.param(log(7, 1, 2, 3)[:-4], "line 3", id="torn"),
        pytest.param(log(7, 1) + log(8, 2), "line 2", id="of another worker"),
        pytest.param("", "0 lines", id="empty"),
    ],
)
def test_log(text: str, found: str) -> None:
    violations = log_complete(worker("a", 0, 0, 1, pid=7)._replace(lines=3, log="x.log"), text)
    assert bool(violations) == bool(found)
    assert all(found in violation.text for violation in violations)


def console(pid: int, *numbers: int) -> str:
    return "".join(f"[default0]:{line}\n" for line in log(pid, *numbers).splitlines())


@pytest.mark.parametrize(
    ("text", "ended", "found"),
    [
        pytest.param("phalanx: x\n" + console(7, 1) + console(8, 1, 2) + console(7, 2), True, "", id="all"),
        pytest.param(console(7, 1) + console(8, 1, 2), True, "1 of 2 lines of pid 7", id="missing"),
        pytest.param(console(7, 1) + console(8, 1, 2), False, "", id="missing, but the agent was killed"),
        pytest.param(console(7, 1, 2)[:-5], False, "", id="cut off by the kill"),
        pytest.param(console(7, 1)[:-5] + console(8, 1, 2), False, "torn", id="torn"),
        pytest.param(console(7, 2) + console(8, 1, 2), False, "follows line 0", id="order"),
        pytest.param(console(7, 1, 1), False, "follows line 1", id="doubled"),
    ],
)
def test_console(text: str, ended: bool, found: str) -> None:
    violations = console_complete("n0.0", text, {7: 2, 8: 2}, ended=ended)
    assert bool(violations) == bool(found)
    assert found in "".join(violation.text for violation in violations)


def test_an_orphan_is_named() -> None:
    processes = [
        ProcessSeen(5, "n0.0", "python"),
        ProcessSeen(6, "n0.1", "python"),
        ProcessSeen(7, "n1.0", "x"),
    ]
    (violation,) = nothing_left(processes, {"n0.0": 10.0, "n1.0": 12.5}, [], now=13, within=2)
    assert violation.pids == (5,)
    assert "n0.0: alive 3.0 s after the agent's end: 5 (python)" in violation.text


@pytest.mark.parametrize(
    ("what", "fault", "found"),
    [
        pytest.param("worker-keeper", "keeper-stop", False, id="a stopped helper"),
        pytest.param("worker-zygote", "keeper-stop", True, id="the other helper"),
        pytest.param("python", "zygote-stop", True, id="a worker of a stopped helper"),
        pytest.param("python", "node-freeze", False, id="a frozen node"),
    ],
)
def test_what_is_stopped_cannot_end(what: str, fault: str, found: bool) -> None:
    stopped = [Disturbance(fault, "n0", 9, 12)]
    left = nothing_left([ProcessSeen(5, "n0.0", what)], {"n0.0": 10.0}, stopped, now=13, within=2)
    assert bool(left) == found
    assert nothing_left([ProcessSeen(5, "n0.0", what)], {"n0.0": 10.0}, stopped, now=15, within=2)


@pytest.mark.parametrize(
    ("share", "disturbances", "starts", "found"),
    [
        pytest.param(0.01, [], [], False, id="idle"),
        pytest.param(0.8, [], [], True, id="busy"),
        pytest.param(0.8, [Disturbance("cut", "n3", 5, 6)], [], True, id="a fault long ago"),
        pytest.param(0.8, [Disturbance("cut", "n3", 5, 16)], [], False, id="a fault just now"),
        pytest.param(0.8, [], [17.0], False, id="a start just now"),
    ],
)
def test_idle(share: float, disturbances: list[Disturbance], starts: list[float], found: bool) -> None:
    samples = [CpuSample("n0.0", 0.5 * step, 0.5 * step * share) for step in range(41)]
    assert bool(idle(samples, disturbances, starts, bound=0.25)) == found


@pytest.mark.parametrize(
    ("seconds", "answered", "disturbances", "found"),
    [
        pytest.param(0.2, True, [], False, id="quick"),
        pytest.param(7, True, [], True, id="slow"),
        pytest.param(1, False, [], True, id="none"),
        pytest.param(7, False, [Disturbance("agent-stop", "n0", 11, 15)], False, id="stopped"),
        pytest.param(7, False, [Disturbance("agent-stop", "n1", 11, 15)], True, id="another is stopped"),
    ],
)
def test_answers(seconds: float, answered: bool, disturbances: list[Disturbance], found: bool) -> None:
    assert bool(answers([StatusAnswer("n0", 10, seconds, answered)], disturbances, bound=5)) == found


@pytest.mark.parametrize(
    ("code", "expected", "cause", "found"),
    [
        pytest.param(0, (0,), "", "", id="right"),
        pytest.param(1, (0,), "", "exited with 1, not 0", id="wrong"),
        pytest.param(1, (), "", "", id="any"),
        pytest.param(None, (0,), "", "does not end", id="never"),
        pytest.param(77, (77,), r"rank 1\b", "", id="cause"),
        pytest.param(77, (77,), r"rank 2\b", "does not show", id="another cause"),
    ],
)
def test_endings(code: int | None, expected: tuple[int, ...], cause: str, found: str) -> None:
    violations = endings([AgentExit("n0.0", 1.0, code, expected, "Root cause: rank 1 on n1\n", cause)])
    assert bool(violations) == bool(found)
    assert all(found in violation.text for violation in violations)
