"""Jobs over a real etcd: rendezvous, nodes that are drained or killed, a reused run ID."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cluster.node_requests import ASK
from phalanx.core.rounds.store_commands import Entry, Get
from phalanx.store.etcd.client import etcd_client_from
from tests.conftest import HUNG, wait_until
from tests.support.etcd_process import Cluster, etcd_program
from tests.support.netns import Job, tell
from tests.support.run_helpers import PHALANX, Ended, plain_environment
from tests.system.test_cluster import everybody, succeed
from tests.system.test_job_commands import told

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]
PASSWORD = "the password of root"
SPEAKS = """
import os, signal
print("rank", os.environ["RANK"], flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An etcd that requires a login."""
    etcd_program()
    with Cluster(tmp_path_factory.mktemp("etcd"), extra=("--auth-token", "simple")) as running:
        member = running.members[0]
        member.ask("/v3/auth/role/add", {"name": "root"})
        member.ask("/v3/auth/user/add", {"name": "root", "password": PASSWORD})
        member.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        member.ask("/v3/auth/enable")
        yield running


def job_at(etcd: Cluster, folder: Path, nodes: str, run_id: str, *words: str) -> Job:
    endpoint = str(etcd.addresses[0])
    job = Job(
        folder,
        nodes,
        endpoint,
        "--rdzv-backend",
        "etcd",
        "--rdzv-id",
        run_id,
        *words,
        conf="user=root,is_host=0,ttl=6",
    )
    job.run_id = run_id
    job.environment["PHALANX_ETCD_PASSWORD"] = PASSWORD
    return job


def drain(job: Job, *words: str, password: str = PASSWORD) -> Ended:
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", job.endpoint]
    env = plain_environment(PHALANX_ETCD_PASSWORD=password)
    command = [PHALANX[0], "drain", job.run_id, *where, "--rdzv-conf", "user=root", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HUNG)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_drain_uses_no_restart(tmp_path: Path, etcd: Cluster) -> None:
    with job_at(etcd, tmp_path, "1:2", "drained") as job:
        nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        refused = drain(job, "--node", "b", password="not it")
        assert refused.code == 1
        assert "PHALANX_ETCD_PASSWORD" in refused.err
        assert (
            drain(job, "--node", "c").err == "phalanx drain: c: no such node in run drained; there are: a b\n"
        )
        done = drain(job, "--node", "b")
        assert (done.code, done.out) == (0, "b has left\n"), done
        assert nodes[1].end().code == 0
        again = everybody(nodes[:1], 1)
        assert {w.attempt for w in again} == {0}
        succeed(nodes[:1], again)


def test_a_killed_agent_is_replaced_when_its_lease_expires(tmp_path: Path, etcd: Cluster) -> None:
    with job_at(etcd, tmp_path, "2", "killed") as job:
        nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        nodes[0].signal(signal.SIGKILL)  # the leader, as likely as not
        nodes[0] = job.node("a")
        again = everybody(nodes, 2)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)


def entries_of(etcd: Cluster, prefix: str) -> tuple[Entry, ...]:
    config, environ = {"user": "root"}, {"PHALANX_ETCD_PASSWORD": PASSWORD}
    with etcd_client_from(str(etcd.addresses[0]), config, environ=environ) as client:
        return client.request(Get(prefix, prefix=True), HUNG).entries


def left_in(etcd: Cluster, run_id: str) -> list[str]:
    """What a job has left in the store; without the one key of those who looked at it (`phalanx status`)."""
    entries = entries_of(etcd, f"job/{run_id}/")
    return sorted({entry.key.removeprefix(f"job/{run_id}/") for entry in entries} - {ASK})


@pytest.mark.parametrize("how", ["succeeds", "fails", "is cancelled"])
def test_the_keys_of_a_finished_job_expire(tmp_path: Path, etcd: Cluster, how: str) -> None:
    run_id = f"over-{how.replace(' ', '-')}"
    with job_at(etcd, tmp_path, "2", run_id, "--max-restarts", "0") as job:
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        if how == "succeeds":
            succeed(nodes, workers)
        elif how == "fails":
            tell(workers[:1], signal.SIGUSR2)
            assert {node.end().code for node in nodes} == {9}
        else:
            for node in nodes:
                node.signal(signal.SIGTERM)
            assert {node.end().code for node in nodes} == {143}
    left = [*entries_of(etcd, f"job/{run_id}/"), *entries_of(etcd, f"shared/{run_id}/")]
    assert left, "a node that comes late finds that the job is over"
    assert [entry.key for entry in left if not entry.lease] == []


def test_a_wrong_password_is_one_line_and_no_code_of_the_program(tmp_path: Path, etcd: Cluster) -> None:
    with job_at(etcd, tmp_path, "1", "refused") as job:
        job.environment["PHALANX_ETCD_PASSWORD"] = "not it"
        ended = job.node("a").end()
    assert ended.code == 94, ended
    assert ended.err.count("PHALANX_ETCD_PASSWORD") == 1
    assert "Traceback" not in ended.err


def test_a_job_is_seen_from_a_machine_without_an_agent(tmp_path: Path, etcd: Cluster) -> None:
    env = plain_environment(PHALANX_ETCD_PASSWORD=PASSWORD, PHALANX_NAMESPACE=f"far-{os.urandom(4).hex()}")
    words = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    with job_at(etcd, tmp_path, "2", "seen", *words) as job:
        job.script.write_text(SPEAKS)
        nodes = [job.node(name) for name in "ab"]
        at = ["--rdzv-backend", "etcd", "--rdzv-endpoint", job.endpoint, "--rdzv-conf", "user=root"]

        def shown() -> set[str]:
            lines = told("logs", "seen", *at, env=env, code=None).splitlines()
            return {line.rpartition(" ")[2] for line in lines if "rank" in line}

        wait_until(lambda: shown() == {"0", "1"}, "the logs of both nodes")
        text = told("status", "see", *at, env=env)
        assert {" on a, pid " in text, " on b, pid " in text} == {True}
        stacks = json.loads(told("stacks", "seen", *at, "--json", env=env))
        assert ({one["host"] for one in stacks["stacks"]}, stacks["silent"]) == ({"a", "b"}, 0)
        refused = told("status", *at, env={**env, "PHALANX_ETCD_PASSWORD": "not it"}, code=1)
        assert "PHALANX_ETCD_PASSWORD" in refused
        for node in nodes:
            node.signal(signal.SIGTERM)
        assert {node.end().code for node in nodes} == {143}


def test_a_run_id_can_be_reused_when_the_nodes_of_its_job_are_gone(tmp_path: Path, etcd: Cluster) -> None:
    with job_at(etcd, tmp_path, "2", "requeued", "--max-restarts", "0") as job:
        for _ in range(2):
            nodes = [job.node(name) for name in "ab"]
            workers = everybody(nodes, 2)
            tell(workers[:1], signal.SIGUSR2)
            assert [node.end().code for node in nodes] == [9, 9]
        nodes = [job.node(name) for name in "ab"]
        succeed(nodes, everybody(nodes, 2))
    left = [re.sub(r"/\d+|\..*", "", key) for key in left_in(etcd, "requeued")]  # without round and node's id
    one = ["ctl/meeting", "ctl/quarantine/a", "ctl/round", "members", "result/a", "result/b", "status"]
    assert left == one, "it does not grow with the number of jobs"


def test_a_job_that_uses_the_id_again_knows_which_host_caused_the_end_of_the_last(
    tmp_path: Path, etcd: Cluster
) -> None:
    words = ("--max-restarts", "0", "--quarantine", "1:600:600")
    line = "b is quarantined for "
    with job_at(etcd, tmp_path, "1:2", "again-without", *words) as job:
        nodes = [job.node(name) for name in "ab"]
        nodes[0].up(2)
        tell(nodes[1].up(2), signal.SIGUSR2)
        assert {node.end().code for node in nodes} == {9}
    with job_at(etcd, tmp_path, "1:2", "again-without", *words) as job:
        nodes = [job.node(name) for name in "ab"]
        for node in nodes:
            node.read_until(line)
        succeed(nodes, everybody(nodes[:1], 1))
    where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", job.endpoint, "--rdzv-id", job.run_id]
    env = plain_environment(PHALANX_ETCD_PASSWORD=PASSWORD)
    command = [PHALANX[0], "quarantine", "list", *where, "--rdzv-conf", "user=root"]
    listed = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=HUNG)
    assert listed.stdout.startswith("b: root cause of a failure: rank "), listed
