"""`--notify`: real commands and a real HTTP server; retries are bounded, and the caller never waits."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from phalanx.observe import outbox
from phalanx.observe.notifier import JobNames, Notifier
from tests.conftest import HUNG, wait_until

NAMES = JobNames("train.py", "run7", "a1")


class Receiver:
    """Answers POSTs with the codes it is given, then with 204."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.got: list[tuple[str, dict[str, str], Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, dict(self.headers), json.loads(body)))
                code = receiver.codes.pop(0) if receiver.codes else 204
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def url(self, user: str = "") -> str:
        return f"http://{user}127.0.0.1:{self.server.server_address[1]}/hook?key=SECRET"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(outbox, "warn", lines.append)
    monkeypatch.setattr(outbox, "_PAUSES", (0.01, 0.02))
    return lines


def test_a_url_gets_every_message_in_order(receiver: Receiver, said: list[str]) -> None:
    sender = Notifier(receiver.url("me:pass%20word@"), NAMES)
    sender.send("failure", "rank 1: boom", restarts=1)
    sender.send("end", "done", exit_code=0)
    sender.close()
    assert [body["event"] for _, _, body in receiver.got] == ["failure", "end"]
    path, headers, body = receiver.got[0]
    assert path == "/hook?key=SECRET"
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"me:pass word"
    assert headers["Content-Type"] == "application/json"
    assert body.pop("time").endswith("Z")
    assert body == {
        "event": "failure", "text": "train.py on a1: rank 1: boom", "job": "train.py", "run_id": "run7",
        "host": "a1", "restarts": 1,
    }  # fmt: skip
    assert said == []


@pytest.mark.parametrize(
    ("codes", "attempts", "lost"),
    [([500], 2, 0), ([503, 429], 3, 0), ([500] * 9, 3, 1), ([404], 1, 1), ([302], 1, 1)],
)
def test_attempts_are_bounded(
    receiver: Receiver, said: list[str], codes: list[int], attempts: int, lost: int
) -> None:
    receiver.codes = list(codes)
    sender = Notifier(receiver.url(), NAMES)
    sender.send("failure", "boom")
    sender.close()
    assert len(receiver.got) == attempts
    assert said[0] == f"--notify: the server answered with {codes[0]}"
    assert said[1:] == ["--notify: 1 message could not be delivered"] * lost
    assert "SECRET" not in "".join(said)


def test_a_command_gets_the_message_on_its_stdin(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "SECRET")
    monkeypatch.setenv("PHALANX_NOTIFY", "SECRET")
    sender = Notifier(f"cat >> {tmp_path}/got; env > {tmp_path}/env; echo noise; echo noise >&2", NAMES)
    sender.send("hang", "no heartbeat", ranks=[1])
    sender.close()
    assert json.loads((tmp_path / "got").read_text())["ranks"] == [1]
    assert "SECRET" not in (tmp_path / "env").read_text()
    assert said == []


def test_a_command_that_fails_is_tried_three_times(tmp_path: Path, said: list[str]) -> None:
    sender = Notifier(f"echo x >> {tmp_path}/tries; exit 3", NAMES)
    sender.send("failure", "boom")
    sender.close()
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    assert said == [
        "--notify: the command failed with exit code 3",
        "--notify: 1 message could not be delivered",
    ]


def test_neither_a_job_nor_its_end_waits_for_a_target_that_hangs(tmp_path: Path, said: list[str]) -> None:
    began = time.monotonic()
    sender = Notifier(f"touch {tmp_path}/begun; sleep 1000", NAMES)
    for number in range(200):
        sender.send("failure", f"number {number}")
    assert time.monotonic() - began < HUNG / 2
    wait_until((tmp_path / "begun").exists, "the command")
    sender.close(0.1)
    assert time.monotonic() - began < HUNG / 2
    assert said == ["--notify: 200 messages could not be delivered"]


def test_a_server_that_cannot_be_reached(said: list[str]) -> None:
    sender = Notifier("http://me:SECRET@127.0.0.1:1/x?y=SECRET", NAMES)
    sender.send("end", "done")
    sender.close()
    assert said == [
        "--notify: the server cannot be reached: Connection refused",
        "--notify: 1 message could not be delivered",
    ]


def test_nothing_is_started_without_a_message() -> None:
    sender = Notifier("true", NAMES)
    sender.close()
    assert sender._thread is None
