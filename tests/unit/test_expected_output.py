"""The process that searches the output for `--expect`: what it finds, what it survives, and how it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.agent.supervision import expected_output
from phalanx.agent.supervision.expected_output import ExpectedOutput
from phalanx.agent.supervision.pattern_process import SearchedFile
from tests.conftest import HUNG, gone, wait_until


class Search:
    """A search through one file of rank 3."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.path = folder / "stdout.log"
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed with the search
        self.said: list[str] = []
        self.output = ExpectedOutput(pattern, True, [(3, str(self.path))], self.said.append)

    @property
    def pid(self) -> int:
        assert self.output._process is not None
        return self.output._process.pid

    def write(self, data: bytes) -> None:
        self.file.write(data)

    def wait_for_end(self) -> None:
        """Everything that was written so far has been searched."""
        then = time.monotonic()
        wait_until(lambda: self.output.searched(time.monotonic(), then), "a search of everything")

    def wait_for_news(self) -> None:
        assert select.select([self.output.fileno()], [], [], 3 * HUNG)[0]  # a second of processor time
        self.output.look()

    def close(self) -> None:
        self.output.close()
        self.file.close()


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    made = Search(tmp_path, r"loss: (\S+)")
    yield made
    made.close()


def test_matches_are_seen_without_waking_anybody(search: Search) -> None:
    assert search.output.matched() == 0.0
    search.write(b"nothing\nloss: 0.3\n")
    wait_until(lambda: search.output.matched() > 0.0, "a match")
    first = search.output.matched()
    assert first <= time.monotonic()
    search.write(b"10%\rloss: 0.2\r")  # a progress bar
    wait_until(lambda: search.output.matched() > first, "a match in a progress bar")
    assert not select.select([search.output.fileno()], [], [], 0)[0]
    assert not search.output.look()
    assert search.output.take_bad() is None


def test_a_value_that_is_not_finite_is_told_once_with_its_line(search: Search) -> None:
    search.write(b"step 4 loss: \xff\nstep 5 loss: nan\x1b[0m\nstep 6 loss: inf\n")
    search.wait_for_news()
    assert search.output.take_bad() == (3, "step 5 loss: nan [0m")
    assert search.output.take_bad() is None


def test_odd_output_does_no_harm(search: Search) -> None:
    search.write(b"\0" * 100_000 + b"x" * 300_000 + b"loss: nan\n" + b"\xff\xfe\n\n\r\r\nloss: 1")
    search.wait_for_end()
    search.write(b".5\n")
    wait_until(lambda: search.output.matched() > 0, "a line that came in two pieces")
    assert search.output.take_bad() is None  # it was beyond the part of a line that is searched


def test_a_pattern_that_never_ends_is_given_up(tmp_path: Path) -> None:
    search = Search(tmp_path, r"^(a+)+$")
    try:
        search.write(b"a" * 60 + b"b\n")
        search.wait_for_news()
        search.output.look()
        assert not search.output.works
        assert search.said == [
            "--expect: the output is not watched any more: the pattern takes too long on a line of rank 3; "
            "use a simpler one"
        ]
    finally:
        search.close()


def test_a_stopped_process_is_not_the_silence_of_the_job(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_output, "_SILENT", 0.5)
    search.write(b"loss: 1\nloss: nan\n")
    search.wait_for_news()
    assert search.output.take_bad() is not None
    first, stopped = search.output.matched(), search.pid
    os.kill(stopped, signal.SIGSTOP)
    search.write(b"loss: 2\n")  # the job goes on
    end = time.monotonic() + HUNG
    while search.pid == stopped and time.monotonic() < end:
        now = time.monotonic()
        assert search.output.last_match(now, 0.0, 0.01) > now - 0.01, "the job is blamed"
    assert search.said == [
        "--expect: the process that searches the output did not answer for 0.5 s: replaced"
    ]
    wait_until(lambda: gone(stopped), "the end of the stopped process")
    wait_until(lambda: search.output.matched() > first, "the line that was not searched")
    search.wait_for_end()
    search.output.look()
    assert search.output.take_bad() is None, "it was told before"
    # A job that is silent is found out all the same, and as soon as the process has answered.
    wait_until(
        lambda: search.output.last_match(now := time.monotonic(), 0.0, 0.01) <= now - 0.01, "the silence"
    )


def test_a_process_that_never_answers_is_given_up(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_output, "_SILENT", 0.05)
    end = time.monotonic() + HUNG
    while search.output.works and time.monotonic() < end:
        os.kill(search.pid, signal.SIGSTOP)
        search.output.searched(time.monotonic(), 1e15)
    assert search.said[-1] == "--expect: the output is not watched any more: its process does not answer"
    assert len(search.said) == 4


def test_the_loss_of_the_process_is_told(search: Search) -> None:
    os.kill(search.pid, signal.SIGKILL)
    search.wait_for_news()
    assert not search.output.works
    assert search.said == ["--expect: the output is not watched any more: its process has ended"]


def test_it_ends_with_the_agent(tmp_path: Path) -> None:
    """Even while it is busy with a pattern that never ends."""
    code = (
        "import sys; from phalanx.agent.supervision.expected_output import ExpectedOutput\n"
        "out = ExpectedOutput('^(a+)+$', True, [(0, sys.argv[1])], print)\n"
        "print(out._process.pid, flush=True); sys.stdin.read()"
    )
    path = tmp_path / "log"
    path.write_bytes(b"a" * 60 + b"b\n")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        agent.kill()
    wait_until(lambda: gone(pid), "the end of the search")


def test_a_hole_in_a_rotated_file_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.seek(1 << 30)
        file.write(b"loss: 1\n")
    file_ = SearchedFile(0, str(path))
    file_.open()
    found: list[str] = []
    began = time.monotonic()
    while (lines := file_.lines()) is not None:
        found += lines
    os.close(file_.fd)
    assert found[-1].endswith("loss: 1")
    assert time.monotonic() - began < HUNG
