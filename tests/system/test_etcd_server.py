"""torch's `EtcdServer` over the etcd of this machine: it starts, serves a job, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.core.rounds.store_commands import Get, Put
from phalanx.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from phalanx.elastic.rendezvous.etcd_rendezvous import create_rdzv_handler
from phalanx.elastic.rendezvous.etcd_server import EtcdServer
from tests.conftest import HUNG, wait_until
from tests.support.etcd_process import etcd_program


def test_it_serves_a_rendezvous_and_removes_its_data(caplog: pytest.LogCaptureFixture) -> None:
    etcd_program()
    server = EtcdServer()
    assert (server.get_host(), server.get_port()) == ("localhost", -1)
    server.start(timeout=30)
    try:
        assert server.get_endpoint() == f"localhost:{server.get_port()}"
        with pytest.raises(RuntimeError, match="runs already"):
            server.start()
        for create in (create_rdzv_handler, rendezvous_handler_registry.create_handler):
            handler = create(RendezvousParameters("etcd-v2", server.get_endpoint(), create.__name__, 1, 1))
            info = handler.next_rendezvous()
            info.store.set("key", "value")
            assert (info.rank, info.world_size, info.store.get("key")) == (0, 1, b"value")
            assert handler.shutdown()
        directory = server._directory
        assert os.path.isdir(directory)
        assert caplog.text.count("etcd has removed its v2 API") == 2
    finally:
        server.stop()
        server.stop()
    assert not os.path.exists(directory)


def test_a_given_directory_is_kept_over_a_restart(tmp_path: Path) -> None:
    server = EtcdServer(str(tmp_path))
    etcd_program()
    for attempt in range(2):
        server.start()
        with server.get_client() as client:
            found = client.request(Get("key"), HUNG).entries
            assert bool(found) == bool(attempt)
            client.request(Put("key", b"value"), HUNG)
        server.stop()
    assert list(tmp_path.iterdir())


def test_a_program_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/nonexistent/etcd")
    with pytest.raises(RuntimeError, match="/nonexistent/etcd cannot be executed; install etcd"):
        EtcdServer().start()
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", "/bin/false")
    with pytest.raises(RuntimeError, match=r"\(/bin/false\) did not start: it exited with code 1"):
        EtcdServer().start(num_retries=1)
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no such program in PATH; install etcd"):
        EtcdServer().start()


def test_it_ends_with_a_program_that_is_killed() -> None:
    etcd_program()
    program = (
        "import sys; from phalanx.elastic.rendezvous.etcd_server import EtcdServer; s = EtcdServer(); "
        "s.start(); print(s._process.pid, s._directory, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, _ = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "etcd to end")


def test_it_may_be_started_from_a_thread() -> None:
    etcd_program()
    server = EtcdServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join(HUNG)
    with server.get_client() as client:
        assert client.request(Put("key", b"value"), HUNG).ok
    server.stop()
