"""The same calls under torch and under Phalanx: the same results, or a difference with its reason.

Each probe gets a library (torch's modules or Phalanx's, at the same paths) and returns plain data. Those that
differ on purpose carry the reason; the table of docs/parity.md is written from this list:

    PHALANX_WRITE_DOCS=1 python -m pytest tests/unit/test_parity_behaviour.py
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import HUNG

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
BEGIN, END = "<!-- behaviour: begin -->\n", "<!-- behaviour: end -->"


class Library:
    """torch.distributed, or Phalanx in its place."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, path: str) -> Any:
        """The module at a path below torch.distributed."""
        return importlib.import_module(f"{self.root}.{path}")


class Behaviour(NamedTuple):
    area: str
    what: str
    probe: Callable[[Library], Any]
    differs: str = ""  # what is different here, and why


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the type of the exception, under the name that programs catch it by."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - that is what is compared
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return ["raises", names[0]]


@contextlib.contextmanager
def variables(**values: str | None) -> Any:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        yield
    finally:
        for name, old in before.items():
            os.environ.pop(name, None) if old is None else os.environ.update({name: old})


# -- failures ---------------------------------------------------------------------------------------------


ERRORS = "elastic.multiprocessing.errors"
RECORDS = {
    "a text": '{"message": "boom"}',
    "a text and a time": '{"message": "boom", "timestamp": 7}',
    "time as text": '{"message": {"message": "boom", "extraInfo": {"timestamp": "123"}}}',
    "time as number": '{"message": {"message": "boom", "extraInfo": {"timestamp": 123}}}',
    "time as float": '{"message": {"message": "boom", "extraInfo": {"timestamp": 123.7}}}',
}
SHAPES = {
    "time that is no number": '{"message": {"message": "m", "extraInfo": {"timestamp": "x"}}}',
    "time null": '{"message": {"message": "m", "extraInfo": {"timestamp": null}}}',
    "extraInfo a text": '{"message": {"message": "m", "extraInfo": "x"}}',
    "no extraInfo": '{"message": {"message": "m"}}',
    "empty message": '{"message": {}}',
    "no message": "{}",
    "message null": '{"message": null}',
    "message a number": '{"message": 3}',
    "message a list": '{"message": ["a"]}',
    "a list": "[]",
    "a number": "3",
    "a string": '"text"',
    "null": "null",
}


def failure(lib: Library, content: str | None, code: int = 1) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "error.json")
        if content is not None:
            Path(path).write_text(content)
        return lib(ERRORS).ProcessFailure(0, 77, code, path)


def times(lib: Library) -> Any:
    stamps = {name: failure(lib, text).timestamp for name, text in RECORDS.items() if "time" in name}
    return stamps, {name: type(stamp).__name__ for name, stamp in stamps.items()}


def signal_messages(lib: Library) -> Any:
    return [failure(lib, None, code).message for code in (-9, -11, -15, -6)]


def shapes(lib: Library) -> Any:
    return {
        name: outcome(lambda text=text: failure(lib, text) and "a failure")  # type: ignore[misc]
        for name, text in SHAPES.items()
    }


def without_file(lib: Library) -> Any:
    made = failure(lib, None, 3)
    hint = made.message.partition(" (")[0]
    return hint, made.error_file, made.error_file_data, made.signal_name(), type(made.timestamp).__name__


def recorded(lib: Library) -> Any:
    """What `record` leaves in the error file: for an exception, and for failed children."""
    errors = lib(ERRORS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        child, own = os.path.join(folder, "child.json"), os.path.join(folder, "own.json")
        Path(child).write_text('{"message": {"message": "inner", "extraInfo": {"timestamp": "5"}}}')

        def run(name: str, error: BaseException) -> None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)

            @errors.record
            def main() -> None:
                raise error

            with variables(TORCHELASTIC_ERROR_FILE=own), contextlib.suppress(BaseException):
                main()
            found[name] = json.loads(Path(own).read_text()) if os.path.exists(own) else None

        failed, kind = errors.ProcessFailure, errors.ChildFailedError
        run("exception", ValueError("bad"))
        found["exception"] = found["exception"]["message"]["message"]
        run("SystemExit 0", SystemExit(0))
        run("child with an error file", kind("train.py", {0: failed(0, 77, 138, child)}))
        run("child killed by a signal", kind("train.py", {0: failed(0, 77, -9, "<N/A>")}))
        run("child with an exit code only", kind("train.py", {0: failed(0, 77, 3, "<N/A>")}))
    return found


