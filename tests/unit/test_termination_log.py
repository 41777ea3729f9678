"""The file in which Kubernetes looks for the reason of an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.observe import termination_log
from phalanx.observe.termination_log import LIMIT, bare, cut, write


@pytest.mark.parametrize("letter", ["x", "é", "€", "😀"])
@pytest.mark.parametrize("more", range(5))
def test_no_character_is_cut(letter: str, more: int) -> None:
    data = cut("a" * more + letter * LIMIT)
    assert LIMIT - 4 < len(data) <= LIMIT
    assert data.decode().strip("a" + letter) == ""


def test_short_text_is_whole_and_bytes_that_are_no_text_are_escaped() -> None:
    assert cut("no \udcff") == b"no \\udcff"


def test_rules_and_colours_are_left_out() -> None:
    assert bare("\n====\n\x1b[1;31mt.py FAILED\x1b[0m\n-----\n  a = 1\n\n") == "t.py FAILED\n  a = 1"


def test_only_an_existing_default_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = tmp_path / "termination-log"
    monkeypatch.setattr(termination_log, "DEFAULT", str(default))
    write("", "why")
    assert not default.exists()
    default.write_text("from before, and longer")
    write("", "")  # nothing to say
    assert default.read_text() == "from before, and longer"
    write("", "\n why \n")
    assert default.read_text() == "why"
    write(str(tmp_path / "asked"), "asked for")
    assert (tmp_path / "asked").read_text() == "asked for"


def test_nothing_waits_or_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "no" / "such", Path("/dev/full")):
        write(str(path), "why")
    monkeypatch.setattr(termination_log, "DEFAULT", "/dev/null")
    write("", "why")
