"""Lines as JSON objects: one object per line, every byte recoverable, whatever a worker writes."""

from __future__ import annotations

import base64
import io
import json
import os
import pty
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx import log
from phalanx.agent.logs.followed_file import BLOCK
from phalanx.agent.logs.log_follower import LogFollower
from phalanx.observe.json_lines import JsonLines, timestamp, whole_characters


def objects(data: bytes) -> list[dict[str, Any]]:
    text = data.decode()  # valid UTF-8, always
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def original(found: list[dict[str, Any]]) -> bytes:
    """The bytes that these objects stand for, by the rules of the module."""
    parts = []
    for one in found:
        exact = one.get("base64")
        parts.append(base64.b64decode(exact) if exact is not None else one["line"].encode())
        parts.append(b"" if one.get("partial") else b"\n")
    return b"".join(parts)


def follow(path: Path, destination: Any) -> None:
    logs = LogFollower("json")
    logs.follow(path, destination, json=JsonLines("a1", 3, "stdout"))
    logs.start()
    assert logs.drain() == 0
    logs.stop()


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"\n", b"\r", b"\xc3", b"\xe2\x82", b"\0"])))
@example([b"\xff\xfe bad \xc3\n", b"10%\r20%\r\n\n", b"end \xe2\x82\xac"])
@example(["\ufffd is not an error\n".encode()])
def test_every_byte_can_be_recovered(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    found = objects(JsonLines("a1", 3, "stdout").of_bytes(data))
    assert original(found) == data
    for one in found:
        assert (one["host"], one["rank"], one["stream"]) == ("a1", 3, "stdout")
        assert "base64" not in one or not _is_text(base64.b64decode(one["base64"]))
    assert sum("partial" in one for one in found) == (not data.endswith(b"\n") and bool(data))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"abc", 3),
        ("aé".encode(), 3),
        ("aé".encode()[:-1], 1),
        ("a€".encode()[:-1], 1),
        ("a😀".encode()[:-1], 1),
        ("a😀".encode()[:-2], 1),
        (b"\xe2\x82", 2),  # nothing else to show
        (b"a\xff", 1),
        (b"\x80\x80\x80\x80", 4),
        (b"", 0),
    ],
)
def test_a_piece_of_a_line_ends_with_a_character(data: bytes, end: int) -> None:
    assert whole_characters(data, len(data)) == end


def test_a_line_longer_than_a_block_is_partial_objects_cut_between_characters(tmp_path: Path) -> None:
    data = b"x" + "€".encode() * (BLOCK // 2) + b"\nlast"
    (tmp_path / "log").write_bytes(data)
    with open(tmp_path / "out", "w") as out:
        follow(tmp_path / "log", out)
    found = objects((tmp_path / "out").read_bytes())
    assert original(found) == data
    assert len(found) > 2
    assert [one.get("partial", False) for one in found] == [True] * (len(found) - 2) + [False, True]
    assert not any("base64" in one for one in found)


def test_a_progress_bar_without_an_end_is_shown_as_partial_objects(tmp_path: Path) -> None:
    read, write = os.pipe()
    logs = LogFollower("bar")
    with open(tmp_path / "log", "wb", buffering=0) as bar, os.fdopen(write, "w") as out:
        logs.follow(tmp_path / "log", out, json=JsonLines("a1", 0, "stderr"))
        logs.start()
        bar.write(b"\r10%\r20%")
        first = os.read(read, 65536)  # by the clock of the follower: the line does not end
        bar.write(b"\r100%\ndone\n")
        assert logs.drain() == 0
        logs.stop()
    with os.fdopen(read, "rb") as rest:
        found = objects(first + rest.read())
    assert found[0] | {"time": ""} == {
        "time": "", "host": "a1", "rank": 0, "stream": "stderr", "line": "\r10%\r20%", "partial": True,
    }  # fmt: skip
    assert [one["line"] for one in found[1:]] == ["\r100%", "done"]


def test_a_terminal_gets_the_same_objects_as_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    data = b"10%\r20%\r\nred \x1b[31m\n"
    (tmp_path / "log").write_bytes(data)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as out:
        follow(tmp_path / "log", out)
        shown = os.read(leader, 65536).replace(b"\r\n", b"\n")  # what a terminal makes of a line feed
    os.close(leader)
    assert original(objects(shown)) == data


def test_lines_of_the_launcher_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    log.use_frame(JsonLines("a1", None, "phalanx"))
    try:
        log.write_stderr("phalanx: one\n\n  two \udcff\x1b[31m\n")
        log.write_stderr("=== report\n", styled=True)
    finally:
        log.use_frame(None)
    log.write_stderr("phalanx: text\n")
    *lines, last = err.getvalue().splitlines()
    assert last == "phalanx: text"
    found = [json.loads(line) for line in lines]
    assert [one["line"] for one in found] == ["one", "  two \\udcff\x1b[31m", "=== report"]
    assert {(one["host"], one["rank"], one["stream"]) for one in found} == {("a1", None, "phalanx")}
    age = time.time() - datetime.fromisoformat(found[0]["time"].replace("Z", "+00:00")).timestamp()
    assert -1 < age < 30


def test_the_time_is_utc_with_microseconds() -> None:
    assert timestamp(0.25) == "1970-01-01T00:00:00.250000Z"
    assert timestamp(1_700_000_000.999_999) == "2023-11-14T22:13:20.999999Z"
