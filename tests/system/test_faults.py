"""What must hold whatever dies, repeated: no orphan, nothing half-started, nobody else's process touched."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from phalanx.errors import StartError
from tests.conftest import HUNG, gone, wait_until
from tests.support.fault_agent import KINDS, family
from tests.support.run_helpers import kill_at_once, zygote_below
from tests.system.hostile_user import as_root, unused_uid

AGENT = str(Path(__file__).parents[1] / "support" / "fault_agent.py")
PROMISE = 1.0  # seconds after the agent's death: the contract, not a measurement
DEFAULT_GRACE = 30.0

few_or_many = pytest.mark.parametrize(
    "times", [pytest.param(3, id="few"), pytest.param(200, id="many", marks=pytest.mark.long)]
)


class Agent:
    """A running fault_agent.py and the pids its workers wrote down."""

    def __init__(self, scenario: str, directory: Path, **env: str) -> None:
        self.directory = directory
        self.scenario = scenario
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, AGENT, scenario, str(directory)],
            env={**os.environ, "PYTHONPATH": root, **env},
            stderr=subprocess.DEVNULL,
        )

    def pids(self, kinds: tuple[str, ...]) -> dict[str, int]:
        """Wait until all of them run, and say who they are."""
        names = [f"{kind}.{rank}" for kind in kinds for rank in range(2)] + ["helpers"]
        files = {name: self.directory / name for name in names}
        wait_until(lambda: all(f.exists() and f.read_text().strip() for f in files.values()), "all pids")
        return {name: int(file.read_text()) for name, file in files.items()}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(scenario: str, **env: str) -> Agent:
        directory = tmp_path / f"run{len(made)}"
        directory.mkdir()
        made.append(Agent(scenario, directory, **env))
        return made[-1]

    yield make
    for one in made:
        one.end()


def in_time(condition: Callable[[], object]) -> bool:
    """Whether a fact comes in the promised time: of this thread, which looks all the while.

    On a busy machine a second of it is several by the clock, as for the processes that are looked at."""
    until = time.thread_time() + PROMISE
    while not condition():
        if time.thread_time() > until:
            return bool(condition())
    return True


def all_gone_in_time(pids: dict[str, int]) -> None:
    if not in_time(lambda: all(gone(pid) for pid in pids.values())):
        left = {name: pid for name, pid in pids.items() if not gone(pid)}
        raise AssertionError(f"alive {PROMISE} s after the kill: {left}")


@few_or_many
def test_agent_killed_nothing_survives(times: int, agent: Callable[..., Agent]) -> None:
    for _ in range(times):
        one = agent("family")
        pids = one.pids(KINDS)
        one.process.kill()
        one.process.wait()
        all_gone_in_time(pids)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_agent_killed_function_workers_end(method: str, agent: Callable[..., Agent]) -> None:
    one = agent(method)
    pids = one.pids(("worker",))
    one.process.kill()
    one.process.wait()
    all_gone_in_time(pids)


@few_or_many
@pytest.mark.parametrize(
    "victims", ["zygote", "keeper", "agent+zygote", "agent+keeper", "stopped zygote+agent"]
)
def test_helpers_killed_nothing_survives(victims: str, times: int, agent: Callable[..., Agent]) -> None:
    for _ in range(times):
        one = agent("family")
        pids = one.pids(KINDS)
        zygote = zygote_below(pids["helpers"]).pid
        who = {"zygote": zygote, "keeper": pids["helpers"], "agent": one.process.pid}
        if victims.startswith("stopped"):
            os.kill(zygote, signal.SIGSTOP)
            victims = "agent"
        kill_at_once(who[name] for name in victims.split("+"))
        all_gone_in_time({name: pid for name, pid in pids.items() if name != "helpers"})
        one.end()


@few_or_many
def test_agent_killed_while_it_starts(times: int, agent: Callable[..., Agent]) -> None:
    """Between fork and exec, before the helpers are up, in the middle of anything."""
    for _ in range(times * 2):
        one = agent("family")
        # Not a wait for something: a random moment of the start is the point.
        select_moment(random.uniform(0, 0.25))
        one.process.kill()
        one.process.wait()
        mark = str(one.directory).encode()
        left = [p for p in psutil.process_iter() if carries(p, mark)]
        assert in_time(lambda left=left, mark=mark: not any(carries(p, mark) for p in left)), left  # type: ignore[misc]


def select_moment(seconds: float) -> None:
    import select

    select.select([], [], [], seconds)


def carries(process: psutil.Process, mark: bytes) -> bool:
    """Whether a live process has the run's directory in its command line."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        return mark in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except (psutil.NoSuchProcess, OSError):
        return False


