"""phalanx.worker in workers of every kind, in their children, and outside Phalanx."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.supervision.stacks import catches, parse
from phalanx.agent.workers.worker_group import GroupOptions, PContext
from phalanx.agent.workers.worker_kinds import MultiprocessContext, SubprocessContext
from phalanx.worker.board import STACK_SIGNAL, VARIABLE, Boards
from tests.conftest import HUNG, wait_until

Start = Callable[..., tuple[PContext, Boards]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script or a function as one worker with a board; stopped at the end of the test."""
    made: list[tuple[PContext, Boards]] = []

    def begin(
        what: Callable[..., object] | str, kind: str = "exec", preempt: int = 0
    ) -> tuple[PContext, Boards]:
        logs = DefaultLogsSpecs(str(tmp_path / "logs"))
        context: PContext
        boards = Boards(1, preempt)
        options = GroupOptions(warm=kind == "fork of Python", boards=boards)
        if callable(what):
            context = MultiprocessContext("t", what, {0: ()}, {0: {}}, kind, logs, options=options)
        else:
            (tmp_path / "worker.py").write_text(what)
            program, args = sys.executable, (str(tmp_path / "worker.py"),)
            if kind == "shell":
                (tmp_path / "run.sh").write_text(f"{sys.executable} {args[0]}\nexit $?\n")
                program, args = "/bin/sh", (str(tmp_path / "run.sh"),)
            context = SubprocessContext("t", program, {0: args}, {0: {}}, logs, options=options)
        made.append((context, boards))
        context.start()
        return context, boards

    yield begin
    for context, boards in made:
        context.close(signal.SIGKILL, 1)
        boards.close()


def succeeded(context: PContext) -> bool:
    result = context.wait(HUNG)
    return result is not None and not result.is_failed()


CALLS = """
import os, time
from phalanx import worker
assert worker.supervised()
before = time.monotonic()
worker.ready()
worker.heartbeat()
worker.heartbeat(7)
worker.section("train").__enter__()
worker.section("forward").__enter__()
"""


@pytest.mark.parametrize("kind", ["exec", "fork of Python", "shell"])
def test_programs(start: Start, kind: str) -> None:
    context, boards = start(CALLS, kind)
    assert succeeded(context)
    slot = boards.read(0)
    assert (slot.count, slot.step, slot.section) == (2, 7, "train/forward")
    assert context.started_at
    assert 0 < slot.ready_at <= slot.beat_at <= time.monotonic()
    assert not slot.listens
    if kind != "shell":
        assert slot.pid == context.pids()[0]
    assert boards.clear_bell()
    assert not boards.clear_bell()


def beat_in_function() -> None:
    from phalanx import worker

    worker.heartbeat(3)


@pytest.mark.parametrize("kind", ["spawn", "forkserver", "fork"])
def test_functions(start: Start, kind: str) -> None:
    context, boards = start(beat_in_function, kind)
    assert succeeded(context)
    assert boards.read(0).step == 3


def test_a_forked_function_is_heard_when_its_parent_has_imported_the_module(start: Start) -> None:
    importlib.import_module("phalanx.worker.api")
    context, boards = start(beat_in_function, "fork")
    assert succeeded(context)
    assert boards.read(0).step == 3


CHILDREN = """
import multiprocessing, os, subprocess, sys
from phalanx import worker
def child():
    worker.heartbeat(100)
    with worker.section("child"), worker.expires(1):
        worker.ready()
    os._exit(0 if not worker.supervised() else 1)
alone = "from phalanx import worker; worker.heartbeat(200); import sys; sys.exit(worker.supervised())"
if __name__ == "__main__":
    worker.heartbeat(5)
    pid = os.fork()
    if pid == 0:
        child()
    assert os.waitpid(pid, 0)[1] == 0
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0, method
    assert subprocess.run([sys.executable, "-c", alone]).returncode == 0
    assert subprocess.run([sys.executable, "-c", alone], close_fds=False).returncode == 0
    # A child with the descriptor open, as after a plain fork, that imports the module itself.
    pid = os.fork()
    if pid == 0:
        del sys.modules["phalanx.worker"], sys.modules["phalanx.worker.api"]
        from phalanx import worker as again
        os._exit(again.supervised())
    assert os.waitpid(pid, 0)[1] == 0
    worker.heartbeat(6)
"""


@pytest.mark.parametrize("kind", ["exec", "fork of Python"])
def test_the_calls_have_no_effect_in_children_of_a_worker(start: Start, kind: str) -> None:
    context, boards = start(CHILDREN, kind)
    assert succeeded(context)
    slot = boards.read(0)
    assert (slot.step, slot.count, slot.ready_at, slot.deadline, slot.section) == (6, 2, 0.0, 0.0, "")


OUTSIDE = """
from phalanx import worker
worker.ready(); worker.heartbeat(); worker.heartbeat(3)
with worker.section("x"), worker.expires(5):
    pass
assert worker.on_preempt(print) is print
assert not worker.should_checkpoint() and not worker.supervised()
"""


