"""LogFollower and TailLog: every byte once, whole lines, bounded in all that can go wrong with a console."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import pty
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.agent.logs import followed_file, inotify
from phalanx.agent.logs.followed_file import BLOCK
from phalanx.agent.logs.log_follower import Containing, LogFollower
from phalanx.agent.logs.repeated_tracebacks import RepeatedTracebacks
from phalanx.elastic.multiprocessing.tail_log import TailLog, tail_logfile
from tests.conftest import HUNG


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread and no descriptor survives a test."""
    fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= fds


class Console:
    """The read end of a pipe or pseudo-terminal that a follower writes to."""

    def __init__(self, terminal: bool = False) -> None:
        self.read_end, write_end = pty.openpty() if terminal else os.pipe()
        if terminal:
            tty.setraw(write_end)  # no translation of \n on the way
        self.stream = os.fdopen(write_end, "w")
        self.got = b""

    def wait_for(self, text: bytes) -> bytes:
        end = time.monotonic() + HUNG
        while text not in self.got:
            self.more(max(0, end - time.monotonic()), text)
        return self.got

    def more(self, patience: float = HUNG, wanted: bytes = b"") -> None:
        assert select.select([self.read_end], [], [], patience)[0], (wanted, self.got)
        self.got += os.read(self.read_end, 65536)

    def quiet(self, seconds: float) -> bool:
        return not select.select([self.read_end], [], [], seconds)[0]

    def rest(self) -> bytes:
        """All that is left, once every writer has closed."""
        self.stream.close()
        while True:
            try:
                data = os.read(self.read_end, 1 << 20)
            except OSError:  # a terminal's way to say end of file
                return self.got
            if not data:
                return self.got
            self.got += data

    def close(self) -> None:
        self.stream.close()
        os.close(self.read_end)


@pytest.fixture
def console() -> Iterator[Console]:
    made = Console()
    yield made
    made.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    made = Console(terminal=True)
    yield made
    made.close()


@pytest.fixture
def logs() -> Iterator[LogFollower]:
    made = LogFollower("test")
    yield made
    made.stop()


def show(files: dict[str, bytes], folder: Path, **kwargs: object) -> str:
    """What a StringIO gets for files that are complete."""
    logs, out = LogFollower("show"), io.StringIO()
    for name, data in files.items():
        (folder / name).write_bytes(data)
        logs.follow(folder / name, out, f"[{name}]:", **kwargs)  # type: ignore[arg-type]
    logs.start()
    assert logs.drain() == 0
    logs.stop()
    return out.getvalue()


# ---- bytes


def test_prefixes_every_line_and_ends_the_last_one(tmp_path: Path) -> None:
    lines = show({"a": b"one\n\ntwo", "b": b"x\n"}, tmp_path).split("\n")
    assert [line for line in lines if line[:3] == "[a]"] == ["[a]:one", "[a]:", "[a]:two"]
    assert sorted(lines)[:2] == ["", "[a]:"]
    assert "[b]:x" in lines


def test_odd_bytes_pass_unchanged_into_a_pipe(tmp_path: Path, console: Console, logs: LogFollower) -> None:
    data = b"\0nul\n\xff\xfe bad utf-8 \xc3\n10%\r20%\r30%\r\n\r\r\nend\n"
    (tmp_path / "log").write_bytes(data)
    logs.follow(tmp_path / "log", console.stream)
    logs.start()
    assert logs.drain() == 0
    logs.stop()
    assert console.rest() == data


def test_bad_utf8_is_replaced_where_only_text_is_taken(tmp_path: Path) -> None:
    assert show({"a": b"\xc3\nok \xe2\x82\xac\n"}, tmp_path) == "[a]:�\n[a]:ok €\n"


def test_a_stream_with_a_buffer_gets_the_bytes(tmp_path: Path, logs: LogFollower) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    out.write("first\n")
    (tmp_path / "log").write_bytes(b"\xff\n")
    logs.follow(tmp_path / "log", out, "p:")
    logs.start()
    logs.drain()
    assert raw.getvalue() == b"first\np:\xff\n"


