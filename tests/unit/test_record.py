"""`record` and `ErrorHandler`: what a decorated main function leaves for its launcher."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.workers.failure import ProcessFailure
from phalanx.errors import ChildFailedError
from phalanx.worker.error_file import VARIABLE, write_data, write_exception
from phalanx.worker.recorder import ErrorHandler, get_error_handler, record
from tests.conftest import HUNG


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own" / "error.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def told(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_bytes())["message"]
    return data


def child_file(tmp_path: Path, error: BaseException) -> str:
    path = str(tmp_path / "child.json")
    assert write_exception(path, error)
    return path


def failing(failures: dict[int, ProcessFailure]) -> Any:
    @record
    def main() -> None:
        raise ChildFailedError("train.py", failures)

    return main


@record
def explode(error: BaseException) -> None:
    raise error


# -- record ---------------------------------------------------------------------------------------


def test_the_exception_is_written_and_goes_on(error_file: Path) -> None:
    error = ValueError("bad batch")
    with pytest.raises(ValueError) as caught:
        explode(error)
    assert caught.value is error
    assert told(error_file)["message"] == "ValueError: bad batch"
    stack = told(error_file)["extraInfo"]["py_callstack"]
    assert stack.endswith("ValueError: bad batch\n")
    assert "in explode" in stack
    assert os.listdir(error_file.parent) == ["error.json"]


def test_a_good_end_leaves_no_trace(error_file: Path) -> None:
    @record
    def add(one: int, two: int = 2) -> int:
        """Adds."""
        return one + two

    assert add(1) == 3
    assert add(1, two=5) == 6
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert not error_file.exists()


def test_nothing_is_written_when_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(RuntimeError, match="untold"):
            explode(RuntimeError("untold"))
        failure = ProcessFailure(0, 11, 1, child_file(tmp_path, KeyError("x")))
        with pytest.raises(ChildFailedError):
            failing({0: failure})()
    assert os.listdir(tmp_path) == ["child.json"]


def test_the_environment_is_read_when_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    handler = ErrorHandler()
    main = record(lambda text: explode.__wrapped__(OSError(text)), handler)  # type: ignore[attr-defined]
    for name in ("one", "two"):
        monkeypatch.setenv(VARIABLE, str(tmp_path / name))
        with pytest.raises(OSError, match=name):
            main(name)
    assert told(tmp_path / "one")["message"] == "OSError: one"
    assert told(tmp_path / "two")["message"] == "OSError: two"


def test_a_file_that_cannot_be_written_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "error.json"))
    with pytest.raises(ValueError, match="the real one"):
        explode(ValueError("the real one"))


def test_system_exit_with_zero_is_no_error(error_file: Path) -> None:
    assert explode(SystemExit(0)) is None
    with pytest.raises(SystemExit) as caught:
        explode(SystemExit())
    assert caught.value.code is None
    assert not error_file.exists()


@pytest.mark.parametrize(("code", "message"), [(3, "SystemExit: 3"), ("give up", "SystemExit: give up")])
def test_any_other_system_exit_is_one(error_file: Path, code: Any, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        explode(SystemExit(code))
    assert caught.value.code == code
    assert told(error_file)["message"] == message


def test_an_interrupt_is_written_too(error_file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        explode(KeyboardInterrupt())
    assert told(error_file)["message"] == "KeyboardInterrupt: "


def test_of_two_decorators_the_inner_one_tells(error_file: Path) -> None:
    @record
    def outer() -> None:
        try:
            explode(ValueError("once"))
        finally:
            first.append(error_file.read_bytes())

    first: list[bytes] = []
    with pytest.raises(ValueError):
        outer()
    assert error_file.read_bytes() == first[0]


# -- failures of children --------------------------------------------------------------------------


def test_a_childs_error_file_is_handed_up_with_its_exit_code(error_file: Path, tmp_path: Path) -> None:
    path = child_file(tmp_path, MemoryError("in the child"))
    failure = ProcessFailure(local_rank=0, pid=997, exitcode=138, error_file=path)
    with pytest.raises(ChildFailedError):
        failing({0: failure})()
    ours, theirs = told(error_file), told(Path(path))
    assert ours.pop("errorCode") == 138
    assert ours == theirs
    assert ours["message"] == "MemoryError: in the child"


def test_of_several_children_the_root_cause_is_handed_up(error_file: Path, tmp_path: Path) -> None:
    failures = {}
    for rank, at in ((0, 1_700_000_002), (1, 1_700_000_001)):
        path = str(tmp_path / f"child{rank}.json")
        assert write_exception(path, ValueError(f"rank {rank}"), now_ns=at * 10**9)
        failures[rank] = ProcessFailure(rank, 900 + rank, 1, path, exited_at=float(at))
    with pytest.raises(ChildFailedError):
        failing(failures)()
    assert told(error_file)["message"] == "ValueError: rank 1"


def test_a_child_that_left_no_file_leaves_nothing_to_pass_on(error_file: Path, tmp_path: Path) -> None:
    failure = ProcessFailure(0, 997, -9, str(tmp_path / "never.json"), exited_at=1_700_000_000.5)
    with pytest.raises(ChildFailedError):
        failing({0: failure})()
    assert not error_file.exists()


def test_a_child_that_wrote_into_our_own_file_is_left_as_it_is(error_file: Path) -> None:
    error_file.parent.mkdir()
    assert write_exception(str(error_file), ValueError("shared"))
    before = error_file.read_bytes()
    with pytest.raises(ChildFailedError):
        failing({0: ProcessFailure(0, 1, 1, str(error_file))})()
    assert error_file.read_bytes() == before


def test_what_was_handed_up_is_not_overwritten_by_an_outer_decorator(
    error_file: Path, tmp_path: Path
) -> None:
    failure = ProcessFailure(0, 997, 7, child_file(tmp_path, KeyError("inner")))
    with pytest.raises(ChildFailedError):
        record(failing({0: failure}))()
    assert told(error_file)["message"] == "KeyError: 'inner'"


def test_dump_error_file(error_file: Path, tmp_path: Path) -> None:
    path = child_file(tmp_path, ValueError("child"))
    get_error_handler().dump_error_file(path)
    assert told(error_file) == told(Path(path))
    get_error_handler().dump_error_file(path, 42)
    assert told(error_file) == {**told(Path(path)), "errorCode": 42}


def test_dump_of_a_file_that_makes_no_sense_says_so(error_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"message": ')
    get_error_handler().dump_error_file(str(broken), 5)
    assert str(broken) in told(error_file)["message"]
    assert "not valid JSON" in told(error_file)["message"]
    assert told(error_file)["errorCode"] == 5
    get_error_handler().dump_error_file(str(tmp_path / "absent.json"))
    assert "was not written" in told(error_file)["message"]
    assert "errorCode" not in told(error_file)


@pytest.mark.filterwarnings("error")
def test_a_plain_text_message_has_no_room_for_a_code(
    error_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "plain.json")
    assert write_data(path, {"message": "just text"})
    with pytest.raises(ChildFailedError):
        failing({0: ProcessFailure(0, 123, 42, path)})()
    assert json.loads(error_file.read_bytes()) == {"message": "just text"}
    assert f"{path}: its message is plain text; ignoring error code 42" in caplog.text


def test_the_code_is_put_into_the_data_in_place() -> None:
    data: dict[str, Any] = {"message": {"message": "m", "extraInfo": {}}}
    get_error_handler().override_error_code_in_rootcause_data("child.json", data, 9)
    assert data == {"message": {"message": "m", "extraInfo": {}, "errorCode": 9}}


# -- handlers ---------------------------------------------------------------------------------------


class Noting(ErrorHandler):
    """Notes the calls instead of writing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(e)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        self.calls.append((rootcause_error_file, error_code))


