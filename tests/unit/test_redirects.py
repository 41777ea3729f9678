"""Redirection at descriptor level: Python, C and child output, restored whatever happens."""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from phalanx.elastic.multiprocessing import redirects as compat
from phalanx.elastic.multiprocessing.redirects import get_libc, redirect, redirect_stderr, redirect_stdout


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    fds = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= fds


@pytest.mark.parametrize(("redirected", "fd"), [(redirect_stdout, 1), (redirect_stderr, 2)])
def test_python_c_and_children_are_caught_in_order(
    redirected: Callable[[str], AbstractContextManager[None]],
    fd: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    libc = ctypes.CDLL(None)
    stream = os.fdopen(os.dup(fd), "w")
    with stream:
        os.write(fd, b"before\n")
        with redirected(str(tmp_path / "log")):
            os.write(fd, b"raw\n")
            libc.dprintf(fd, b"C\n")
            subprocess.run(["sh", "-c", f"echo child >&{fd}"], check=True)
        os.write(fd, b"after\n")
    assert (tmp_path / "log").read_text() == "raw\nC\nchild\n"
    assert capfd.readouterr()[fd - 1] == "before\nafter\n"


def test_buffers_of_python_and_c_land_where_they_were_printed(tmp_path: Path) -> None:
    program = (
        "import ctypes, sys; from phalanx.elastic.multiprocessing.redirects import redirect_stdout\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.printf(b'c1\\n'); print('p1')\n"
        "with redirect_stdout(sys.argv[1]): libc.printf(b'c2\\n'); print('p2')\n"
        "libc.printf(b'c3\\n'); print('p3')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=buffered)
    assert sorted(done.stdout.split()) == ["c1", "c3", "p1", "p3"]
    assert sorted((tmp_path / "log").read_text().split()) == ["c2", "p2"]


def test_nested_redirections_undo_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_stdout(str(tmp_path / "outer")):
        os.write(1, b"o1\n")
        with redirect_stdout(str(tmp_path / "inner")), redirect_stderr(str(tmp_path / "err")):
            os.write(1, b"i\n")
            os.write(2, b"e\n")
        os.write(1, b"o2\n")
    os.write(1, b"end\n")
    assert (tmp_path / "outer").read_text() == "o1\no2\n"
    assert (tmp_path / "inner").read_text() == "i\n"
    assert (tmp_path / "err").read_text() == "e\n"
    assert capfd.readouterr().out == "end\n"


def test_an_exception_restores_the_stream(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), redirect_stdout(str(tmp_path / "log")):
        raise KeyError("x")
    os.write(1, b"back\n")
    assert capfd.readouterr().out == "back\n"


def test_a_replaced_or_closed_python_stream_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", stream)
        with redirect_stdout(str(tmp_path / "log")):
            os.write(1, b"fd\n")
        assert (tmp_path / "log").read_text() == "fd\n"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    with redirect_stdout(str(tmp_path / "log")):
        os.write(1, b"fd\n")
    assert capfd.readouterr().out == ""


def test_a_closed_descriptor_is_closed_again(tmp_path: Path) -> None:
    program = (
        "import os, sys; from phalanx.elastic.multiprocessing.redirects import get_libc, redirect_stdout\n"
        "get_libc(); os.close(1)\n"  # newer versions of libffi keep a file open, here under the number 1
        "with redirect_stdout(sys.argv[1]): os.write(1, b'x')\n"
        "try: os.fstat(1)\n"
        "except OSError: os._exit(7)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7
    assert (tmp_path / "log").read_text() == "x"


def test_bad_input_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="stdin"), redirect("stdin", str(tmp_path / "log")):
        pass
    with pytest.raises(FileNotFoundError), redirect_stdout(str(tmp_path / "missing" / "log")):
        pass
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"
    assert list(tmp_path.iterdir()) == []


def test_the_compatible_path_offers_the_same_names() -> None:
    assert compat.redirect is redirect
    assert compat.redirect_stdout is redirect_stdout
    assert compat.redirect_stderr is redirect_stderr
    assert get_libc().getpid() == os.getpid()
