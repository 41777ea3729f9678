"""Overrides of torch's steps take effect: the order of the calls, each step alone, and loops of one's own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.spec import Worker, WorkerGroup, WorkerSpec
from phalanx.agent.workers.result import RunResult
from phalanx.cluster.handler import RendezvousInfo
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.events import WorkerState
from phalanx.elastic.agent.server.api import STEPS, SimpleElasticAgent
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.elastic.agent.server.torch_events import METHODS as EVENT_METHODS
from phalanx.errors import RendezvousClosedError, RendezvousTimeoutError, SignalException, StartError
from tests.conftest import HUNG, gone, wait_until
from tests.system.test_cluster import handlers, together

PYTHON = sys.executable

AT_THE_END = ("_record_metrics", "_record_worker_events", "_get_worker_state", "_record_flakiness_metric")
ONCE = "import os, sys; sys.exit(9 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
STAYS = "import os, signal; open(os.environ['MARK'], 'w').close(); signal.pause()"


# ---- the same calls as under torch ---------------------------------------------------------------------


class Handler:
    """A rendezvous of one node for either agent, which is neither's own class."""

    use_agent_store = False

    def __init__(self, info: Any, store: Any, waiting: list[int]) -> None:
        self.info = info
        self.store = store
        self.waiting = waiting
        self.rounds = 0

    def get_backend(self) -> str:
        return "scripted"

    def next_rendezvous(self) -> Any:
        self.rounds += 1
        return self.info(self.store(), 0, 1, None)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return self.waiting.pop(0) if self.waiting else 0

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


def recorder(base: Any, run_result: Any, states: list[Any]) -> Any:
    """A subclass that overrides every step; the ones for workers follow a script."""
    calls: list[tuple[str, int, tuple[str, ...]]] = []

    class Recorder(base):  # type: ignore[misc]
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

        def _stop_workers(self, worker_group: Any) -> None: ...

        def _monitor_workers(self, worker_group: Any) -> Any:
            return run_result(state=states.pop(0), return_values={0: None, 1: None})

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None: ...

    def recorded(name: str) -> Any:
        inner = getattr(Recorder, name)

        def step(self: Any, *args: Any, **named: Any) -> Any:
            calls.append((name, len(args), tuple(named)))
            return inner(self, *args, **named)

        return step

    body: dict[str, Any] = {name: recorded(name) for name in (*STEPS, *AT_THE_END)}
    kind = type("Recorded", (Recorder,), body)
    kind.calls = calls
    return kind


