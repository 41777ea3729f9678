"""Launching from Python: functions as workers, their results and errors, and the configuration."""

from __future__ import annotations

import builtins
import errno
import os
import pickle
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.elastic.agent.elastic_launch import LaunchConfig, elastic_launch, launch_agent
from phalanx.errors import ChildFailedError, SignalException, StartError
from phalanx.job.environment import SIGNALS
from phalanx.job.numa import cpus_for
from tests.conftest import HUNG
from tests.support.run_helpers import plain_environment, script

METHODS = ["spawn", "fork", "forkserver"]


def config(tmp_path: Path, workers: int = 2, **more: Any) -> LaunchConfig:
    logs = DefaultLogsSpecs(str(tmp_path / "logs"))
    return LaunchConfig(1, 1, workers, logs_specs=logs, **{"max_restarts": 0, **more})


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch sets this variable for its workers; no other test may see it."""
    monkeypatch.setenv(SIGNALS, "SIGTERM,SIGINT")


def rank_and(value: Any = None) -> tuple[int, int, Any]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value


class OfOurOwn(Exception):
    """With an attribute."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(what)
        self.code = code


class Demanding(Exception):
    """Needs two arguments, so that it cannot be made again from its message."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


class Late(Exception):
    """Knows whether its rank was reported as failed before it was stored."""

    def __reduce__(self) -> Any:
        return Late, (os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]),)


def fail(kind: str) -> None:
    if os.environ["RANK"] != "1":
        signal.pause()
    if kind == "late":
        raise Late
    if kind == "own":
        raise OfOurOwn("no more data", 42)
    if kind == "demanding":
        raise Demanding(42, "no more data")
    if kind == "os":
        raise FileNotFoundError(errno.ENOENT, "No such file", "/data/set")
    if kind == "unicode":
        b"\xff".decode()
    if kind == "group":
        raise getattr(builtins, "ExceptionGroup")("several", [ValueError("a"), KeyError("b")])  # noqa: B009 - absent in 3.10
    if kind == "chain":
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error
    if kind == "exit":
        sys.exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "unpicklable":

        class Local(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise Local("odd one")


# ---- results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_results_by_global_rank(method: str, tmp_path: Path) -> None:
    made = elastic_launch(config(tmp_path, 3, start_method=method), rank_and)("x")
    assert made == {0: (0, 3, "x"), 1: (1, 3, "x"), 2: (2, 3, "x")}


def test_lambdas_and_closures(tmp_path: Path) -> None:
    secret = {"n": 41}

    def inner(add: int) -> int:
        return secret["n"] + add

    assert elastic_launch(config(tmp_path, 1), inner)(1) == {0: 42}
    assert elastic_launch(config(tmp_path, 1), lambda: __import__("os").environ["RANK"])() == {0: "0"}


def test_macros_in_arguments(tmp_path: Path) -> None:
    made = elastic_launch(config(tmp_path), rank_and)("r${local_rank}")
    assert [value for _, _, value in made.values()] == ["r0", "r1"]


def test_programs_have_no_results(tmp_path: Path) -> None:
    assert elastic_launch(config(tmp_path), sys.executable)("-c", "pass") == {0: None, 1: None}


def test_what_cannot_be_pickled_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import threading

    with pytest.raises((StartError, TypeError, pickle.PicklingError), match="lock"):
        elastic_launch(config(tmp_path, 1), rank_and)(threading.Lock())


def test_a_return_value_of_some_size(tmp_path: Path) -> None:
    made = elastic_launch(config(tmp_path, 1), lambda: b"x" * (1 << 24))()
    assert len(made[0]) == 1 << 24


# ---- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "error"),
    [("own", OfOurOwn), ("os", FileNotFoundError), ("unicode", UnicodeDecodeError), ("chain", ValueError)],
)
def test_the_original_type_is_raised(kind: str, error: type[Exception], method: str, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        elastic_launch(config(tmp_path, start_method=method), fail)(kind)
    told = caught.value
    assert isinstance(told, ChildFailedError)
    assert isinstance(told, error)
    assert type(told).__name__ == error.__name__
    assert list(told.failures) == [1]
    assert list(told.stopped) == [0]
    assert "Root cause: rank 1" in str(told)
    assert type(told.__cause__) is error
    text = "".join(traceback.format_exception(told))
    assert "in fail" in text, text  # where it happened, in the worker


def test_attributes_survive(tmp_path: Path) -> None:
    with pytest.raises(OfOurOwn) as own:
        elastic_launch(config(tmp_path), fail)("own")
    assert own.value.code == 42
    with pytest.raises(FileNotFoundError) as missing:
        elastic_launch(config(tmp_path), fail)("os")
    assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "/data/set")
    assert isinstance(missing.value.__cause__, FileNotFoundError)
    assert not isinstance(missing.value.__cause__, ChildFailedError)


def test_an_exception_is_stored_before_its_rank_is_reported(tmp_path: Path) -> None:
    """A rank that fails beside another may be stopped at any moment; what is reported has its exception."""
    with pytest.raises(Late) as caught:
        elastic_launch(config(tmp_path), fail)("late")
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.args == (False,)


def test_an_exception_that_cannot_be_made_from_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(Demanding) as caught:
        elastic_launch(config(tmp_path), fail)("demanding")
    assert caught.value.code == 42


def test_a_failure_can_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(OfOurOwn) as caught:
        elastic_launch(config(tmp_path), fail)("own")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ChildFailedError)
    assert isinstance(again, OfOurOwn)
    assert str(again) == str(caught.value)


@pytest.mark.parametrize(("kind", "code"), [("exit", 7), ("kill", -9), ("unpicklable", 1), ("group", 1)])
def test_failures_that_have_no_exception_to_raise(kind: str, code: int, tmp_path: Path) -> None:
    if kind == "group" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no exception groups")
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path), fail)(kind)
    assert caught.value.failures[1].exitcode == code
    if kind == "unpicklable":
        assert "odd one" in str(caught.value)


def test_the_text_of_an_exit_is_in_the_report(tmp_path: Path) -> None:
    def leave() -> None:
        sys.exit("no data in /data")

    with pytest.raises(ChildFailedError, match="SystemExit: no data in /data"):
        elastic_launch(config(tmp_path, 1), leave)()


def test_a_program_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="exit code 9"):
        launch_agent(config(tmp_path, 1), sys.executable, ["-c", "raise SystemExit(9)"])


def test_restarts(tmp_path: Path) -> None:
    def second_time() -> int:
        n = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if n < 2:
            raise RuntimeError("not yet")
        return n

    assert elastic_launch(config(tmp_path, 2, max_restarts=2), second_time)() == {0: 2, 1: 2}


def test_no_program_and_no_function(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="entrypoint=None"):
        elastic_launch(config(tmp_path), None)()


def test_a_signal_is_raised(tmp_path: Path) -> None:
    def ring(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        signal.pause()

    with pytest.raises(SignalException) as caught:
        elastic_launch(config(tmp_path, 1), ring)(os.getpid())
    assert caught.value.sigval is signal.SIGTERM


# ---- where __main__ is no file -------------------------------------------------------------------------

NOTEBOOK = """\
# A notebook's __main__ has no file, and its functions live there.
import os
from phalanx.elastic.agent.elastic_launch import LaunchConfig, elastic_launch
base = 40
class Point:
    def __init__(self, x): self.x = x
