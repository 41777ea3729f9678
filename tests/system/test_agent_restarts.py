"""Restarts that a subclass of torch's agents decides on, step by step, over every back end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.spec import AgentOptions, WorkerGroup, WorkerSpec
from phalanx.agent.workers.result import RunResult
from phalanx.cluster.handler import RendezvousParameters
from phalanx.cluster.registry import get_rendezvous_handler
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.events import WorkerState
from phalanx.core.group.restarts import RestartPolicy
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from phalanx.errors import RendezvousStateError
from tests.conftest import HUNG, gone, wait_until
from tests.support.etcd_process import Cluster
from tests.support.memory_blob import MemoryBlob
from tests.support.netns import free_port

TOKEN = "0123456789abcdef0123456789abcdef"
BUDGET = 5
QUICK = AgentOptions(restart_policy=RestartPolicy(BUDGET, backoff_first=0.05, backoff_max=0.1))

STARTS = """
import os, sys, time
at = os.environ["AT"]
with open(f"{at}/{os.environ['RANK']}", "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
"""
FAILS = STARTS + "sys.exit(3)"
WAITS = STARTS + "while not os.path.exists(f'{at}/go'): time.sleep(0.01)"
SAVES = """
import os, signal, sys
def save(*_):
    open(os.environ["AT"] + "/saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(os.environ["AT"] + "/0", "w").write("0\\n")
signal.pause()
"""

Decision = Callable[[Any, WorkerGroup], object]


def start_by_hand(agent: Any, group: WorkerGroup) -> None:
    ids = agent._start_workers(group)
    for worker in group.workers:
        worker.id = ids[worker.local_rank]


DECISIONS: dict[str, Decision] = {
    "restart": lambda agent, group: agent._restart_workers(group),
    "restart twice": lambda agent, group: (agent._restart_workers(group), agent._restart_workers(group)),
    "stop, then initialize": lambda agent, group: (
        agent._stop_workers(group),
        agent._stop_workers(group),
        agent._initialize_workers(group),
    ),
    "initialize": lambda agent, group: agent._initialize_workers(group),
    "two rounds, one start": lambda agent, group: (
        agent._stop_workers(group),
        agent._rendezvous(group),
        agent._rendezvous(group),
        start_by_hand(agent, group),
    ),
}


class Place:
    """The directory that the workers write to, and the handlers of one job's nodes."""

    def __init__(self, at: Path, backend: str, endpoint: str) -> None:
        self.at, self.backend, self._endpoint = at, backend, endpoint
        self._blob = MemoryBlob()

    def handler(self, number: int = 0, nodes: int = 1) -> Any:
        if self.backend == "solo":
            return SoloRendezvous("job")
        if self.backend == "blob":
            return DynamicRendezvousHandler.from_backend("job", None, self._blob, nodes, nodes, "127.0.0.1")
        config: dict[str, Any] = {"rank": number} if self.backend == "static" else {"is_host": number == 0}
        if self.backend != "static":
            config["name"] = f"n{number}"
        parameters = RendezvousParameters(
            self.backend, self._endpoint, "job", nodes, nodes, local_addr="127.0.0.1", **config
        )
        return get_rendezvous_handler(parameters)

    def agent(self, kind: Any, code: str, handler: Any, number: int = 0) -> Any:
        spec = WorkerSpec(
            "r",
            1,
            handler,
            entrypoint=sys.executable,
            args=("-c", code),
            max_restarts=BUDGET,
            monitor_interval=0.01,
        )
        logs = DefaultLogsSpecs(str(self.at / f"logs{number}"))
        return kind(spec, logs, options=QUICK)

    def starts(self, rank: int = 0) -> list[int]:
        """The restarts used, as each worker of this rank was told."""
        try:
            return [int(word) for word in (self.at / str(rank)).read_text().split()]
        except FileNotFoundError:
            return []


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("AT", str(tmp_path))
    monkeypatch.setenv("PHALANX_TOKEN", TOKEN)
    if request.param == "etcd":
        with Cluster(tmp_path) as cluster:
            yield Place(tmp_path, "etcd", str(cluster.members[0].address))
    else:
        yield Place(tmp_path, request.param, f"127.0.0.1:{free_port()}")


def over(*backends: str, long: tuple[str, ...] = ()) -> Any:
    slow = [pytest.param(backend, marks=pytest.mark.long) for backend in long]
    return pytest.mark.parametrize("place", [*backends, *slow], indirect=True)


def in_time(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls at the same time; none may hang."""
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - for the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    assert len(found) == len(calls), "a call hangs"
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    return [found[number] for number in range(len(calls))]


def deciding(place: Place, decide: Decision, times: int, ranks: int = 1) -> Any:
    """A class that decides, `times` times, once all workers have started; then it lets them end."""

    class Deciding(LocalElasticAgent):
        done = 0
        pids: tuple[Any, ...] = ()

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            pids = tuple(worker.id for worker in worker_group.workers)
            ready = pids != self.pids and all(len(place.starts(r)) > self.done for r in range(ranks))
            if result.state is not WorkerState.HEALTHY or not ready:
                return result
            self.pids = pids
            if self.done == times:
                (place.at / "go").touch()
                return result
            self.done += 1
            decide(self, worker_group)
            assert all(gone(pid) for pid in pids)
            return result

    return Deciding


class Watching(LocalElasticAgent):
    """The smallest override: every step is called in torch's order."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return super()._monitor_workers(worker_group)


class TorchRestart(LocalElasticAgent):
    """`_restart_workers` as other projects write it, from torch's steps."""

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)


class TorchLoop(LocalElasticAgent):
    """`_invoke_run` as other projects write it, with its own count."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            threading.Event().wait(0.01)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if result.state is WorkerState.HEALTHY:
                if group.spec.rdzv_handler.num_nodes_waiting() > 0:
                    self._restart_workers(group)
            elif self._remaining_restarts > 0:
                self._remaining_restarts -= 1
                self._restart_workers(group)
            else:
                self._stop_workers(group)
                return result


@over("c10d", "static", long=("solo", "etcd", "blob"))
@pytest.mark.parametrize("kind", [Watching, TorchRestart, TorchLoop])
def test_a_crash_loop_uses_the_whole_budget_and_ends(place: Place, kind: Any) -> None:
    agent = place.agent(kind, FAILS, place.handler())
    (result,) = in_time(agent.run)
    assert result.state is WorkerState.FAILED
    assert [failure.exitcode for failure in result.failures.values()] == [3]
    assert place.starts() == list(range(BUDGET + 1))
    assert agent._remaining_restarts == 0


@over("c10d", long=("solo", "static", "etcd", "blob"))
@pytest.mark.parametrize("decision", DECISIONS)
def test_a_restart_of_the_subclass_uses_none_of_the_budget(place: Place, decision: str) -> None:
    agent = place.agent(deciding(place, DECISIONS[decision], 3), WAITS, place.handler())
    (result,) = in_time(agent.run)
    assert (result.state, agent._remaining_restarts) == (WorkerState.SUCCEEDED, BUDGET)
    assert set(place.starts()) == {0}
    assert len(place.starts()) >= 4


@over("c10d", long=("solo", "static", "etcd"))
def test_restarts_that_the_subclass_counts_are_counted(place: Place) -> None:
    def counted(agent: Any, group: WorkerGroup) -> None:
        agent._remaining_restarts -= 1
        agent._restart_workers(group)

    agent = place.agent(deciding(place, counted, 3), WAITS, place.handler())
    (result,) = in_time(agent.run)
    assert (result.state, agent._remaining_restarts) == (WorkerState.SUCCEEDED, BUDGET - 3)
    assert place.starts() == [0, 1, 2, 3]


@over("c10d", long=("static", "etcd"))
@pytest.mark.parametrize("decision", ["restart", "initialize", "two rounds, one start"])
@pytest.mark.parametrize("other", [LocalElasticAgent, Watching, TorchLoop])
def test_the_other_nodes_restart_too(place: Place, decision: str, other: Any) -> None:
    kind = deciding(place, DECISIONS[decision], 2, ranks=2)
    if other is TorchLoop:  # torch's interface alone, on both
        kind = type(
            "Both", (kind,), {"_rendezvous": lambda self, group: LocalElasticAgent._rendezvous(self, group)}
        )
    handlers = [place.handler(number, 2) for number in range(2)]
    agents = [place.agent(kind, WAITS, handlers[0]), place.agent(other, WAITS, handlers[1], 1)]
    results = in_time(*(agent.run for agent in agents))
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert [agent._remaining_restarts for agent in agents] == [BUDGET] * 2
    assert set(place.starts(0)) == set(place.starts(1)) == {0}
    assert len(place.starts(0)) == 3
    # The round between two rendezvous is a round: the other node may have started its worker in it.
    between = 2 if decision == "two rounds, one start" else 0
    assert 3 <= len(place.starts(1)) <= 3 + between


@over("c10d", long=("static", "etcd"))
@pytest.mark.parametrize("kind", [Watching, TorchLoop])
def test_two_nodes_have_one_count(place: Place, kind: Any) -> None:
    """Failures of either node count, also where the class has torch's interface alone."""
    code = (
        STARTS
        + """
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def started(rank):
    return os.path.exists(f"{at}/{rank}") and len(open(f"{at}/{rank}").readlines()) > count
if count < 4 and count % 2 == int(os.environ["RANK"]):
    while not (started(0) and started(1)):
        time.sleep(0.01)
    sys.exit(3)
while count < 4:
    time.sleep(0.01)
"""
    )
    handlers = [place.handler(number, 2) for number in range(2)]
    agents = [place.agent(kind, code, handler, number) for number, handler in enumerate(handlers)]
    results = in_time(*(agent.run for agent in agents))
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert place.starts(0) == place.starts(1) == [0, 1, 2, 3, 4]


@over("c10d", long=("solo", "static", "etcd"))
@pytest.mark.parametrize("decision", DECISIONS)
def test_steps_work_outside_of_run_and_before_it(place: Place, decision: str) -> None:
    agent = place.agent(LocalElasticAgent, WAITS, place.handler())
    group = agent.get_worker_group()

    def steps() -> None:
        agent._restart_workers(group)  # before any start: torch's stops nothing and begins
        for _ in range(3):
            before = [worker.id for worker in group.workers]
            DECISIONS[decision](agent, group)
            assert all(gone(pid) for pid in before)
            assert agent._monitor_workers(group).state is WorkerState.HEALTHY
            assert agent._monitor_workers(group).state is WorkerState.HEALTHY

    in_time(steps)
    assert agent._remaining_restarts == BUDGET
    left = [worker.id for worker in group.workers]

    def end() -> None:
        wait_until(lambda: [worker.id for worker in group.workers] != left, "the start of `run`")
        (place.at / "go").touch()

    result, _ = in_time(agent.run, end)
    assert result.state is WorkerState.SUCCEEDED
    assert all(gone(pid) for pid in left)
    with pytest.raises(RuntimeError, match=r"this agent has ended \(all workers succeeded"):
        agent.run()


@over("solo", "c10d")
def test_the_exit_barrier_may_be_called_twice_outside_of_run(place: Place) -> None:
    agent = place.agent(LocalElasticAgent, STARTS, place.handler())
    group = agent.get_worker_group()
    in_time(lambda: (agent._rendezvous(group), start_by_hand(agent, group)))
    wait_until(lambda: agent._monitor_workers(group).state is WorkerState.SUCCEEDED, "the success")
    in_time(lambda: (agent._exit_barrier(), agent._exit_barrier(), agent._shutdown(), agent._shutdown()))
    assert agent.state.phase == "DONE"
    assert agent._rdzv_handler.shutdown()


@over("solo")
def test_workers_that_the_subclass_stops_have_their_grace(place: Place) -> None:
    agent = place.agent(LocalElasticAgent, SAVES, place.handler())
    group = agent.get_worker_group()
    in_time(lambda: agent._initialize_workers(group))
    wait_until(place.starts, "the worker")
    in_time(lambda: agent._stop_workers(group))
    assert (place.at / "saved").exists()
    agent._shutdown()


@over("c10d")
def test_a_handler_that_an_agent_drives_refuses_to_be_asked(place: Place) -> None:
    handler = place.handler()
    place.agent(LocalElasticAgent, WAITS, handler)
    with pytest.raises(RendezvousStateError, match="override _rendezvous"):
        in_time(handler.next_rendezvous)
