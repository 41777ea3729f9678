"""Groups of real processes: start, wait, results, output, environment, and every way of ending well."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.workers.worker_group import GroupOptions
from phalanx.core.group.events import SiblingStop
from phalanx.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    SignalException,
    Std,
    SubprocessContext,
    start_processes,
)
from phalanx.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from phalanx.errors import StartError
from tests.conftest import HUNG, gone, wait_until

LIBC_OWN = 0b11 << 31  # signals 32 and 33, which glibc's posix_spawn leaves ignored
METHODS = ["spawn", "forkserver", "fork"]


def envs(n: int, **more: str) -> dict[int, dict[str, str]]:
    return {rank: {"RANK": str(rank), **more} for rank in range(n)}


def none(n: int) -> dict[int, tuple[Any, ...]]:
    return dict.fromkeys(range(n), ())


def sh(script: str, n: int = 1, specs: DefaultLogsSpecs | None = None, **kwargs: Any) -> PContext:
    args: dict[int, tuple[Any, ...]] = dict.fromkeys(range(n), ("-c", script))
    return start_processes("sh", "/bin/sh", args, envs(n), specs or DefaultLogsSpecs(), **kwargs)


def logs(tmp_path: Path, what: Std = Std.ALL) -> DefaultLogsSpecs:
    return DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=what)


# -- functions --------------------------------------------------------------------------------------


def double(value: int) -> int:
    return value * 2


def environment_and_group() -> tuple[str, int, int]:
    return os.environ["RANK"], os.getpid(), os.getsid(0)


@pytest.mark.parametrize("method", METHODS)
def test_functions_return_their_values_by_rank(method: str) -> None:
    with start_processes(
        "f", double, {r: (r,) for r in range(4)}, envs(4), DefaultLogsSpecs(), start_method=method
    ) as group:
        result = group.wait(HUNG)
    assert result is not None
    assert not result.is_failed()
    assert result.return_values == {0: 0, 1: 2, 2: 4, 3: 6}


@pytest.mark.parametrize("method", METHODS)
def test_each_worker_has_its_own_environment_and_session(method: str) -> None:
    group = start_processes(
        "f", environment_and_group, none(2), envs(2), DefaultLogsSpecs(), start_method=method
    )
    pids = group.pids()
    result = group.wait(HUNG)
    assert result is not None
    for rank in range(2):
        value, pid, session = result.return_values[rank]
        assert (value, pid, session) == (str(rank), pids[rank], pids[rank])


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_closures(method: str) -> None:
    offset = 40
    group = start_processes(
        "f", lambda x: {"sum": x + offset}, {0: (2,)}, envs(1), DefaultLogsSpecs(), start_method=method
    )
    result = group.wait(HUNG)
    assert result is not None
    assert result.return_values == {0: {"sum": 42}}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [0, 1, 65_536, 20_000_000])
def test_return_values_of_any_size(method: str, size: int) -> None:
    group = start_processes(
        "f", lambda n: b"x" * n, {0: (size,), 1: (size,)}, envs(2), DefaultLogsSpecs(), start_method=method
    )
    result = group.wait(HUNG)
    assert result is not None
    assert {rank: len(value) for rank, value in result.return_values.items()} == {0: size, 1: size}


def test_queues_and_locks_travel_as_with_multiprocessing() -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    queue: Any = context.SimpleQueue()
    lock = context.Lock()

    def put(queue: Any, lock: Any) -> None:
        with lock:
            queue.put(os.environ["RANK"])

    group = start_processes("f", put, {0: (queue, lock), 1: (queue, lock)}, envs(2), DefaultLogsSpecs())
    result = group.wait(HUNG)
    assert result is not None
    assert not result.failures
    assert {queue.get(), queue.get()} == {"0", "1"}
    queue.close()
    del queue, lock, group, result
    gc.collect()  # while the tracker below still knows their names
    # The standard library's own helper, which would live as long as this process.
    from multiprocessing import resource_tracker

    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_a_return_value_that_cannot_be_pickled_is_a_clear_failure(method: str) -> None:
    group = start_processes(
        "f", lambda: threading.Lock(), none(1), envs(1), DefaultLogsSpecs(), start_method=method
    )
    result = group.wait(HUNG)
    assert result is not None
    assert "cannot be pickled" in result.failures[0].message
    assert "lock" in result.failures[0].message


def test_arguments_that_cannot_be_pickled_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="arguments of rank 1"):
        start_processes("f", double, {0: (1,), 1: (threading.Lock(),)}, envs(2), DefaultLogsSpecs())


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_carries_its_traceback_without_a_decorator(method: str) -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError(f"bad data on rank {rank}")
        threading.Event().wait()

    group = start_processes(
        "f", fail, {r: (r,) for r in range(3)}, envs(3), DefaultLogsSpecs(), start_method=method
    )
    result = group.wait(HUNG)
    assert result is not None
    assert set(result.failures) == {1}
    assert set(result.stopped) == {0, 2}
    failure = result.failures[1]
    assert failure.exitcode == 1
    assert failure.message == "ValueError: bad data on rank 1"
    assert "in fail" in failure.traceback
    assert "phalanx/processes" not in failure.traceback


def test_sys_exit_in_a_function(tmp_path: Path) -> None:
    group = start_processes("f", lambda code: sys.exit(code), {0: (0,), 1: (7,)}, envs(2), DefaultLogsSpecs())
    result = group.wait(HUNG)
    assert result is not None
    assert result.failures[1].exitcode == 7


@pytest.mark.parametrize("method", METHODS)
def test_exit_functions_run_and_output_is_flushed(method: str, tmp_path: Path) -> None:
    def work() -> None:
        import atexit

        atexit.register(lambda: print("at exit"))
        print("no newline", end="")

    group = start_processes("f", work, none(1), envs(1), logs(tmp_path), start_method=method)
    result = group.wait(HUNG)
    assert result is not None
    assert Path(result.stdouts[0]).read_text() == "no newlineat exit\n"


# -- programs ---------------------------------------------------------------------------------------


def test_programs_have_no_return_value() -> None:
    result = sh("exit 0", 3).wait(HUNG)
    assert result is not None
    assert result.return_values == {0: None, 1: None, 2: None}


@pytest.mark.parametrize("code", [1, 2, 42, 126, 127, 128, 200, 255])
def test_exit_codes(code: int) -> None:
    result = sh(f"exit {code}").wait(HUNG)
    assert result is not None
    assert result.failures[0].exitcode == code


@pytest.mark.parametrize("sig", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGINT", "SIGUSR1"])
def test_signals_have_names(sig: str) -> None:
    result = sh(f"kill -{sig[3:]} $$; sleep 1000").wait(HUNG)
    assert result is not None
    failure = result.failures[0]
    assert failure.exitcode == -signal.Signals[sig]
    assert failure.signal_name() == sig


def test_a_python_script_runs_as_under_python(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    group = start_processes("py", sys.executable, {0: (str(script), "--x", "a b")}, envs(1), logs(tmp_path))
    result = group.wait(HUNG)
    assert result is not None
    assert Path(result.stdouts[0]).read_text() == f"__main__ ['--x', 'a b'] {tmp_path}\n"


def test_a_python_scripts_traceback_is_known_without_a_decorator(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    return {}['missing']\n\nf()\n")
    group = start_processes("py", sys.executable, {0: (str(script),)}, envs(1), logs(tmp_path))
    result = group.wait(HUNG)
    assert result is not None
    failure = result.failures[0]
    assert failure.message == "KeyError: 'missing'"
    assert "line 2, in f" in failure.traceback
    stderr = Path(result.stderrs[0]).read_text()
    assert stderr.count("Traceback") == 1
    assert "phalanx" not in stderr
    assert failure.tail.splitlines()[-1] == "KeyError: 'missing'"


@pytest.mark.parametrize("sig", ["SIGSEGV", "SIGABRT", "SIGFPE", "SIGBUS", "SIGILL"])
def test_a_crash_leaves_its_stack(sig: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.{sig})\ncrash()\n")
    result = start_processes("py", sys.executable, {0: (str(script),)}, envs(1), DefaultLogsSpecs()).wait(
        HUNG
    )
    assert result is not None
    failure = result.failures[0]
    assert failure.signal_name() == sig
    assert "in crash" in failure.traceback


def test_workers_inherit_only_the_standard_descriptors(tmp_path: Path) -> None:
    mine = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(mine, True)
    try:
        result = sh("ls /proc/self/fd", 2, logs(tmp_path)).wait(HUNG)
    finally:
        os.close(mine)
    assert result is not None
    for rank in range(2):
        numbers = {int(word) for word in Path(result.stdouts[rank]).read_text().split()}
        # ls itself holds the directory open, the shell its own at 10 and above.
        assert numbers - {0, 1, 2, 3, 10, 11} <= {12}, numbers


def test_workers_start_with_default_signal_handling(tmp_path: Path) -> None:
    script = "grep -E 'Sig(Blk|Ign)' /proc/self/status | awk '{print $2}'"
    result = sh(script, 1, logs(tmp_path)).wait(HUNG)
    assert result is not None
    blocked, ignored = (int(word, 16) for word in Path(result.stdouts[0]).read_text().split())
    assert blocked == 0
    assert ignored & ~LIBC_OWN == 0


def test_standard_input_is_the_agents(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"from the agent\n")
    os.close(write)
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        result = sh("cat", 1, logs(tmp_path)).wait(HUNG)
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read)
    assert result is not None
    assert Path(result.stdouts[0]).read_text() == "from the agent\n"


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "environments", "named"),
    [
        ({0: (), 2: ()}, {0: {}, 1: {}}, "args"),
        ({0: (), 1: ()}, {0: {}}, "envs"),
        ({1: ()}, {0: {}}, "args"),
        ({}, {}, "no workers"),
    ],
)
def test_wrong_rank_maps(args: dict[int, Any], environments: dict[int, Any], named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        start_processes("bad", "/bin/true", args, environments, DefaultLogsSpecs())


def test_unknown_and_unusable_programs(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("hello")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00\x01\x02")
    garbage.chmod(0o755)
    for program, said in [
        ("no-such-program", "not found in PATH"),
        (str(tmp_path / "absent"), "no such file"),
        (str(plain), "not executable"),
        (str(tmp_path), "is a directory"),
        (str(garbage), "not a program"),
        ("", "name of the program is empty"),
    ]:
        with pytest.raises(StartError, match=said):
            start_processes("bad", program, none(2), envs(2), DefaultLogsSpecs())


@pytest.mark.parametrize("start", ["group", "single"])
def test_programs_that_cannot_run_are_told_as_subprocess_does(start: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("hello")
    kinds: list[tuple[str, type[OSError], int]] = [
        ("no-such-program", FileNotFoundError, errno.ENOENT),
        (str(tmp_path / "absent"), FileNotFoundError, errno.ENOENT),
        (str(plain), PermissionError, errno.EACCES),
        (str(tmp_path), PermissionError, errno.EACCES),
    ]
    run: Callable[[str], object] = {
        "group": lambda program: start_processes("bad", program, none(2), envs(2), DefaultLogsSpecs()),
        "single": lambda program: SubprocessHandler(program, (), {}, None, None, 0, None),
    }[start]
    for program, kind, number in kinds:
        with pytest.raises(kind) as found:
            run(program)
        assert isinstance(found.value, StartError)
        assert isinstance(found.value, RuntimeError)
        assert (found.value.errno, found.value.filename) == (number, program)
        assert str(found.value).startswith(f"{program}: "), found.value


def test_entrypoint_none() -> None:
    with pytest.raises(TypeError, match="entrypoint None"):
        start_processes("bad", None, none(1), envs(1), DefaultLogsSpecs())  # type: ignore[arg-type]


def test_unknown_start_method() -> None:
    with pytest.raises(ValueError, match="'thread'"):
        start_processes("bad", double, {0: (1,)}, envs(1), DefaultLogsSpecs(), start_method="thread")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    here = os.getcwd()
    there = tmp_path / "gone"
    there.mkdir()
    os.chdir(there)
    try:
        there.rmdir()
        with pytest.raises((StartError, FileNotFoundError)):
            start_processes("bad", "/bin/true", none(1), envs(1), DefaultLogsSpecs())
    finally:
        os.chdir(here)


# -- waiting and closing ----------------------------------------------------------------------------


def test_a_poll_has_no_result_while_workers_run_and_changes_nothing() -> None:
    group = sh("sleep 1000", 2)
    try:
        for _ in range(3):
            assert group.wait(0) is None
        assert not any(gone(pid) for pid in group.pids().values())
    finally:
        group.close()


def test_wait_with_a_timeout_comes_back() -> None:
    group = sh("sleep 1000")
    try:
        assert group.wait(0.05) is None
    finally:
        group.close()
    assert gone(group.pids()[0])


def test_a_poll_never_sits_out_the_grace_period(tmp_path: Path) -> None:
    """A sibling ignores SIGTERM; polls return None meanwhile, and the result comes when it has ended."""
    stays = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 7"
    group = SubprocessContext(
        "sh",
        "/bin/sh",
        {
            0: ("-c", f"trap '' TERM; touch {tmp_path}/ready; {stays}"),
            1: ("-c", f"until [ -e {tmp_path}/ready ]; do sleep 0.01; done; exit 3"),
        },
        envs(2),
        DefaultLogsSpecs(),
        options=GroupOptions(at_failure=SiblingStop(grace=10 * HUNG)),
    )
    group.start()
    pids = group.pids()

    def failed() -> bool:
        assert group.wait(0) is None
        return gone(pids[1])

    wait_until(failed, "the failure")
    for _ in range(100):
        assert group.wait(0) is None
    assert not gone(pids[0])
    (tmp_path / "go").touch()
    wait_until(lambda: group.wait(0), "a result")
    result = group.wait(0)
    assert result is not None
    assert set(result.failures) == {1}
    assert set(result.stopped) == {0}


def test_close_is_idempotent_and_safe_before_start_and_after_the_end() -> None:
    fresh = SubprocessContext("sh", "/bin/true", none(1), envs(1), DefaultLogsSpecs())
    fresh.close()
    fresh.close()
    ended = sh("exit 0")
    assert ended.wait(HUNG) is not None
    ended.close()
    ended.close()
    running = sh("sleep 1000")
    running.close()
    running.close()
    assert gone(running.pids()[0])


def test_close_while_another_thread_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of the two hears of the end, the other one does not wait for it, nor for the helpers' end."""
    before = [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    for _ in range(5):
        group = sh("exec sleep 1000")
        results: list[Any] = []
        waiter = threading.Thread(target=lambda g, r: r.append(g.wait(period=HUNG)), args=(group, results))
        waiter.start()
        wait_until(partial(_sleeps, waiter), "the other thread waits")
        begun = time.monotonic()
        group.close()
        waiter.join(HUNG / 2)
        assert not waiter.is_alive()
        assert time.monotonic() - begun < HUNG / 2  # it would have been the whole period
        assert results[0] is None or results[0].failures[0].exitcode == -signal.SIGTERM
        assert group.wait(0) is not None
        assert [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
    assert caplog.text == ""


def _sleeps(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/wchan") as file:
        return "poll" in file.read()


def test_results_are_the_same_however_often_they_are_asked_for() -> None:
    group = sh("exit 5")
    first = group.wait(HUNG)
    assert group.wait(HUNG) is first
    assert group.wait(0) is first


def test_a_group_starts_once() -> None:
    group = sh("exit 0")
    with pytest.raises(RuntimeError, match="started already"):
        group.start()
    group.wait(HUNG)


def test_waiting_for_a_group_that_was_not_started() -> None:
    group = MultiprocessContext("f", double, {0: (1,)}, envs(1), "spawn", DefaultLogsSpecs())
    with pytest.raises(RuntimeError, match="not started"):
        group.wait(0)
    group.close()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_close_sends_the_death_signal(sig: signal.Signals, tmp_path: Path) -> None:
    name = sig.name[3:]
    script = f"trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
    group = sh(script, 2, logs(tmp_path))
    for rank in range(2):
        path = Path(group.stdouts[rank])
        wait_until(lambda path=path: path.exists() and "ready" in path.read_text(), "the trap")  # type: ignore[misc]
    group.close(sig, timeout=HUNG)
    for rank in range(2):
        assert f"got {name}" in Path(group.stdouts[rank]).read_text()


def test_a_stopped_worker_still_hears_the_death_signal(tmp_path: Path) -> None:
    group = sh("trap 'echo heard; exit 0' TERM; echo ready; while :; do sleep 0.05; done", 1, logs(tmp_path))
    path = Path(group.stdouts[0])
    wait_until(lambda: path.exists() and "ready" in path.read_text(), "the trap")
    os.kill(group.pids()[0], signal.SIGSTOP)
    group.close(timeout=HUNG)
    assert "heard" in path.read_text()


# -- signals to the agent ---------------------------------------------------------------------------


def test_a_signal_is_raised_in_wait_and_handlers_are_restored() -> None:
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    group = sh("sleep 1000")
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SignalException) as caught:
        group.wait(HUNG)
    assert caught.value.sigval == signal.SIGTERM
    group.close(caught.value.sigval)
    assert {sig: signal.getsignal(sig) for sig in before} == before


def test_an_ignored_sighup_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        group = sh("grep SigIgn /proc/self/status", 1, logs(tmp_path))
        os.kill(os.getpid(), signal.SIGHUP)
        result = group.wait(HUNG)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result is not None
    ignored = int(Path(result.stdouts[0]).read_text().split()[1], 16)
    assert ignored & ~LIBC_OWN == 1 << (signal.SIGHUP - 1)


def test_the_set_of_signals_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR2, SIGNOTHING")
    before = signal.getsignal(signal.SIGTERM)
    group = sh("sleep 1000")
    assert signal.getsignal(signal.SIGTERM) is before
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    with pytest.raises(SignalException):
        group.wait(HUNG)
    group.close()
    assert "SIGNOTHING" in caplog.text


def test_off_the_main_thread_handlers_are_left_alone() -> None:
    results: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        group = sh("exit 0", 2)
        assert signal.getsignal(signal.SIGTERM) is before
        results.append(group.wait(HUNG))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HUNG)
    assert results[0].return_values == {0: None, 1: None}


# -- output -----------------------------------------------------------------------------------------


def test_tee_shows_every_line_with_its_rank_before_the_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), tee=Std.ALL)
    result = sh("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done; echo err >&2", 3, specs).wait(
        HUNG
    )
    out, err = capfd.readouterr()
    assert result is not None
    for rank in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"[sh{rank}]:")]
        assert mine == [f"[sh{rank}]:line {i}" for i in range(200)]
        assert f"[sh{rank}]:err" in err


