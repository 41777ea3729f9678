"""`phalanx warm`: why a package is preloaded or not, and how to start anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.agent.warm.import_cache import ImportCache
from phalanx.helpers.preload.packages import LEFT_OUT, PACKAGES
from tests.conftest import HUNG


def warm(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "warm", *words], capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    versions = {
        "tqdm": "99.0",
        "idna": "0.1",
        "huggingface_hub": "99.0",
        "unproven": "99.0",
        "pyarrow": "99.0",
    }
    for name, version in {**versions, "six": f"{PACKAGES['six'][0]}+local"}.items():
        (packages / f"{name}.py").write_text("")
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Name: {name}\nVersion: {version}\n"
        )
        (packages / f"{name}-{version}.dist-info" / "RECORD").write_text(f"{name}.py,,\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.syspath_prepend(str(packages))
    path = tmp_path / "train.py"
    path.write_text(
        "import os, tqdm, unproven, pyarrow, six\nos.environ['A'] = '1'\n"
        "if __debug__: os.environ['HF_HOME'] = '1'\n"
        "import huggingface_hub\n"
    )
    return path


def learn(script: Path) -> None:
    """As after a launch."""
    cache = ImportCache(["script", str(script)], os.environ)
    cache.add(["tqdm", "tqdm.auto", "idna", "json", "org.not.there"])
    cache.save()


def test_explain_says_why_a_package_is_preloaded_or_not(script: Path) -> None:
    learn(script)
    said = warm("--explain", str(script))
    lines = {line.split()[0]: line for line in said.splitlines() if line.startswith("  ")}
    names = {"tqdm", "unproven", "pyarrow", "six", "huggingface_hub", "idna"}
    assert set(lines) == names  # not those of the standard library
    proven = PACKAGES["tqdm"][0]
    assert lines["tqdm"].split(None, 1)[1] == f"preloaded (99.0; proven with {proven})"
    assert "left to the workers: not on the list of proven packages; each takes 0." in lines["unproven"]
    assert " s to import it, unless --preload unproven" in lines["unproven"]
    assert lines["pyarrow"].endswith(f"left to the workers: {LEFT_OUT['pyarrow']}"), (
        "--preload would not help"
    )
    assert lines["six"].split() == ["six", "preloaded"]
    assert "reads HF_HOME while it is imported, which your code may set" in lines["huggingface_hub"]
    assert lines["huggingface_hub"].endswith("(if that does not matter: --preload huggingface_hub)")
    older = f" (0.1; proven with {PACKAGES['idna'][0]})"
    assert f"preloaded for restarts: the script imports it later{older}" in lines["idna"]
    assert "set by the script to a constant, and by the preload too: A" in said
    assert said.startswith(f"{script}: 3 of 6 packages are preloaded\n")


def test_explain_names_a_package_that_did_not_suit_a_fork_here(script: Path) -> None:
    cache = ImportCache(["script", str(script)], os.environ)
    for name in ("tqdm", "unproven"):  # the user has named it
        cache.refuse(name, "leaves 1 thread running")
    cache.save()
    assert warm("--explain", str(script)).count("left to the workers: leaves 1 thread running\n") == 2


def test_forget_removes_the_list_of_one_script_or_all(script: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("")
    for one in (script, other):
        learn(one)
    assert "1 list removed" in warm("--forget", str(script))
    assert "idna" not in warm("--explain", str(script))
    assert "idna" in warm("--explain", str(other))
    assert "1 list removed" in warm("--forget")
    assert "imports no installed package at its top" in warm("--explain", str(other))
    assert "0 lists removed" in warm("--forget")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--explain"], "name a script"),
        (["--explain", "/no/such/file.py"], "/no/such/file.py: no such file"),
        (["--explain", "-m"], "-m/--module: expected one argument"),
        (["--explain", "--all"], "unrecognized arguments: --all"),
        (["--list"], "unrecognized arguments: --list"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], said: str) -> None:
    error = warm(*words, code=2)
    assert said in error
    assert error.count("\n") == 1
