"""The page without a browser: what it shows, whom it lets in, and which files it reads."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.agent.logs.rotation import RotatedLog, Rotation
from phalanx.errors import UsageError
from phalanx.job import config
from phalanx.observe import snapshot
from phalanx.web.dashboard import job_feed, log_files, log_stream, page_state
from phalanx.web.dashboard.agent_link import AgentLink
from phalanx.web.dashboard.guard import COOKIE, PageGuard
from phalanx.web.dashboard.rate_history import POINTS, RateHistory
from tests.support.jobs import python_with
from tests.support.simulated_job import SimulatedJob

TOKEN = "t" * 48


# --- the option ---------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    python_with("starlette", "uvicorn")
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.parametrize(
    ("words", "variable", "where"),
    [
        ([], "", None),
        (["--dashboard"], "", ("127.0.0.1", 0)),
        (["--dashboard", "8080"], "", ("127.0.0.1", 8080)),
        (["--dashboard=8080"], "", ("127.0.0.1", 8080)),
        (["--dashboard", "0.0.0.0:80"], "", ("0.0.0.0", 80)),
        (["--dashboard", "[::1]:0"], "", ("::1", 0)),
        (["--dash", "localhost:7"], "", ("localhost", 7)),
        ([], "on", ("127.0.0.1", 0)),
        ([], "1", ("127.0.0.1", 0)),
        ([], "0", None),
        ([], "host:9", ("host", 9)),
        (["--dashboard=off"], "host:9", None),
    ],
)
def test_where_the_page_is_served(
    script: str, words: list[str], variable: str, where: tuple[str, int] | None
) -> None:
    environ = {"PHALANX_DASHBOARD": variable} if variable else {}
    job = config.parse([*words, script, "8080"], environ)
    assert job.watching.dashboard == where
    assert job.program.args[-1] == "8080", "what follows the script is the script's"
    assert job.output.tee == ("0" if where is None else "3"), "the page shows the output of files"


@pytest.mark.parametrize("value", ["=x", "=host:", "=host:70000", "=:80", "=a:b"])
def test_a_bad_address_is_refused(script: str, value: str) -> None:
    with pytest.raises(UsageError, match=r"dashboard.*write PORT or HOST:PORT"):
        config.parse([f"--dashboard{value}", script], {})


# --- what it shows ------------------------------------------------------------------------------------


def job_of(ranks: int, now: float = 1000.0, **more: Any) -> snapshot.JobSnapshot:
    told = SimulatedJob(ranks, began=400.0).snapshot(now)
    return snapshot.decode(json.dumps({**told, **more}).encode())


def test_the_sections_of_a_job() -> None:
    found = page_state.sections(job_of(24), [13])
    assert found["job"]["world"] == 24
    assert found["job"]["nodes"] == 3
    assert found["ranks"]["states"] == "tttttc" + "t" * 18
    assert found["ranks"]["slow"] == [13]
    assert found["ranks"]["failed"] == [21]
    assert [node["host"] for node in found["nodes"]] == ["gpu-000", "gpu-001", "gpu-002"]
    assert found["incidents"][0]["stages"]["first_step"] == 2.1
    assert "uncorrectable ECC" in found["cause"]["text"]
    assert found["goodput"]["ratio"] == pytest.approx(0.96, abs=0.01)
    detail = page_state.rank_detail(job_of(24), 13, None)
    assert detail is not None
    assert (detail["host"], detail["pid"], detail["rate"]) == ("gpu-001", 10013, 2.0)
    assert page_state.rank_detail(job_of(24), 24, None) is None


def test_hosts_that_are_kept_out_are_listed() -> None:
    assert page_state.sections(job_of(8, quarantine=[]), [])["quarantine"] == []
    out = [
        {"host": "gpu-7", "reason": "its node was lost", "left": 59.0},
        {"host": "gpu-8", "reason": "XID 79"},
    ]
    assert page_state.sections(job_of(8, quarantine=out), [])["quarantine"] == [
        "gpu-7: its node was lost (for another 59.0 s)",
        "gpu-8: XID 79 (until removed)",
    ]
    many = [{"host": f"n{number}"} for number in range(1000)]
    found = page_state.sections(job_of(8, quarantine=many), [])["quarantine"]
    assert len(found) == 20
    assert found[-1] == "981 more hosts: see phalanx quarantine"


def test_ranks_whose_node_is_silent_are_shown_as_not_known() -> None:
    found = page_state.sections(job_of(24, peers=[], silent=2), [])
    assert found["ranks"]["states"] == "tttttctt" + "." * 16
    assert found["job"]["silent"] == 2


def test_ranks_that_no_world_has_do_no_harm() -> None:
    """Any process may answer in a job's name; numbers are bounded before they become memory."""
    workers = [{"rank": rank, "state": "ready"} for rank in (-1, 2**50, 3)]
    job = job_of(8, workers=workers, world_size=2**50, peers=[])
    assert page_state.world_of(job) == page_state.RANKS
    found = page_state.sections(job, [])
    assert found["ranks"]["states"].count("t") == 1
    RateHistory().add(1.0, page_state.beats(job), page_state.world_of(job))