def test_a_megabyte_and_then_an_abrupt_end_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.write(1, (b'x' * 99 + b'\\n') * 10_000)\nos._exit(0)\n")
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), tee=Std.OUT)
    group = start_processes(
        "py", sys.executable, {0: (str(script),)}, envs(1), specs, log_line_prefixes={0: ""}
    )
    result = group.wait(HUNG)
    assert result is not None
    assert not result.failures
    assert Path(result.stdouts[0]).stat().st_size == 1_000_000
    assert len(capfd.readouterr().out) == 1_000_000


def test_python_prints_arrive_line_by_line(tmp_path: Path) -> None:
    """stdout is line-buffered although it is a file: the line is there while the worker still runs."""
    script = tmp_path / "script.py"
    script.write_text("import threading\nprint('first')\nthreading.Event().wait()\n")
    group = start_processes("py", sys.executable, {0: (str(script),)}, envs(1), logs(tmp_path))
    try:
        path = Path(group.stdouts[0])
        wait_until(lambda: path.exists() and path.read_text() == "first\n", "the line")
    finally:
        group.close()


@pytest.mark.parametrize("kind", ["program", "function"])
def test_the_paths_that_a_group_has_by_torchs_names(kind: str, tmp_path: Path) -> None:
    entrypoint, args = ("/bin/true", ()) if kind == "program" else (double, (1,))
    with start_processes("p", entrypoint, {0: args}, envs(1), logs(tmp_path)) as group:  # type: ignore[dict-item]
        for name in ("stdouts", "stderrs", "error_files", "filtered_stdout", "filtered_stderr"):
            assert getattr(group, name) == getattr(group.logs, name)
        assert group.filtered_stdout.endswith("filtered_stdout.log")
        assert group.filtered_stderr.endswith("filtered_stderr.log")


