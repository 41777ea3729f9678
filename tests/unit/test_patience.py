"""How long a hang's evidence is waited for: the table, and what /proc says of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from phalanx.agent.supervision.silent_workers import SilentWorkers
from phalanx.core.diagnosis.patience import (
    NODE,
    NODE_BUSY,
    RANK,
    RANK_BUSY,
    SilentRank,
    is_node_awaited,
    is_rank_awaited,
)
from tests.conftest import wait_until

SOON, LATER, TOO_LATE = RANK - 0.1, RANK + 0.1, RANK_BUSY


@pytest.mark.parametrize(
    ("rank", "soon", "later"),
    [
        pytest.param(SilentRank("S"), True, False, id="asleep, and the signal is not delivered"),
        pytest.param(SilentRank("D"), True, False, id="in the kernel"),
        pytest.param(SilentRank("R", threads=(("R", 0.98), ("S", 0.0))), True, False, id="busy"),
        pytest.param(SilentRank("T"), False, False, id="stopped since it was asked"),
        pytest.param(SilentRank(""), False, False, id="exited"),
        pytest.param(SilentRank("Z"), False, False, id="exited, not collected"),
        pytest.param(SilentRank("S", begun=True), True, True, id="has begun to answer"),
        pytest.param(SilentRank("t"), True, True, id="held by a tool that takes its native stack"),
        pytest.param(SilentRank("S", threads=(("S", 0.0), ("R", 0.1))), True, True, id="starved"),
        pytest.param(SilentRank("R", threads=(("R", None),)), True, True, id="ready to run"),
        pytest.param(SilentRank("T", begun=True), False, False, id="stopped while it answered"),
    ],
)  # fmt: skip
def test_a_rank_that_has_not_answered(rank: SilentRank, soon: bool, later: bool) -> None:
    assert [is_rank_awaited(waited, rank) for waited in (SOON, LATER, TOO_LATE)] == [soon, later, False]


@pytest.mark.parametrize(
    ("acknowledged", "took", "may_progress", "later"),
    [
        pytest.param(False, 0.05, False, False, id="frozen or cut off"),
        pytest.param(True, 0.05, False, True, id="its ranks are late"),
        pytest.param(False, 0.5, False, True, id="this node was late, too"),
        pytest.param(False, 0.05, True, True, id="its ranks may progress"),
    ],
)
def test_a_node_that_has_not_reported(
    acknowledged: bool, took: float, may_progress: bool, later: bool
) -> None:
    found = [
        is_node_awaited(waited, acknowledged=acknowledged, took=took, may_progress=may_progress)
        for waited in (NODE - 0.1, NODE, NODE + 0.1, NODE_BUSY)
    ]
    assert found == [True, later, later, False]


@contextmanager
def process(code: str) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.communicate()


ASLEEP, BUSY = "import time\ntime.sleep(1000)", "while True: pass"


def test_workers_that_are_asleep_stopped_or_gone() -> None:
    with process(ASLEEP) as asleep, process(ASLEEP) as stopped, process(ASLEEP) as gone:
        os.kill(stopped, signal.SIGSTOP)
        os.kill(gone, signal.SIGKILL)
        for pid, state in ((stopped, "T"), (gone, "Z"), (asleep, "S")):
            wait_until(lambda pid=pid, state=state: _state(pid) == state, f"state {state}")
        workers = SilentWorkers({0: asleep, 1: stopped, 2: gone}, 0.0)
        everyone = {0, 1, 2}
        assert workers.awaited(everyone, set(), -0.01) == {0}, "the owner's time is that of the turn"
        for tenths in range(1, 6):
            assert workers.awaited(everyone, set(), tenths / 10) == {0}
        assert workers.awaited(everyone, set(), LATER) == set()
        assert workers.stopped == {1}
        assert workers.awaited(everyone, {0}, LATER + 0.2) == {0}, "it has begun to answer"
        workers = SilentWorkers({0: asleep}, 0.0)
        assert workers.awaited({0}, set(), 1.5) == {0}, "it may have answered: nobody has looked before"


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_worker_that_gets_no_processor_is_waited_for_longer() -> None:
    """Four busy processes share one processor; each of them gets a quarter."""
    here = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, {{{here}}})\n{BUSY}"
    with ExitStack() as stack:
        pids = dict(enumerate([stack.enter_context(process(pinned)) for _ in range(4)]))
        begin = time.monotonic()
        workers = SilentWorkers(pids, begin)

        def looked() -> bool:
            now = time.monotonic()
            assert len(workers.awaited(pids, set(), now)) >= 3
            return now >= begin + RANK + 0.2

        wait_until(looked, "some looks")