def test_an_own_handler_is_asked_for_everything(error_file: Path, tmp_path: Path) -> None:
    handler = Noting()
    error = ValueError("theirs")

    def main() -> None:
        handler.calls.append("main")
        raise error

    with pytest.raises(ValueError):
        record(main, error_handler=handler)()
    assert handler.calls == ["initialize", "main", error]
    assert not error_file.exists()

    handler.calls.clear()
    path = child_file(tmp_path, KeyError("x"))
    failed = ChildFailedError("x", {0: ProcessFailure(0, 1, 17, path)})
    with pytest.raises(ChildFailedError):
        record(explode.__wrapped__, handler)(failed)  # type: ignore[attr-defined]
    assert handler.calls == ["initialize", (path, 17)]
    assert not error_file.exists()


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=True,
    )
    return done.stdout


def test_a_handler_learns_the_name_of_the_function_and_of_its_success(error_file: Path) -> None:
    seen: list[Any] = []

    class Handler(ErrorHandler):
        def initialize(self) -> None:
            seen.append(("initialize", self._fn_name))

        def record_success(self) -> None:
            seen.append("success")
            raise OSError("no room for it")

    def main(error: BaseException | None) -> None:
        if error is not None:
            raise error

    decorated = record(main, Handler())
    with pytest.raises(OSError, match="no room"):
        decorated(None)
    assert not error_file.exists()  # it is no failure of the function
    with pytest.raises(ValueError, match="bad"):
        decorated(ValueError("bad"))
    named = ("initialize", f"{main.__qualname__}")
    assert seen == [named, "success", named]


