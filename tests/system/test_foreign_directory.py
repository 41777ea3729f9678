"""No process that we start imports from the current directory, where anybody may have put a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.check.backend_process import BackendProcess
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.python_command import python_command
from tests.conftest import HUNG
from tests.support.run_helpers import plain_environment, run, script

# Names that our processes import while they start, each in front of the module of that name.
NAMES = (
    "array", "asyncio", "cloudpickle", "fcntl", "json", "marshal", "msgspec", "opentelemetry", "phalanx",
    "random", "resource", "runpy", "select", "selectors", "setproctitle", "shlex", "signal", "socket",
    "struct", "subprocess", "tempfile", "termios", "torch", "typing", "uvicorn",
)  # fmt: skip
INTRUDER = """\
import os, sys
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a") as file:
    print(__name__, sys.orig_argv, file=file)
raise ImportError(f"{__name__} of the current directory")
"""


def plant(folder: Path) -> None:
    """Modules that leave a line in `ran` when they are imported."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(INTRUDER)


def caught(folder: Path) -> str:
    """The imports that happened."""
    found = folder / "ran"
    return found.read_text() if found.exists() else ""


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    plant(tmp_path / "shared")
    return tmp_path / "shared"


def test_the_trap_works(foreign: Path) -> None:
    command = [sys.executable, "-m", "json.tool", "--help"]
    subprocess.run(command, cwd=foreign, capture_output=True, check=False, timeout=HUNG)
    assert caught(foreign)


def test_a_module_of_ours_without_the_current_directory(foreign: Path) -> None:
    done = subprocess.run(
        python_command("phalanx", "--version"), cwd=foreign, capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0, done
    assert done.stdout.startswith("phalanx ")
    assert not caught(foreign)


def test_no_helper_of_a_run_imports_from_there(foreign: Path, tmp_path: Path) -> None:
    """Check, output search, page, traces, notifier, keeper, zygote."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("opentelemetry.sdk")
    once = "import os; print('step', flush=True); os._exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    words = ["--check", "--expect", "step", "--expect-every", "60", "--dashboard", "0", "--otel"]
    words += ["--notify", f"cat > {tmp_path}/told", "--max-restarts", "1", script(tmp_path, once)]
    environ = plain_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="1"
    )
    ended = run(*words, cwd=foreign, env=environ, timeout=2 * HUNG)
    assert ended.code == 0, ended
    assert not caught(foreign), ended


def test_no_package_is_timed_from_there(foreign: Path, tmp_path: Path) -> None:
    """`phalanx warm --explain` imports what the script imports, to say how long that takes."""
    main = script(tmp_path, "import hypothesis, psutil, pytest, xdist")
    command = python_command("phalanx", "warm", "--explain", main)
    done = subprocess.run(
        command, cwd=foreign, env=plain_environment(), capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0, done
    assert "pytest" in done.stdout
    assert not caught(foreign)


def double(value: int) -> int:
    return 2 * value


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_no_helper_of_a_function_imports_from_there(
    method: str, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    environ = {0: {"RANK": "0"}}
    with start_processes("f", double, {0: (2,)}, environ, DefaultLogsSpecs(), start_method=method) as group:
        result = group.wait(HUNG)
    assert result is not None
    assert result.return_values == {0: 4}
    assert not caught(foreign)


def test_the_back_end_check_starts(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(foreign)
    process = BackendProcess(os.environ, {})
    try:
        assert process.backend() in ("", "gloo", "nccl")
    finally:
        process.close()
    assert not caught(foreign)
