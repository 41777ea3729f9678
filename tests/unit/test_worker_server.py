"""The HTTP server inside a worker."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from phalanx.elastic.control_plane import TORCH_WORKER_SERVER_SOCKET, worker_main
from tests.conftest import HUNG


def ask(path: Path, what: str, method: str = "POST") -> tuple[int, str]:
    connection = http.client.HTTPConnection("worker", timeout=HUNG)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(HUNG)
    try:
        connection.sock.connect(str(path))
        connection.request(method, what)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "s"
    monkeypatch.setenv(TORCH_WORKER_SERVER_SOCKET, str(made))
    return made


def test_it_answers_and_removes_its_socket(path: Path) -> None:
    with worker_main():
        assert ask(path, "/handler/ping") == (200, "pong")
        assert ask(path, "/handler/ping", "GET") == (200, "pong")
        assert ask(path, "/")[0] == 200
        status, names = ask(path, "/handler/", "GET")
        assert status == 200
        assert {"ping", "dump_traceback"} <= set(json.loads(names))
        assert ask(path, "/handler/nope")[0] == 404
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not path.exists()


def test_the_stack_of_every_thread(path: Path) -> None:
    ready, release = threading.Event(), threading.Event()

    def busy_with_something() -> None:
        ready.set()
        release.wait(HUNG)

    thread = threading.Thread(target=busy_with_something)
    thread.start()
    ready.wait(HUNG)
    try:
        with worker_main():
            status, text = ask(path, "/handler/dump_traceback")
    finally:
        release.set()
        thread.join()
    assert status == 200
    assert "busy_with_something" in text
    assert "test_the_stack_of_every_thread" in text


def test_without_the_variable_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCH_WORKER_SERVER_SOCKET, raising=False)
    before = threading.active_count()
    with worker_main():
        assert threading.active_count() <= before


def test_an_exception_is_recorded_and_passes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(errors))
    with pytest.raises(ValueError, match="broken"), worker_main():
        raise ValueError("broken")
    assert "broken" in errors.read_text()
    assert not path.exists()


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with worker_main():
        assert ask(path, "/handler/ping") == (200, "pong")
        with pytest.raises(FileExistsError, match="another process serves it"), worker_main():
            pass
        assert ask(path, "/handler/ping") == (200, "pong")


def test_a_path_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_WORKER_SERVER_SOCKET, str(tmp_path / ("x" * 120)))
    with pytest.raises(ValueError, match="shorter path"), worker_main():
        pass