def test_a_decorated_function_runs_with_faulthandler_on() -> None:
    assert run_python("""
        import faulthandler
        from phalanx.worker.recorder import record
        print(faulthandler.is_enabled(), record(faulthandler.is_enabled)())
    """).split() == ["False", "True"]


def test_a_crash_of_a_decorated_function_shows_its_stack() -> None:
    code = """
        import faulthandler
        from phalanx.worker.recorder import record

        @record
        def crash_here():
            faulthandler._sigsegv()

        crash_here()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode < 0
    assert "in crash_here" in done.stderr


def test_a_faulthandler_that_is_on_is_left_alone(tmp_path: Path) -> None:
    code = f"""
        import faulthandler
        from phalanx.worker.recorder import get_error_handler
        faulthandler.enable(open({str(tmp_path / "own")!r}, "w"))
        get_error_handler().initialize()
        faulthandler._sigsegv()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=HUNG)
    assert done.returncode < 0
    assert done.stderr == b""
    assert "Segmentation fault" in (tmp_path / "own").read_text()


@pytest.mark.parametrize("stderr", ["None", "io.StringIO()", "open(os.devnull, 'w'); sys.stderr.close()"])
def test_a_stderr_without_descriptor_is_no_obstacle(stderr: str) -> None:
    assert run_python(f"""
        import io, os, sys
        from phalanx.worker.recorder import record
        sys.stderr = {stderr}
        print(record(lambda: "ran")())
    """).split() == ["ran"]


# -- torch ------------------------------------------------------------------------------------------


def test_torch_reads_what_record_writes(error_file: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(ValueError):
        explode(ValueError("for torch"))
    failure = errors.ProcessFailure(0, 1, 1, str(error_file))
    assert failure.message["message"] == "ValueError: for torch"


def test_parameters_have_torchs_names() -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    assert list(inspect.signature(record).parameters) == list(inspect.signature(errors.record).parameters)
    for name in (
        "initialize",
        "record_exception",
        "dump_error_file",
        "override_error_code_in_rootcause_data",
    ):
        ours, theirs = getattr(ErrorHandler, name), getattr(errors.ErrorHandler, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


# -- torch's hook for the report ---------------------------------------------------------------------


class Enriching(ErrorHandler):
    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        assert "Signal 11 (SIGSEGV) received by PID 77" in message
        return f"{message}\n  the device says: fault at {error_file}"


def test_a_handler_may_add_to_the_report_of_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.elastic.multiprocessing import errors

    failure = ProcessFailure(0, 77, -11, "<N/A>")
    monkeypatch.setattr(errors, "get_error_handler", Enriching)
    text = str(ChildFailedError("train.py", {0: failure}))
    assert "\n  the device says: fault at <N/A>\n" in text
    assert "the device" not in str(ChildFailedError("train.py", {0: ProcessFailure(0, 77, 3, "<N/A>")}))
    assert "the device" not in failure.message

    class Raising(ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            raise RuntimeError("no")

    monkeypatch.setattr(errors, "get_error_handler", Raising)
    assert "SIGSEGV" in str(ChildFailedError("train.py", {0: failure}))


def test_a_replaced_handler_is_the_one_that_record_uses(
    monkeypatch: pytest.MonkeyPatch, error_file: Path
) -> None:
    from phalanx.elastic.multiprocessing import errors

    class Own(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            seen.append(e)

    seen: list[BaseException] = []
    monkeypatch.setattr(errors, "get_error_handler", Own)
    with pytest.raises(KeyError):
        record(explode.__wrapped__)(KeyError("x"))  # type: ignore[attr-defined]
    assert [type(e) for e in seen] == [KeyError]
    assert not error_file.exists()
