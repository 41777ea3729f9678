"""`--log-rotate`: parts of the right size, every byte once, whatever writer, console and disk do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.agent.logs import rotation
from phalanx.agent.logs.log_follower import LogFollower
from phalanx.agent.logs.rotation import LogRotation, RotatedLog, Rotation, punch, wait_for_rotation
from phalanx.agent.workers.result import tail_of
from phalanx.observe.log_layout import WholeLog, tail
from tests.conftest import wait_until

SIZE = 64 * 1024

# Writes numbered lines as fast as it can, straight into the file, until it is killed or has written enough.
WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(fd, b"line %08d %s\\n" % (number, b"x" * (number % 90)))
"""


@pytest.fixture(autouse=True)
def can_punch(tmp_path: Path) -> None:
    try:
        with open(tmp_path / "probe", "wb") as file:
            punch(file.fileno(), 0, 0, probe=str(tmp_path / "probe"))
    except OSError as error:
        if error.errno not in rotation._UNABLE:
            raise
        pytest.skip("this file system cannot punch holes")


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    yield
    assert wait_for_rotation()


def parts(log: Path) -> list[Path]:
    return sorted(log.parent.glob(f"{log.name}.0*"))


def whole(log: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (*parts(log), log))


def read_all(log: Path) -> tuple[bytes, int]:
    """The whole output, and the offset at which it begins."""
    reader = WholeLog(str(log))
    first, block = reader.read(0)
    data, at = block, first + len(block)
    while block:
        at, block = reader.read(at)
        data, at = data + block, at + len(block)
    return data, first


def numbers(data: bytes) -> list[int]:
    assert data.endswith(b"\n")
    return [int(line.split()[1]) for line in data.splitlines()]


def test_a_log_becomes_parts_that_end_with_lines(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    data = b"".join(b"line %d\n" % number for number in range(40_000))
    path.write_bytes(data)
    log = RotatedLog(str(path), Rotation(SIZE))
    while log.move_front(len(data)):
        pass
    assert path.stat().st_size == len(data)  # offsets stay valid while it is written
    assert path.stat().st_blocks * 512 < 2 * SIZE
    sizes = [part.stat().st_size for part in parts(path)]
    assert all(SIZE - 100 < size <= SIZE for size in sizes)
    assert all(part.read_bytes().endswith(b"\n") for part in parts(path))
    log.close_up()
    log.close()
    assert whole(path) == data
    assert path.stat().st_size <= SIZE
    assert not list(tmp_path.glob("*.new"))
    assert {one.stat().st_mode & 0o777 for one in parts(path)} == {0o600}


def test_only_the_newest_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    data = os.urandom(10 * SIZE + 5).replace(b"\n", b"x")  # no line ends anywhere
    path.write_bytes(data)
    log = RotatedLog(str(path), Rotation(SIZE, 2))
    while log.move_front(len(data)):
        pass
    log.close_up()
    log.close()
    assert [int(part.suffix[1:]) for part in parts(path)] == [8 * SIZE, 9 * SIZE, 10 * SIZE]
    assert parts(path)[-1].read_bytes() == b""
    assert whole(path) == data[8 * SIZE :]
    assert read_all(path) == (data[8 * SIZE :], 8 * SIZE)


def test_a_log_that_its_worker_empties_keeps_what_comes_then(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"z" * 2 * SIZE)
    log = RotatedLog(str(path), Rotation(SIZE))
    assert log.move_front(2 * SIZE)
    os.truncate(path, 0)
    with open(path, "ab") as file:
        file.write(b"new")
    assert not log.move_front(2 * SIZE)
    log.close_up()
    log.close()
    assert path.read_bytes() == b"new"


def test_what_a_worker_puts_in_the_way_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"z" * 2 * SIZE)
    (tmp_path / "elsewhere").write_text("kept")
    for make in (os.mkfifo, lambda where: os.symlink(tmp_path / "elsewhere", where)):
        log = RotatedLog(str(path), Rotation(SIZE))
        make(f"{path}.new")
        assert log.move_front(2 * SIZE)
        log.close()
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_the_tail_of_a_rotated_log_has_no_hole(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"old\n" * SIZE + b"the error\n")
    log = RotatedLog(str(path), Rotation(4 * SIZE))
    assert log.move_front(5 * SIZE)
    log.close()
    assert tail_of(str(path)) == "the error"
    assert tail(str(path), 2048).strip() in ("the error", "")