def test_a_straggler_stands_out() -> None:
    rates = RateHistory()
    for second in range(8):
        rates.add(float(second), page_state.beats(job_of(24, 1000.0 + second)), 24)
    assert rates.typical() == pytest.approx(5.0, rel=0.2)
    assert rates.slow() == [13]
    lines: dict[str, Any] = rates.lines()
    assert [one["rank"] for one in lines["ranks"]] == [13], "of many ranks, the slow ones are drawn"
    assert lines["low"][-1] < lines["middle"][-1]


def test_rates_over_time() -> None:
    rates = RateHistory()
    rates.add(0.0, [(0, 10, 0.0), (1, None, 0.0)], 2)
    assert rates.current() == [None, None]
    rates.add(1.0, [(0, 14, 1.0), (1, None, 0.0)], 2)
    assert rates.current() == [4.0, None]
    rates.add(2.0, [(0, 14, 1.0)], 2)
    assert rates.current() == [4.0, None], "no new heartbeat yet"
    rates.add(9.0, [(0, 14, 1.0)], 2)
    assert rates.current() == [0.0, None], "none for a long time"
    rates.add(10.0, [(0, 3, 10.0)], 2)
    assert rates.current() == [None, None], "a restart begins anew"
    rates.add(11.0, [(0, 5, 11.0), (2**40, 5, 11.0)], 1)
    assert rates.current() == [2.0]
    for at in range(3 * POINTS):
        rates.add(20.0 + at, [(0, at, 20.0 + at)], 1)
    assert len(rates.times) == POINTS


def test_ranks_of_a_filter() -> None:
    assert log_stream.parse_ranks("", 3) == [0, 1, 2]
    assert log_stream.parse_ranks("0,3-5", 100) == [0, 3, 4, 5]
    assert log_stream.parse_ranks("5-4000", 4096) == list(range(5, 5 + log_stream.RANKS))
    for bad in ("a", "1-", "0-999999999999", "-1", "1--2", "٣", "1" * 2000):
        with pytest.raises(ValueError, match=r"write 0,3-7|too long"):
            log_stream.parse_ranks(bad, 8)


# --- the feed -----------------------------------------------------------------------------------------


def test_it_asks_only_while_somebody_looks() -> None:
    async def look() -> None:
        source = SimulatedJob(4)
        feed = job_feed.JobFeed(source)
        assert not source.asked
        events = feed.watch()
        first = await anext(events)
        told = json.loads(first.removeprefix(b"event: state\ndata: "))
        assert set(told) >= {"job", "ranks", "nodes", "incidents", "cause", "goodput", "rates"}
        await feed.end("FAILED", 3, "boom")
        last = [event async for event in events][-1]
        assert b'"end":{"outcome":"FAILED","exit_code":3,"why":"boom"}' in last, "and the stream ends"
        assert feed.viewers == 0
        asked = len(source.asked)
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
        assert len(source.asked) <= asked + 1

    asyncio.run(look())


def test_too_many_viewers_end_the_oldest() -> None:
    async def look() -> None:
        feed = job_feed.JobFeed(SimulatedJob(1))
        streams = [feed.watch() for _ in range(job_feed.VIEWERS + 3)]
        for stream in streams:
            await anext(stream)
        assert feed.viewers == job_feed.VIEWERS
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        assert feed.viewers == 0

    asyncio.run(look())


def test_looks_cost_the_agent_at_most_a_percent() -> None:
    async def look() -> None:
        source, used = SimulatedJob(1), 0.0

        def time_used() -> float:
            nonlocal used
            used += 0.025
            return used

        source.time_used = time_used  # type: ignore[method-assign]
        feed = job_feed.JobFeed(source)
        for _ in range(20):
            await feed.look()
        assert feed.pause == pytest.approx(6.25, rel=0.05)

    asyncio.run(look())


# --- whom it lets in ----------------------------------------------------------------------------------


class Answer(msgspec.Struct):
    status: int = 0
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")


