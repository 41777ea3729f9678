"""Other users cannot decide what the zygote imports, nor where its cache is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.agent.warm.import_cache import ImportCache
from phalanx.helpers.preload import preload
from phalanx.helpers.preload.preload_log import PreloadLog
from phalanx.kernel import anonymous_file
from tests.system.hostile_user import NOBODY, as_root, do, shared_directory

PROGRAM = ["script", "/tmp/phalanx-test-train.py"]
LINES = ["wave", "colorsys"]


def saved(base: Path) -> ImportCache:
    cache = ImportCache(PROGRAM, {"XDG_CACHE_HOME": str(base)})
    cache.add(LINES)
    cache.save()
    return cache


def names(base: Path) -> list[str]:
    return ImportCache(PROGRAM, {"XDG_CACHE_HOME": str(base)}).seen


def test_an_own_list_is_used_and_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = saved(tmp_path / "cache")
    finally:
        os.umask(before)
    assert cache.path is not None
    assert names(tmp_path / "cache") == LINES
    assert os.stat(cache.path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(cache.path)).st_mode & 0o777 == 0o700
    assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700


def test_a_sticky_directory_is_as_safe_as_its_owner(tmp_path: Path) -> None:
    with shared_directory(0o1777) as base:
        saved(base / "cache")
        assert names(base / "cache") == LINES


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_list_that_another_user_planted_is_ignored(mode: int, tmp_path: Path) -> None:
    text = Path(saved(tmp_path).path or "").read_bytes()
    with shared_directory(mode) as base:
        place = Path(ImportCache(PROGRAM, {"XDG_CACHE_HOME": str(base)}).path or "")

        def plant() -> None:
            place.parent.mkdir(parents=True)
            place.write_bytes(text)

        do(plant)
        assert names(base) == []


@as_root
@pytest.mark.parametrize("what", ["file", "directory", "parent", "link", "file mode", "directory mode"])
def test_each_part_of_the_path_must_be_of_this_user(what: str, tmp_path: Path) -> None:
    base = tmp_path / "cache"
    path = Path(saved(base).path or "")
    assert names(base) == LINES
    if what == "file":
        os.chown(path, NOBODY, NOBODY)
    elif what == "directory":
        os.chown(path.parent, NOBODY, NOBODY)
    elif what == "parent":
        os.chown(base, NOBODY, NOBODY)
    elif what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "file mode":
        path.chmod(0o620)
    else:
        path.parent.chmod(0o730)
    assert names(base) == []


@as_root
def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """At the name of the list, and at the name that a scratch file had when it was the process's number."""
    victim = tmp_path / "roots-own"
    victim.write_text("precious")
    with shared_directory(0o777) as base:
        place = Path(ImportCache(PROGRAM, {"XDG_CACHE_HOME": str(base)}).path or "")
        me = os.getpid()

        def plant() -> None:
            place.parent.mkdir(parents=True)
            place.parent.chmod(0o777)
            place.symlink_to(victim)
            Path(f"{place}.{me}").symlink_to(victim)

        do(plant)
        saved(base)
        assert victim.read_text() == "precious"


def test_a_broken_list_is_ignored(tmp_path: Path) -> None:
    path = Path(saved(tmp_path).path or "")
    whole = path.read_bytes()
    for broken in (b"", whole[:-3], whole[:3], whole.partition(b"\n")[0] + b"\nodd", b"other" + whole):
        path.write_bytes(broken)
        assert names(tmp_path) == []
    path.write_bytes(whole)
    assert names(tmp_path) == LINES


@pytest.mark.parametrize("word", ["+", "?"])
@pytest.mark.parametrize(
    "variable", ["LD_PRELOAD", "PYTHONPATH", "OPENSSL_CONF", "SSL_CERT_FILE", "GCONV_PATH", "PATH"]
)
def test_no_variable_that_loads_code_is_set_from_a_list(
    word: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    set_here: list[str] = []
    monkeypatch.setattr(preload, "_set_for_script", lambda _word, text, _own: set_here.append(text))
    said: list[str] = []
    monkeypatch.setattr(preload.Preload, "_entry", lambda _self, name: said.append(name))
    monkeypatch.setattr("gc.freeze", lambda: None)
    log = PreloadLog(anonymous_file("log"), 0)
    try:
        lines = ["+A=1", f"{word}{variable}=/tmp/evil", "wave"]
        preload.preload(lines, log, lambda _line: None)
    finally:
        os.close(log.fd)
    assert set_here == ["A=1"]
    assert said == []  # what follows may depend on it
