"""The health port: its answers, its address, and 503 for a stalled loop or watchdog."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.agent.supervision.agent_services import NodeCheck, Services
from phalanx.elastic.agent.server.health_check_server import create_healthcheck_server
from phalanx.errors import PhalanxError
from phalanx.web.health import HealthServer, LoopProbe
from tests.conftest import HUNG, gone, has_ipv6, wait_until


def ask(port: int, path: str = "/healthz", method: str = "GET", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=HUNG)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        assert "Python" not in str(answer.headers)
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., HealthServer]]:
    made: list[HealthServer] = []

    def begin(
        live: Callable[[], bool], ready: Callable[[], bool] | None = None, host: str = ""
    ) -> HealthServer:
        made.append(HealthServer(host, 0, live, ready))
        made[-1].start()
        return made[-1]

    yield begin
    for server in made:
        server.stop()
        server.stop()


class Loop:
    """An owner loop like the agent's: runs what is posted, until it stalls."""

    def __init__(self) -> None:
        self.posted_calls: list[Callable[[], None]] = []
        self.posted = threading.Event()
        self.stalled = threading.Event()
        self.turns = 0
        self.over = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over:
            self.posted.wait()
            self.posted.clear()
            self.turns += 1
            while self.posted_calls and not self.stalled.is_set():
                self.posted_calls.pop()()

    def probe(self, answer: threading.Event) -> None:
        self.posted_calls.append(answer.set)
        self.posted.set()

    def close(self) -> None:
        self.over = True
        self.posted.set()
        self.thread.join()


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.close()


def test_answers(serve: Callable[..., HealthServer]) -> None:
    state = {"live": True, "ready": False}
    port = serve(lambda: state["live"], lambda: state["ready"]).port
    assert ask(port) == (200, b"")
    assert ask(port, "/healthz?verbose") == (200, b"")
    assert ask(port, "/readyz") == (503, b"")
    state.update(live=False, ready=True)
    assert ask(port) == (503, b"")
    assert ask(port, method="HEAD") == (503, b"")
    assert ask(port, "/readyz") == (200, b"")
    assert ask(port, "/etc/passwd") == (404, b"")
    assert ask(port, method="POST")[0] == 501
    assert ask(port, "/<script>" * 20000)[0] == 414


def test_a_callback_that_fails_counts_as_unhealthy(serve: Callable[..., HealthServer]) -> None:
    assert ask(serve(lambda: bool(1 / 0)).port) == (503, b"")


def test_silent_clients_delay_no_other_client(
    serve: Callable[..., HealthServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CLIENT_TIMEOUT", "HTTP_TOTAL", "_Handler.timeout"):
        monkeypatch.setattr(f"phalanx.web.health.{name}", 10 * HUNG)
    port = serve(lambda: True).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    try:
        assert ask(port) == (200, b"")
    finally:
        for one in silent:
            one.close()


def test_loopback_unless_an_address_is_given(serve: Callable[..., HealthServer]) -> None:
    own = serve(lambda: True)
    assert own._server is not None
    assert own._server.server_address[0] == "127.0.0.1"
    everywhere = serve(lambda: True, host="0.0.0.0")
    assert ask(everywhere.port) == (200, b"")
    if has_ipv6():
        assert ask(serve(lambda: True, host="::1").port, host="::1") == (200, b"")


def test_a_port_in_use_is_reported(serve: Callable[..., HealthServer]) -> None:
    taken = serve(lambda: True).port
    with pytest.raises(PhalanxError, match=f"cannot listen on 127.0.0.1:{taken}: Address already in use"):
        HealthServer("", taken, lambda: True).start()


def test_a_loop_that_responds_is_alive_and_wakes_only_for_probes(loop: Loop) -> None:
    probe = LoopProbe(loop.probe, stalled_after=0.2)
    assert probe.live()
    assert probe.live()
    assert loop.turns == 2


def test_a_stalled_loop_is_not(loop: Loop) -> None:
    probe = LoopProbe(loop.probe, stalled_after=0.3)
    loop.stalled.set()
    assert probe.live()  # it may just be busy
    wait_until(lambda: not probe.live(), "503")
    loop.stalled.clear()
    wait_until(probe.live, "200 again")


def test_a_watchdog_that_stalls(loop: Loop) -> None:
    assert LoopProbe(loop.probe, watchdog_progress=time.time).live()
    assert not LoopProbe(loop.probe, watchdog_progress=lambda: time.time() - 60).live()


def test_torchs_server() -> None:
    at = int(time.time())
    server = create_healthcheck_server(lambda: at, 0, 60)
    server.start()
    try:
        assert ask(server.port, "/") == (200, b"")
        at -= 100
        assert ask(server.port, "/") == (503, b"")
    finally:
        server.stop()


def test_timers_and_health_by_environment(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")
    services = Services()
    services.open("run", loop.probe, lambda: True)
    try:
        assert services.health is not None
        assert ask(services.health.port) == (200, b"")
        path = Path(services.environment["TORCHELASTIC_TIMER_FILE"])
        assert path.is_fifo()
        assert path.parent.stat().st_mode & 0o077 == 0
    finally:
        services.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("true", None),
        ("echo all is well; exit 0", None),
        (
            "echo 'GPU 3 has fallen off the bus' >&2; exit 3",
            "failed (exit code 3): GPU 3 has fallen off the bus",
        ),
        ("kill -9 $$", "failed (signal 9)"),
        ("no-such-program-here", "failed (exit code 127)"),
    ],
)
def test_node_check(command: str, reason: str | None) -> None:
    unfit = NodeCheck(command).run()
    assert (unfit is None) == (reason is None)
    assert reason is None or reason in str(unfit)


def test_a_node_check_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    unfit = NodeCheck(f"sleep 1000 & echo $! > {tmp_path}/pid; wait", patience=3.0).run()
    assert "did not end within 3 s" in str(unfit)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: gone(pid), "its child")


def test_a_node_check_ends_with_the_agent(tmp_path: Path) -> None:
    check = NodeCheck(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    over = threading.Event()
    check.begin(lambda _unfit: over.set())
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the check")
    check.close()
    assert over.wait(HUNG)
    assert gone(int((tmp_path / "pid").read_text()))
