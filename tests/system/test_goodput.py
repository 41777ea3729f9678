"""The goodput ledger of real jobs that are killed, against the truth that the workers write down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.job_goodput import ledgers_prefix
from phalanx.core.rounds.store_commands import Get
from phalanx.store.embedded.client import Client
from phalanx.store.net.token import Token
from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, Running, plain_environment, run, script

KILLED = """
import json, os, random, signal, sys, time
from phalanx import worker

folder, kills, length, tells = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "ready"
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
saved, log = f"{folder}/saved-{rank}", os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
tell = lambda *what: os.write(log, json.dumps(what).encode() + b"\\n")
source = random.Random(attempt)
first = int(open(saved).read()) if os.path.exists(saved) else 0
last = first + source.randrange(25, 40)
dies = rank == "0" and attempt < kills
tell("begin", time.monotonic())
if tells:
    worker.ready()
    tell("noted", time.monotonic())
for step in range(first + 1, last + 1):
    time.sleep(length * source.uniform(0.7, 1.3))
    if step == last and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    tell("step", time.monotonic(), step)
    worker.heartbeat(step)
    tell("noted", time.monotonic())
    if step % 10 == 0:
        with worker.section("checkpoint"):
            tell("noted", time.monotonic())
            time.sleep(length)
            with open(saved + ".new", "w") as file:
                file.write(str(step))
            os.replace(saved + ".new", saved)
            tell("saved", time.monotonic())
        tell("noted", time.monotonic())
if attempt < kills:
    time.sleep(1000)
os._exit(0)
"""


def truth(log: Path) -> tuple[float, int, float]:
    """The seconds of a rank that were not in vain: each step once; its starts; the seconds of doubt, those
    between its own record and the ledger's, which are many where it gets no processor just then."""
    productive, reached, before, starts, doubt = 0.0, 0, 0.0, 0, 0.0
    for line in log.read_text().splitlines():
        what, at, *step = json.loads(line)
        if what == "noted":
            doubt += at - before
            continue
        starts += what == "begin"
        if what == "step" and step[0] > reached:
            productive += at - before
            reached = step[0]
        before = at
    return productive, starts, doubt


