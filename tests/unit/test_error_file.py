"""The error file: written by a failing worker, read by a parent that trusts nothing in it."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.workers.failure import ProcessFailure
from phalanx.worker import error_file

NOW = 1_700_000_000_123_456_789


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it is what the test is about
        return caught


def written(tmp_path: Path, exc: BaseException) -> dict[str, Any]:
    path = tmp_path / "error.json"
    assert error_file.write_exception(str(path), exc, now_ns=NOW)
    assert os.listdir(tmp_path) == ["error.json"]
    data: dict[str, Any] = json.loads(path.read_bytes())
    return data


def test_round_trip(tmp_path: Path) -> None:
    data = written(tmp_path, raised(ValueError("bad batch")))
    told = data["message"]
    assert told["message"] == "ValueError: bad batch"
    assert told["extraInfo"]["timestamp"] == "1700000000"
    record = error_file.read_with_reason(str(tmp_path / "error.json"))[0]
    assert record is not None
    assert record.message == "ValueError: bad batch"
    assert record.traceback.startswith("Traceback (most recent call last):\n")
    assert record.traceback.endswith("ValueError: bad batch\n")
    assert record.precise
    assert record.at == pytest.approx(NOW / 1e9, abs=1e-5)


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    written(tmp_path, raised(ValueError("bad batch")))
    failure = errors.ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert failure.timestamp == 1_700_000_000
    assert failure.message["message"] == "ValueError: bad batch"


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class Sealed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("sealed")

    def __getattribute__(self, name: str) -> Any:
        if name in ("__notes__", "__cause__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("exc", "message", "in_stack"),
    [
        (Hostile(), "Hostile: <str() of this Hostile failed>", "Hostile"),
        (Sealed("x"), "Sealed: x", "Sealed"),
        (ValueError("\udc80 lone"), "ValueError: \\udc80 lone", "\\udc80 lone"),
        (ValueError("naïve 漢 \x00"), "ValueError: naïve 漢 \x00", "naïve 漢"),
        (KeyboardInterrupt(), "KeyboardInterrupt: ", "KeyboardInterrupt"),
        (
            SyntaxError("invalid syntax", ("x.py", 3, 1, "a b\n", 3, 2)),
            "SyntaxError: invalid syntax (x.py, line 3)",
            "x.py",
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_difficult_exceptions(tmp_path: Path, exc: BaseException, message: str, in_stack: str) -> None:
    told = written(tmp_path, raised(exc))["message"]
    assert told["message"] == message
    assert in_stack in told["extraInfo"]["py_callstack"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_a_group_of_exceptions(tmp_path: Path) -> None:
    group = getattr(builtins, "ExceptionGroup")("two", [ValueError("a"), KeyError("b")])  # noqa: B009 - absent in 3.10
    told = written(tmp_path, raised(group))["message"]
    assert told["message"] == "ExceptionGroup: two (2 sub-exceptions)"
    assert "KeyError" in told["extraInfo"]["py_callstack"]
    assert told["extraInfo"]["exceptionMembers"] == ["ValueError: a", "KeyError: 'b'"]


def test_giant_message_is_capped_and_still_readable(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert error_file.write_exception(str(path), raised(ValueError("\x01" * (8 << 20))))
    assert path.stat().st_size < error_file.READ_LIMIT
    record = error_file.read_with_reason(str(path))[0]
    assert record is not None
    assert "characters omitted" in record.message


def test_chain_is_kept(tmp_path: Path) -> None:
    try:
        try:
            raise ConnectionResetError("peer")
        except ConnectionResetError as first:
            raise RuntimeError("step failed") from first
    except RuntimeError as exc:
        stack = written(tmp_path, exc)["message"]["extraInfo"]["py_callstack"]
    assert stack.index("ConnectionResetError: peer") < stack.index("RuntimeError: step failed")


def test_the_first_record_of_an_exception_stays(tmp_path: Path) -> None:
    path, exc = str(tmp_path / "error.json"), raised(ValueError("once"))
    assert error_file.write_exception(path, exc, now_ns=NOW)
    assert error_file.write_exception(path, exc, now_ns=NOW + 10**12)
    record = error_file.read_with_reason(path)[0]
    assert record is not None
    assert record.at == pytest.approx(NOW / 1e9, abs=1e-5)


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert not error_file.write_exception(str(blocker / "sub" / "error.json"), ValueError("x"))
    assert not error_file.write_exception("", ValueError("x"))
    assert not error_file.write_exception("a\0b", ValueError("x"))
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    # A file size limit makes write() fail as a full disk does, without needing one.
    code = (
        "import resource, signal, sys, os\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from phalanx.worker import error_file\n"
        "print(error_file.write_exception(sys.argv[1], ValueError('y' * 1000)))\n"
    )
    target = str(tmp_path / "error.json")
    run = subprocess.run(
        [sys.executable, "-c", code, target], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "False"
    assert os.listdir(tmp_path) == []


def test_cheap_to_import() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import phalanx.worker.error_file\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert not {"json", "traceback", "re", "typing", "dataclasses"} & set(run.stdout.split())


# ---------------------------------------------------------------- reading


SHAPES: list[tuple[Any, str, float | None, bool, int | None]] = [
    ({"message": "plain text"}, "plain text", None, False, None),
    ({"message": {"message": "m"}}, "m", None, False, None),
    ({"message": {"message": "m", "extraInfo": {"timestamp": 100}}}, "m", 100.0, False, None),
    ({"message": {"message": "m", "extraInfo": {"timestamp": "100"}}}, "m", 100.0, False, None),
    ({"message": {"message": "m", "extraInfo": {"timestamp": 100.25}}}, "m", 100.25, True, None),
    ({"message": {"message": "m", "errorCode": 17}}, "m", None, False, 17),
    ({"message": {"message": "m", "errorCode": "17"}}, "m", None, False, 17),
    ({"message": {"message": "m", "errorCode": True, "extraInfo": []}}, "m", None, False, None),
    (
        {"message": {"message": "m", "extraInfo": {"timestamp": "soon", "py_callstack": 7}}},
        "m",
        None,
        False,
        None,
    ),
    ({"message": {"message": "m", "extraInfo": {"timestamp": float("nan")}}}, "m", None, False, None),
    ({"message": {"message": "m", "extraInfo": {"timestamp": float("inf")}}}, "m", None, False, None),
    ({"message": {}}, "", None, False, None),
]


@pytest.mark.parametrize(("data", "message", "at", "precise", "code"), SHAPES)
def test_known_shapes(
    tmp_path: Path, data: Any, message: str, at: float | None, precise: bool, code: int | None
) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps(data))
    record = error_file.read_with_reason(str(path))[0]
    assert record is not None
    assert (record.message, record.at, record.precise, record.code) == (message, at, precise, code)


BROKEN = {
    "empty": b"",
    "truncated": b'{"message": {"message": "half of',
    "binary": bytes(range(256)) * 10,
    "list": b"[1, 2]",
    "no message": b'{"a": 1}',
    "null message": b'{"message": null}',
    "nested": b"[" * 500_000,
    "long number": b'{"message": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_give_a_reason(tmp_path: Path, name: str) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(BROKEN[name])
    record, reason = error_file.read_with_reason(str(path))
    assert record is None
    assert str(path) in reason
    failure = ProcessFailure(0, 42, 3, str(path), tolerant=True)
    assert failure.message == (
        "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        " (process 42 failed with exit code 3 and left no traceback)"
    )


@pytest.mark.timeout(20)
def test_what_is_not_a_regular_file_never_hangs(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, why in (
        (fifo, "not a regular"),
        (tmp_path, "not a regular"),
        (Path("/dev/zero"), "not a regular"),
    ):
        record, reason = error_file.read_with_reason(str(path))
        assert record is None
        assert why in reason
    for name, why in (
        (str(tmp_path / "none"), "not written"),
        ("", "no error file"),
        ("a\0b", "cannot be opened"),
    ):
        assert why in error_file.read_with_reason(name)[1]


def test_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as f:
        f.truncate(100 << 20)
    record, reason = error_file.read_with_reason(str(path))
    assert record is None
    assert "too large" in reason
    assert "104857600" in reason


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: (
            st.lists(c)
            | st.dictionaries(
                st.sampled_from(
                    ["message", "extraInfo", "timestamp", "timestampNs", "errorCode", "py_callstack", "x"]
                ),
                c,
            )
        ),
    ).map(lambda v: json.dumps(v).encode())
)
def test_any_content_is_survived(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.json"
    path.write_bytes(content)
    record, reason = error_file.read_with_reason(str(path))
    assert (record is None) == bool(reason)
    assert ProcessFailure(0, 1, 1, str(path), tolerant=True).message
    path.unlink()


# ---------------------------------------------------------------- crashes


CRASH = """
import faulthandler, sys, threading, os, signal
stack = open(sys.argv[1] + ".stack", "w")
faulthandler.enable(file=stack, all_threads=len(sys.argv) > 3)
gate = threading.Event()
if len(sys.argv) > 3:
    threading.Thread(target=gate.wait, daemon=True).start()
