"""`phalanx warm`: why a package is preloaded or not, and how to start anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.warm.import_cache import ImportCache
from phalanx.warm.verdict_log import VerdictLog
from tests.conftest import HUNG


def warm(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "warm", *words], capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "train.py"
    path.write_text("import os, good, bad\nif __debug__: os.environ['SOMETIMES'] = '1'\n")
    return path


def learn(script: Path) -> None:
    """As after a launch whose helpers in the background have tried the list."""
    cache = ImportCache(["script", str(script)], os.environ)
    cache.add(["good", "good.part", "bad", "bad.part", "decimal"], complete=True)
    log = VerdictLog(-1, 0)
    log.unsuitable = {"bad.part": "leaves 1 thread running"}
    log.importers = {"bad": "bad.part"}
    log.seconds = 1.0
    cache.judge(cache.all_lines(), log)
    cache.add(["late"])
    cache.save()


def test_explain_says_why_a_package_is_preloaded_or_not(script: Path) -> None:
    assert "nothing is known" in warm("--explain", str(script))
    learn(script)
    said = warm("--explain", str(script))
    lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
    assert set(lines) == {"good", "bad", "late"}  # not those of the standard library
    assert "preloaded" in lines["good"]
    assert "2 modules" in lines["good"]
    assert "not preloaded: bad.part leaves 1 thread running" in lines["bad"]
    assert "not tried yet" in lines["late"]
    assert "SOMETIMES" in said


def test_forget_removes_the_list_of_one_script_or_all(script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("")
    for one in (script, other):
        learn(one)
    assert "1 list removed" in warm("--forget", str(script))
    assert "nothing is known" in warm("--explain", str(script))
    assert "nothing is known" not in warm("--explain", str(other))
    assert "1 list removed" in warm("--forget")
    assert "nothing is known" in warm("--explain", str(other))
    assert "0 lists removed" in warm("--forget")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain"], "name a script"),
        (["--explain", "/no/such/file.py"], "/no/such/file.py: no such file"),
        (["--explain", "-m"], "name a module"),
        (["--explain", "--all"], "--all: name a script"),
        (["--list"], "--list: use --explain SCRIPT, --forget [SCRIPT] or --stop [SCRIPT]"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], said: str) -> None:
    error = warm(*words, code=2)
    assert said in error
    assert error.count("\n") == 1
