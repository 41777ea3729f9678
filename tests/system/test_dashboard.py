"""The page of a real job, through its port: whom it lets in, what it tells, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import HUNG, gone, wait_until
from tests.support.jobs import python_with
from tests.support.run_helpers import PHALANX, Running, plain_environment, run, script

WORKER = """
import os, sys, time
rank = int(os.environ["RANK"])
print("", "ready", rank, os.getpid(), flush=True)
print("<script>alert(1)</script>", file=sys.stderr, flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def packages() -> None:
    python_with("starlette", "uvicorn")


class Page:
    """The page as a client sees it."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.address = link.removeprefix("http://").partition("/")[0]
        self.token = link.rpartition("=")[2]
        status, headers, _ = self.ask(f"/?token={self.token}", cookie="")
        assert status == 200
        self.cookie = headers["set-cookie"].partition(";")[0]

    def connect(self) -> http.client.HTTPConnection:
        host, _, port = self.address.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=HUNG)

    def ask(
        self, path: str, method: str = "GET", cookie: str | None = None, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        client = self.connect()
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            sent["Cookie"] = self.cookie if cookie is None else cookie
            data = None
            if body is not None:
                data = json.dumps(body)
                sent.setdefault("Content-Type", "application/json")
            client.request(method, path, data, sent)
            answer = client.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            client.close()

    @contextmanager
    def events(self, path: str = "/api/events") -> Iterator[Iterator[dict[str, object]]]:
        client = self.connect()
        try:
            client.request("GET", path, headers={"Cookie": self.cookie})
            answer = client.getresponse()
            assert answer.status == 200
            yield (json.loads(line[6:]) for line in iter(answer.readline, b"") if line.startswith(b"data: "))
        finally:
            client.close()


def link_of(job: Running) -> str:
    """As a person gets it where the launcher's lines go to a file."""
    job.read_until("; its link: phalanx status ")
    found = subprocess.run(
        [PHALANX[0], "status", "--link"],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    links = [line for line in found.stdout.splitlines() if line.startswith("http://")]
    mine = [line for line in links if line.partition("/?")[0] in job.text]
    assert len(mine) == 1, found
    return mine[0]


def page_process(agent: int) -> int:
    found = [
        c.pid for c in psutil.Process(agent).children() if "phalanx.web.dashboard" in " ".join(c.cmdline())
    ]
    assert len(found) == 1
    return found[0]


def test_the_page_of_a_job(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    words = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--backoff",
        "0",
        "--log-dir",
        str(logs),
        "--dashboard",
    ]
    with Running([*words, script(tmp_path, WORKER)]) as job:
        workers = job.workers(2)
        page = Page(link_of(job))
        process = page_process(job.agent)
        # No secret where others, or the job itself, can read it.
        assert page.token not in job.text
        for one in psutil.Process(job.agent).children(recursive=True):
            assert page.token not in " ".join(one.cmdline())
            assert page.token not in json.dumps(one.environ())
        # Every route and method.
        for path in ("/", "/static/page.js", "/api/events", "/api/rank/0", "/api/files", "/api/drain", "/x"):
            assert page.ask(path, cookie="")[0] == 401
        for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert page.ask("/api/drain", method, f"{page.cookie.partition('=')[0]}={page.token}")[0] == 401
        assert page.ask("/", Host="evil.example")[0] == 421
        assert page.ask("/", Origin="http://evil.example")[0] == 403
        assert page.ask("/api/drain", "POST", body={"node": "", "confirm": True})[0] == 403
        own = {"Origin": f"http://{page.address}"}
        assert page.ask("/api/drain", "POST", body={"node": ""}, **own)[0] == 400
        assert page.ask("/api/drain", "POST", body=[1], **own)[0] == 400
        assert page.ask("/api/drain", "POST", body="x" * 10000, **own)[0] == 413
        assert page.ask("/api/stacks", "POST", body={}, Content_Type="text/plain", **own)[0] == 415
        assert page.ask("/api/drain", "PUT", **own)[0] == 405
        for path in (
            "/static/../pages.py",
            "/static/%2e%2e%2fpages.py",
            "/api/file?name=../../x",
            "/api/rank/7",
        ):
            assert page.ask(path)[0] == 404
        # What it tells.
        assert page.ask("/")[2].startswith(b"<!doctype html>")
        with page.events() as events:
            assert any(one["ranks"]["states"] == "rr" for one in events if "ranks" in one)  # type: ignore[index]
            detail = json.loads(page.ask("/api/rank/1")[2])
            assert detail["pid"] == workers[1]
            os.kill(workers[1], signal.SIGKILL)
            told = next(one for one in events if one.get("incidents"))
            assert told["incidents"][0]["rank"] == 1  # type: ignore[index]
            assert told["incidents"][0]["reason"].startswith("rank 1: SIGKILL")  # type: ignore[index]
            cause = told.get("cause") or next(one["cause"] for one in events if one.get("cause"))
            assert "SIGKILL" in cause["text"]  # type: ignore[index]
        with page.events("/api/logs?ranks=1") as events:
            lines = next(events)
            assert [1, "stderr", "<script>alert(1)</script>"] in lines
            assert all(rank == 1 for rank, *_ in lines)
        assert page.ask("/api/logs?ranks=x")[0] == 400
        names = [one["name"] for one in json.loads(page.ask("/api/files")[2])["files"]]
        assert "attempt_0/1/stderr.log" in names
        assert page.ask("/api/file?name=attempt_0/1/stderr.log")[2] == b"<script>alert(1)</script>\n"
        stacks = json.loads(page.ask("/api/stacks", "POST", body={}, **own)[2])["stacks"]
        assert [one["rank"] for one in stacks] == [0, 1]
        # A drain, which ends the only node; the viewer learns how it ended.
        with page.events() as events:
            assert (
                b"leaves the job"
                in page.ask("/api/drain", "POST", body={"node": "", "confirm": True}, **own)[2]
            )
            ended = next(one["end"] for one in events if one.get("end"))
            assert ended["exit_code"] == 0  # type: ignore[index]
        assert job.end().code == 0
        assert gone(process)
    for file in logs.rglob("*"):
        assert not file.is_file() or page.token not in file.read_text(errors="replace")


def test_connections_that_were_refused_do_not_keep_the_owner_out(tmp_path: Path) -> None:
    """More of them than the page has room for, kept open, each with an answer of 401."""
    with Running(["--dashboard", script(tmp_path, WORKER)]) as job, ExitStack() as held:
        page = Page(link_of(job))

        def refused() -> bool:
            client = page.connect()
            held.callback(client.close)
            try:
                client.request("GET", "/")
                return client.getresponse().status == 401
            except OSError:  # closed by the page
                return False

        assert sum(refused() for _ in range(300)) > 256
        for _ in range(20):
            refused()
            assert page.ask("/")[0] == 200
        job.signal(signal.SIGTERM)
        job.end()


def test_the_page_ends_with_the_agent_and_the_job_goes_on_without_it(tmp_path: Path) -> None:
    worker = script(tmp_path, WORKER)
    with Running(["--nproc-per-node", "1", "--dashboard", worker]) as job:
        job.workers(1)
        page = Page(link_of(job))
        process = page_process(job.agent)
        # A crowd that sends nothing: a viewer is served meanwhile, and it holds nothing but descriptors.
        crowd = []
        try:
            host, _, port = page.address.rpartition(":")
            crowd = [socket.create_connection((host, int(port)), timeout=HUNG) for _ in range(1000)]
            assert page.ask("/")[0] == 200
            with page.events() as events:
                assert next(events)
            assert psutil.Process(process).num_fds() < 400
        finally:
            for one in crowd:
                one.close()
        # Nobody looks: nothing wakes the agent, when it has done what it does in its first seconds. A page
        # that asks every second would wake it twice as often.
        assert any(wakes_in(2.5, job.agent) <= 3 for _ in range(8))
        # Stopped, it still goes with the agent, however that ends.
        os.kill(process, signal.SIGSTOP)
        job.signal(signal.SIGKILL)
        wait_until(lambda: gone(process), "the end of the page")
    with Running(["--nproc-per-node", "1", "--dashboard", worker], terminal=True) as job:
        link = job.read_until("?token=").partition("dashboard: ")[2]
        while "\n" not in link:
            job.read_on()
            link = job.text.partition("dashboard: ")[2]
        assert Page(link.split()[0])
        process = page_process(job.agent)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: gone(process), "the end of the page")
        job.signal(signal.SIGTERM)
        assert job.end().code == 143


def wakes_in(seconds: float, pid: int) -> int:
    before = wakes(pid)
    select.select([], [], [], seconds)
    return wakes(pid) - before


def wakes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_an_address_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    worker = script(tmp_path, WORKER)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--dashboard", f"127.0.0.1:{taken.getsockname()[1]}", worker)
    assert ended.code == 2
    assert "cannot listen there: Address already in use; choose another address" in ended.err
    assert "ready" not in ended.out


def test_the_socket_of_another_user_is_not_asked(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can be two users")
    import asyncio

    from phalanx.web.dashboard.agent_link import AgentGone, AgentLink

    name = f"\0phalanx-test-{os.urandom(8).hex()}"
    serve = (
        "import os, socket, sys; os.setresuid(65534, 65534, 65534); s = socket.socket(socket.AF_UNIX); "
        f"s.bind({name!r}); s.listen(); print('up', flush=True); p, _ = s.accept(); "
        "print(p.recv(99), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        with pytest.raises(AgentGone, match="another user"):
            asyncio.run(AgentLink(name, os.getpid()).ask({"ask": "status"}))
        assert other.stdout.readline() == b"b''\n", "it was told nothing"
