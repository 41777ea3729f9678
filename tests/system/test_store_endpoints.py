"""Health and metrics of `phalanx store`."""

from __future__ import annotations

import re
import signal
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from phalanx.core.rounds.store_commands import Grant, Put
from phalanx.errors import StoreAuthError
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from phalanx.web import health
from phalanx.web.store_metrics import store_endpoints
from tests.conftest import HUNG
from tests.support.prometheus_process import check_metrics, needs_client
from tests.support.run_helpers import PHALANX, Running, plain_environment

TOKEN = Token(b"a token of more than thirty-two bytes", "this test")
STORE = (PHALANX[0], "store")


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HUNG) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def page(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HUNG) as answer:
        text = answer.read().decode()
    assert check_metrics(text) == ""
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }


def test_a_store_serves_health_and_metrics_of_all_its_jobs(tmp_path: Path) -> None:
    needs_client()
    words = ["--listen", "127.0.0.1:0", "--journal", str(tmp_path / "journal")]
    words += ["--health-listen", "0", "--metrics"]
    environ = {**plain_environment(), "PHALANX_TOKEN": TOKEN.secret.decode()}
    with Running(words, launcher=STORE, env=environ) as store:
        store.read_until("\n")
        found = re.search(r"listening on 127.0.0.1:(\d+), .*health at 127.0.0.1:(\d+)", store.text)
        assert found is not None
        port, health_port = int(found[1]), int(found[2])
        assert (status(health_port, "/healthz"), status(health_port, "/readyz")) == (200, 200)
        with Client("127.0.0.1", port, token=TOKEN) as client:
            lease = client.request(Grant(60.0)).number
            for key in ("job/a/node/1", "job/a/node/2", "job/b/node/1", "job/b/ctl/ask", "else/node/1"):
                client.request(Put(key, b"", lease))
            stranger = Client("127.0.0.1", port, token=Token(b"wrong", "this test"))
            with closing(stranger), pytest.raises(StoreAuthError):
                stranger.connect(HUNG)
            shown = page(health_port)
        assert shown['phalanx_store_job_nodes{run_id="a"}'] == 2
        assert shown['phalanx_store_job_nodes{run_id="b"}'] == 1
        assert (shown["phalanx_store_clients"], shown["phalanx_store_leases"]) == (1, 1)
        assert (shown["phalanx_store_keys"], shown['phalanx_store_commands_total{command="put"}']) == (5, 5)
        assert shown["phalanx_store_refused_total"] == 1
        assert shown["phalanx_store_journal_bytes"] > 0
        store.process.send_signal(signal.SIGTERM)
        assert store.process.wait(HUNG) == 0


def test_a_stalled_store_is_unhealthy_until_it_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health.LoopProbe.__init__, "__defaults__", (None, 0.0))  # no patience
    stalled, go_on = threading.Event(), threading.Event()
    with Server(token=TOKEN) as server:
        endpoints = store_endpoints(server, "", 0, metrics=False)
        endpoints.start()
        try:
            assert status(endpoints.port, "/metrics") == 404

            def stall() -> None:
                stalled.set()
                go_on.wait(HUNG)

            server.post(stall)
            assert stalled.wait(HUNG)
            try:
                assert status(endpoints.port, "/healthz") == 503
            finally:
                go_on.set()
            with Client(*server.address, token=TOKEN) as client:
                client.put("k", b"")  # it responds again
            while status(endpoints.port, "/healthz") != 200:
                pass  # one that waited for more than 50 ms on a busy machine
        finally:
            endpoints.stop()


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--metrics"], 2, "--metrics is served at --health-listen; add --health-listen"),
        (["--health-listen", "x"], 2, "--health-listen: x: not an address; write PORT or HOST:PORT"),
        (["--health-listen", "192.0.2.1:1"], 1, "health: cannot listen on 192.0.2.1:1"),
    ],
)
def test_an_address_that_cannot_be(words: list[str], code: int, line: str, tmp_path: Path) -> None:
    environ = {**plain_environment(), "PHALANX_TOKEN": TOKEN.secret.decode()}
    with Running(["--listen", "127.0.0.1:0", *words], launcher=STORE, env=environ) as store:
        store.read_until(line)
        assert store.process.wait(HUNG) == code