def test_a_file_that_appears_later_is_followed(tmp_path: Path, console: Console, logs: LogFollower) -> None:
    logs.follow(tmp_path / "late", console.stream, "p:")
    logs.start()
    with open(tmp_path / "late", "wb", buffering=0) as log:
        log.write(b"now\n")
        assert console.wait_for(b"\n") == b"p:now\n"
        log.write(b"more\n")
        assert console.wait_for(b"more\n") == b"p:now\np:more\n"


def test_a_file_in_a_directory_that_appears_later_is_followed(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    logs.follow(tmp_path / "a" / "b" / "late", console.stream)
    logs.start()
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "late").write_bytes(b"now\n")
    assert console.wait_for(b"\n") == b"now\n"


def test_a_partial_line_waits_for_its_newline_in_a_pipe(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    with open(tmp_path / "a", "wb", 0) as log, open(tmp_path / "b", "wb", 0) as other:
        logs.follow(tmp_path / "a", console.stream, "a:")
        logs.follow(tmp_path / "b", console.stream, "b:")
        logs.start()
        log.write(b"half")
        assert console.quiet(0.3)
        other.write(b"whole\n")
        assert console.wait_for(b"\n") == b"b:whole\n"
        for piece in (b" and", b" half", b"\nnext"):
            log.write(piece)
        assert console.wait_for(b"half\n") == b"b:whole\na:half and half\n"
        assert logs.drain() == 0
    logs.stop()
    assert console.rest().endswith(b"a:next\n")


def test_a_progress_bar_moves_in_a_pipe_and_other_lines_stay_whole(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    over = threading.Event()

    def train(path: Path) -> None:
        with open(path, "wb", 0) as log:
            for step in range(100_000):
                log.write(b"\r%d/100000" % step)
                if over.wait(0.005):
                    break
            log.write(b"\ndone\n")

    with open(tmp_path / "other", "wb", 0) as other:
        paths = [tmp_path / "a", tmp_path / "b"]
        ranks = [threading.Thread(target=train, args=(path,)) for path in paths]
        try:
            for rank in ranks:
                rank.start()
            for name in ("a", "b", "other"):
                logs.follow(tmp_path / name, console.stream, f"{name}:")
            logs.start()
            console.wait_for(b"a:\r0/100000")  # while the bar is being drawn, and no line ends
            console.wait_for(b"b:\r0/100000")
            other.write(b"a whole line\n")
            console.wait_for(b"a whole line\n")
            shown = len(console.got)
            while len(console.got) == shown:  # and the bars go on
                console.more()
        finally:
            over.set()
            for rank in ranks:
                rank.join()
        assert logs.drain() == 0
    logs.stop()
    lines = console.rest().split(b"\n")
    assert b"other:a whole line" in lines
    assert lines.pop() == b""
    for name, path in zip((b"a:", b"b:"), paths, strict=True):
        mine = [line.removeprefix(name) for line in lines if line.startswith(name)]
        assert b"".join(mine) == path.read_bytes().replace(b"\n", b""), "every byte, in order"


def test_the_start_of_a_line_is_shown_in_a_pipe_after_a_while(
    tmp_path: Path, console: Console, logs: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_file, "_SHOW_TEXT", 0.2)
    with open(tmp_path / "a", "wb", 0) as log, open(tmp_path / "b", "wb", 0) as other:
        logs.follow(tmp_path / "a", console.stream, "a:")
        logs.follow(tmp_path / "b", console.stream, "b:")
        logs.start()
        log.write(b"loading ...")
        assert console.wait_for(b"loading ...") == b"a:loading ..."
        log.write(b" done\nnext ...")
        assert console.wait_for(b"next ...") == b"a:loading ... done\na:next ..."
        other.write(b"whole\n")
        assert console.wait_for(b"whole\n").endswith(b"a:next ...\nb:whole\n")
        log.write(b" done\n")
        assert console.wait_for(b" done\na:next ...\nb:whole\na: done\n")


TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 4, in <module>
    g(0)
  File "train.py", line 2, in f
    def f(x): return 1/x
                     ~^~
ZeroDivisionError: division by zero on rank %d
"""


@pytest.mark.parametrize("prefixed", [False, True], ids=["plain", "as torch prints it"])
def test_a_traceback_that_all_ranks_print_is_shown_once(
    tmp_path: Path, console: Console, prefixed: bool
) -> None:
    logs = LogFollower("test", repeated_tracebacks=RepeatedTracebacks())
    paths = [tmp_path / str(rank) for rank in range(3)]
    for rank, path in enumerate(paths):
        text = TRACEBACK % rank
        if prefixed:
            text = b"".join(b"[rank%d]: %b" % (rank, line) for line in text.splitlines(keepends=True))
        path.write_bytes(b"before\n" + text + b"after\n")
        logs.follow(path, console.stream, f"{rank}:")
    (tmp_path / "other").write_bytes(TRACEBACK.replace(b"Zero", b"Other") % 0)
    logs.follow(tmp_path / "other", console.stream, "other:")
    logs.follow(paths[1], tmp_path / "combined")
    logs.start()
    assert logs.drain() == 0
    logs.stop()
    shown = console.rest()
    assert shown.count(b"Traceback (most recent call last)") == 2
    assert shown.count(b"(the same traceback as above) ZeroDivisionError: division by zero on rank ") == 2
    assert shown.count(b"before\n") == shown.count(b"after\n") == 3
    assert (tmp_path / "combined").read_bytes() == paths[1].read_bytes()


def test_a_line_that_a_programs_buffer_cut_stays_whole(
    tmp_path: Path, console: Console, logs: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_file, "_SHOW_TEXT", 0.05)
    with open(tmp_path / "a", "wb", 0) as log:
        logs.follow(tmp_path / "a", console.stream)
        logs.start()
        log.write(b"x" * 4096)
        assert console.quiet(0.3)
        log.write(b"y\n")
        assert console.wait_for(b"\n") == b"x" * 4096 + b"y\n"


def test_a_huge_line_streams_in_bounded_memory_and_is_not_mixed(tmp_path: Path) -> None:
    size = 100 << 20
    with open(tmp_path / "big", "wb") as log:
        for _ in range(size >> 20):
            log.write(b"x" * (1 << 20))
        log.write(b"\n")
    (tmp_path / "small").write_bytes(b"y\n" * 1000)
    program = (
        "import sys, resource; from phalanx.agent.logs.log_follower import LogFollower\n"
        "t = LogFollower('t')\n"
        "for p in sys.argv[1:]: t.follow(p, sys.stdout, 'p:')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "t.start(); lost = t.drain(); t.stop()\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(lost, after - before, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "big"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    lost, grown = map(int, done.stderr.split())
    lines = done.stdout.split(b"\n")
    assert (lost, lines.pop()) == (0, b"")
    assert sorted(map(len, lines)) == [3] * 1000 + [size + 2]
    assert grown < 20_000  # KiB


def test_an_open_long_line_yields_after_silence(tmp_path: Path, console: Console, logs: LogFollower) -> None:
    (tmp_path / "a").write_bytes(b"x" * (BLOCK + 5))
    logs.follow(tmp_path / "a", console.stream, "a:")
    logs.start()
    console.wait_for(b"x" * BLOCK)
    (tmp_path / "b").write_bytes(b"patient\n")
    logs.follow(tmp_path / "b", console.stream, "b:")
    assert console.wait_for(b"patient\n").endswith(b"x\nb:patient\n")


CHUNKS = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=12)), max_size=25)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chunks=CHUNKS, long_lines=st.booleans())
def test_any_chunking_gives_each_source_its_bytes_in_order(
    chunks: list[tuple[int, bytes]], long_lines: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        paths = [os.path.join(folder, str(i)) for i in range(3)]
        sink = os.path.join(folder, "combined")
        writers = [files.enter_context(open(path, "wb", buffering=0)) for path in paths]
        logs = LogFollower("h")
        for i, path in enumerate(paths):
            logs.follow(path, sink, f"<{i}>")
        logs.start()
        written = [b""] * 3
        for i, data in chunks:
            data = data.replace(b"<", b"(").replace(b"\x01", b"\n")
            if long_lines and data[:1] > b"\xc0":
                data += b"z" * (BLOCK - len(data) + 3)
            writers[i].write(data)
            written[i] += data
        assert logs.drain() == 0
        logs.stop()
        with open(sink, "rb") as shown:
            lines = shown.read().split(b"\n")
    assert lines.pop() == b""
    got = [b""] * 3
    for line in lines:
        assert line[:1] == b"<", line[:30]
        assert line.count(b"<") == 1, "torn"
        got[int(line[1:2])] += line[3:] + b"\n"
    for i in range(3):
        assert got[i] == (written[i] + b"\n" if written[i] and written[i][-1:] != b"\n" else written[i])


# ---- terminals


def test_colour_and_partial_lines_only_on_a_terminal(
    tmp_path: Path, terminal: Console, logs: LogFollower
) -> None:
    (tmp_path / "a").write_bytes(b"line\nprompt> ")
    logs.follow(tmp_path / "a", terminal.stream, "[0]:")
    logs.start()
    text = terminal.wait_for(b"prompt> ")
    assert text.count(b"\x1b[36m[0]:\x1b[0m") == 2
    (tmp_path / "b").write_bytes(b"other\n")
    logs.follow(tmp_path / "b", terminal.stream, "[1]:")
    text = terminal.wait_for(b"other")
    assert b"prompt> \n\x1b[33m[1]:\x1b[0mother" in text


def test_no_color_is_honoured(
    tmp_path: Path, terminal: Console, logs: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "a").write_bytes(b"line\n")
    logs.follow(tmp_path / "a", terminal.stream, "[0]:")
    logs.start()
    assert terminal.wait_for(b"line").startswith(b"[0]:line")


def test_progress_bars_keep_their_rank_on_a_terminal(
    tmp_path: Path, terminal: Console, logs: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with open(tmp_path / "a", "wb", 0) as log:
        logs.follow(tmp_path / "a", terminal.stream, "[0]:")
        logs.start()
        log.write(b"10%\r20%\r30%")
        assert terminal.wait_for(b"30%") == b"[0]:10%\r[0]:20%\r[0]:30%"
        log.write(b"\r\ndone\r\n")
        assert terminal.wait_for(b"done\r\n").endswith(b"[0]:30%\r\n[0]:done\r\n")


# ---- filters


def test_a_filter_picks_lines_and_sees_their_text(tmp_path: Path) -> None:
    seen = []

    def keep(line: str) -> bool:
        seen.append(line)
        return "b" in line

    assert show({"a": b"a\nb\nabc"}, tmp_path, line_filter=keep) == "[a]:b\n[a]:abc\n"
    assert seen == ["a\n", "b\n", "abc"]


def test_a_filter_judges_a_huge_line_as_a_whole(tmp_path: Path) -> None:
    data = b"no" + b"x" * (2 * BLOCK) + b"yes\nyes" + b"y" * (2 * BLOCK) + b"\nno\nyes\n"
    shown = show({"a": data}, tmp_path, line_filter=lambda line: line.startswith("yes"))
    assert [len(line) for line in shown.split("\n")] == [2 * BLOCK + 7, 7, 0]


def test_matching_lines_of_all_ranks_go_to_one_combined_file(tmp_path: Path, logs: LogFollower) -> None:
    console = io.StringIO()
    for rank in (0, 1):
        path = tmp_path / str(rank)
        path.write_bytes(b"step 1\nloss=%d\nstep 2\nsaved\n" % rank)
        logs.follow(path, console, f"{rank}:")
        logs.follow(path, tmp_path / "filtered.log", f"{rank}:", Containing(["loss", "saved"]))
    logs.start()
    assert logs.drain() == 0
    combined = (tmp_path / "filtered.log").read_text().splitlines()
    assert sorted(combined) == ["0:loss=0", "0:saved", "1:loss=1", "1:saved"]
    assert len(console.getvalue().splitlines()) == 8


def test_a_filter_that_raises_shows_the_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert show({"a": b"x\ny\n"}, tmp_path, line_filter=lambda line: 1 // 0 > 0) == "[a]:x\n[a]:y\n"
    assert caplog.text.count("ZeroDivisionError") == 1


# ---- trouble


def test_stdout_and_stderr_on_one_pipe_never_tear_lines(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes((name * 70 + "\n").encode() * 20_000)
    program = (
        "import sys; from phalanx.agent.logs.log_follower import LogFollower\n"
        "t = LogFollower('t'); t.follow(sys.argv[1], sys.stdout); t.follow(sys.argv[2], sys.stderr)\n"
        "t.start(); t.drain(); t.stop()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "b")]
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True)
    lines = out.stdout.split(b"\n")
    assert lines.pop() == b""
    assert (lines.count(b"a" * 70), lines.count(b"b" * 70), len(lines)) == (20_000, 20_000, 40_000)


def test_two_streams_on_one_pipe_share_the_open_block(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    """A block stuck halfway through a line must end before the other stream gets a turn."""
    (tmp_path / "a").write_bytes((b"a" * 1000 + b"\n") * 200)
    with os.fdopen(os.dup(console.stream.fileno()), "w") as second, open(tmp_path / "b", "wb", 0) as log:
        logs.follow(tmp_path / "b", second)
        logs.follow(tmp_path / "a", console.stream)
        logs.start()
        console.wait_for(b"a\n")
        log.write(b"b" * 10 + b"\n")
        console.wait_for(b"b\n")
        assert logs.drain() == 0
    logs.stop()
    lines = console.rest().split(b"\n")
    assert sorted(set(map(len, lines))) == [0, 10, 1000]


def test_a_write_between_the_last_look_and_the_watch_is_not_missed(
    tmp_path: Path, console: Console, logs: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = inotify.Watcher.watch_file, [b"late\n"]

    def watch_file(self: inotify.Watcher, fd: int, path: str) -> int:
        if late:
            log.write(late.pop())
        return real(self, fd, path)

    monkeypatch.setattr(inotify.Watcher, "watch_file", watch_file)
    with open(tmp_path / "log", "wb", buffering=0) as log:
        logs.follow(tmp_path / "log", console.stream)
        logs.start()
        console.wait_for(b"late\n")


def test_a_blocked_console_is_counted_and_bounded(
    tmp_path: Path, console: Console, logs: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_bytes(b"x" * 1023 + b"\n" * 1 + b"y\n" * 500_000)
    (tmp_path / "free").write_bytes(b"fine\n")
    other = io.StringIO()
    logs.follow(tmp_path / "log", console.stream)
    logs.follow(tmp_path / "free", other)
    logs.start()
    start = time.monotonic()
    unshown = logs.drain(stall=0.3)
    logs.stop()
    assert time.monotonic() - start < HUNG
    assert other.getvalue() == "fine\n"
    shown = len(console.rest())
    assert unshown > 0
    assert shown + unshown == 1024 + 1_000_000
    assert caplog.text.count("accepted nothing") == 1


def test_a_stream_stuck_in_its_own_write_does_not_hold_the_caller(tmp_path: Path, logs: LogFollower) -> None:
    release = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            release.wait(HUNG)
            return len(text)

    (tmp_path / "log").write_bytes(b"line\n")
    logs.follow(tmp_path / "log", Stuck())
    logs.start()
    assert logs.drain(stall=0.2) == 5
    release.set()


def test_a_console_whose_reader_left_is_no_news_and_the_rest_goes_on(
    tmp_path: Path, logs: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    read_end, write_end = os.pipe()
    other = io.StringIO()
    with os.fdopen(write_end, "w") as stream:
        for name, dst in (("a", stream), ("b", stream), ("c", other)):
            (tmp_path / name).write_bytes(b"line\n" * 10)
            logs.follow(tmp_path / name, dst)
        os.close(read_end)
        logs.start()
        assert logs.drain() == 100
    assert other.getvalue() == "line\n" * 10
    assert logs.lost == 100
    assert caplog.text == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_counted(tmp_path: Path, logs: LogFollower, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log").write_bytes(b"line\n" * 100)
    logs.follow(tmp_path / "log", "/dev/full")
    logs.start()
    assert logs.drain() == 500
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 1
    assert "see the log files" in caplog.text


def test_a_drain_in_steps_loses_nothing_of_a_slow_console(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    (tmp_path / "log").write_bytes(b"y\n" * 500_000)
    logs.follow(tmp_path / "log", console.stream)
    logs.start()
    assert not logs.finish(0.0)
    assert not logs.finish(0.0)
    assert not select.select([logs], [], [], 0)[0]
    shown = 0
    while not select.select([logs], [], [], 0)[0]:
        assert select.select([console.read_end, logs], [], [], HUNG)[0]
        if select.select([console.read_end], [], [], 0)[0]:
            shown += len(os.read(console.read_end, 65536))
    assert logs.finish(0.0)
    assert logs.lost == 0
    logs.stop()
    assert shown + len(console.rest()) == 1_000_000


@pytest.mark.parametrize("hurried", [False, True])
def test_a_drain_in_steps_ends_by_itself_at_a_console_that_takes_nothing(
    hurried: bool, tmp_path: Path, console: Console, logs: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_bytes(b"y\n" * 500_000)
    logs.follow(tmp_path / "log", console.stream)
    logs.start()
    assert not logs.finish(0.0, stall=10 * HUNG if hurried else 0.3)
    if hurried:
        logs.hurry(0.3)
    assert select.select([logs], [], [], HUNG)[0], "nobody is told that it was given up"
    assert logs.finish(0.0)
    logs.stop()
    assert len(console.rest()) + logs.lost == 1_000_000
    assert caplog.text.count("accepted nothing") == 1


def test_a_combined_file_that_cannot_be_opened_is_counted(tmp_path: Path, logs: LogFollower) -> None:
    (tmp_path / "log").write_bytes(b"line\n")
    logs.follow(tmp_path / "log", tmp_path / "missing" / "combined.log")
    logs.start()
    assert logs.drain() == 5
    assert any("cannot be opened" in why for why in logs.losses)


def test_a_truncated_file_is_followed_from_its_new_start(
    tmp_path: Path, console: Console, logs: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    with open(tmp_path / "log", "ab", buffering=0) as log:
        logs.follow(tmp_path / "log", console.stream)
        logs.start()
        log.write(b"before the cut\n")
        console.wait_for(b"cut\n")
        log.truncate(0)
        end = time.monotonic() + HUNG
        while "truncated" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)  # nothing to wait on: the notice is a log record of another thread
        log.write(b"after\n")
        assert console.wait_for(b"after\n") == b"before the cut\nafter\n"


def test_a_deleted_file_and_directory_are_followed_to_the_end(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with open(folder / "log", "wb", buffering=0) as log:
        logs.follow(folder / "log", console.stream)
        logs.start()
        log.write(b"one\n")
        console.wait_for(b"one\n")
        (folder / "log").unlink()
        folder.rmdir()
        log.write(b"two\n")
        console.wait_for(b"two\n")
        log.write(b"three")
        assert logs.drain() == 0
    logs.stop()
    assert console.rest() == b"one\ntwo\nthree\n"


def test_without_inotify_files_are_looked_at_now_and_then(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify.Watcher, "_watch", lambda self, path, mask: -1)
    logs = LogFollower("polled", poll_interval=0.02)
    logs.follow(tmp_path / "log", console.stream)
    logs.start()
    with open(tmp_path / "log", "wb", buffering=0) as log:
        log.write(b"one\n")
        console.wait_for(b"one\n")
        log.write(b"two\n")
        console.wait_for(b"two\n")
    logs.stop()


def test_no_descriptors_left_is_survived_and_counted(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"line\n")
    program = (
        "import os, resource, sys; from phalanx.agent.logs.log_follower import LogFollower\n"
        "t = LogFollower('t'); t.follow(sys.argv[1], sys.stdout)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)); held = []\n"
        "try:\n"
        "    while True: held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError: pass\n"
        "t.start(); lost = t.drain(); t.stop(); os.write(1, b'lost %d' % lost); os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert done.stdout == b"lost 5", done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 32


def test_an_idle_follower_uses_no_cpu_and_does_not_wake(
    tmp_path: Path, console: Console, logs: LogFollower
) -> None:
    (tmp_path / "log").write_bytes(b"line\npartial")
    logs.follow(tmp_path / "log", console.stream)
    logs.follow(tmp_path / "never", console.stream)
    logs.start()
    console.wait_for(b"line\n")
    thread = logs.thread
    assert thread is not None

    def switches() -> int:
        with open(f"/proc/self/task/{thread.native_id}/status") as status:
            return sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)

    def idle() -> bool:
        before = switches()
        time.sleep(0.5)  # the span that is measured
        return switches() - before <= 2

    assert any(idle() for _ in range(20)), "after the last timers of the burst"


# ---- TailLog


def test_tail_log_uses_the_known_default_prefix_and_drains_on_stop(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).write_bytes(b"rank %d\n" % rank)
    out = io.StringIO()
    tail = TailLog("trainer", {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}, out, {1: "one:"})
    assert tail.start() is tail
    assert not tail.stopped()
    tail.stop()
    tail.stop()
    assert tail.stopped()
    assert sorted(out.getvalue().splitlines()) == ["[trainer0]:rank 0", "one:rank 1"]


def test_tail_log_without_files_or_with_files_that_never_appear(tmp_path: Path) -> None:
    for files in ({}, {0: str(tmp_path / "never")}):
        tail = TailLog("t", files, io.StringIO()).start()
        tail.stop()
        assert tail.stopped()


def test_tail_logfile_returns_when_finished_with_everything_shown(tmp_path: Path) -> None:
    out, finished = io.StringIO(), threading.Event()
    args = ("h:", str(tmp_path / "log"), out, finished, 0.1, lambda line: "keep" in line)
    thread = threading.Thread(target=tail_logfile, args=args)
    thread.start()
    (tmp_path / "log").write_bytes(b"keep 1\ndrop\nkeep 2")
    finished.set()
    thread.join(HUNG)
    assert not thread.is_alive()
    assert out.getvalue() == "h:keep 1\nh:keep 2\n"


def test_say_once_logger_is_phalanx(
    tmp_path: Path, logs: LogFollower, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "log").write_bytes(b"x\n")
    logs.follow(tmp_path / "log", tmp_path)  # a directory
    logs.start()
    logs.drain()
    assert [(r.name, r.levelno) for r in caplog.records] == [("phalanx", logging.WARNING)]


@pytest.mark.parametrize("has", [4096, 1 << 20])
def test_a_pipe_gets_room_for_more_than_one_block_and_is_never_made_smaller(
    has: int, logs: LogFollower
) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as stream:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, has)
        logs.follow("never", stream)
        assert fcntl.fcntl(read_end, fcntl.F_GETPIPE_SZ) >= max(has, BLOCK + 1)