def test_what_the_console_has_not_read_stays(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"y" * 3 * SIZE)
    log = RotatedLog(str(path), Rotation(SIZE))
    assert not log.move_front(SIZE - 1)
    assert log.move_front(SIZE + 1)
    assert not log.move_front(SIZE + 1)
    log.close()


@pytest.mark.parametrize("killed", [False, True], ids=["to its end", "SIGKILLed"])
def test_a_writer_at_full_speed_loses_no_byte(tmp_path: Path, killed: bool) -> None:
    """The console shows every line once and in order, and so do the files."""
    path, shown = tmp_path / "stdout.log", tmp_path / "console"
    follower = LogFollower("rotated")
    follower.follow(path, shown)
    follower.start()
    logs = LogRotation([str(path)], Rotation(SIZE), follower.position)
    logs.start()
    count = 10_000_000 if killed else 60_000
    seen: list[bytes] = []
    over = threading.Event()

    def read() -> None:  # as `phalanx logs -f` does
        at, log = 0, WholeLog(str(path))
        while not over.is_set():
            ended = over.is_set()
            at, block = log.read(at)
            at += len(block)
            seen.append(block)
            if not block and not ended:
                over.wait(0.01)

    reader = threading.Thread(target=read)
    reader.start()
    with subprocess.Popen([sys.executable, "-S", "-c", WRITER, str(path), str(count)]) as writer:
        if killed:
            wait_until(lambda: len(parts(path)) > 20, "twenty parts")
            writer.kill()
    written = path.stat().st_size
    assert follower.drain() == 0
    follower.stop()
    logs.stop()
    assert wait_for_rotation()
    assert shown.stat().st_size == written
    data = whole(path)
    assert len(data) == written
    assert data == shown.read_bytes()
    assert numbers(data) == list(range(len(numbers(data))))
    assert killed or numbers(data)[-1] == count - 1
    assert path.stat().st_size <= SIZE
    assert not list(tmp_path.glob("*.new"))
    wait_until(lambda: sum(map(len, seen)) >= written, "the end, for a reader")
    over.set()
    reader.join()
    assert b"".join(seen) == data
    assert read_all(path) == (data, 0)


def test_a_full_disk_keeps_the_log_whole_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rotation, "warn", said.append)
    room = threading.Event()
    send = os.sendfile

    def sendfile(out: int, source: int, offset: int, count: int) -> int:
        if not room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return send(out, source, offset, count)

    monkeypatch.setattr(os, "sendfile", sendfile)
    path = tmp_path / "stdout.log"
    data = b"0123456\n" * SIZE
    path.write_bytes(data)
    logs = LogRotation([str(path)], Rotation(SIZE), lambda _path: None)
    logs.start()
    wait_until(lambda: said, "a line about the disk")
    assert path.read_bytes() == data
    room.set()  # somebody has tidied up
    wait_until(lambda: parts(path), "a part")
    logs.stop()
    assert wait_for_rotation()
    assert whole(path) == data
    assert len(said) == 1
    assert "no room" in said[0]


def test_a_file_system_without_holes_keeps_its_logs_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rotation, "warn", said.append)

    def unable(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(rotation, "punch", unable)
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * 5 * SIZE)
    logs = LogRotation([str(path)], Rotation(SIZE), lambda _path: None)
    logs.start()
    assert wait_for_rotation()
    logs.stop()
    assert path.read_bytes() == b"x" * 5 * SIZE
    assert said == [
        f"--log-rotate: the file system of {tmp_path} cannot free a part of a file; logs stay whole"
    ]