def ask(
    path: str = "/",
    query: str = "",
    method: str = "GET",
    host: str = "127.0.0.1:8080",
    served: str = "127.0.0.1",
    token: str = TOKEN,
    **headers: str,
) -> Answer:
    """What the guard answers; 299 if the request gets through."""

    async def behind(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": [(b"cache-control", b"public")]})
        await send({"type": "http.response.body", "body": b"in"})

    answer = Answer()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], message["headers"]
        else:
            answer.body += message.get("body", b"")

    sent = [(b"host", host.encode())] if host else []
    sent += [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": sent}
    with pytest.raises(StopIteration):  # nothing in it waits, so it needs no loop
        PageGuard(behind, token, served)(scope, None, send).send(None)
    return answer


@pytest.fixture(scope="module")
def cookie() -> str:
    answer = ask(query=f"token={TOKEN}")
    assert answer.status == 200
    value = answer.header(b"set-cookie").decode()
    assert value.endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert TOKEN not in value
    assert TOKEN.encode() not in answer.body
    return value.partition(";")[0]


ROUTES = ("/", "/static/page.js", "/api/events", "/api/rank/0", "/api/logs", "/api/file", "/api/drain", "/no")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "ANY")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", METHODS)
def test_every_route_and_method_asks_for_the_token(path: str, method: str, cookie: str) -> None:
    wrong = cookie[:-1] + ("0" if cookie[-1] != "0" else "1")
    for attempt in (
        "",
        f"{cookie.partition('=')[0]}=",
        f"{cookie.partition('=')[0]}={TOKEN}",
        wrong,
        f"{cookie}0",
        f"x{cookie}",
        f"a=b; {wrong}",
    ):
        answer = ask(path, method=method, cookie=attempt, origin="http://127.0.0.1:8080")
        assert answer.status == 401, attempt
    for query in ("", "token=", f"token={TOKEN[:-1]}", f"token={TOKEN}x", f"x={TOKEN}", "token=%ff", "token"):
        assert ask(path, query, method, origin="http://127.0.0.1:8080").status == 401, query
    if path != "/":
        assert ask(path, f"token={TOKEN}", method).status == 401, "the link opens the page, and nothing else"
    allowed = ask(path, method=method, cookie=cookie, origin="http://127.0.0.1:8080").status
    assert allowed == (299 if method in ("GET", "HEAD", "POST") else 405)


@pytest.mark.parametrize(
    ("host", "served", "lets_in"),
    [
        ("127.0.0.1:8080", "127.0.0.1", True),
        ("localhost:1", "127.0.0.1", True),
        ("[::1]:8080", "::1", True),
        ("10.1.2.3", "0.0.0.0", True),
        (os.uname().nodename, "0.0.0.0", True),
        ("node7:80", "node7", True),
        ("evil.example:8080", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil.example:80@127.0.0.1", "127.0.0.1", False),
        ("localhost:80@evil.com", "127.0.0.1", False),
        ("127.0.0.1:80@evil.com", "127.0.0.1", False),
        ("[::1]@evil.com", "127.0.0.1", False),
        ("[::1].evil.com:80", "127.0.0.1", False),
        ("[localhost]", "127.0.0.1", False),
        ("localhost:", "127.0.0.1", False),
        (":80", "127.0.0.1", False),
        ("", "127.0.0.1", False),
    ],
)
def test_names_of_other_sites_are_refused(host: str, served: str, lets_in: bool, cookie: str) -> None:
    assert ask(host=host, served=served, cookie=cookie).status == (299 if lets_in else 421)


@pytest.mark.parametrize(
    ("method", "origin", "code"),
    [
        ("GET", "", 299),
        ("POST", "", 403),
        ("POST", "http://127.0.0.1:8080", 299),
        ("POST", "http://127.0.0.1:8081", 403),
        ("POST", "https://127.0.0.1:8080", 403),
        ("POST", "null", 403),
        ("GET", "http://evil.example", 403),
        ("GET", "null", 403),
    ],
)
def test_requests_of_other_sites_are_refused(method: str, origin: str, code: int, cookie: str) -> None:
    more = {"origin": origin} if origin else {}
    assert ask(method=method, cookie=cookie, **more).status == code


def test_the_cookies_of_two_pages_do_not_replace_each_other(cookie: str) -> None:
    other = ask(query="token=other", token="other").header(b"set-cookie").decode().partition(";")[0]
    assert cookie.startswith(COOKIE)
    assert other.startswith(COOKIE)
    assert other.partition("=")[0] != cookie.partition("=")[0]
    for sent in (f"{cookie}; {other}", f"{other}; x=y; {cookie}"):
        assert (ask(cookie=sent).status, ask(cookie=sent, token="other").status) == (299, 299)
    assert ask(cookie=other).status == 401


def test_every_answer_has_the_policy(cookie: str) -> None:
    answers = [ask(), ask(query=f"token={TOKEN}"), ask(cookie=cookie), ask(host="evil"), ask(method="PUT")]
    for answer in answers:
        policy = answer.header(b"content-security-policy").decode()
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.header(b"cache-control") == b"no-store"
        assert answer.header(b"x-content-type-options") == b"nosniff"
        assert answer.header(b"referrer-policy") == b"no-referrer"


def test_the_page_brings_everything_along() -> None:
    """No address of another site and no script in the markup; text becomes text, never markup."""
    folder = Path(page_state.__file__).parent / "static"
    for file in folder.iterdir():
        text = file.read_text()
        assert not [word for word in ("https://", "//cdn", "@import") if word in text], file.name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), file.name
        for bad in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert bad not in text, f"{file.name}: {bad}"
    page = (folder / "index.html").read_text()
    assert page.count("<script") == 1
    assert " on" not in "".join(part.partition(">")[0] for part in page.split("<")).replace(" one", "")