@pytest.mark.parametrize(
    ("states", "waiting", "restarts", "end"),
    [
        ("S", [], 1, "SUCCEEDED"),
        ("HHS", [], 1, "SUCCEEDED"),
        ("HFHS", [], 1, "SUCCEEDED"),
        ("US", [], 2, "SUCCEEDED"),
        ("HHS", [0, 1], 0, "SUCCEEDED"),
        ("F", [], 0, "FAILED"),
        ("FHF", [], 1, "FAILED"),
    ],
)
def test_every_step_is_called_as_torch_calls_it(
    states: str, waiting: list[int], restarts: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo as TorchInfo

    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    names = {"S": "SUCCEEDED", "F": "FAILED", "H": "HEALTHY", "U": "UNHEALTHY"}
    told = []
    for base, result, spec_of, state, info in (
        (api.SimpleElasticAgent, api.RunResult, api.WorkerSpec, api.WorkerState, TorchInfo),
        (SimpleElasticAgent, RunResult, WorkerSpec, WorkerState, RendezvousInfo),
    ):
        kind = recorder(base, result, [state[names[letter]] for letter in states])
        handler = Handler(info, HashStore, list(waiting))
        spec = spec_of(
            role="r",
            local_world_size=2,
            rdzv_handler=handler,
            entrypoint="x",
            max_restarts=restarts,
            monitor_interval=0.01,
            master_addr="h",
            master_port=1,
        )
        agent = kind(spec)
        assert agent.run().state.name == end
        told.append(
            (kind.calls, handler.rounds, agent._remaining_restarts, agent.get_worker_group().state.name)
        )
    torchs, ours = told
    assert ours == torchs


def test_torchs_exceptions_mean_the_same_here() -> None:
    torchs = pytest.importorskip("torch.distributed.elastic.rendezvous.api")

    class Raising(Handler):
        def next_rendezvous(self) -> Any:
            raise self.info

    for error, ends in (
        (torchs.RendezvousClosedError("over"), WorkerState.SUCCEEDED),
        (torchs.RendezvousGracefulExitError("bye"), WorkerState.SUCCEEDED),
        (torchs.RendezvousTimeoutError("nobody came"), RendezvousTimeoutError),
    ):
        spec = WorkerSpec("r", 1, Raising(error, None, []), entrypoint="x")  # type: ignore[arg-type]
        agent = recorder(SimpleElasticAgent, RunResult, [])(spec)
        if isinstance(ends, WorkerState):
            assert agent.run().state is ends
        else:
            with pytest.raises(ends, match="nobody came"):
                agent.run()


# ---- one step at a time --------------------------------------------------------------------------------


def spec_of(*args: str, handler: Any = None, **more: Any) -> WorkerSpec:
    more = {"role": "r", "local_world_size": 2, "max_restarts": 1, "monitor_interval": 0.01, **more}
    handler = handler or SoloRendezvous("job")
    return WorkerSpec(entrypoint=PYTHON, args=("-c", *args), rdzv_handler=handler, **more)


def overriding(name: str, calls: list[str]) -> type[LocalElasticAgent]:
    """A class that overrides one step and calls the original."""
    inner = getattr(LocalElasticAgent, name)

    def step(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(name)
        return inner(self, *args, **named)

    return type("One", (LocalElasticAgent,), {name: step})


@pytest.mark.parametrize("name", STEPS)
def test_a_single_override_is_called_and_the_job_restarts(name: str, tmp_path: Path) -> None:
    calls: list[str] = []
    agent = overriding(name, calls)(spec_of(ONCE), DefaultLogsSpecs(str(tmp_path)))
    result = agent.run()
    assert (result.state, agent.attempt, agent._remaining_restarts) == (WorkerState.SUCCEEDED, 1, 0)
    assert result.return_values == {0: None, 1: None}
    often = {
        "_invoke_run": 1, "_initialize_workers": 2, "_rendezvous": 2, "_assign_worker_ranks": 2,
        "_start_workers": 2, "_stop_workers": 1, "_restart_workers": 1, "_exit_barrier": 1, "_shutdown": 2,
    }  # fmt: skip
    assert set(calls) == {name}
    assert name == "_monitor_workers" or len(calls) == often[name]
    assert all(isinstance(worker.id, int) and gone(worker.id) for worker in agent.get_worker_group().workers)


def test_steps_may_do_without_the_originals(tmp_path: Path) -> None:
    """A rendezvous, ranks and an exit barrier of the subclass's own."""

    class Own(LocalElasticAgent):
        barriers = 0

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            info = worker_group.spec.rdzv_handler.next_rendezvous()
            worker_group.group_rank, worker_group.group_world_size = info.rank, info.world_size
            worker_group.master_addr, worker_group.master_port = "localhost", 1
            worker_group.workers = self._assign_worker_ranks(info.store, 0, 1, worker_group.spec)

        def _assign_worker_ranks(
            self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
        ) -> list[Worker]:
            return [Worker(rank, rank + 10, rank, 12, 2) for rank in range(2)]

        def _exit_barrier(self) -> None:
            self.barriers += 1

    agent = Own(spec_of(ONCE), DefaultLogsSpecs(str(tmp_path)))
    result = agent.run()
    assert (result.state, result.return_values) == (WorkerState.SUCCEEDED, {10: None, 11: None})
    assert (agent.barriers, agent.attempt) == (1, 1)
    assert agent.state.phase == "DONE"


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """As programs have it that replace `_invoke_run`: steps called by themselves, restarts counted there."""

    class Looped(LocalElasticAgent):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.left: list[int] = []

        def _invoke_run(self, role: str = "default") -> RunResult:
            group = self._worker_group
            self._initialize_workers(group)
            while True:
                time.sleep(group.spec.monitor_interval)
                result = self._monitor_workers(group)
                group.state = result.state
                self.left.append(self._remaining_restarts)
                if result.state is WorkerState.SUCCEEDED:
                    self._exit_barrier()
                    return result
                if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                    if self._remaining_restarts == 0:
                        self._stop_workers(group)
                        return result
                    self._remaining_restarts -= 1
                    self._restart_workers(group)

    agent = Looped(spec_of(ONCE, max_restarts=2), DefaultLogsSpecs(str(tmp_path / "a")))
    assert agent.run().state is WorkerState.SUCCEEDED
    assert (set(agent.left), agent.attempt) == ({2, 1}, 1)
    agent = Looped(spec_of("raise SystemExit(4)"), DefaultLogsSpecs(str(tmp_path / "b")))
    result = agent.run()
    assert result.state is WorkerState.FAILED
    assert {failure.exitcode for failure in result.failures.values()} == {4}
    assert agent._store is agent.get_worker_group().store
    assert agent._pcontext is not None
    assert all(gone(pid) for pid in agent._pcontext.pids().values())


def test_steps_of_a_plain_agent_work_without_run(tmp_path: Path) -> None:
    agent = LocalElasticAgent(spec_of(ONCE), DefaultLogsSpecs(str(tmp_path)))
    group = agent.get_worker_group()
    agent._rendezvous(group)
    assert [worker.global_rank for worker in group.workers] == [0, 1]
    ids = agent._start_workers(group)
    assert sorted(ids) == [0, 1]
    wait_until(lambda: agent._monitor_workers(group).state is WorkerState.FAILED, "the failure")
    agent._remaining_restarts -= 1
    agent._restart_workers(group)
    wait_until(lambda: agent._monitor_workers(group).state is WorkerState.SUCCEEDED, "the success")
    agent._exit_barrier()
    assert agent.state.phase == "DONE"
    agent._shutdown()
    assert all(gone(worker.id) for worker in group.workers)


# ---- several nodes ------------------------------------------------------------------------------------


TOGETHER = """
import os, sys, time
at, rank = os.environ["AT"], os.environ["RANK"]
with open(f"{at}/{rank}", "a") as file:
    file.write("started\\n")
def started(other):
    try:
        return len(open(f"{at}/{other}").readlines())
    except FileNotFoundError:
        return 0
if rank == "0":
    while started("1") < started("0"):
        time.sleep(0.01)
    if started("0") == 1:
        sys.exit(9)
    open(f"{at}/go", "w").close()
while not os.path.exists(f"{at}/go"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["_start_workers", "_restart_workers", "_rendezvous", "_invoke_run"])
def test_two_nodes_restart_together_under_an_override(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a membership that reports, or with torch's interface alone where the step may use the handler."""
    monkeypatch.setenv("AT", str(tmp_path))
    calls: list[str] = []
    kind = overriding(name, calls)
    made = handlers(2, monkeypatch, (2, 2))
    agents = [
        kind(
            spec_of(TOGETHER, handler=handler, local_world_size=1, max_restarts=2),
            DefaultLogsSpecs(str(tmp_path / f"logs{number}")),
        )
        for number, handler in enumerate(made)
    ]
    results = together([agent.run for agent in agents])
    assert [result.state for result in results] == [WorkerState.SUCCEEDED] * 2
    assert sorted(rank for result in results for rank in result.return_values) == [0, 1]
    assert [(tmp_path / rank).read_text().count("started") for rank in "01"] == [2, 2]
    assert len(calls) >= 2


# ---- signals and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["base step", "own code"])
def test_a_signal_is_raised_out_of_the_step(where: str, tmp_path: Path) -> None:
    """In a step of ours it ends the wait; in the subclass's own code it is raised there, as torch's is."""
    mark = tmp_path / "mark"
    ended: list[Any] = []

    class Signalled(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if where == "own code":
                wait_until(mark.exists, "the worker")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(HUNG)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            ended.append((death_sig, timeout))
            super()._shutdown(death_sig, timeout)

    def ring() -> None:
        wait_until(mark.exists, "the worker")
        os.kill(os.getpid(), signal.SIGTERM)

    os.environ["MARK"] = str(mark)
    thread = threading.Thread(target=ring)
    if where == "base step":
        thread.start()
    agent = Signalled(
        spec_of(STAYS, local_world_size=1, monitor_interval=HUNG if where == "base step" else 0.01),
        DefaultLogsSpecs(str(tmp_path / "logs")),
        shutdown_timeout=7,
    )
    begin = time.monotonic()
    with pytest.raises(SignalException) as caught:
        agent.run()
    del os.environ["MARK"]
    assert caught.value.sigval is signal.SIGTERM
    assert ended == [(signal.SIGTERM, 7)]
    assert time.monotonic() - begin < HUNG / 2
    assert gone(agent.get_worker_group().workers[0].id)
    assert agent.state.ending is not None
    assert agent.state.ending.sig == signal.SIGTERM
    if thread.ident:
        thread.join(HUNG)


NOTES_SIGNALS = """
import os, signal
def note(number, frame):
    with open(os.environ["MARK"], "a") as file:
        file.write(f"{number} ")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    note("up", None)
    while True:
        signal.pause()
"""


def test_a_stop_by_a_subclass_has_its_signal_and_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))

    class Interrupting(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if self._remaining_restarts == 1:
                up = mark.exists() and mark.read_text() == "up "
                return RunResult(WorkerState.UNHEALTHY if up else WorkerState.HEALTHY)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            super()._shutdown(signal.SIGINT, 1)

    spec = spec_of(NOTES_SIGNALS, local_world_size=1, max_restarts=1)
    begin = time.monotonic()
    agent = Interrupting(spec, DefaultLogsSpecs(str(tmp_path / "logs")), shutdown_timeout=2 * HUNG)
    assert agent.run().state is WorkerState.SUCCEEDED
    assert mark.read_text() == f"up {int(signal.SIGINT)} "
    assert time.monotonic() - begin < HUNG  # it was killed after its second, not after `shutdown_timeout`


def test_errors_come_out_of_the_steps(tmp_path: Path) -> None:
    class Broken(SoloRendezvous):
        immediate = False

        def next_rendezvous(self) -> RendezvousInfo:
            raise self.error

        error: Exception = RendezvousTimeoutError("nobody came")

    caught: list[BaseException] = []

    class Catching(LocalElasticAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            try:
                super()._rendezvous(worker_group)
            except BaseException as error:
                caught.append(error)
                raise

    handler = Broken("job")
    with pytest.raises(RendezvousTimeoutError, match="nobody came"):
        Catching(spec_of("", handler=handler), DefaultLogsSpecs(str(tmp_path))).run()
    handler.error = RendezvousClosedError("over")
    result = Catching(spec_of("", handler=handler), DefaultLogsSpecs(str(tmp_path))).run()
    assert result.state is WorkerState.SUCCEEDED  # a rendezvous that is closed is a clean end
    assert [type(error).__name__ for error in caught] == ["RendezvousTimeoutError", "RendezvousClosedError"]


def test_a_start_that_fails_comes_out_of_the_step(tmp_path: Path) -> None:
    calls: list[str] = []
    spec = WorkerSpec("r", 1, SoloRendezvous("job"), entrypoint="/nonexistent/program", max_restarts=3)
    agent = overriding("_start_workers", calls)(spec, DefaultLogsSpecs(str(tmp_path)))
    with pytest.raises(StartError, match="nonexistent"):
        agent.run()
    assert (calls, agent.attempt) == (["_start_workers"], 0)


def test_what_cannot_be_honoured_is_refused_at_the_definition() -> None:
    async def step(self: Any) -> None: ...

    with pytest.raises(TypeError, match="_exit_barrier must not be a coroutine"):
        type("Later", (SimpleElasticAgent,), {"_exit_barrier": step})
    with pytest.raises(TypeError, match="_stop_workers must be a method"):
        type("Static", (SimpleElasticAgent,), {"_stop_workers": staticmethod(lambda group: None)})


def test_torchs_methods_are_called_or_refused() -> None:
    """Whatever torch's class defines is a step here, or readable, or refused, never ignored."""
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    methods = {name for name, value in vars(api.SimpleElasticAgent).items() if callable(value)}
    known = {*STEPS, *EVENT_METHODS, "__init__", "run", "get_worker_group"}
    assert methods - known == set()


# ---- agents that start their workers themselves ---------------------------------------------------------


def test_a_subclass_brings_its_own_processes(tmp_path: Path) -> None:
    """As the agents of other projects do: `_start_workers` makes a context, and the other steps use it."""
    from phalanx.elastic.multiprocessing import start_processes

    class Bringing(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self._worker_watchdog = None
            envs = {w.local_rank: {"RANK": str(w.global_rank)} for w in worker_group.workers}
            self._setup_local_watchdog(envs=envs)
            self._setup_healthcheck()
            env = {"TORCHELASTIC_RESTART_COUNT": str(2 - self._remaining_restarts)}
            self._pcontext = start_processes(
                name=worker_group.spec.role,
                entrypoint=PYTHON,
                args=dict.fromkeys(envs, ("-c", ONCE)),
                envs={local: {**own, **env} for local, own in envs.items()},
                logs_specs=self._logs_specs,
            )
            return self._pcontext.pids()

    spec = WorkerSpec("r", 2, SoloRendezvous("job"), entrypoint="x", max_restarts=2, monitor_interval=0.01)
    agent = Bringing(spec, DefaultLogsSpecs(str(tmp_path)), log_line_prefix_template="[mine]")
    result = agent.run()
    assert result.state is WorkerState.SUCCEEDED
    assert result.return_values == {0: None, 1: None}
    assert agent.attempt == 1
    assert agent._log_line_prefix_template == "[mine]"
    context = agent._pcontext
    assert context is not None
    assert all(gone(pid) for pid in context.pids().values())


def test_workers_of_a_subclass_are_stopped_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.elastic.multiprocessing import start_processes

    mark = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(mark))

    class Bringing(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self._pcontext = start_processes("r", PYTHON, {0: ("-c", STAYS)}, {0: {}}, self._logs_specs)
            return self._pcontext.pids()

    agent = Bringing(spec_of("", local_world_size=1), DefaultLogsSpecs(str(tmp_path / "logs")))
    threading.Thread(
        target=lambda: (wait_until(mark.exists, "a worker"), os.kill(os.getpid(), signal.SIGTERM))
    ).start()
    with pytest.raises(SignalException):
        agent.run()
    context = agent._pcontext
    assert context is not None
    assert all(gone(pid) for pid in context.pids().values())


def test_nodes_exchange_ranks_as_torchs_do() -> None:
    """A handler's own store may answer torch's keys: the place of a node is what the store says."""
    from phalanx.cluster.exchange import exchange_ranks

    class Told:
        def set(self, key: str, value: bytes) -> None:
            seen.append(key)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return []

        def multi_set(self, keys: list[str], values: list[str]) -> None:
            seen.append("multi_set")

        def get(self, key: str) -> bytes:
            seen.append(key)
            return b"[4, 8, 2, 6]"

    seen: list[str] = []
    ranks = exchange_ranks(Told(), 0, 3, spec_of("", local_world_size=2))
    assert [(w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in ranks] == [
        (4, 8, 2, 6),
        (5, 8, 3, 6),
    ]
    assert seen == ["torchelastic/role_info/0", "multi_set", "torchelastic/assigned_ranks/0"]