def killed_job(tmp_path: Path, kills: int, length: float, tells: str) -> dict[str, Any]:
    words = [
        "--nproc-per-node",
        "2",
        "--max-restarts",
        str(kills),
        "--backoff",
        "0",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    steps = 40 * (kills + 1) * length  # of a rank, in seconds: a job of 50 starts takes minutes
    ended = run(
        *words,
        script(tmp_path, KILLED),
        str(tmp_path),
        str(kills),
        str(length),
        tells,
        timeout=HUNG + 5 * steps,
    )
    assert ended.code == 0, ended
    (summary,) = (tmp_path / "logs").glob("*/summary.json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return {**found, "said": ended.said}


@pytest.mark.parametrize(
    ("kills", "length", "tells"),
    [
        (3, 0.03, "ready"),
        pytest.param(50, 0.05, "ready", marks=pytest.mark.long),
        pytest.param(50, 0.05, "heartbeat", marks=pytest.mark.long),
    ],
)
def test_the_goodput_of_a_killed_job_is_the_truth(
    tmp_path: Path, kills: int, length: float, tells: str
) -> None:
    found = killed_job(tmp_path, kills, length, tells)
    goodput = found["goodput"]
    productive = doubt = 0.0
    for rank in (0, 1):
        seconds, starts, unsure = truth(tmp_path / f"log-{rank}")
        productive, doubt = productive + seconds, doubt + unsure
        assert starts == kills + 1
    total = sum(goodput["seconds"].values())
    assert abs(goodput["goodput"] - productive / total) < 0.005 + doubt / total, (found, productive, doubt)
    assert goodput["seconds"]["recomputed"] > 0.0
    assert goodput["seconds"]["checkpointing"] > 0.0
    wall = found["until"] - found["since"]
    assert total / 2 <= wall
    # Attributed time is wall time; what is left out is the launcher's own, before there is a job.
    least = max(2.0, 0.2 * wall) if kills < 50 else 0.01 * wall
    assert total / 2 > wall - least, (total / 2, wall)
    assert [one["recovery"] for one in found["incidents"]] == ["restart"] * kills
    assert all(one["over"] and one["first_step"] is not None for one in found["incidents"])
    assert found["incidents"][0]["rank"] == 0
    assert found["line"].startswith(f"goodput {100 * goodput['goodput']:.1f} %: ")
    assert f"{kills} restarts" in found["line"]


NODES = """
import os, signal, sys, time
from phalanx import worker
folder, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step = 0
while not os.path.exists(f"{folder}/end"):
    step += 1
    worker.heartbeat(step)
    if attempt == 0 and os.environ["RANK"] == "1" and os.path.exists(f"{folder}/fail"):
        sys.exit(7)
    time.sleep(0.01)
"""


def test_all_nodes_print_one_figure_and_a_lost_node_counts_as_last_known(tmp_path: Path) -> None:
    run_id, port, secret = f"together-{os.getpid()}", free_port(), "secret" * 6
    words = ["--nnodes", "2:3", "--rdzv-backend", "phalanx", "--rdzv-id", run_id, "--max-restarts", "3"]
    words += ["--backoff", "0"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    env = plain_environment(PHALANX_TOKEN=secret)
    path = script(tmp_path, NODES)

    def agent(name: str) -> Running:
        own = ["--rdzv-conf", f"last_call_timeout=30,name={name}", "--log-dir", str(tmp_path / name)]
        return Running([*words, *own, path, str(tmp_path)], env=env)

    with contextlib.ExitStack() as stack:
        one = stack.enter_context(agent("one"))  # alone, so that it hosts the store
        token = Token(secret.encode(), "the test")
        with Client("127.0.0.1", port, token=token, grace=HUNG).connect(HUNG) as client:
            two, six = (stack.enter_context(agent(name)) for name in ("two", "six"))

            def ledgers() -> int:
                return len(client.request(Get(ledgers_prefix(run_id), prefix=True)).entries)

            wait_until(lambda: ledgers() == 3, "a ledger of each node, in case it is lost")
        six.signal(signal.SIGKILL)
        wait_until(lambda: len(places(run_id, env)) == 2, "a round of the two that are left")
        (tmp_path / "fail").touch()
        wait_until(lambda: restarts(run_id, env) == 1, "a restart of both")
        (tmp_path / "end").touch()
        assert (one.end().code, two.end().code) == (0, 0)
    found = [json.loads(summary.read_text()) for summary in tmp_path.glob("*/*/summary.json")]
    assert len(found) == 2
    first, second = (one["goodput"] for one in found)
    assert {name: first[name] for name in first if name != "node"} == {
        name: second[name] for name in second if name != "node"
    }
    assert (first["of"], first["nodes"], first["lost_nodes"], first["ranks"]) == ("job", 3, 1, 2)
    own = sum(sum(each["goodput"]["node"]["seconds"].values()) for each in found)
    assert sum(first["seconds"].values()) > own + 2.0, "and what is known of the lost one"
    assert found[0]["line"] == found[1]["line"]
    assert "a restart" in found[0]["line"]
    assert found[0]["line"].endswith("(1 lost node as last known)")


def nodes_of(run_id: str, env: dict[str, str]) -> list[dict[str, Any]]:
    """The nodes of a job that are in a round whose workers have steps."""
    done = subprocess.run(
        [PHALANX[0], "status", run_id, "--json"], env=env, capture_output=True, timeout=HUNG, check=False
    )
    found = [one for one in json.loads(done.stdout or b"[]") if one["workers"]]
    return found if found and all(worker["step"] for one in found for worker in one["workers"]) else []


def places(run_id: str, env: dict[str, str]) -> dict[str, int]:
    """Node ranks by name, of a round that is complete."""
    found = {one["host"]: one["node"] for one in nodes_of(run_id, env)}
    size = {len(one["nodes"]) for one in nodes_of(run_id, env)}
    return found if size == {len(found)} else {}


def restarts(run_id: str, env: dict[str, str]) -> int:
    return min((one["restarts"] for one in nodes_of(run_id, env)), default=0)