def inner():
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
def outer():
    inner()
outer()
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SIGSEGV", "Segmentation fault"),
        ("SIGABRT", "Aborted"),
        ("SIGFPE", "Floating"),
        ("SIGBUS", "Bus error"),
        ("SIGILL", "Illegal"),
    ],
)
@pytest.mark.parametrize("threads", [[], ["threads"]], ids=["one thread", "threads"])
def test_real_crash_stack(tmp_path: Path, name: str, words: str, threads: list[str]) -> None:
    script, target = tmp_path / "crash.py", str(tmp_path / "error.json")
    script.write_text(CRASH)
    run = subprocess.run([sys.executable, str(script), target, name, *threads], timeout=60, check=False)
    assert run.returncode == -getattr(signal, name)
    crash = error_file.read_crash(target)
    assert crash is not None
    stack = crash.traceback
    assert stack.startswith("Traceback (most recent call last):\n")
    assert stack.index("in outer") < stack.index("in inner")
    assert "os.kill(os.getpid()" in stack
    failure = ProcessFailure(0, 7, run.returncode, target, exited_at=time.time())
    assert failure.message == f"Signal {-run.returncode} ({name}) received by PID 7"
    assert failure.error is not None
    assert failure.error.message.startswith(f"Fatal Python error: {words}")
    assert failure.traceback == stack
    assert failure.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    assert failure.signal_name() == name


