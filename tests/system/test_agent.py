"""Agents as a library: subclasses with four hooks, handlers of one's own, events and metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.logs.specs import DefaultLogsSpecs
from phalanx.agent.spec import AgentOptions, Worker, WorkerGroup, WorkerSpec
from phalanx.agent.workers.result import RunResult
from phalanx.cluster.handler import RendezvousHandler, RendezvousInfo
from phalanx.cluster.solo import SoloRendezvous
from phalanx.core.group.events import WorkerState
from phalanx.elastic.agent.server.api import ElasticAgent, SimpleElasticAgent
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.errors import (
    PhalanxError,
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    SignalException,
    StartError,
)
from phalanx.observe import events, metrics
from tests.conftest import HUNG, gone, wait_until

PYTHON = sys.executable


class Scripted(SoloRendezvous):
    """A handler that a test tells what to answer; asked in a thread, and again and again, as plug-ins are."""

    immediate = False
    watches = False

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__("job")
        self.answers = list(answers)
        self.asked = 0
        self.waiting = 0
        self.left = 0
        self.closed_by_agent = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer
        self.waiting = 0
        return super().next_rendezvous()

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def leave(self) -> None:
        self.left += 1

    def shutdown(self) -> bool:
        self.closed_by_agent += 1
        return super().shutdown()


def spec_of(entrypoint: Any, *args: Any, handler: RendezvousHandler | None = None, **more: Any) -> WorkerSpec:
    more = {"role": "r", "local_world_size": 1, "max_restarts": 0, **more}
    return WorkerSpec(entrypoint=entrypoint, args=args, rdzv_handler=handler or SoloRendezvous("job"), **more)


def agent_of(spec: WorkerSpec, tmp_path: Path, **more: Any) -> LocalElasticAgent:
    return LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs")), **more)


# ---- subclasses of SimpleElasticAgent ------------------------------------------------------------------


class Hooked(SimpleElasticAgent):
    """Workers that exist only as a list of states."""

    def __init__(self, spec: WorkerSpec, states: list[WorkerState]) -> None:
        super().__init__(spec)
        self.states = states
        self.calls: list[str] = []
        self.polls: list[float] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        return {worker.local_rank: f"id{worker.local_rank}" for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.calls.append("monitor")
        self.polls.append(time.monotonic())
        return RunResult(self.states.pop(0), {worker_group.workers[0].global_rank: "done"})

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append("shutdown")


H, S, F, U = WorkerState.HEALTHY, WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.UNHEALTHY


@pytest.mark.parametrize(
    ("states", "calls", "end"),
    [
        ([S], "start monitor shutdown", S),
        ([H, H, S], "start monitor monitor monitor shutdown", S),
        ([F, S], "start monitor stop start monitor shutdown", S),
        ([U, H, S], "start monitor stop start monitor monitor shutdown", S),
        ([F, F], "start monitor stop start monitor stop shutdown", F),
    ],
)
def test_the_four_hooks_fire(states: list[WorkerState], calls: str, end: WorkerState) -> None:
    agent = Hooked(spec_of("x", max_restarts=1, monitor_interval=0.02), list(states))
    result = agent.run()
    assert (" ".join(agent.calls), result.state) == (calls, end)
    assert agent.get_worker_group().state is end
    assert result.return_values == ({0: "done"} if end is S else {})


def test_subclass_is_polled_at_the_monitor_interval() -> None:
    agent = Hooked(spec_of("x", monitor_interval=0.05), [H] * 5 + [S])
    agent.run()
    gaps = [after - before for before, after in zip(agent.polls, agent.polls[1:], strict=False)]
    assert len(gaps) == 5
    assert min(gaps) >= 0.045


def test_an_error_in_a_hook_ends_the_agent_cleanly() -> None:
    class Broken(Hooked):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            raise KeyError("mine")

    handler = Scripted()
    agent = Broken(spec_of("x", handler=handler), [])
    with pytest.raises(KeyError, match="mine"):
        agent.run()
    assert agent.calls[-1] == "shutdown"
    assert handler.closed_by_agent == 1


def test_a_signal_that_a_hook_raises_leaves_the_rendezvous_open() -> None:
    class Signalled(Hooked):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            raise SignalException("a signal, as a hook has it", signal.SIGINT)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            self.calls.append(f"shutdown by {death_sig.name}")

    handler = Scripted()
    agent = Signalled(spec_of("x", handler=handler), [])
    with pytest.raises(SignalException, match="as a hook has it"):
        agent.run()
    assert agent.calls[-1] == "shutdown by SIGINT"
    assert (handler.left, handler.closed_by_agent) == (1, 0)


@pytest.mark.parametrize("state", [WorkerState.UNKNOWN, WorkerState.INIT, WorkerState.STOPPED])
def test_a_state_that_no_running_group_has_is_an_error_of_the_hook(state: WorkerState) -> None:
    handler = Scripted()
    agent = Hooked(spec_of("x", handler=handler), [state, S])
    with pytest.raises(RuntimeError, match=f"role r: _monitor_workers returned WorkerState.{state.name}"):
        agent.run()
    assert agent.calls == ["start", "monitor", "shutdown"]
    assert handler.closed_by_agent == 1


def test_an_unhealthy_group_without_restarts_has_failed() -> None:
    result = Hooked(spec_of("x"), [U]).run()
    assert (result.state, result.is_failed()) == (F, True)


def test_abstract_classes_cannot_be_made() -> None:
    for kind in (ElasticAgent, SimpleElasticAgent, RendezvousHandler):
        with pytest.raises(TypeError):
            kind(spec_of("x"))  # type: ignore[abstract,call-arg]


# ---- specifications and groups -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"local_world_size": 0}, "local_world_size=0"),
        ({"local_world_size": -1}, "local_world_size=-1"),
        ({"local_world_size": 1.5}, "1.5"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"monitor_interval": 0}, "monitor_interval=0"),
        ({"monitor_interval": float("nan")}, "nan"),
        ({"master_port": 70000}, "70000"),
        ({"local_world_size": "2"}, "local_world_size='2'"),
        ({"max_restarts": None}, "max_restarts=None"),
        ({"monitor_interval": None}, "monitor_interval=None"),
        ({"monitor_interval": "1"}, "monitor_interval='1'"),
        ({"master_port": "29500"}, "master_port='29500'"),
        ({"args": "--lr 0.1"}, "args='--lr 0.1'"),
        ({"args": None}, "args=None"),
        ({"entrypoint": None}, "entrypoint=None"),
        ({"entrypoint": ""}, "entrypoint=''"),
        ({"entrypoint": 5}, "entrypoint=5"),
    ],
    ids=str,
)
def test_bad_specifications_are_refused(bad: dict[str, Any], says: str) -> None:
    given = {
        "role": "r",
        "local_world_size": 1,
        "rdzv_handler": SoloRendezvous("j"),
        "entrypoint": "x",
        **bad,
    }
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        WorkerSpec(**given)


def test_numbers_of_other_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    spec = spec_of("x", local_world_size=numpy.int64(2), monitor_interval=numpy.float32(0.5))
    assert len(WorkerGroup(spec).workers) == 2
    assert type(spec.local_world_size) is int


def test_a_function_is_known_by_its_name() -> None:
    class Trainer:
        def __call__(self) -> None: ...

    spec = spec_of("x")
    assert replace(spec, entrypoint=partial(partial(len))).get_entrypoint_name() == "len"
    assert replace(spec, entrypoint=Trainer()).get_entrypoint_name().endswith("Trainer")


def test_fn_is_deprecated_but_works() -> None:
    with pytest.warns(DeprecationWarning, match="entrypoint"):
        spec = WorkerSpec("r", 1, SoloRendezvous("j"), fn=len)
    assert spec.entrypoint is len
    assert spec.get_entrypoint_name() == "len"
    assert spec_of("/usr/bin/env").get_entrypoint_name() == "env"


def test_a_group_before_and_after(tmp_path: Path) -> None:
    agent = agent_of(spec_of(PYTHON, "-c", "", local_world_size=2, role="trainer"), tmp_path)
    group = agent.get_worker_group()
    assert [(w.local_rank, w.global_rank, w.world_size, w.id) for w in group.workers] == [
        (0, -1, -1, None),
        (1, -1, -1, None),
    ]
    assert group.state is WorkerState.INIT
    assert group.group_rank is None
    result = agent.run()
    assert agent.get_worker_group("trainer") is group
    assert (group.group_rank, group.group_world_size, group.state) == (0, 1, S)
    assert [
        (w.local_rank, w.global_rank, w.role_rank, w.world_size, w.role_world_size) for w in group.workers
    ] == [
        (0, 0, 0, 2, 2),
        (1, 1, 1, 2, 2),
    ]
    assert all(isinstance(worker.id, int) and gone(worker.id) for worker in group.workers)
    assert (group.master_addr, isinstance(group.master_port, int)) == ("localhost", True)
    assert result.return_values == {0: None, 1: None}
    assert not result.is_failed()
    assert "local_rank=1" in repr(Worker(1))


def test_failures_come_by_global_rank(tmp_path: Path) -> None:
    class Second(SoloRendezvous):
        """This node is the second of two."""

        def next_rendezvous(self) -> RendezvousInfo:
            return RendezvousInfo(None, 1, 2, None)

    code = "import os, sys, signal; sys.exit(3) if os.environ['LOCAL_RANK'] == '1' else signal.pause()"
    spec = spec_of(
        PYTHON, "-c", code, local_world_size=2, handler=Second("j"), master_addr="h", master_port=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
        result = agent_of(spec, tmp_path).run()
    assert result.is_failed()
    assert list(result.failures) == [3]
    assert list(result.stopped) == [2]
    failure = result.failures[3]
    assert (failure.local_rank, failure.exitcode, failure.role, failure.rank) == (1, 3, "r", 3)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    agent = agent_of(spec_of("/nonexistent/program", max_restarts=5), tmp_path)
    with pytest.raises(StartError, match="nonexistent"):
        agent.run()
    assert agent.attempt == 0


def test_off_the_main_thread(tmp_path: Path) -> None:
    agent = agent_of(spec_of(PYTHON, "-c", ""), tmp_path)
    results: list[RunResult] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    thread.join(HUNG)
    assert [result.state for result in results] == [S]


def test_handlers_of_signals_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    agent_of(spec_of(PYTHON, "-c", ""), tmp_path).run()
    assert [signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


# ---- handlers of one's own -----------------------------------------------------------------------------


def test_nodes_waiting_cause_one_new_round_and_use_no_restart(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    code = (
        f"import os, signal; n = len(os.listdir({str(marks)!r})); "
        f"open({str(marks)!r} + '/' + str(os.getpid()), 'w').close(); n or signal.pause()"
    )
    handler = Scripted()
    spec = spec_of(PYTHON, "-c", code, handler=handler, monitor_interval=0.01)
    notes: list[str] = []
    agent = agent_of(spec, tmp_path, options=AgentOptions(note=notes.append))

    def join() -> None:
        wait_until(lambda: list(marks.iterdir()), "the first worker")
        handler.waiting = 1

    thread = threading.Thread(target=join)
    thread.start()
    result = agent.run()
    thread.join(HUNG)
    assert (result.state, handler.asked, agent.attempt) == (S, 2, 0)
    assert result.failures == {}
    assert len(list(marks.iterdir())) == 2
    assert [note for note in notes if "waiting to join" in note and "no restart" in note] == notes


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (RendezvousGracefulExitError("bye"), S),
        (RendezvousClosedError("over"), S),
        (RendezvousTimeoutError("nobody came"), RendezvousTimeoutError),
        (RuntimeError("plug-in broke"), RuntimeError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_how_a_rendezvous_may_end(answer: Exception, ends: Any, tmp_path: Path) -> None:
    agent = agent_of(spec_of(PYTHON, "-c", "", handler=Scripted(answer), max_restarts=3), tmp_path)
    if isinstance(ends, WorkerState):
        result = agent.run()
        assert (result.state, result.failures, result.return_values) == (ends, {}, {})
        return
    with pytest.raises(ends, match=str(answer)):
        agent.run()


def test_a_rendezvous_that_fails_after_a_worker_shows_the_worker(tmp_path: Path) -> None:
    handler = Scripted(None, RendezvousTimeoutError("nobody came back"))
    notes: list[str] = []
    spec = spec_of(PYTHON, "-c", "raise SystemExit(4)", handler=handler, max_restarts=3)
    agent = agent_of(spec, tmp_path, options=AgentOptions(note=notes.append))
    result = agent.run()
    assert result.is_failed()
    assert result.failures[0].exitcode == 4
    assert "nobody came back" in notes[-1]
    assert "while recovering from" in notes[-1]


def test_closed_after_a_new_round_was_wanted_is_a_clean_end(tmp_path: Path) -> None:
    class Wanted(Scripted):
        def num_nodes_waiting(self) -> int:
            return 1

    handler = Wanted(None, RendezvousClosedError("the others are done"))
    agent = agent_of(spec_of(PYTHON, "-c", "import signal; signal.pause()", handler=handler), tmp_path)
    result = agent.run()
    assert (result.state, result.failures) == (S, {})


def test_a_signal_leaves_and_does_not_close(tmp_path: Path) -> None:
    class Ringing(Scripted):
        def num_nodes_waiting(self) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

    handler = Ringing()
    agent = agent_of(spec_of(PYTHON, "-c", "import signal; signal.pause()", handler=handler), tmp_path)
    with pytest.raises(SignalException) as caught:
        agent.run()
    assert caught.value.sigval is signal.SIGTERM
    assert (handler.left, handler.closed_by_agent) == (1, 0)
    assert gone(agent.get_worker_group().workers[0].id)


def test_success_closes_the_rendezvous(tmp_path: Path) -> None:
    handler = Scripted()
    agent_of(spec_of(PYTHON, "-c", "", handler=handler), tmp_path).run()
    assert (handler.closed_by_agent, handler.is_closed()) == (1, True)


def test_errors_are_in_one_tree() -> None:
    assert issubclass(StartError, PhalanxError)
    assert issubclass(RendezvousTimeoutError, PhalanxError)


# ---- events and metrics --------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    path = tmp_path / "events.jsonl"
    events.set_file(path)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    events.set_file(None)


ONCE = (
    "import os, sys, signal\n"
    "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
    "    sys.exit(9) if os.environ['RANK'] == '1' else signal.pause()\n"
)


def test_events_of_a_run_with_an_incident(
    recorded: Callable[[], list[dict[str, Any]]], tmp_path: Path
) -> None:
    once = tmp_path / "once.py"  # with -c, Python 3.14 tells no first line
    once.write_text(ONCE)
    spec = spec_of(
        PYTHON, str(once), local_world_size=2, max_restarts=2, role="trainer", event_log_handler="file"
    )
    begin = time.time()
    agent_of(spec, tmp_path).run()
    found = recorded()
    names = [(e["source"], e["name"].removeprefix("torchelastic.worker.status.")) for e in found]
    rounds = [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "START"),
    ]
    assert [name for name in names if name[1] != "incident"] == [
        *rounds, *rounds, ("WORKER", "SUCCEEDED"), ("WORKER", "SUCCEEDED"), ("AGENT", "SUCCEEDED"),
    ]  # fmt: skip
    (incident,) = [event["metadata"] for event in found if event["name"] == "incident"]
    assert (incident["kind"], incident["rank"], incident["exit_code"]) == ("failure", 1, 9)
    assert (incident["round"], incident["attempt"]) == (1, 1)
    assert incident["node"] == os.uname().nodename
    assert "exit code 9" in incident["reason"]
    assert "restart 1 of 2" in incident["reason"]
    assert begin <= incident["timestamp"] <= time.time()
    started = {e["metadata"]["worker_pid"] for e in found if e["name"].endswith("START")}
    assert incident["pid"] in started
    for stage in ("detect_ms", "stop_ms", "reform_ms", "start_ms", "first_line_ms", "total_ms"):
        assert 0 <= incident[stage] < HUNG * 1000, stage
    for event in found:
        assert all(v is None or isinstance(v, str | int | float | bool) for v in event["metadata"].values())


def test_the_end_of_a_failed_run(recorded: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> None:
    spec = spec_of(PYTHON, "-c", ONCE, local_world_size=2, event_log_handler="file")
    agent_of(spec, tmp_path).run()
    ends = {(e["source"], e["metadata"].get("local_rank")): e for e in recorded()[-3:]}
    stopped, failed = ends["WORKER", 0]["metadata"], ends["WORKER", 1]["metadata"]
    assert (stopped["state"], failed["state"]) == ("TERMINATED", "FAILED")
    assert (failed["exit_code"], stopped["exit_code"]) == (9, -15)
    assert json.loads(failed["metadata"])["exit_code"] == [9]
    assert "system_terminated_error" in stopped["raw_error"]
    agent = ends["AGENT", None]["metadata"]
    assert agent["state"] == "FAILED"
    assert "not restarted" in agent["raw_error"]
    assert agent["duration_ms"] > 0


def test_metadata_has_torchs_names(recorded: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> None:
    agent_of(spec_of(PYTHON, "-c", "", event_log_handler="file"), tmp_path).run()
    torchs = {
        "run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state", "total_run_time",
        "rdzv_backend", "raw_error", "metadata", "agent_restarts", "duration_ms",
    }  # fmt: skip
    for event in recorded():
        assert event["metadata"].keys() >= torchs, event
        assert event["metadata"]["hostname"] == socket.getfqdn(socket.gethostname())
        packed = json.loads(event["metadata"]["metadata"])
        assert packed["entry_point"] == os.path.basename(PYTHON)
        if event["source"] == "WORKER":
            assert packed.keys() >= {"local_rank", "role_rank", "role_world_size", "exit_code", "worker_pid"}


class Collect(metrics.MetricHandler):
    """Keeps the last value of every name, and how often it came."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        assert metric_data.group_name == "torchelastic"
        self.values.setdefault(metric_data.name, []).append(metric_data.value)


