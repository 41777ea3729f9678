"""`phalanx status`, asked by root, against sockets that another user has opened."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.observe.local_agents import find
from phalanx.observe.snapshot import decode
from phalanx.observe.status_text import format_status
from tests.conftest import HUNG
from tests.support.run_helpers import run
from tests.system.hostile_user import NOBODY, as_root, doing
from tests.system.test_status import BEATS, Running, job_status, script, status
from tests.unit.test_status import answer as a_job
from tests.unit.test_status import worker

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


def serve(answer: Callable[[socket.socket], None], ready: int, name: bytes) -> Callable[[], None]:
    """What the other user does: listen under an agent's name, and answer."""

    def action() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(64)
            os.write(ready, b"x")
            while True:
                peer, _ = listener.accept()
                try:
                    answer(peer)
                except OSError:
                    pass

    return action


def say(value: Any) -> Callable[[socket.socket], None]:
    data = value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()

    def answer(peer: socket.socket) -> None:
        with peer:
            peer.sendall(data)

    return answer


def for_ever(peer: socket.socket) -> None:
    while True:
        peer.sendall(b" " * 65536)


def dripping(peer: socket.socket) -> None:
    while True:
        peer.sendall(b" ")
        time.sleep(0.5)


def socket_name(user: int, last: bytes) -> bytes:
    return f"\0phalanx/{user}/{os.environ['PHALANX_NAMESPACE']}/".encode() + last


def asked(answer: Callable[[socket.socket], None], *words: str, claims: int = NOBODY) -> Any:
    """What root's `phalanx status` prints meanwhile."""
    ready, told = os.pipe()
    name = socket_name(claims, f"{os.getpid()}-{os.urandom(4).hex()}".encode())
    try:
        with doing(serve(answer, told, name)):
            os.read(ready, 1)
            return status("--all-users", *words)
    finally:
        os.close(ready)
        os.close(told)


@as_root
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 100_000,
        {"run": "x"},
        a_job(run=7),
        a_job(workers=7),
        a_job(workers=[{"rank": "one"}]),
        a_job(since="long ago"),
        a_job(pid=10**400),
        a_job(standbys={"count": "two"}),
        a_job(incidents=[{}]),
    ],
)
def test_an_answer_that_is_not_a_job_is_ignored(value: Any) -> None:
    done = asked(say(value))
    assert "Traceback" not in done.stderr
    assert f"user {NOBODY}" not in done.stdout
    assert done.returncode in (0, 1)  # there may be jobs of other tests


@as_root
def test_escapes_in_an_answer_do_not_reach_the_terminal() -> None:
    evil = a_job(
        run=f"run{ESCAPE}",
        name=f"name{ESCAPE}\nphalanx: forged line",
        host=ESCAPE,
        phase=ESCAPE,
        nodes=[ESCAPE, ESCAPE],
        workers=[worker(0, section=ESCAPE)],
        slow=[ESCAPE],
        hangs=[ESCAPE],
        incidents=[{"at": 0.0, "what": ESCAPE}],
        logs=ESCAPE,
    )
    for words in ([], ["--json"]):
        done = asked(say(evil), "run\x1b]0;owned", *words)
        assert done.returncode == 0
        assert all(char.isprintable() or char == "\n" for char in done.stdout + done.stderr)
        assert "phalanx: forged line" not in done.stdout.splitlines()
    assert f"user {NOBODY}" in asked(say(evil)).stdout


@as_root
@pytest.mark.parametrize("answer", [for_ever, dripping])
def test_an_endless_answer_ends(answer: Callable[[socket.socket], None], tmp_path: Path) -> None:
    """And does not hide the jobs of others."""
    run = f"beside-{os.getpid()}"
    with Running(["--rdzv-id", run, script(tmp_path, BEATS)]) as job:
        job.workers(1)
        job_status(run)
        began = time.monotonic()
        done = asked(answer)
        assert time.monotonic() - began < HUNG / 2
        assert run in done.stdout
        job.signal(signal.SIGTERM)
        job.end()


@as_root
def test_a_socket_under_the_name_of_another_user_is_not_asked() -> None:
    done = asked(say(a_job(run="forged")), "forged", claims=0)
    assert (done.returncode, done.stdout) == (1, "")


@as_root
def test_a_name_that_is_not_text_is_skipped() -> None:
    ready, told = os.pipe()
    try:
        with doing(serve(say(a_job()), told, socket_name(NOBODY, b"\xff\xfe\n7"))):
            os.read(ready, 1)
            find(everyone=True)
    finally:
        os.close(ready)
        os.close(told)


def test_a_job_of_an_older_agent_is_shown() -> None:
    few = {key: a_job()[key] for key in ("run", "name", "host", "pid", "since", "now", "phase")}
    assert format_status(decode(json.dumps({**few, "news": 1}).encode())).startswith(
        "train.py (run job7) on node-a, pid 42, running"
    )


def test_a_run_id_is_not_echoed_raw_in_a_refusal(tmp_path: Path) -> None:
    done = run("--rdzv-id", f"a/b{ESCAPE}", script(tmp_path, BEATS))
    assert done.code == 2
    assert "\\x1b" in done.err
    assert all(char.isprintable() or char == "\n" for char in done.err)