@few_or_many
def test_children_of_a_failed_worker_end_with_the_group(times: int, tmp_path: Path) -> None:
    for turn in range(times):
        directory = tmp_path / str(turn)
        directory.mkdir()
        files = [directory / f"{kind}.0" for kind in KINDS]
        until = " && ".join(f"[ -s {file} ]" for file in files)
        script = family(directory, wait=f"until {until}; do sleep 0.01; done; exit 3")
        args: dict[int, tuple[Any, ...]] = {0: ("-c", script)}
        result = start_processes("f", "/bin/sh", args, {0: {"RANK": "0"}}, DefaultLogsSpecs()).wait(HUNG)
        assert result is not None
        assert result.failures[0].exitcode == 3
        for file in files:
            assert gone(int(file.read_text())), file.name


@few_or_many
def test_workers_that_ignore_sigterm_are_killed_at_the_end_of_grace(times: int, tmp_path: Path) -> None:
    grace, soonest = 0.3, HUNG
    for turn in range(times):
        ready = tmp_path / f"ready{turn}"
        script = f"trap '' TERM; touch {ready}.$RANK; while :; do sleep 0.05; done"
        args: dict[int, tuple[Any, ...]] = dict.fromkeys(range(2), ("-c", script))
        group = start_processes(
            "f", "/bin/sh", args, {r: {"RANK": str(r)} for r in range(2)}, DefaultLogsSpecs()
        )
        wait_until(lambda ready=ready: all(Path(f"{ready}.{r}").exists() for r in range(2)), "the traps")  # type: ignore[misc]
        begin = time.monotonic()
        group.close(timeout=grace)
        took = time.monotonic() - begin
        assert took >= grace
        soonest = min(soonest, took)
        assert all(gone(pid) for pid in group.pids().values())
    assert soonest < DEFAULT_GRACE, "the grace that was given, and no other"