def first_failure(lib: Library) -> Any:
    errors, made = lib(ERRORS), {}
    for rank, at in ((0, 30), (1, 20), (2, 25)):
        made[rank] = failure(lib, json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": at}}}))
    rank, first = errors.ChildFailedError("train.py", made).get_first_failure()
    return rank, first.timestamp


def report_of_a_signal(lib: Library) -> Any:
    errors = lib(ERRORS)
    text = str(errors.ChildFailedError("train.py", {0: failure(lib, None, -11)}))
    return "SIGSEGV" in text, "Signal 11 (SIGSEGV) received by PID 77" in text, "train.py FAILED" in text


def messages(lib: Library) -> Any:
    return {name: failure(lib, text).message for name, text in RECORDS.items()}


def in_python(lib: Library, code: str) -> str:
    """The output of a program of its own; `ROOT` stands for the library's path."""
    command = [sys.executable, "-c", code.replace("ROOT", lib.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HUNG, check=True).stdout


def fault_handler(lib: Library) -> str:
    return in_python(
        lib,
        f"import faulthandler; from ROOT.{ERRORS} import ErrorHandler; before = faulthandler.is_enabled(); "
        "ErrorHandler().initialize(); print(before, faulthandler.is_enabled())",
    )


# -- the list ---------------------------------------------------------------------------------------------


BEHAVIOUR = [
    Behaviour("failures", "`ProcessFailure.timestamp`: an int, from the error file", times),
    Behaviour("failures", "`ProcessFailure.message` after a signal", signal_messages),
    Behaviour("failures", "`ProcessFailure` without an error file", without_file),
    Behaviour("failures", "`ProcessFailure` of an error file with the wrong shape", shapes),
    Behaviour(
        "failures",
        "`ProcessFailure.message` of an error file",
        messages,
        "always text, because people print it; in torch an object if the file has one",
    ),
    Behaviour("failures", "`ChildFailedError.get_first_failure`", first_failure),
    Behaviour("failures", "the report of a signal names it", report_of_a_signal),
    Behaviour("failures", "`record`: exceptions and failed children", recorded),
    Behaviour("failures", "`ErrorHandler.initialize` enables faulthandler", fault_handler),
]


@pytest.fixture(scope="module")
def libraries() -> tuple[Library, Library]:
    if importlib.util.find_spec("torch") is None and not os.environ.get("CI"):
        pytest.skip("torch is not installed")
    return Library("torch.distributed"), Library("phalanx")


@pytest.mark.parametrize("behaviour", BEHAVIOUR, ids=lambda b: f"{b.area}: {b.what}".replace("`", ""))
def test_the_same_as_torch(libraries: tuple[Library, Library], behaviour: Behaviour) -> None:
    theirs, ours = libraries
    expected, found = behaviour.probe(theirs), behaviour.probe(ours)
    if behaviour.differs:
        assert found != expected, "no difference any more: take the reason away"
    else:
        assert found == expected


def table() -> str:
    lines = ["| area | behaviour | difference |", "|---|---|---|"]
    lines += [f"| {b.area} | {b.what} | {b.differs or 'none'} |" for b in BEHAVIOUR]
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table() -> None:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    assert (begin, end) == (BEGIN, END), f"{PAGE.name} has no place for the table"
    if os.environ.get("PHALANX_WRITE_DOCS"):
        PAGE.write_text(before + begin + table() + end + after)
        return
    assert shown == table(), "write it again: PHALANX_WRITE_DOCS=1 python -m pytest " + os.path.relpath(
        __file__
    )
