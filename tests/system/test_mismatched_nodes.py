"""Nodes that do not belong together are told so in one line: other tokens, other --nnodes, torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.exit_codes import NO_MEETING
from phalanx.store.tcpstore.client import TorchStoreClient
from phalanx.store.tcpstore.server import TorchStoreServer
from tests.support.netns import Job, Node, tell
from tests.support.run_helpers import plain_environment


def words(job: Job, nnodes: str, conf: str = "join_timeout=100,last_call_timeout=0.5") -> list[str]:
    return [
        *("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", job.endpoint, "--rdzv-id", "job"),
        *("--rdzv-conf", conf, "--nproc-per-node", "1", str(job.script)),
    ]  # fmt: skip


def node(job: Job, nnodes: str, name: str, **env: str) -> Node:
    conf = f"join_timeout=100,last_call_timeout=0.5,name={name}"
    made = Node(name, words(job, nnodes, conf), env={**job.environment, **env})
    job._nodes.append(made)
    return made


def test_the_host_names_a_node_with_another_token(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        zero = node(job, "1:2", "zero")
        workers = zero.up(1)
        one = node(job, "1:2", "one", PHALANX_TOKEN="another")
        zero.read_until("refused a node at 127.0.0.1: its token is not ours (ours is from the variable")
        zero.read_until("give the same token to every node")
        assert one.end().code == 94
        assert "another" not in zero.text
        tell(workers)
        assert zero.end().code == 0
        assert zero.text.count("refused a node at") == 1


def test_nodes_with_different_numbers_of_nodes_are_told(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        zero = node(job, "1:2", "zero")
        zero.up(1)
        one = node(job, "2:4", "one")
        one.read_until(
            "the leader was started with --nnodes 1:2, and this node with 2:4: the leader's counts"
        )
        zero.read_until("one was started with --nnodes 2:4, and this node with 1:2")
        workers = [worker for each in (zero, one) for worker in each.up(2)]
        two = node(job, "1:2", "two")  # a spare, which agrees with the leader
        two.read_until("one was started with --nnodes 2:4")
        tell(workers)
        assert [each.end().code for each in (zero, one)] == [0, 0]
        for each in (zero, one):
            assert each.text.count("was started with --nnodes") == 1


def test_nodes_that_wait_for_different_numbers_are_told(tmp_path: Path) -> None:
    with Job(tmp_path, "3") as job:
        first, second = node(job, "3", "first"), node(job, "4", "second")
        for each in (first, second):
            each.read_until("was started with --nnodes ")
        first.process.send_signal(signal.SIGTERM)
        second.process.send_signal(signal.SIGTERM)


def test_a_node_finds_torchruns_store_at_the_endpoint(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        host, _, port = job.endpoint.rpartition(":")
        server = TorchStoreServer(host, int(port))
        server.start()
        try:
            for backend in ("c10d", "static"):
                command = words(job, "2", "join_timeout=3")
                command[3] = backend
                late = Node("late", ["--node-rank", "1", *command], env=job.environment)
                job._nodes.append(late)
                late.read_until(
                    "the server there speaks the protocol of torch's store: does that node run torchrun?"
                )
                ended = late.end()
                assert ended.code == NO_MEETING
                assert "Start every node with phalanx run" in ended.said[-1], ended
        finally:
            server.close()


def test_the_host_names_a_node_that_speaks_torchs_protocol(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        zero = node(job, "1:2", "zero")
        workers = zero.up(1)
        host, _, port = job.endpoint.rpartition(":")
        for _ in range(2):
            with pytest.raises(ConnectionError):
                TorchStoreClient(host, int(port), 0.2)
        zero.read_until(
            "refused a node at 127.0.0.1: it speaks the protocol of torch's store: does that node run"
        )
        tell(workers)
        assert zero.end().code == 0
        assert zero.text.count("refused a node at") == 1


def test_torchrun_itself_is_recognised(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Job(tmp_path, "1:2") as job:
        zero = node(job, "1:2", "zero")
        workers = zero.up(1)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words(job, "1:2", "read_timeout=3,is_host=0"),
        ]
        with subprocess.Popen(
            torchrun, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as other:
            try:
                zero.read_until("does that node run torchrun?")
            finally:
                other.kill()
        tell(workers)
        assert zero.end().code == 0


def test_node_0_of_a_static_job_names_a_node_that_speaks_torchs_protocol(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        host, _, port = job.endpoint.rpartition(":")

        def start(rank: int) -> Node:
            address = ["--master-addr", host, "--master-port", port, "--node-rank", str(rank)]
            made = Node(f"node {rank}", ["--nnodes", "2", *address, str(job.script)], env=job.environment)
            job._nodes.append(made)
            return made

        zero = start(0)
        zero.read_until("1 of 2 nodes here")
        with TorchStoreClient(host, int(port), 5) as other:
            other.set("a", "b")
            zero.read_until(
                "a program at 127.0.0.1 speaks the protocol of torch's store, and no worker runs yet"
            )
        nodes = [zero, start(1)]
        workers = [worker for each in nodes for worker in each.up(2)]
        with TorchStoreClient(host, int(port), 5) as other:  # as workers do
            other.set("a", "b")
        tell(workers)
        assert [each.end().code for each in nodes] == [0, 0]
        assert zero.text.count("speaks the protocol") == 1