@few_or_many
def test_many_signals_during_shutdown(times: int, agent: Callable[..., Agent]) -> None:
    """1 to 20 signals while it stops: it ends, with the first signal's code, and leaves nothing."""
    for turn in range(times):
        one = agent("stubborn", GRACE="5")
        pids = one.pids(("worker",))
        wait_until((one.directory / "waiting").exists, "an agent that waits: the worker may be earlier")
        count = 1 + (turn * 7) % 20
        first = signal.SIGTERM if turn % 2 else signal.SIGINT
        one.process.send_signal(first)
        wait_until((one.directory / "stopping").exists, "the stop")
        for _ in range(count):
            one.process.send_signal(random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        assert one.process.wait(HUNG) == 128 + first
        all_gone_in_time(pids)


LIMITED = """
import resource
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.errors import StartError
# This process, keeper, zygote, and room for {room} workers of the 6 that are asked for.
resource.setrlimit(resource.RLIMIT_NPROC, (3 + {room}, 3 + {room}))
script = "echo ran >> {ran}"
try:
    start_processes("f", "/bin/sh", {{r: ("-c", script) for r in range(6)}}, {{r: {{}} for r in range(6)}},
        DefaultLogsSpecs())
except StartError as error:
    print(error)
"""


@few_or_many
def test_a_fork_that_fails_leaves_no_partial_group(times: int, tmp_path: Path) -> None:
    """A real process limit: root is exempt from it, so another real user runs this, without the privilege."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be another user with a process limit of its own")
    other = ["setpriv", "--ruid", str(unused_uid()), "--bounding-set", "-sys_resource,-sys_admin", "--"]
    for turn in range(times):
        ran = tmp_path / f"ran{turn}"
        code = LIMITED.format(room=turn % 5, ran=ran)
        command = [*other, sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)
        assert "cannot fork" in done.stdout, done.stderr
        assert f"rank {turn % 5}" in done.stdout
        assert not ran.exists()


@few_or_many
def test_output_before_an_abrupt_exit_is_complete(
    times: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os; os.write(1, (b'y' * 127 + b'\\n') * 8192); os._exit(9)"
    for turn in range(times):
        specs = DefaultLogsSpecs(log_dir=str(tmp_path / str(turn)), tee=Std.ALL)
        group = start_processes(
            "f", sys.executable, {0: ("-c", code)}, {0: {}}, specs, log_line_prefixes={0: ""}
        )
        result = group.wait(HUNG)
        assert result is not None
        assert result.failures[0].exitcode == 9
        assert capfd.readouterr().out == ("y" * 127 + "\n") * 8192
        assert Path(result.stdouts[0]).stat().st_size == 1 << 20


@as_root
@few_or_many
def test_pid_reuse_a_stranger_with_a_workers_pid_is_never_signalled(times: int, tmp_path: Path) -> None:
    """In a pid namespace whose next pid can be chosen, a stranger takes the dead worker's number."""
    script = Path(__file__).parents[1] / "support" / "pid_reuse.py"
    root = str(Path(__file__).parents[2])
    for _ in range(times):
        done = subprocess.run(
            ["unshare", "-pf", "--mount-proc", sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=HUNG,
        )
        assert done.stdout.splitlines()[-1:] == ["stranger alive"], done.stdout + done.stderr


@few_or_many
@pytest.mark.parametrize("content", ["truncated", "huge", "binary", "directory"])
def test_broken_error_files_still_give_a_correct_failure(content: str, times: int, tmp_path: Path) -> None:
    recipes = {
        "truncated": 'printf \'{"message": {"mess\' > "$TORCHELASTIC_ERROR_FILE"',
        "huge": 'head -c 100000000 /dev/zero | tr "\\0" "[" > "$TORCHELASTIC_ERROR_FILE"',
        "binary": 'head -c 5000 /dev/urandom > "$TORCHELASTIC_ERROR_FILE"',
        "directory": 'mkdir "$TORCHELASTIC_ERROR_FILE"',
    }
    for turn in range(times):
        specs = DefaultLogsSpecs(log_dir=str(tmp_path / str(turn)))
        args: dict[int, tuple[Any, ...]] = {0: ("-c", f"{recipes[content]}; exit 11")}
        result = start_processes("f", "/bin/sh", args, {0: {}}, specs).wait(HUNG)
        assert result is not None
        assert result.failures[0].exitcode == 11
        assert len(result.failures[0].message) < 10_000
        shutil.rmtree(tmp_path / str(turn))  # a hundred megabytes each


def test_start_fails_when_the_log_directory_cannot_be_written(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL)
    from phalanx.elastic.multiprocessing import SubprocessContext

    group = SubprocessContext("f", "/bin/true", {0: (), 1: ()}, {0: {}, 1: {}}, specs)
    target = Path(group.stdouts[1])
    target.mkdir(parents=True)
    with pytest.raises(StartError, match=r"rank 1 .*Is a directory"):
        group.start()


def test_exhausted_descriptors_end_in_a_clear_error_and_leave_nothing() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        with pytest.raises((StartError, OSError)):
            start_processes("f", "/bin/true", {0: ()}, {0: {}}, DefaultLogsSpecs())
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