@pytest.mark.parametrize("value", [None, "", "garbage", "0,1,2,3,46", "13,14,1,1,46"])
def test_the_calls_have_no_effect_outside_phalanx(value: str | None) -> None:
    env = {**os.environ, **({VARIABLE: value} if value is not None else {})}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OUTSIDE],
        env=env,
        timeout=HUNG,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_deadlines_are_those_of_the_scope_that_ends_first(start: Start) -> None:
    context, boards = start(
        "import time\nfrom phalanx import worker\nfrom phalanx.worker import api\nnow = time.monotonic()\n"
        "e = worker.expires(50)\n"
        "with worker.expires(1000):\n"
        "    with e:\n"
        "        with e: pass\n"
        "        with worker.expires(500): pass\n"
        "        assert 40 < api.TIME.unpack_from(api._board, api.DEADLINE_AT)[0] - now < 60\n"
        "    assert 900 < api.TIME.unpack_from(api._board, api.DEADLINE_AT)[0] - now < 1100\n"
    )
    assert succeeded(context)
    assert boards.read(0).deadline == 0.0
    assert boards.clear_bell()


def test_a_loop_of_deadlines_wakes_the_agent_once() -> None:
    """Not once per step."""
    boards = Boards(1)
    try:
        code = (
            "from phalanx import worker\n"
            "for _ in range(1000):\n"
            "    with worker.expires(60): worker.heartbeat()\n"
        )
        board, bell = (fd for _, fd, _ in boards.places(0, executed=True))
        file = os.fstat(board)
        variable = f"{board},{bell},{file.st_dev},{file.st_ino},{STACK_SIGNAL}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, VARIABLE: variable},
            pass_fds=(board, bell),
            timeout=HUNG,
            check=False,
        )
        assert done.returncode == 0
        assert boards.read(0).count == 1000
        assert len(os.read(boards.fileno(), 4096)) == 2  # the first deadline, the first heartbeat
    finally:
        boards.close()


@pytest.mark.parametrize("after", [0, -1, float("nan")])
def test_a_deadline_in_the_past_is_refused(after: float) -> None:
    from phalanx import worker

    with pytest.raises(ValueError, match="above 0"):
        worker.expires(after)


PREEMPT = """
import signal, sys, time
from phalanx import worker
@worker.on_preempt
def save():
    print("saved", flush=True)
    done.append(worker.should_checkpoint())
done = []
worker.ready()
while not done:
    time.sleep(0.01)
assert done == [True]
"""


def test_preemption_by_signal(start: Start) -> None:
    context, boards = start(PREEMPT, preempt=signal.SIGUSR1)
    wait_until(lambda: boards.read(0).ready_at, "ready")
    assert boards.read(0).listens
    assert catches(context.pids()[0], signal.SIGUSR1)
    boards.set_preempted(0)
    context.send_signal(signal.SIGUSR1, {0}, alone=True)
    assert succeeded(context)


def test_preemption_by_heartbeat(start: Start) -> None:
    context, boards = start(
        PREEMPT.replace("time.sleep(0.01)", "worker.heartbeat(); time.sleep(0.001)").replace(
            "worker.ready()", "signal.signal(signal.SIGUSR1, signal.SIG_IGN); worker.ready()"
        )
    )
    wait_until(lambda: boards.read(0).ready_at, "ready")
    assert not catches(context.pids()[0], signal.SIGUSR1)
    boards.set_preempted(0)
    assert succeeded(context)


HOLDS_THE_LOCK = """
import threading
from phalanx import worker
def inner():
    worker.heartbeat(1)
    while True: pass
def idle(): threading.Event().wait()
threading.Thread(target=idle, daemon=True).start()
inner()
"""


@pytest.mark.parametrize("kind", ["exec", "fork of Python"])
def test_stacks_of_a_worker_that_holds_the_interpreter(start: Start, kind: str) -> None:
    context, boards = start(HOLDS_THE_LOCK, kind)
    wait_until(lambda: boards.read(0).count, "the loop")
    assert catches(context.pids()[0], STACK_SIGNAL)
    context.send_signal(STACK_SIGNAL, {0}, alone=True)
    wait_until(lambda: len(parse(boards.stacks(0))) == 2 and "in <module>" in boards.stacks(0), "stacks")
    main, other = parse(boards.stacks(0))
    assert [frame.rpartition(" in ")[2] for frame in main] == ["inner", "<module>"]
    assert any(frame.endswith("in idle") for frame in other)
    assert not context.failed()


def test_a_program_other_than_python_gets_no_signal(start: Start) -> None:
    context, _ = start("import time; time.sleep(1000)", "shell")
    assert not catches(context.pids()[0], STACK_SIGNAL)
    assert not catches(1 << 30, STACK_SIGNAL)


def test_record_is_available() -> None:
    import phalanx
    from phalanx import worker

    assert worker.record is phalanx.record
    with pytest.raises(AttributeError, match=r"phalanx\.worker.*'recrod'"):
        worker.recrod  # noqa: B018


def test_the_bell_never_blocks_a_worker(start: Start) -> None:
    context, boards = start("from phalanx import worker\nfor _ in range(100_000): worker.ready()\n")
    assert succeeded(context)
    assert select.select([boards.fileno()], [], [], 0)[0]
