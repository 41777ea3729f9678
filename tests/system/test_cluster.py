"""Several agents on loopback form one world, keep it, and close the ranks again when somebody falls."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.cluster.elastic import NextRound
from phalanx.cluster.handler import RendezvousHandler, RendezvousParameters
from phalanx.cluster.registry import get_rendezvous_handler
from phalanx.core.exit_codes import NO_MEETING
from phalanx.core.rounds.node_failure import NodeFailure
from phalanx.core.rounds.requests import CONTROL
from phalanx.core.rounds.store_commands import Get, Watch
from phalanx.errors import RendezvousClosedError
from phalanx.store.embedded.client import Client
from phalanx.store.embedded.server import Server
from phalanx.store.net.token import Token
from tests.conftest import HUNG, gone, needs_ipv6, wait_until
from tests.support.netns import TOKEN, Job, Node, Worker, free_port, tell
from tests.support.run_helpers import PHALANX, all_gone, kill_at_once, plain_environment, run
from tests.system.test_store_server import Proxy


def everybody(nodes: list[Node], world: int) -> list[Worker]:
    """All workers of a world, by rank, once they run; they agree about it.

    Where a lease ran out on a busy machine while the world came up, this is the one after it: there is one at
    a time, so the workers of the other end, and their node starts others."""
    here = {node: node.up(world) for node in nodes}
    while len({(w.address, w.port, w.attempt) for workers in here.values() for w in workers}) > 1:
        wait_until(lambda: overtaken(here), "the end of all worlds but one")
        here.update((node, node.up(world)) for node in overtaken(here))
    found = sorted(worker for workers in here.values() for worker in workers)
    assert [worker.rank for worker in found] == list(range(world))
    return found


def starts(nodes: list[Node]) -> list[int]:
    """How many workers each has started: more than one where the world re-formed while it came up."""
    return [node.text.count("ready") for node in nodes]


def overtaken(here: dict[Node, list[Worker]]) -> list[Node]:
    """Nodes of which a worker has ended."""
    return [node for node, workers in here.items() if any(gone(worker.pid) for worker in workers)]


def succeed(nodes: list[Node], workers: list[Worker]) -> None:
    tell(workers)
    for node in nodes:
        ended = node.end()
        assert ended.code == 0, ended


def test_two_nodes_form_one_world_with_ranks_by_name_and_without_the_token(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        job.first_hosts = False
        late, early = job.node("node10", nproc=2), job.node("node9", nproc=2)
        workers = everybody([late, early], 4)
        assert [w.node for w in workers] == [0, 0, 1, 1]
        assert {w.token for w in workers} == {"-"}
        succeed([late, early], workers)
        assert "ready 0 4" in early.text
        assert "ready 2 4" in late.text


@needs_ipv6
def test_nodes_meet_over_ipv6(tmp_path: Path) -> None:
    with Job(tmp_path, "2", f"[::1]:{free_port()}") as job:
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        assert {w.address for w in workers} == {"::1"}
        succeed(nodes, workers)


def test_workers_meet_at_the_address_that_node_0_was_given(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        a, b = job.node("a", "--local-addr", "127.0.0.2"), job.node("b", "--local-addr", "127.0.0.3")
        workers = everybody([a, b], 2)
        assert {w.address for w in workers} == {"127.0.0.2"}
        succeed([a, b], workers)


TWICE = """
import os, sys, time
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
    sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(1000)
"""


def test_the_pause_of_a_crash_loop_holds_on_every_node(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "3") as job:
        job.script.write_text(TWICE)
        nodes = [job.node(name) for name in "ab"]
        texts = []
        for node in nodes:
            ended = node.end()
            assert ended.code == 0, ended
            texts.append(ended.err)
    both = "".join(texts)
    assert both.count("restart 2 of 3, in 0.5 s because the workers keep failing") == 1, texts
    assert both.count("rank 1: exit code 3; re-forming for attempt 2, in 0.5 s") == 1, texts


AGAIN = """
import os, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == attempt:  # another node each time
    raise KeyError(f"batch {attempt}")