@pytest.fixture
def collected() -> Iterator[Collect]:
    handler = Collect()
    metrics.configure(handler)
    yield handler
    metrics.configure(metrics.NullMetricHandler())


@pytest.mark.parametrize(
    ("code", "allowed", "totals"),
    [
        ("", 1, {"flakiness": 0, "run_total": 1, "run_success_no_retries": 1, "succeeded": 1}),
        (ONCE, 1, {"flakiness": 50, "run_total": 1, "run_success_with_retries": 1, "remaining_restarts": 0}),
        (ONCE, 0, {"flakiness": 100, "run_total": 1, "run_failed_no_retries": 1, "failed": 1}),
        ("1/0", 1, {"flakiness": 100, "run_total": 1, "run_failed_with_retries": 1, "failed": 1}),
    ],
    ids=["clean", "retried", "failed", "failed-with-retries"],
)
def test_metrics_of_a_run(
    code: str, allowed: int, totals: dict[str, int], collected: Collect, tmp_path: Path
) -> None:
    spec = spec_of(PYTHON, "-c", code, local_world_size=2, max_restarts=allowed, role="trainer")
    result = agent_of(spec, tmp_path).run()
    last = {name: values[-1] for name, values in collected.values.items()}
    assert {name: last.get(f"workers.trainer.{name}") for name in totals} == totals
    others = {f"workers.trainer.run_{how}_{retries}" for how in ("success", "failed")
              for retries in ("with_retries", "no_retries")}  # fmt: skip
    assert sum(last[name] for name in others) == 1
    starts = len(collected.values["LocalElasticAgent._start_workers.duration.ms"])
    assert len(collected.values["SimpleElasticAgent._rendezvous.duration.ms"]) == starts
    assert last["SimpleElasticAgent.run.success"] == 1
    steps = {
        "SimpleElasticAgent._initialize_workers": starts,
        "SimpleElasticAgent._restart_workers": starts - 1,
        "LocalElasticAgent._stop_workers": starts - (result.state is S),
    }
    for name, count in steps.items():
        assert len(collected.values.get(f"{name}.duration.ms", ())) == count, name
        assert len(collected.values.get(f"{name}.success", ())) == count, name
    assert len(collected.values["workers.trainer.healthy"]) == starts  # it is not polled


def test_a_start_that_fails_is_in_the_metrics(collected: Collect, tmp_path: Path) -> None:
    with pytest.raises(StartError):
        agent_of(spec_of(str(tmp_path / "missing"), max_restarts=1), tmp_path).run()
    assert collected.values["SimpleElasticAgent._initialize_workers.failure"] == [1]
    assert "SimpleElasticAgent._restart_workers.failure" not in collected.values


def test_nothing_is_made_for_null(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError("an event was built that nobody hears")

    monkeypatch.setattr(events, "Event", never)
    assert agent_of(spec_of(PYTHON, "-c", ""), tmp_path).run().state is S
