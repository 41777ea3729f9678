"""Logs on disk as their readers find them: names, parts that come and go, and directories of many files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.agent.log_reader import next_lines
from phalanx.agent.logs.rotation import RotatedLog, Rotation
from phalanx.observe import log_layout
from phalanx.observe.log_layout import (
    LogName,
    WholeLog,
    list_logs,
    parse_name,
    part_path,
    tail,
    worker_directory,
)

SIZE = 8192
LINE = b"%07d\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "attempt_0" / "3" / "stdout.log"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def write(path: Path, count: int, first: int = 0) -> bytes:
    data = b"".join(LINE % number for number in range(first, first + count))
    with open(path, "ab") as file:
        file.write(data)
    return data


def rotate(log: RotatedLog) -> None:
    while log.move_front(1 << 40):
        pass


def read_all(reader: WholeLog, at: int = 0) -> bytes:
    data = b""
    while True:
        at, block = reader.read(at)
        if not block:
            return data
        data, at = data + block, at + len(block)


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("attempt_0/3/stdout.log", LogName(0, 0, 3, "stdout")),
        ("attempt_12.4/0/stderr.log", LogName(12, 4, 0, "stderr")),
        ("attempt_1/7/stdout.log.000000104857600", LogName(1, 0, 7, "stdout", 104857600)),
    ],
)
def test_names(name: str, log: LogName) -> None:
    assert parse_name(name) == log
    assert log.name == name


def test_the_logs_of_a_run_are_listed_with_or_without_parts(log: Path, tmp_path: Path) -> None:
    write(log, 4 * SIZE // 8)
    rotated = RotatedLog(str(log), Rotation(SIZE))
    rotate(rotated)
    rotated.close()
    (log.parent / "stderr.log").symlink_to(log)
    (log.parent / "stdout.log.old").touch()
    assert list_logs(str(tmp_path)) == [LogName(0, 0, 3, "stdout")]
    parts = [one.part for one in list_logs(str(tmp_path), parts=True)]
    assert parts == [None, 0, SIZE, 2 * SIZE]


def test_a_directory_is_listed_once_however_many_files_and_parts_it_has(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = []
    scan = os.scandir
    monkeypatch.setattr(log_layout.os, "scandir", lambda path: listed.append(path) or scan(path))
    rotated = RotatedLog(str(log), Rotation(SIZE))
    reader, data, seen = WholeLog(str(log)), b"", b""
    for turn in range(40):
        data += write(log, SIZE // 8, turn * SIZE // 8)
        rotate(rotated)
        seen += read_all(reader, len(seen))
        assert seen == data
        assert reader.end() == len(data)
    rotated.close_up()
    rotated.close()
    assert read_all(reader) == data
    assert (read_all(reader, len(data)), reader.end()) == (b"", len(data))
    assert len(listed) == 1


def test_parts_that_came_and_went_unseen_are_skipped_and_no_zeros_are_read(log: Path) -> None:
    rotated = RotatedLog(str(log), Rotation(SIZE, 2))
    reader = WholeLog(str(log))
    seen = write(log, 100)
    assert read_all(reader) == seen
    data = seen + write(log, 10 * SIZE // 8 + 5, 100)
    rotate(rotated)
    first = min(int(path.suffix[1:]) for path in log.parent.glob("stdout.log.0*"))
    assert first > len(seen)
    assert reader.read(len(seen))[0] == first
    assert read_all(reader, len(seen)) == data[first:]
    rotated.close_up()
    rotated.close()
    for late in (reader, WholeLog(str(log))):
        assert read_all(late, len(seen)) == data[first:]
        assert late.end() == len(data)


def test_zeros_that_a_worker_wrote_are_read(log: Path) -> None:
    rotated = RotatedLog(str(log), Rotation(SIZE))
    data = b"\0" * (3 * SIZE) + b"end\n"
    log.write_bytes(data)
    reader = WholeLog(str(log))
    assert read_all(reader) == data
    rotate(rotated)
    assert read_all(reader) == data
    assert read_all(WholeLog(str(log))) == data
    rotated.close()


def test_a_log_that_its_worker_empties_goes_on_where_the_parts_end(log: Path) -> None:
    rotated = RotatedLog(str(log), Rotation(SIZE))
    reader = WholeLog(str(log))
    data = write(log, SIZE // 8 + 9)
    rotate(rotated)
    assert read_all(reader) == data
    os.truncate(log, 0)
    write(log, 3, 5000)
    rotate(rotated)
    assert read_all(reader, SIZE).splitlines() == [b"0005000", b"0005001", b"0005002"]
    assert reader.end() == SIZE + 24
    rotated.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_only_regular_files_are_read(log: Path, make: object) -> None:
    log.unlink()
    make(log)  # type: ignore[operator]
    part = part_path(str(log), 0)
    make(part)  # type: ignore[operator]
    assert read_all(WholeLog(str(log))) == b""
    assert WholeLog(str(log)).end() == 0
    assert tail(str(log), 100) == ""


def test_a_follower_that_is_behind_gets_the_last_lines_or_all(log: Path) -> None:
    rotated = RotatedLog(str(log), Rotation(SIZE))
    write(log, 100)
    name, known = "run/attempt_0/3/stdout.log", {"run/attempt_0/3/stdout.log": WholeLog(str(log))}
    first = next_lines(None, name, known, 4096, whole=False)
    assert first is not None
    assert (first["text"].split()[0], first["next"]) == ("0000000", 800)
    assert next_lines([name, 800], name, known, 4096, whole=False) is None
    write(log, 2000, 100)
    rotate(rotated)  # also what nobody has followed so far
    place, text = 800, ""
    while new := next_lines([name, place], name, known, 4096, whole=False):
        place, text = new["next"], text + new["text"]
    assert text.split() == [f"{number:07d}" for number in range(1589, 2100)], "the last 4,096 bytes"
    rest = next_lines([name, 800], name, known, 4096, whole=True)
    assert rest is not None
    assert rest["text"].split()[0] == "0000100"
    rotated.close_up()
    rotated.close()
    assert next_lines([name, place], name, known, 4096, whole=False) is None, "nothing comes twice"


def test_a_worker_without_an_error_file_has_no_directory() -> None:
    assert worker_directory("/logs/attempt_0/3/error.json") == "/logs/attempt_0/3"
    assert [worker_directory(none) for none in (None, "", os.devnull)] == ["", "", ""]