time.sleep(1000 if attempt < "2" else 0)
"""


def test_the_same_failure_on_another_node_ends_the_job_everywhere(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "9") as job:
        job.script.write_text(AGAIN)
        nodes = [job.node(name) for name in "ab"]
        ends = [node.end() for node in nodes]
    assert [ended.code for ended in ends] == [93, 93], ends
    both = "".join(ended.err for ended in ends)
    assert both.count("not restarted: the same failure twice in a row without progress (KeyError at ") == 1, (
        both
    )


def test_an_address_that_is_not_ours_ends_the_job_with_what_to_do(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "3") as job:
        nodes = [job.node("a", "--local-addr", "192.0.2.1"), job.node("b")]
        for node in nodes:
            ended = node.end()
            assert ended.code == 1, ended
            assert "cannot serve the workers' store on 192.0.2.1" in ended.err
            assert "--local-addr" in ended.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["store", "--listen", "a:b"], 2, "--listen: a:b: not an address; write PORT or HOST:PORT"),
        (["store", "--listen", "192.0.2.1:1"], 1, "cannot listen on 192.0.2.1:1"),
        (["store", "--nonsense"], 2, "--nonsense"),
        (["drain"], 2, "required: RUN"),
        (["drain", "no-such-run"], 1, "no job 'no-such-run' of this user runs on this machine"),
        (["drain", "a", "--rdzv-endpoint", "127.0.0.1:1", "--timeout", "0.2"], 1, "127.0.0.1:1"),
    ],
)
def test_store_and_drain_say_in_one_line_what_is_wrong(words: list[str], code: int, says: str) -> None:
    env = plain_environment(PHALANX_TOKEN=TOKEN)
    done = subprocess.run([PHALANX[0], *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("static", [False, True])
def test_a_port_that_another_program_has_is_no_failure_of_the_program(static: bool, tmp_path: Path) -> None:
    """A scheduler may start the job again, elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["--rdzv-backend", "phalanx", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        words += ["--rdzv-conf", "is_host=1"]
        if static:
            words = ["--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        done = run(*words, "--nnodes", "2", "--no-python", "true")
    assert done.code == NO_MEETING, done
    assert f"127.0.0.1:{port}" in done.err
    assert "Address already in use" in done.err


def test_draining_a_node_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    with Job(tmp_path, "1") as job:
        job.node("a", "--nnodes", "1:2").up(1)
        words = ["drain", job.run_id, "--node", "b", "--rdzv-endpoint", job.endpoint]
        env = plain_environment(PHALANX_TOKEN=TOKEN)
        done = subprocess.run([PHALANX[0], *words], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (
            1,
            "phalanx drain: b: no such node in run job; there are: a\n",
        )


def test_roles_and_worker_counts_may_differ(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        a = job.node("a", "--role", "trainer", nproc=1)
        b = job.node("b", "--role", "reader", nproc=2)
        workers = everybody([a, b], 3)
        assert [(w.rank, w.role_rank) for w in workers] == [(0, 0), (1, 0), (2, 1)]
        succeed([a, b], workers)


def test_a_failure_anywhere_restarts_all_nodes_and_counts_once(tmp_path: Path) -> None:
    with Job(tmp_path, "3", "", "--max-restarts", "1") as job:
        nodes = [job.node(name) for name in "abc"]
        first = everybody(nodes, 3)
        tell(first[1:], signal.SIGUSR2)  # two nodes at once: still one restart
        second = everybody(nodes, 3)
        assert {w.attempt for w in second} == {1}
        assert second[0].port != first[0].port
        assert all_gone([w.pid for w in first])
        tell(second[2:], signal.SIGUSR2)
        ends = [node.end() for node in nodes]
        assert [end.code for end in ends] == [9, 9, 9]
        reports = {re.sub(r".*(={40,}\n.*FAILED.*={40,}).*", r"\1", end.err, flags=re.DOTALL) for end in ends}
        assert len(reports) == 1, "every node shows the same report"
        assert "rank 2 (local rank 0, role default) on c" in reports.pop()
        assert all_gone([w.pid for w in second])


def test_an_exit_code_that_is_not_worth_a_restart_ends_the_job_everywhere(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "3") as job:
        a, b = job.node("a"), job.node("b", "--no-restart-on", "9")
        workers = everybody([a, b], 2)
        before = starts([a, b])
        tell(workers[1:], signal.SIGUSR2)
        assert [a.end().code, b.end().code] == [9, 9]
        assert starts([a, b]) == before


def test_a_node_killed_with_its_workers_is_replaced_by_nobody_and_the_rest_go_on(tmp_path: Path) -> None:
    with Job(tmp_path, "2:3") as job:
        nodes = [job.node(name) for name in "abc"]
        workers = everybody(nodes, 3)
        kill_at_once([nodes[2].agent, workers[2].pid])
        again = everybody(nodes[:2], 2)
        assert {w.attempt for w in again} == {0}, "a lost member costs no restart"
        succeed(nodes[:2], again)


def test_an_agent_killed_alone_leaves_no_worker_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    with Job(tmp_path, "3") as job:
        nodes = [job.node(name) for name in "abc"]
        workers = everybody(nodes, 3)
        nodes[1].signal(signal.SIGKILL)
        nodes[1] = job.node("b")
        again = everybody(nodes, 3)
        assert {w.attempt for w in again} == {0}
        assert [w.node for w in again] == [0, 1, 2], (
            "the others keep their ranks, the new one gets the free one"
        )
        assert nodes[1].text.count("ready 1 3") == 1
        assert gone(workers[1].pid)
        succeed(nodes, again)


def test_scale_from_one_to_four_and_down_to_two(tmp_path: Path) -> None:
    with Job(tmp_path, "1:4") as job:
        nodes = [job.node("a")]
        everybody(nodes, 1)
        nodes += [job.node(name) for name in "bcd"]
        workers = everybody(nodes, 4)
        for node in nodes[2:]:
            node.signal(signal.SIGTERM)
        again = everybody(nodes[:2], 2)
        assert {w.attempt for w in again} == {0}
        assert [node.end().code for node in nodes[2:]] == [143, 143]
        assert all_gone([w.pid for w in workers])
        succeed(nodes[:2], again)


def test_a_spare_says_once_that_it_waits_and_that_it_was_not_needed(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "2") as job:
        nodes = [job.node("a"), job.node("b")]
        workers = everybody(nodes, 2)
        spare = job.node("c")
        spare.read_until("1 spare")
        succeed(nodes, workers)
        ended = spare.end()
        assert ended.code == 0, ended
        assert ended.err.count("1 spare") == 1, ended
        assert "this node was a spare and was not needed; the job succeeded (workers of 2" in ended.err, ended
        assert "closed" not in ended.err, ended


def test_a_spare_waits_and_steps_in(tmp_path: Path) -> None:
    with Job(tmp_path, "2:2") as job:
        nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        spare = job.node("c")
        spare.read_until("1 spare")
        nodes[1].signal(signal.SIGKILL)
        again = everybody([nodes[0], spare], 2)
        assert {w.attempt for w in again} == {0}
        succeed([nodes[0], spare], again)


def test_a_node_that_finished_comes_back_when_the_others_need_it(tmp_path: Path) -> None:
    with Job(tmp_path, "2:3") as job:
        nodes = [job.node(name) for name in "abc"]
        workers = everybody(nodes, 3)
        tell(workers[:1])
        wait_until(lambda: gone(workers[0].pid), "the end of the first worker")
        nodes[2].signal(signal.SIGKILL)
        again = everybody(nodes[:2], 2)
        succeed(nodes[:2], again)


IN_BARRIER = "all workers succeeded; waiting for the other nodes"


def test_a_node_lost_before_it_reported_success_makes_the_others_run_again(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2", "", "--verbose") as job:
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        tell(workers[:1])
        nodes[0].read_until(IN_BARRIER)
        nodes[1].signal(signal.SIGKILL)  # noticed a second later, for it might come back
        again = everybody(nodes[:1], 1)
        assert {w.attempt for w in again} == {0}, "no restart was used"
        nodes[0].read_until("lost b, which had not reported success")
        succeed(nodes[:1], again)


def test_a_job_that_cannot_go_on_without_a_node_that_did_not_report_fails(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--verbose", conf="join_timeout=10") as job:
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        tell(workers[:1])
        nodes[0].read_until(IN_BARRIER)
        nodes[1].signal(signal.SIGKILL)
        ended = nodes[0].end()
        assert ended.code == NO_MEETING, ended
        assert any("lost b, which had not reported success" in line for line in ended.said), ended


@pytest.mark.parametrize("where", ["hosted", "separate"])
def test_a_store_lost_in_the_exit_barrier_is_not_a_success(tmp_path: Path, where: str) -> None:
    """With the store the job ends on all nodes; those that still run workers have not succeeded."""
    conf = "is_host=0,store_grace=2" if where == "separate" else ""
    with Job(tmp_path, "2", "", "--verbose", conf=conf) as job:
        store = separate_store(job) if where == "separate" else None
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        tell(workers[1:])
        nodes[1].read_until(IN_BARRIER)
        (store or nodes[0]).signal(signal.SIGKILL)
        for node in nodes[1:] if store is None else nodes:
            ended = node.end()
            assert ended.code == NO_MEETING, ended
            assert any(f"the store at {job.endpoint}" in line for line in ended.said), ended


def test_drain_lets_a_node_leave_for_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, "1:2") as job:
        nodes = [job.node(name) for name in "ab"]
        everybody(nodes, 2)
        words = ["drain", job.run_id, "--node", "b", "--rdzv-endpoint", job.endpoint]
        done = subprocess.run(
            [PHALANX[0], *words], env=plain_environment(PHALANX_TOKEN=TOKEN), capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, "b has left\n"), done
        ended = nodes[1].end()
        assert ended.code == 0, ended
        again = everybody(nodes[:1], 1)
        assert {w.attempt for w in again} == {0}
        succeed(nodes[:1], again)


def test_a_node_waits_aloud_and_gives_up_with_what_to_check(tmp_path: Path) -> None:
    with Job(tmp_path, "3", conf="join_timeout=12") as job:
        nodes = [job.node(name) for name in "ab"]
        for node in nodes:
            ended = node.end()
            assert ended.code == NO_MEETING, ended
            # On a busy machine the other node may come after the first line.
            aloud = r"(2 of 3 nodes here \(a b\)|1 of 3 nodes here \(a\)), waiting for [12] more, \d+ s left"
            assert re.search(f"phalanx: {aloud}", ended.err), ended
            last = ended.said[-1]
            assert "2 of 3 nodes here (a b), waiting for 1 more; gave up after 12 s" in last
            assert job.endpoint in last
            assert "--rdzv-id (job)" in last


def test_on_a_terminal_one_line_tells_who_is_awaited(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        a = job.node("a", terminal=True)
        while len(set(re.findall(r"1 of 2 nodes here \(a\), waiting for 1 more, (\d+) s left", a.text))) < 3:
            a.read_until("s left", a.text.count("s left") + 1)
        assert a.text.count("\n") <= 2, "it is redrawn, not repeated"
        b = job.node("b")
        succeed([b], everybody([a, b], 2))


def static_node(
    job: Job,
    rank: int,
    nodes: int,
    conf: str = "join_timeout=100",
    terminal: bool = False,
    warm: str = "auto",
) -> Node:
    words = ["--warm", warm, "--nnodes", str(nodes), "--node-rank", str(rank), "--rdzv-conf", conf]
    host, _, port = job.endpoint.rpartition(":")
    words += ["--master-addr", host, "--master-port", port, "--nproc-per-node", "1", str(job.script)]
    node = Node(f"node {rank}", words, terminal=terminal, env=job.environment)
    job._nodes.append(node)
    return node


def test_nodes_with_given_ranks_wait_aloud(tmp_path: Path) -> None:
    """Node 0 tells who is here, the others tell where they knock, and then the same as node 0."""
    own = re.escape(os.uname().nodename)
    with Job(tmp_path, "4") as job:
        two = static_node(job, 2, 4)
        two.read_until(f"phalanx: connecting to node 0 at {job.endpoint}, ")
        zero = static_node(job, 0, 4)
        for node in (zero, two):
            node.read_until("waiting for nodes 1, 3, ")
        assert re.search(rf"2 of 4 nodes here \({own} {own}\), waiting for nodes 1, 3, \d+ s left", zero.text)
        assert zero.text.count("nodes here") <= 2, "now and then, not all the time"
        nodes = [zero, two, static_node(job, 1, 4), static_node(job, 3, 4)]
        succeed(nodes, everybody(nodes, 4))


def test_a_node_with_a_given_rank_gives_up_with_who_is_missing(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        ended = static_node(job, 0, 2, "join_timeout=4").end()
        assert ended.code == NO_MEETING, ended
        assert re.search(r"1 of 2 nodes here \(\S+\), waiting for node 1, [0-4] s left", ended.err), ended
        assert "node 1 of 2 did not come within 4 s" in ended.said[-1]


def test_on_a_terminal_one_line_tells_which_rank_is_awaited(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        zero = static_node(job, 0, 2, terminal=True)
        while len(set(re.findall(r"waiting for node 1, (\d+) s left", zero.text))) < 3:
            zero.read_until("s left", zero.text.count("s left") + 1)
        assert zero.text.count("\n") <= 2, "it is redrawn, not repeated"
        nodes = [zero, static_node(job, 1, 2)]
        succeed(nodes[1:], everybody(nodes, 2))


QUICK = "join_timeout=100,ttl=5"


def test_a_static_job_needs_no_token_and_says_that_it_is_open(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        job.environment = plain_environment(HOME=str(tmp_path))
        nodes = [static_node(job, rank, 2) for rank in (0, 1)]
        succeed(nodes, everybody(nodes, 2))
        assert nodes[0].text.count("control traffic of this job is not authenticated (no PHALANX_TOKEN)") == 1
        assert "not authenticated" not in nodes[1].text
        assert not (tmp_path / ".phalanx").exists(), "no token file is made for it"


def test_a_static_node_that_is_killed_is_noticed_and_replaced(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        zero, one = nodes = [static_node(job, rank, 2, QUICK) for rank in (0, 1)]
        everybody(nodes, 2)
        one.signal(signal.SIGKILL)
        zero.read_until("waiting for node 1")
        nodes = [zero, static_node(job, 1, 2, QUICK)]
        again = everybody(nodes, 2)
        assert {w.attempt for w in again} == {0}
        succeed(nodes, again)


@pytest.mark.parametrize("when", ["in mid-run", "in the exit barrier"])
def test_a_static_node_lost_before_it_reported_is_not_a_success(tmp_path: Path, when: str) -> None:
    with Job(tmp_path, "3") as job:
        conf = "join_timeout=10,ttl=5"
        nodes = [static_node(job, rank, 3, conf) for rank in (0, 1, 2)]
        workers = everybody(nodes, 3)
        if when == "in the exit barrier":
            tell(workers[:2])
            wait_until(lambda: all_gone([w.pid for w in workers[:2]]), "the end of the other workers")
        nodes[2].signal(signal.SIGKILL)
        lost = f"lost node 2 ({os.uname().nodename})"
        for node in nodes[:2]:
            ended = node.end()
            assert ended.code == NO_MEETING, ended
            (why,) = (line for line in ended.said if "node 2 of 3 did not come within 10 s" in line)
            assert lost in why, ended


@pytest.mark.parametrize("when", ["in mid-run", "in the exit barrier"])
def test_node_0_of_a_static_job_lost_before_it_reported_is_not_a_success(tmp_path: Path, when: str) -> None:
    with Job(tmp_path, "2") as job:
        zero, one = nodes = [static_node(job, rank, 2, "join_timeout=10,ttl=5") for rank in (0, 1)]
        workers = everybody(nodes, 2)
        if when == "in the exit barrier":
            tell(workers[1:])
            wait_until(lambda: gone(workers[1].pid), "the end of the other worker")
        zero.signal(signal.SIGKILL)
        ended = one.end()
        assert ended.code == NO_MEETING, ended
        lost = f"node 0 at {job.endpoint} is gone and did not return"
        assert any(lost in line for line in ended.said), ended


def test_node_0_of_a_static_job_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        zero, one = nodes = [static_node(job, rank, 2, QUICK) for rank in (0, 1)]
        workers = everybody(nodes, 2)
        zero.signal(signal.SIGKILL)
        wait_until(lambda: gone(workers[1].pid), "the end of the other node's worker")
        nodes = [static_node(job, 0, 2, QUICK), one]
        again = everybody(nodes, 2)
        assert {w.node for w in again} == {0, 1}
        succeed(nodes, again)


def test_nobody_at_the_endpoint_is_told_with_the_addresses(tmp_path: Path) -> None:
    with Job(tmp_path, "2", conf="join_timeout=1,is_host=0") as job:
        ended = job.node("a").end()
        assert ended.code == NO_MEETING
        assert f"the store at {job.endpoint} could not be reached for 1 s" in ended.said[-1]
        assert "Tried 127.0.0.1" in ended.said[-1]


def test_a_wrong_token_is_told_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        a = job.node("a")
        a.read_until("1 of 2")
        words = [
            "--nnodes",
            "2",
            "--rdzv-backend",
            "phalanx",
            "--rdzv-endpoint",
            job.endpoint,
            "--rdzv-id",
            "job",
        ]
        ended = run(*words, str(tmp_path / "train.py"), env=plain_environment(PHALANX_TOKEN="wrong"))
        assert ended.code == 94
        assert "refused our token" in ended.err
        assert "PHALANX_TOKEN" in ended.err
        assert "wrong" not in ended.err


@pytest.mark.parametrize("journal", [True, False], ids=["with a journal", "without"])
def test_the_store_is_killed_under_a_running_job(tmp_path: Path, journal: bool) -> None:
    more = ["--journal", str(tmp_path / "journal")] if journal else []
    # With a journal the restart has nine tenths of a lease; on a busy machine it takes a while.
    with Job(tmp_path, "2", conf="is_host=0,ttl=30" if journal else "is_host=0") as job:
        first = separate_store(job, *more)
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        before = starts(nodes)
        first.signal(signal.SIGKILL)
        if journal:
            second = separate_store(job, *more)
            tell(workers[:1])
            succeed(nodes, workers[1:])
            assert starts(nodes) == before, "nobody noticed"
            second.signal(signal.SIGTERM)
            assert second.end().code == 0
        else:
            for node in nodes:
                ended = node.end()
                assert ended.code == NO_MEETING
                assert any("kept no journal" in line for line in ended.said), ended
            assert all_gone([w.pid for w in workers])


def test_a_store_whose_disk_is_full_ends_aloud_and_the_job_goes_on_with_the_next(tmp_path: Path) -> None:
    with Job(tmp_path, "2", "", "--max-restarts", "1", conf="is_host=0,ttl=60") as job:
        journal = ["--journal", str(tmp_path / "journal"), "--linger", "50"]
        store = separate_store(job, *journal)
        nodes = [job.node(name) for name in "ab"]
        workers = everybody(nodes, 2)
        resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        tell(workers[1:], signal.SIGUSR2)
        ended = store.end()
        assert ended.code == 1
        assert f"journal {tmp_path / 'journal'}: " in ended.err
        separate_store(job, *journal)
        again = everybody(nodes, 2)
        assert {w.attempt for w in again} == {1}, "the failure was told to the new store, once"
        succeed(nodes, again)


def test_the_host_of_the_store_is_killed_and_nobody_is_orphaned(tmp_path: Path) -> None:
    with Job(tmp_path, "2") as job:
        host = job.node("a")
        host.read_until("1 of 2")
        other = job.node("b")
        workers = everybody([host, other], 2)
        host.signal(signal.SIGKILL)
        ended = other.end()
        assert ended.code == NO_MEETING
        assert any("kept no journal" in line for line in ended.said), ended
        wait_until(lambda: all_gone([w.pid for w in workers]), "the end of all workers")


# ---- torch's way to use the handler, without an agent ----------------------------------------------


def handlers(
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[int, int],
    endpoint: str = "",
    run_id: str = "run",
    **settings: Any,
) -> list[RendezvousHandler]:
    """Nodes of one job; the first hosts the store, unless `is_host` says otherwise."""
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    endpoint = endpoint or f"127.0.0.1:{free_port()}"
    settings = {"last_call_timeout": 0.2, "join_timeout": HUNG, **settings}
    return [
        get_rendezvous_handler(
            RendezvousParameters(
                "c10d", endpoint, run_id, *nodes, name=f"n{n}", **{"is_host": n == 0, **settings}
            )
        )
        for n in range(count)
    ]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls, timeout=HUNG))


def test_torchs_interface_forms_a_round_re_forms_it_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = handlers(3, monkeypatch, (2, 3))

    def whole(handler: RendezvousHandler) -> Any:
        """The round of all three; the third may come when the other two have met, and is then waited for."""
        info = handler.next_rendezvous()
        while info.world_size < 3:
            wait_until(handler.num_nodes_waiting, "the third node")
            info = handler.next_rendezvous()
        return info

    infos = together([partial(whole, h) for h in made])
    assert sorted((i.rank, i.world_size) for i in infos) == [(0, 3), (1, 3), (2, 3)]
    assert len({i.bootstrap_store_info.master_port for i in infos}) == 1
    infos[0].store.set("key", b"value")
    assert infos[1].store.get("key") == b"value"
    assert [h.num_nodes_waiting() for h in made] == [0, 0, 0]
    assert made[0].get_run_id() == "run"
    assert not made[0].use_agent_store
    made[2].leave()  # type: ignore[attr-defined]
    wait_until(lambda: made[0].num_nodes_waiting() and made[1].num_nodes_waiting(), "news of the leave")
    infos = together([h.next_rendezvous for h in made[:2]])
    assert sorted((i.rank, i.world_size) for i in infos) == [(0, 2), (1, 2)]
    assert not infos[0].store.check(["key"]), "a round begins with an empty store"
    made[0].set_closed()
    wait_until(lambda: made[1].is_closed(), "news of the close")
    with pytest.raises(RendezvousClosedError, match="closed by n0"):
        made[1].next_rendezvous()
    assert together([h.shutdown for h in reversed(made)]) == [True, True, True]


def test_a_node_whose_first_look_shows_its_round_and_its_meeting_place_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One command registers it: its round can be active before it sees anything."""
    endpoint, looks, send = f"127.0.0.1:{free_port()}", [], Client.send

    def late(client: Client, command: Any, *more: Any) -> None:
        if isinstance(command, Watch) and command.watch == CONTROL:
            looks.append(client)
            if len(looks) == 2:
                with Client("127.0.0.1", int(endpoint[10:]), token=Token(TOKEN.encode(), "test")) as other:
                    wait_until(lambda: other.get("job/run/ctl/meeting/1"), "a meeting place")
        send(client, command, *more)

    monkeypatch.setattr(Client, "send", late)
    made = handlers(2, monkeypatch, (2, 2), endpoint)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made[0].next_rendezvous)
        wait_until(lambda: looks, "the first node")
        assert [pool.submit(made[1].next_rendezvous).result(HUNG).rank, first.result(HUNG).rank] == [1, 0]
    together([h.shutdown for h in reversed(made)])


def test_asking_for_a_round_while_one_runs_is_a_restart_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = handlers(2, monkeypatch, (2, 2))
    together([h.next_rendezvous for h in made])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(made[1].next_rendezvous)
        wait_until(lambda: made[0].num_nodes_waiting(), "the other's wish")
        infos = [made[0].next_rendezvous(), first.result(HUNG)]
    assert [i.rank for i in infos] == [0, 1]
    together([h.shutdown for h in reversed(made)])


def test_a_round_that_is_over_before_its_caller_has_it_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = handlers(2, monkeypatch, (1, 2))
    made[0]._joined()  # as by a thread in `next_rendezvous` that does not get to run
    wait_until(lambda: made[0]._next.meeting is not None, "the first round")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(made[1].next_rendezvous)
        wait_until(lambda: made[0].num_nodes_waiting(), "the end of the first round")
        infos = [made[0].next_rendezvous(), second.result(HUNG)]
    assert sorted((i.rank, i.world_size) for i in infos) == [(0, 2), (1, 2)]
    together([h.shutdown for h in reversed(made)])


def test_a_failure_that_ends_the_job_does_so_although_its_round_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = handlers(2, monkeypatch, (2, 2))
    nodes = [NextRound(lambda number: None) for _ in made]
    members = [
        h.attach(node, lambda _address: (None, 1), slots=1, role="r", max_restarts=9)
        for h, node in zip(made, nodes, strict=True)
    ]
    for member in members:
        member.start()
    wait_until(lambda: all(node.meeting for node in nodes), "the round")
    members[1].failed(0, NodeFailure("exit code 3", final="exit code 3"))  # of a round before this one
    wait_until(lambda: all(node.over for node in nodes), "its end")
    for member in members:
        member.workers_gone(1)
    wait_until(lambda: all(node.end for node in nodes), "the end of the job")
    for node in nodes:
        assert node.end is not None
        assert node.end[:2] == ("failed", "workers on n1 failed; not restarted: exit code 3")
    for member in reversed(members):
        member.release()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_torch_workers_of_two_nodes_meet_again_after_a_failure(tmp_path: Path) -> None:
    worker = tmp_path / "reduce.py"
    worker.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(total)\n"
        "print('sum', total.item(), os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 2: os._exit(3)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    with Job(tmp_path, "2", "", "--max-restarts", "1") as job:
        job.script = worker
        nodes = [job.node(name, nproc=2) for name in "ab"]
        for node in nodes:
            ended = node.end()
            assert ended.code == 0, ended
            assert ended.out.count("sum 10 1") == 2


def separate_store(job: Job, *words: str) -> Node:
    """A store by itself, which outlives the jobs that use it."""
    node = Node("store", ["--listen", job.endpoint, *words], launcher=[PHALANX[0], "store"])
    job._nodes.append(node)
    node.read_until("listening")
    return node


def test_an_id_is_free_again_when_the_nodes_of_its_job_have_gone(tmp_path: Path) -> None:
    """A scheduler that starts a job again under its old id, at a store that has lasted, gets a new job."""
    with Job(tmp_path, "2", "", "--max-restarts", "1", conf="is_host=0") as job:
        journal = ["--journal", str(tmp_path / "journal")]
        store = separate_store(job, *journal)
        for life in ("fails", "is preempted", "succeeds", "succeeds"):
            nodes = [job.node(name) for name in "ab"]
            workers = everybody(nodes, 2)
            assert {w.attempt for w in workers} == {0}, "no restart of an earlier job counts"
            if life == "succeeds":
                succeed(nodes, workers)
                continue
            tell(workers[1:], signal.SIGUSR2)
            again = everybody(nodes, 2)
            assert {w.attempt for w in again} == {1}
            if life == "fails":
                tell(again[1:], signal.SIGUSR2)
                assert [node.end().code for node in nodes] == [9, 9]
                store.signal(signal.SIGKILL)
                store = separate_store(job, *journal)
            else:
                for node in nodes:
                    node.signal(signal.SIGTERM)
                assert [node.end().code for node in nodes] == [143, 143]


def test_who_comes_while_a_job_is_ending_is_told_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = handlers(2, monkeypatch, (1, 2), ttl=600)
    made[0].next_rendezvous()
    made[0].set_closed()
    wait_until(made[0].is_closed, "the end of the job")
    with pytest.raises(RendezvousClosedError, match=r"run run is over \(closed: closed by n0\)"):
        made[1].next_rendezvous()
    together([h.shutdown for h in reversed(made)])


def test_a_new_job_of_an_old_id_forms_where_the_last_one_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    # The host of the store is a member of another job, so that the store outlives the one that is closed.
    (other,) = handlers(1, monkeypatch, (1, 1), endpoint, "other")
    assert other.next_rendezvous().rank == 0
    first = handlers(2, monkeypatch, (2, 2), endpoint, is_host=False)
    together([h.next_rendezvous for h in first])
    assert together([h.shutdown for h in first]) == [True, True]
    second = handlers(2, monkeypatch, (2, 2), endpoint, is_host=False)
    infos = together([h.next_rendezvous for h in second])
    assert sorted((i.rank, i.world_size, i.attempt) for i in infos) == [(0, 2, 0), (1, 2, 0)]
    together([h.shutdown for h in (*second, other)])


def test_a_node_that_has_left_is_not_found_even_if_its_connection_had_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who starts the job again at once must not find a node of the old one, which would seem to go on."""
    token = Token(TOKEN.encode(), "the test")
    with Server(token=token) as server, Proxy(server.address) as way:
        where = "{}:{}".format(*way.address)
        (node,) = handlers(1, monkeypatch, (1, 1), where, is_host=False, ttl=600)
        node.next_rendezvous()
        way.hush(0)
        node.membership.release()  # type: ignore[attr-defined]
        with Client(*server.address, token=token) as client:
            assert client.get("job/run/ctl/round") is not None
            assert client.request(Get("job/run/node/", prefix=True)).entries == ()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_killed_the_world_comes_back(tmp_path: Path, seed: int) -> None:
    """Agents and workers of ten nodes are killed at random; nodes come back; the job always does."""
    chance = random.Random(seed)
    words = ("--max-restarts", "1000", "--backoff", "0", "--quarantine", "off")
    with Job(tmp_path, "3:10", "", *words) as job:
        nodes = {name: job.node(name) for name in "abcdefghij"}
        workers = everybody(list(nodes.values()), 10)
        for _ in range(15):
            victims = chance.sample("bcdefghij", chance.randint(1, 4))  # not a: it hosts the store
            for name in victims:
                how = chance.choice(["kill", "worker", "leave"])
                if how == "worker":
                    mine = nodes[name].process.pid
                    with suppress(ProcessLookupError):  # it fell with an earlier victim
                        tell([w for w in workers if mine in parents(w.pid)], signal.SIGKILL)
                    continue
                nodes[name].signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
                nodes[name] = job.node(name)
            workers = settled(nodes, workers[0].port)
        succeed(list(nodes.values()), workers)


def parents(pid: int) -> set[int]:
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return set()


def settled(nodes: dict[str, Node], before: int) -> list[Worker]:
    """The workers, once the last that every node tells of is the same new round of all ten."""
    found: list[Worker | None] = []

    def agreed() -> bool:
        found[:] = [node.latest() for node in nodes.values()]
        rounds = {(w.world, w.port) if w is not None else None for w in found}
        return len(rounds) == 1 and None not in rounds and (10, before) not in rounds and found[0].world == 10  # type: ignore[union-attr]

    wait_until(agreed, "a world of ten")
    return sorted(worker for worker in found if worker is not None)