def cell(add):
    import os
    return Point(base + add + int(os.environ["RANK"]))
made = elastic_launch(LaunchConfig(1, 1, 2, max_restarts=0, start_method=METHOD), cell)(2)
print(sorted((rank, point.x, type(point) is Point) for rank, point in made.items()))
try:
    elastic_launch(LaunchConfig(1, 1, 1, max_restarts=0, start_method=METHOD), lambda: 1 / 0)()
except ZeroDivisionError as error:
    print("caught", type(error.__cause__).__name__)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["stdin", "exec"])
def test_from_a_main_without_a_file(how: str, method: str, tmp_path: Path) -> None:
    code = NOTEBOOK.replace("METHOD", repr(method))
    words, given = [sys.executable, "-"], code
    if how == "exec":  # as IPython runs a cell: __main__ has a file, but not that of the functions
        shell = f"import sys; exec(compile({code!r}, '<cell>', 'exec'), sys.modules['__main__'].__dict__)"
        words, given = [sys.executable, script(tmp_path, shell)], ""
    done = subprocess.run(
        words, input=given, capture_output=True, text=True, timeout=HUNG, env=plain_environment(), check=False
    )
    assert (done.returncode, done.stdout) == (
        0,
        "[(0, 42, True), (1, 43, True)]\ncaught ZeroDivisionError\n",
    ), done


