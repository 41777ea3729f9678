"""An agent that is stopped cannot stop its workers: its helpers do, before another node takes their place."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import gone, wait_until
from tests.support.netns import Job, Node, Worker, tell
from tests.support.run_helpers import all_gone, supervisors_of
from tests.support.trials import few_or_many, play
from tests.system.test_cluster import everybody, separate_store, static_node, succeed

warmth = pytest.mark.parametrize("warm", ["auto", "standby"])


def stop(node: Node, workers: list[Worker]) -> None:
    """Stop the agent alone; its workers must end without it."""
    node.signal(signal.SIGSTOP)
    wait_until(lambda: all_gone([w.pid for w in workers]), "the end of the workers of a stopped agent")


def again(nodes: list[Node], world: int) -> None:
    """They form one world again, at no cost, and end well."""
    workers = everybody(nodes, world)
    assert {w.attempt for w in workers} == {0}, "no restart was used"
    succeed(nodes, workers)


@few_or_many(ways=7)
@pytest.mark.parametrize(
    ("journal", "warm", "also"),
    [
        pytest.param(False, "auto", "", id="embedded-auto"),
        pytest.param(False, "standby", "", id="embedded-standby"),
        pytest.param(True, "auto", "", id="journal-auto"),
        pytest.param(True, "standby", "", id="journal-standby"),
        pytest.param(False, "auto", "zygote", id="embedded-zygote"),
        pytest.param(True, "standby", "zygote", id="journal-zygote"),
        pytest.param(False, "auto", "keeper", id="embedded-keeper", marks=pytest.mark.long),
    ],
)
def test_workers_of_a_stopped_agent_end_before_the_others_go_on(
    tmp_path: Path, warm: str, journal: bool, also: str, times: int
) -> None:
    """Also if one of its helpers is stopped at the same time: the other one ends the workers."""

    def trial(folder: Path) -> None:
        with Job(folder, "1:2", "", "--warm", warm, conf="is_host=0" if journal else "") as job:
            if journal:
                separate_store(job, "--journal", str(folder / "journal"))
            a, b = nodes = [job.node(name) for name in "ab"]
            workers = everybody(nodes, 2)
            helpers = supervisors_of(workers[1].pid)
            b.signal(signal.SIGSTOP)
            if also:
                helpers[also].suspend()
            (alone,) = a.up(1)
            assert gone(workers[1].pid), "two worlds at the same time"
            if also == "keeper":
                helpers[also].resume()
            b.signal(signal.SIGCONT)
            b.read_until("re-forming, which uses no restart")
            again(nodes, 2)
            assert gone(alone.pid)

    play(times, tmp_path, trial)


@few_or_many(ways=4)
@warmth
@pytest.mark.parametrize("rank", [0, 1])
def test_a_static_job_goes_on_when_a_stopped_agent_continues(
    tmp_path: Path, warm: str, rank: int, times: int
) -> None:
    """Node 0 has the store: while it is stopped, nothing runs anywhere."""

    def trial(folder: Path) -> None:
        with Job(folder, "2") as job:
            nodes = [static_node(job, n, 2, "join_timeout=100,ttl=5", warm=warm) for n in (0, 1)]
            workers = everybody(nodes, 2)
            stop(nodes[rank], workers)
            nodes[rank].signal(signal.SIGCONT)
            again(nodes, 2)

    play(times, tmp_path, trial)


def test_an_agent_stopped_in_the_grace_of_its_workers_does_not_keep_them_alive(tmp_path: Path) -> None:
    """The workers of the old round ignore SIGTERM, and the agent that waits for them is stopped."""
    with Job(tmp_path, "1:2", "", "--grace", "60") as job:
        # Not in a round of one node, which a slow start of the other makes: it would not end for the next.
        deaf = "import os, signal\nif os.environ['WORLD_SIZE'] == '2': signal.signal(15, signal.SIG_IGN)\n"
        job.script.write_text(deaf + job.script.read_text())
        a, b = job.node("a"), job.node("b")
        everybody([a, b], 2)
        (mine,) = [w for w in (b.latest(),) if w is not None]
        b.signal(signal.SIGTERM)
        b.read_until("SIGTERM: stopping")
        stop(b, [mine])
        b.signal(signal.SIGCONT)
        assert b.end().code == 128 + signal.SIGTERM


def test_an_agent_that_continues_after_the_job_succeeded_without_it_says_so(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2", conf="is_host=0") as job:
        separate_store(job)
        a, b = nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        b.signal(signal.SIGSTOP)
        succeed([a], a.up(1))
        b.signal(signal.SIGCONT)
        ended = b.end()
        assert ended.code == 0, ended
        assert "is over (succeeded" in ended.err, ended


def test_a_node_of_its_own_has_no_lease(tmp_path: Path) -> None:
    """One node, no other that could take its place: its workers outlive any stop of their agent."""
    with Job(tmp_path, "1", conf="ttl=1") as job:
        node = Node("a", ["--nproc-per-node", "1", str(job.script)])
        job._nodes.append(node)
        (worker,) = node.up(1)
        node.signal(signal.SIGSTOP)
        with pytest.raises(AssertionError):
            wait_until(lambda: gone(worker.pid), "the end of the worker", 2.0)
        node.signal(signal.SIGCONT)
        tell([worker])
        assert node.end().code == 0
