"""`phalanx status`, `logs` and `stacks` of a job on other machines, through its store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, Running, plain_environment, script
from tests.system.test_job_commands import STEPS, told

TOKEN = "secret" * 6


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without agents: in a namespace of its own, it finds none."""
    return plain_environment(
        PHALANX_TOKEN=TOKEN, PHALANX_NAMESPACE=f"elsewhere-{os.urandom(4).hex()}", HOME=str(tmp_path)
    )


@contextmanager
def job_of_two(folder: Path, port: int, run: str) -> Iterator[list[Running]]:
    """Nodes `ann` and `bob` at a store that outlives them."""
    env = plain_environment(PHALANX_TOKEN=TOKEN, XDG_STATE_HOME=str(folder / "state"))
    words = ["--nnodes", "2", "--rdzv-backend", "phalanx", "--rdzv-id", run, "--max-restarts", "1"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--redirects", "3", "--log-dir", str(folder / "logs")]
    path = script(folder, STEPS)
    ann = [*words, "--rdzv-conf", "is_host=0,name=ann", path]
    bob = [*words, "--rdzv-conf", "is_host=0,name=bob", path]
    with Running(ann, env=env) as one, Running(bob, env=env) as two:
        yield [one, two]


@contextmanager
def store(port: int, env: dict[str, str]) -> Iterator[Running]:
    with Running(["--listen", f"127.0.0.1:{port}"], launcher=[PHALANX[0], "store"], env=env) as found:
        found.read_until("listening")
        yield found


def test_a_job_is_seen_from_a_machine_without_an_agent(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    port = free_port()
    at = ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    with store(port, elsewhere), job_of_two(tmp_path, port, "fleet") as nodes:

        def ready() -> bool:
            if "ann" not in told("status", *at, "--json", env=elsewhere, code=None):
                return False
            (job,) = json.loads(told("status", *at, "--json", env=elsewhere))
            workers = [worker for node in (job, *job["peers"]) for worker in node["workers"]]
            return len(workers) == 2 and all(worker["step"] for worker in workers)

        wait_until(ready, "steps of both nodes")
        assert "no job" in told("status", env=elsewhere, code=1), "there is no agent on this machine"
        shown = told("status", "flee", *at, env=elsewhere)
        assert {" on ann, pid " in shown, " on bob, pid " in shown} == {True}
        assert told("stacks", *at, env=elsewhere).count("train.py:") >= 1
        stacks = json.loads(told("stacks", "--rdzv-id", "fleet", *at, "--json", env=elsewhere))
        assert ({one["host"] for one in stacks["stacks"]}, stacks["silent"]) == ({"ann", "bob"}, 0)
        lines = told("logs", *at, env=elsewhere).splitlines()
        assert sorted(line.partition(" ")[0] for line in lines) == ["[ann", "[bob"]
        one = told("logs", *at, "--node", "bob", env=elsewhere)
        assert one in [f"{line}\n" for line in lines]
        assert one.startswith("[bob ")

        assert "eve is not a node of the job; there are: ann bob" in told(
            "logs", *at, "--node", "eve", env=elsewhere, code=1
        )
        assert "no job 'x' runs at this store; there are: fleet" in told(
            "status", "x", *at, env=elsewhere, code=1
        )
        stranger = {**elsewhere, "PHALANX_TOKEN": "other" * 8}
        assert "refused our token" in told("status", *at, env=stranger, code=1)
        assert "--watch shows jobs of this machine" in told("status", *at, "--watch", env=elsewhere, code=2)
        assert "choose files of this machine" in told("logs", *at, "--since", "1h", env=elsewhere, code=2)

        with Running([*at, "-f"], launcher=[PHALANX[0], "logs"], env=elsewhere) as reader:
            reader.read_until("begin 0", 2)
            assert "restarted" in told("restart", "fleet", env=plain_environment())
            reader.read_until("begin 0", 4)  # a requested restart is free
            for node in nodes:
                node.process.terminate()
            assert [node.end().code for node in nodes] == [143, 143]
            assert reader.end().code == 0
        assert "there are: none" in told("status", *at, env=elsewhere, code=1)


def test_several_jobs_at_one_store(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    port = free_port()
    at = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--timeout", "60"]
    (tmp_path / "b").mkdir()
    (tmp_path / "bb").mkdir()
    with (
        store(port, elsewhere),
        job_of_two(tmp_path / "b", port, "b"),
        job_of_two(tmp_path / "bb", port, "bb"),
    ):
        wait_until(lambda: "name one: b bb" in told("status", *at, env=elsewhere, code=None), "both jobs")

        def named(run: str) -> bool:
            text = told("status", run, *at, env=elsewhere, code=None)
            return f"(run {run}) on ann" in text and f"(run {run}) on bob" in text

        wait_until(lambda: named("b"), "the job whose name begins the other's")
        wait_until(lambda: named("bb"), "the other one")


def test_a_store_that_is_not_there(elsewhere: dict[str, str]) -> None:
    at = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--timeout", "0.2"]
    for command in ("status", "logs", "stacks"):
        assert f"phalanx {command}: " in told(command, *at, env=elsewhere, code=1)


ENDS = """
import os, select, sys
print(f"rank {os.environ['RANK']} of {os.path.basename(sys.argv[1])}", flush=True)
while not os.path.exists(sys.argv[1]):
    select.select([], [], [], 0.05)
"""


@pytest.mark.parametrize("shared", [True, False])
def test_logs_of_other_nodes_after_the_end(tmp_path: Path, shared: bool) -> None:
    """Read where they are in one directory; else a line says which machines have them."""
    path, endpoint = script(tmp_path, ENDS), f"127.0.0.1:{free_port()}"

    def environment(name: str) -> dict[str, str]:
        """Of a machine of its own."""
        return plain_environment(PHALANX_TOKEN=TOKEN, XDG_STATE_HOME=str(tmp_path / f"state-{name}"))

    def node(name: str, life: int) -> Running:
        words = ["--nnodes", "2", "--rdzv-backend", "phalanx", "--rdzv-id", "ended", "--redirects", "3"]
        words += ["--rdzv-endpoint", endpoint, "--rdzv-conf", f"name={name}"]
        logs = tmp_path / ("logs" if shared else f"logs-{name}")
        return Running(
            [*words, "--log-dir", str(logs), path, str(tmp_path / f"{life}")], env=environment(name)
        )

    def listed(count: int) -> bool:
        return len(list(tmp_path.glob("state-*/phalanx/runs@*/*/*.json"))) == count

    for life in range(2):  # the logs of an earlier run under this id are not of this one
        with node("ann", life) as ann, node("bob", life) as bob:
            wait_until(partial(listed, 2 * life + 2), "both nodes in their lists of runs")
            (tmp_path / f"{life}").touch()
            assert [ann.end().code, bob.end().code] == [0, 0]
    env = environment("ann")
    text = told("logs", "ended", env=env)
    if shared:
        assert sorted(text.splitlines()) == ["[ann 0]  rank 0 of 1", "[bob 1]  rank 1 of 1"]
        assert told("logs", "ended", "--node", "bob", env=env) == "[bob 1]  rank 1 of 1\n"
        assert told("logs", "ended", "--rank", "1", env=env) == "[bob 1]  rank 1 of 1\n"
    else:
        where = "phalanx logs: the logs of bob are on those machines: run phalanx logs ended there"
        assert text.splitlines()[0] == "[0]  rank 0 of 1"
        assert where in text
        assert where in told("logs", "ended", "--node", "bob", env=env, code=1)