# --- log files ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "attempt_0" / "1").mkdir(parents=True)
    (folder / "attempt_0" / "1" / "stdout.log").write_text("hello\n")
    (folder / "attempt_0" / "1" / "error.json").write_text("{}")
    (folder / "attempt_10" / "0").mkdir(parents=True)
    (folder / "attempt_10" / "0" / "stderr.log").write_text("late\n")
    (tmp_path / "secret").write_text("secret\n")
    (folder / "attempt_0" / "1" / "stderr.log").symlink_to(tmp_path / "secret")
    (folder / "attempt_1").symlink_to(tmp_path)
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "stdout.log").write_text("secret\n")
    (folder / "attempt_2" / "0").mkdir(parents=True)
    os.mkfifo(folder / "attempt_2" / "0" / "stdout.log")
    return folder


def test_log_files(run: Path) -> None:
    assert log_files.read_end(str(run), "attempt_0/1/stdout.log") == b"hello\n"
    names = [one["name"] for one in log_files.list_files(str(run))]
    assert names[0] == "attempt_10/0/stderr.log"
    assert "attempt_0/1/stdout.log" in names
    assert not [name for name in names if "error" in str(name)]
    (run / "attempt_0" / "1" / "stdout.log").write_bytes(b"x" * (log_files.LONGEST + 5))
    assert len(log_files.read_end(str(run), "attempt_0/1/stdout.log") or b"") == log_files.LONGEST


def test_a_rotated_log_is_listed_and_read_without_its_hole(run: Path) -> None:
    path = run / "attempt_0" / "1" / "stdout.log"
    path.write_bytes(b"old\n" * 2000 + b"new\n" * 300)
    log = RotatedLog(str(path), Rotation(8000))
    assert log.move_front(9000)
    log.close()
    found = {one["name"]: one["size"] for one in log_files.list_files(str(run))}
    part = "attempt_0/1/stdout.log.000000000000000"
    assert found[part] == 8000
    assert 1200 <= int(str(found["attempt_0/1/stdout.log"])) < 9200, "a hole has no size, up to a block"
    assert log_files.read_end(str(run), part) == b"old\n" * 2000
    assert log_files.read_end(str(run), "attempt_0/1/stdout.log") == b"new\n" * 300


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "/etc/passwd", "../secret", "attempt_0/../../secret", "attempt_0/1/../1/stdout.log",
        "attempt_0/1/error.json", "attempt_0/1/stdout.log/", "attempt_0//1/stdout.log",
        "attempt_0/1/stdout.log\x00", "attempt_0/1/stdout.log\n", "attempt_0/1/stderr.log",
        "attempt_1/0/stdout.log", "attempt_2/0/stdout.log", "attempt_٠/1/stdout.log", "%2e%2e/secret",
        "attempt_0/1/stdout.log.000001", "attempt_9/9/stdout.log", "attempt_00/1/stdout.log",
        f"attempt_{'9' * 10_000}/1/stdout.log", "attempt_0.0/1/stdout.log", "attempt_-1/1/stdout.log",
    ],
)  # fmt: skip
def test_nothing_but_log_files_is_read(run: Path, name: str) -> None:
    assert log_files.read_end(str(run), name) is None
    assert log_files.read_end("", name) is None


# --- scale --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_4096_ranks_cost_the_agent_less_than_a_percent() -> None:
    """A viewer looks for a minute; the agent's own processor time, by the kernel's account."""
    command = [sys.executable, "-m", "tests.support.simulated_job", "4096", "agent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            link = AgentLink("\0" + agent.stdout.readline().strip(), agent.pid)

            async def look() -> tuple[float, float]:
                feed = job_feed.JobFeed(link)
                for _ in range(8):  # until it knows what a look costs
                    await feed.look()
                events = feed.watch()
                begin, used = time.monotonic(), link.time_used()
                while time.monotonic() < begin + 60:
                    await anext(events)
                share = (link.time_used() - used) / (time.monotonic() - begin)
                await events.aclose()  # type: ignore[attr-defined]
                return share, feed.pause

            share, pause = asyncio.run(look())
            print(f"{100 * share:.2f} % of a processor, a look every {pause:.1f} s")
            assert share < 0.01
        finally:
            agent.kill()
