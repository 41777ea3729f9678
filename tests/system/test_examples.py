"""The examples: a kill changes no bit of the result, and the demo shows its three runs."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import HUNG
from tests.support.jobs import EXAMPLES, Job, job, python_with


def test_the_demo(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HUNG,
    )
    assert ran.returncode == 0, ran.stdout
    for words in (
        "1. A run without failures",
        "ValueError: record 70 of shard 3 is corrupt",
        "Root cause: rank 3",
        "rank 3 is killed on purpose",
        "ms after the kill, at step 60 of 120",
        "with the kill and without: yes",
    ):
        assert words in ran.stdout


def line(folder: Path, *words: str, workers: int = 2) -> dict[str, int]:
    """The result of the example without a framework."""
    options = ("--nproc-per-node", str(workers), "--max-restarts", "1")
    job(folder, *options, str(EXAMPLES / "elastic_cpu.py"), "--checkpoint", "line.json", *words)
    found: dict[str, int] = json.loads((folder / "line.json").read_text())
    return found


def test_any_number_of_workers_and_another_number_later(tmp_path: Path) -> None:
    alone = line(tmp_path / "one", workers=1)
    assert alone["step"] == 120
    assert line(tmp_path / "three", "--kill-at", "55", workers=3) == alone
    part = line(tmp_path / "part", "--steps", "40", workers=2)
    assert part["step"] == 40
    assert line(tmp_path / "part", workers=4) == alone


def train(folder: Path, python: str, example: str, *words: str, restarts: int = 0) -> tuple[Any, Job]:
    options = ("--nproc-per-node", "2", "--max-restarts", str(restarts))
    path = str(EXAMPLES / example)
    with Job(folder / "job", *options, path, "--out", str(folder), *words, python=python) as running:
        running.succeeds()
    return json.loads((folder / "result.json").read_text()), running


def test_ddp_continues_exactly(tmp_path: Path) -> None:
    python = python_with("torch")
    words = ("--steps", "24", "--every", "5", "--batch", "4", "--plot", str(tmp_path / "loss.png"))
    plain, _ = train(tmp_path / "plain", python, "train_ddp.py", *words)
    killed, running = train(
        tmp_path / "killed", python, "train_ddp.py", *words, "--kill-at", "8,17", restarts=2
    )
    assert killed == plain
    assert len(plain["losses"]) == 24
    assert plain["losses"][-1] < plain["losses"][0]
    assert [row for row in running.out.splitlines() if "from step" in row] == [
        f"2 workers, from step {step} to 24" for step in (0, 5, 15)
    ]
    check_png(tmp_path / "loss.png", red_columns=2)


def test_ddp_continues_from_memory(tmp_path: Path) -> None:
    python = python_with("torch")
    words = ("--steps", "12", "--every", "5", "--batch", "4", "--keep")
    plain, _ = train(tmp_path / "plain", python, "train_ddp.py", *words)
    killed, running = train(tmp_path / "killed", python, "train_ddp.py", *words, "--kill-at", "8", restarts=1)
    assert killed == plain
    assert "from step 5 to 12" in running.out
    assert not (tmp_path / "killed" / "checkpoint.pt").exists()
    words = (*words, "--reenter", "--kill-at", "3,8")
    reentered, running = train(tmp_path / "reentered", python, "train_ddp.py", *words, restarts=2)
    assert reentered == plain
    assert running.err.count("re-entered: 1 of 2 workers kept") == 2, running.err


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ddp_is_killed_twenty_times_at_random(tmp_path: Path) -> None:
    """The kills are spread over the steps, not over the time: as many on a slow machine as on a fast one."""
    python = python_with("torch")
    words = ("--steps", "400", "--every", "3", "--batch", "2", "--reenter")
    plain, _ = train(tmp_path / "plain", python, "train_ddp.py", *words)
    dice = random.Random(14)
    options = ("--nproc-per-node", "2", "--max-restarts", "60", "--backoff", "0", "--warm", "standby")
    path, out = str(EXAMPLES / "train_ddp.py"), str(tmp_path / "killed")
    with Job(tmp_path / "job", *options, path, "--out", out, *words, python=python) as running:
        for count, step in enumerate(sorted(dice.sample(range(380), 20))):

            def has_come(count: int = count, step: int = step) -> bool:
                rounds = running.out.split("from step")
                if len(rounds) < count + 2:
                    return False
                return any(int(found) >= step for found in re.findall(r"^step +(\d+) ", rounds[-1], re.M))

            running.until(has_come, f"round {count + 1}, step {step}")
            time.sleep(0.1 * dice.random())  # a random moment, not a wait for something
            os.kill(dice.choice(workers_of(running)), signal.SIGKILL)
        running.succeeds(600.0)
    assert json.loads((tmp_path / "killed" / "result.json").read_text()) == plain
    assert running.err.count("SIGKILL; restart") == 20, running.err
    assert running.err.count("re-entered") > 15, running.err


def workers_of(running: Job) -> list[int]:
    """The pids of its workers, in the order of their ranks."""
    found: dict[str, int] = {}
    for one in psutil.Process(running.process.pid).children(recursive=True):
        try:
            _, is_rank, rank = " ".join(one.cmdline()).partition("[rank ")
        except psutil.NoSuchProcess:
            continue
        if is_rank:
            found[rank] = one.pid
    assert found, running.err
    return [found[rank] for rank in sorted(found)]


def test_reentry_without_a_framework_and_with_jax(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "3", "--max-restarts", "1")
    with Job(tmp_path / "plain", *options, str(EXAMPLES / "reenter_plain.py")) as running:
        running.succeeds()
    assert "the sum is 2470" in running.out
    assert "re-entered: 2 of 3 workers kept" in running.err
    python = python_with("jax")
    words = (*options, str(EXAMPLES / "reenter_jax.py"), "--steps", "12", "--kill-at", "5")
    with Job(tmp_path / "jax", *words, python=python) as running:
        running.succeeds()
    rows = [row for row in running.out.splitlines() if "compiled 1 times" in row]
    assert len(rows) == 3, "every process compiles once"
    assert len({row.rpartition(" ")[2] for row in rows}) == 1
    assert "re-entered: 2 of 3 workers kept" in running.err


def check_png(path: Path, red_columns: int) -> None:
    """A whole image, and as many red lines in it as there were restarts."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        size, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + size
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == height * (1 + 3 * width)
    row = pixels[(1 + 3 * width) * (height - 21) :][1 : 1 + 3 * width]
    assert sum(row[3 * x : 3 * x + 3] == b"\xdd\x33\x33" for x in range(width)) == red_columns


def test_jax_continues_exactly(tmp_path: Path) -> None:
    python = python_with("jax")
    words = ("--steps", "24", "--every", "5")
    plain, _ = train(tmp_path / "plain", python, "train_jax.py", *words)
    killed, running = train(
        tmp_path / "killed", python, "train_jax.py", *words, "--kill-at", "12", restarts=1
    )
    assert killed == plain
    assert "2 processes, 2 devices, from step 10" in running.out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_described(path: Path) -> None:
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text()