# ---- the configuration ---------------------------------------------------------------------------------


def test_defaults() -> None:
    made = LaunchConfig(1, 2, 4)
    assert (made.role, made.max_restarts, made.monitor_interval) == ("default_role", 3, 0.1)
    assert (made.start_method, made.event_log_handler, made.shutdown_timeout) == ("spawn", "null", 30)
    assert made.rdzv_configs["timeout"] == 900
    assert LaunchConfig(1, 1, 1, rdzv_timeout=7).rdzv_configs["timeout"] == 7
    assert LaunchConfig(1, 1, 1, rdzv_configs={"timeout": 5}).rdzv_configs == {"timeout": 5}
    both = LaunchConfig(1, 1, 1, rdzv_timeout=7, rdzv_configs={"timeout": 5})
    assert both.rdzv_configs == {"timeout": 7}
    assert LaunchConfig(1, 1, 1).rdzv_configs is not LaunchConfig(1, 1, 1).rdzv_configs


def test_torchs_own_numa_options_bind_the_workers(tmp_path: Path) -> None:
    binding = pytest.importorskip("torch.numa.binding")
    options = binding.NumaOptions(binding.AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)
    expected = {rank: cpus_for(rank, 2, options) or os.sched_getaffinity(0) for rank in range(2)}
    made = elastic_launch(config(tmp_path, numa_options=options), lambda: os.sched_getaffinity(0))()
    assert made == expected


@pytest.mark.parametrize(("text", "value"), [("", 30), ("5", 5), ("0", 0), ("2.5", 2.5)])
def test_shutdown_timeout_from_the_environment(
    text: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == value
    assert LaunchConfig(1, 1, 1, shutdown_timeout=9).shutdown_timeout == 9


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_bad_shutdown_timeouts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    with pytest.raises(ValueError, match=text):
        LaunchConfig(1, 1, 1)
    with pytest.raises(ValueError, match="-3"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-3)


def test_shutdown_timeout_is_used_when_one_fails(tmp_path: Path) -> None:
    def deaf() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()

    with pytest.raises(ValueError, match="first") as caught:
        elastic_launch(config(tmp_path, shutdown_timeout=0.2), deaf)()
    assert isinstance(caught.value, ChildFailedError)
    assert 0 in caught.value.stopped


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"nproc_per_node": 0}, "nproc_per_node=0"), ({"max_restarts": -1}, "max_restarts=-1"),
     ({"start_method": "thread"}, "thread"), ({"event_log_handler": "nosuch"}, "nosuch"),
     ({"min_nodes": 2}, "min_nodes=2"), ({"min_nodes": 0}, "min_nodes=0")],
)  # fmt: skip
def test_bad_configurations(bad: dict[str, Any], says: str, tmp_path: Path) -> None:
    made = config(tmp_path)
    for name, value in bad.items():
        setattr(made, name, value)
    with pytest.raises((ValueError, KeyError, StartError), match=says):
        elastic_launch(made, rank_and)()


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert elastic_launch(LaunchConfig(1, 1, 2), rank_and)("x")
    assert list(tmp_path.iterdir()) == []