def test_each_program_of_a_group_has_a_handle() -> None:
    with sh("exec sleep 1000", 2) as group:
        assert isinstance(group, SubprocessContext)
        handlers = group.subprocess_handlers
        assert {rank: handler.proc.pid for rank, handler in handlers.items()} == group.pids()
        assert [handlers[rank].local_rank_id for rank in (0, 1)] == [0, 1]
        assert handlers[1].proc.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            handlers[1].proc.wait(0.01)
        handlers[1].close(signal.SIGUSR1)
        assert handlers[1].proc.wait(HUNG) == handlers[1].proc.returncode == -signal.SIGUSR1
        assert handlers[0].proc.poll() is None
        handlers[0].proc.kill()
        assert handlers[0].proc.wait() == -signal.SIGKILL
        handlers[0].proc.terminate()  # gone: nobody else gets it
        result = group.wait(HUNG)
    assert result is not None
    assert set(result.failures) == {0, 1}


def test_a_single_program_starts_its_logs_anew(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("old\n" * 10)
    err.write_text("old\n" * 10)
    handler = SubprocessHandler("/bin/sh", ("-c", "echo new; echo bad >&2"), {}, str(out), str(err), 0, None)
    assert handler.proc.wait(HUNG) == 0
    handler.close()
    assert (out.read_text(), err.read_text()) == ("new\n", "bad\n")


def test_filtered_lines_are_also_in_one_combined_file(tmp_path: Path) -> None:
    group = sh(
        "echo keep $RANK; echo drop",
        2,
        logs(tmp_path),
        duplicate_stdout_filters=["keep"],
        log_line_prefixes={0: "[a] ", 1: "[b] "},
    )
    result = group.wait(HUNG)
    assert result is not None
    combined = Path(group.logs.filtered_stdout).read_text().splitlines()
    assert sorted(combined) == ["[a] keep 0", "[b] keep 1"]


def test_a_full_disk_does_not_stop_a_python_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real full file system: /dev/full answers every write with ENOSPC."""
    script = tmp_path / "script.py"
    script.write_text("for i in range(1000):\n    print('x' * 100)\n")
    group = SubprocessContext("py", sys.executable, {0: (str(script),)}, envs(1), logs(tmp_path))
    path = Path(group.stdouts[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")
    group.start()
    result = group.wait(HUNG)
    assert result is not None
    assert not result.failures
    assert "101000 bytes did not fit" in caplog.text


def test_a_deleted_log_directory_does_not_stop_the_workers(tmp_path: Path) -> None:
    import shutil

    gate = tmp_path / "gate"
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), tee=Std.ALL)
    group = sh(f"echo before; until [ -e {gate} ]; do sleep 0.02; done; echo after", 2, specs)
    for rank in range(2):
        path = Path(group.stdouts[rank])
        wait_until(lambda path=path: path.exists() and path.read_text(), "the first line")  # type: ignore[misc]
    shutil.rmtree(tmp_path / "logs")
    gate.touch()
    result = group.wait(HUNG)
    assert result is not None
    assert not result.failures


def test_console_that_is_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook sys.stdout is no descriptor; lines go through its write method."""
    console = io.StringIO()
    monkeypatch.setattr(sys, "stdout", console)
    specs = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), tee=Std.OUT)
    result = sh("echo hello", 1, specs).wait(HUNG)
    assert result is not None
    assert console.getvalue() == "[sh0]:hello\n"
