"""`phalanx logs -f` over restarts, rotation and nodes, and `phalanx drain RUN`, for real jobs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from phalanx.cli.logs import RemoteLogs
from phalanx.observe.local_agents import LocalAgent, find
from phalanx.store.embedded.client import Client
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, Running, plain_environment, script

LINES = """
import os, sys, time
from phalanx import worker
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
count = 0
worker.heartbeat(1)
while True:
    wanted = f"{folder}/until-{rank}"
    until = int(open(wanted).read() or 0) if os.path.exists(wanted) else 0
    while count < until:
        count += 1
        print(f"line {rank} {attempt} {count}", flush=True)
    for code, name in ((1, f"fail-{rank}-{attempt}"), (0, "end")):
        if os.path.exists(f"{folder}/{name}"):
            print(f"last {rank} {attempt}", end="", flush=True)
            sys.exit(code)
    time.sleep(0.02)
"""


def write(path: Path, text: str) -> None:
    """At once: a reader never sees half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def shown(text: str, rank: int, attempt: int) -> list[int]:
    """The numbers of a rank's lines, as they came."""
    return [
        int(found) for found in re.findall(rf"^\[\S*(?: \S+)?\]  line {rank} {attempt} (\d+)$", text, re.M)
    ]


def follow(run: str, env: dict[str, str], *words: str) -> Running:
    return Running([run, "-f", *words], launcher=[PHALANX[0], "logs"], env=env)


def test_logs_are_followed_over_a_restart_and_a_rotation_to_the_end(tmp_path: Path) -> None:
    run, env = f"followed-{os.getpid()}", plain_environment(XDG_STATE_HOME=str(tmp_path / "state"))
    words = ["--nproc-per-node", "2", "--rdzv-id", run, "--redirects", "3", "--max-restarts", "1"]
    words += ["--log-dir", str(tmp_path / "logs"), "--log-rotate", "4k:100", "--backoff", "0"]
    with Running([*words, script(tmp_path, LINES), str(tmp_path)], env=env) as job:
        write(tmp_path / "until-1", "1000")
        wait_until(lambda: any((tmp_path / "logs").glob("*/attempt_0/1/stdout.log*")), "a log")
        events = Running([run, "--events", "-f"], launcher=[PHALANX[0], "logs"], env=env)
        with follow(run, env, "--rank", "1") as one, follow(run, env, "--grep", "^last|1 7$") as few, events:
            one.read_until("line 1 0 1000\n")
            write(tmp_path / "until-1", "1200")
            one.read_until("line 1 0 1200\n")
            (tmp_path / "fail-1-0").touch()
            one.read_until("line 1 1 1200\n")
            (tmp_path / "end").touch()
            assert job.end().code == 0
            assert (one.end().code, few.end().code, events.end().code) == (0, 0, 0)
    assert shown(one.text, 1, 0) == list(range(1, 1201))
    assert shown(one.text, 1, 1) == list(range(1, 1201))
    assert "[1]  last 1 0\n" in one.text, "a line without an end, before a restart"
    assert one.text.endswith("[1]  last 1 1\n")
    assert "[0]" not in one.text
    assert "rank 1: exit code 1; restart 1 of 1" in events.text
    assert "incident 1 (restart): " in events.text
    assert {line for line in few.text.splitlines() if "line" in line} == {"[1]  line 1 1 7"}
    assert "[0]  last 0 1\n" in few.text


def test_logs_of_another_node_are_followed_and_a_node_is_drained(tmp_path: Path) -> None:
    run, port = f"apart-{os.getpid()}", free_port()
    env = plain_environment(PHALANX_TOKEN="secret" * 6, XDG_STATE_HOME=str(tmp_path / "state"))
    words = ["--nnodes", "1:2", "--rdzv-backend", "phalanx", "--rdzv-id", run, "--redirects", "3"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "2", "--backoff", "0"]
    path = script(tmp_path, LINES)

    def agent(name: str) -> Running:
        own = ["--rdzv-conf", f"last_call_timeout=30,name={name}", "--log-dir", str(tmp_path / name)]
        return Running([*words, *own, path, str(tmp_path)], env=env)

    def here(*names: str) -> list[LocalAgent]:
        return [one for one in find()[0] if one.job.run == run and one.job.host in names and one.job.workers]

    with agent("one") as one:
        Client("127.0.0.1", port, token=Token(b"secret" * 6, "the test")).connect(HUNG).close()
        with agent("two") as two:
            wait_until(lambda: len(here("one", "two")) == 2, "both nodes")
            (rank,) = (worker.rank for worker in here("two")[0].job.workers)
            # As if the other node were on another machine, where its files cannot be read.
            remote, seen = RemoteLogs(here("one"), None, ""), ""

            def read(what: str) -> bool:
                nonlocal seen
                lines = remote.lines()
                assert {line.host for line in lines} <= {"two"}
                seen += "".join(f"[{line.host} {line.rank}]  {line.text}\n" for line in lines)
                return f"{what}\n" in seen

            write(tmp_path / f"until-{rank}", "20000")  # more than an answer holds
            wait_until(lambda: read(f"line {rank} 0 20000"), "the lines of the other node")
            (tmp_path / f"fail-{rank}-0").touch()
            wait_until(lambda: read(f"line {rank} 1 20000"), "its lines after the restart")
            first, again = shown(seen, rank, 0), shown(seen, rank, 1)
            assert first == list(range(first[0], 20001)), "the end of the file, then everything"
            assert again == list(range(1, 20001))
            assert f"[two {rank}]  last {rank} 0\n" in seen
            with follow(run, env, "--node", "two") as reader:
                reader.read_until(f"line {rank} 1 20000\n")
                assert "choose one with --node: one two" in told(env, 2, run)
                assert "--node three: not on this machine (one two)" in told(env, 1, run, "--node", "three")
                assert "one holds the job's store" in told(env, 1, run, "--node", "one")
                assert "two leaves the job; the others go on" in told(env, 0, run, "--node", "two")
                assert two.end().code == 0
                wait_until(lambda: here("one") and here("one")[0].job.nodes == ["one"], "the other alone")
                assert here("one")[0].job.restarts == 1
                (tmp_path / "end").touch()
                assert one.end().code == 0
                assert reader.end().code == 0
            assert "[0]" not in reader.text or rank == 0


def told(env: dict[str, str], code: int, *words: str) -> str:
    """What `phalanx drain` says."""
    done = subprocess.run(
        [PHALANX[0], "drain", *words], env=env, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert done.returncode == code, done
    return done.stdout + done.stderr