def test_crash_stack_counts_only_for_a_death_by_signal(tmp_path: Path) -> None:
    target = str(tmp_path / "error.json")
    Path(target + ".stack").write_text(
        'Fatal Python error: Aborted\n\nStack (most recent call first):\n  File "x.py", line 1 in f\n'
    )
    assert ProcessFailure(0, 7, 1, target).traceback == ""
    assert "x.py" in ProcessFailure(0, 7, -6, target).traceback


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Fatal Python",
        'Current thread 0x1 (most recent call first):\n  File "x", line 1 in f',
        "\x00\xff" * 50,
    ],
)
def test_no_crash_in_the_stack_file(tmp_path: Path, text: str) -> None:
    Path(tmp_path / "e.stack").write_text(text)
    assert error_file.read_crash(str(tmp_path / "e")) is None


@given(st.text())
def test_any_crash_text_is_survived(text: str) -> None:
    parsed = error_file.parse_crash("Fatal Python error: Aborted\n" + text)
    assert parsed is not None


# ---------------------------------------------------------------- ProcessFailure


def test_failure_moment_is_the_records_not_the_exits(tmp_path: Path) -> None:
    written(tmp_path, raised(ValueError("x")))
    at = NOW / 1e9
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"), exited_at=at + 5, stopped_at=at + 1)
    assert failure.failed_at == pytest.approx(at, abs=1e-5)
    assert failure.timestamp == int(at)
    assert not failure.is_victim
    late = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"), exited_at=at + 5, stopped_at=at - 1)
    assert late.is_victim


def test_failure_without_an_error_file() -> None:
    killed = ProcessFailure(2, 77, -9, "/no/such/file", exited_at=5.5)
    assert killed.signal_name() == "SIGKILL"
    assert killed.message == "Signal 9 (SIGKILL) received by PID 77"
    assert (killed.timestamp, killed.failed_at) == (5, 5.5)
    assert killed.error_file == "<N/A>"
    assert killed.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    assert killed.shell_status == 137
    plain = ProcessFailure(0, 1, 3, "", exited_at=5.5)
    assert plain.signal_name() == "<N/A>"
    assert "exit code 3" in plain.message
    assert time.time() - 60 < ProcessFailure(0, 1, 3, "").failed_at <= time.time()


def test_error_code_of_the_file_is_the_reported_one(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "m", "errorCode": 17, "extraInfo": {"timestamp": 5}}}))
    failure = ProcessFailure(0, 1, 1, str(path))
    assert (failure.exitcode, failure.reported_exitcode) == (1, 17)


def test_failure_survives_pickling_after_its_file_is_gone(tmp_path: Path) -> None:
    written(tmp_path, raised(ValueError("x")))
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"), tail="t", host="h", global_rank=9)
    os.unlink(tmp_path / "error.json")
    again = pickle.loads(pickle.dumps(failure))
    assert again == failure
    assert again.traceback == failure.traceback
    assert again.rank == 9


def test_isoformat_has_milliseconds() -> None:
    failure = ProcessFailure(0, 1, 3, "", exited_at=1_700_000_000.1234)
    assert ".123" in failure.timestamp_isoformat()
    assert ProcessFailure(0, 1, 3, "", exited_at=1e300).timestamp_isoformat() == "<N/A>"
