"""What a spec and the environment ask of an agent: the workers' address, services, objects like specs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.solo import SoloRendezvous
from phalanx.elastic.agent.server import WorkerSpec
from phalanx.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from phalanx.elastic.multiprocessing import DefaultLogsSpecs
from phalanx.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from phalanx.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from phalanx.elastic.rendezvous.etcd_server import EtcdServer
from phalanx.elastic.rendezvous.registry import get_rendezvous_handler
from tests.support.etcd_process import etcd_program
from tests.support.memory_blob import MemoryBlob
from tests.support.netns import free_port

WORKER = """
import json, os, sys
from phalanx.store.tcpstore.client import TorchStoreClient
names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
where = [os.environ[name] for name in names]
client = TorchStoreClient(where[0], int(where[1]), 30)
keys = client.num_keys()
client.set("key", "value")
client.close()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
json.dump([*where, keys], open(sys.argv[1] + attempt, "w"))
sys.exit(attempt == "0")
"""


class Answering(RendezvousHandler):
    """A plug-in that brings an address for the workers, as torch's does."""

    def get_backend(self) -> str:
        return "answering"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(None, 0, 1, RendezvousStoreInfo("elsewhere", 1))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "run"

    def shutdown(self) -> bool:
        return True

    @property
    def use_agent_store(self) -> bool:
        return True


@pytest.fixture(params=["solo", "phalanx", "static", "blob", "plugin", "etcd"])
def handler(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "solo":
        yield SoloRendezvous("run")
    elif request.param == "blob":
        yield DynamicRendezvousHandler.from_backend("run", None, MemoryBlob(), 1, 1, "localhost")  # type: ignore[arg-type]
    elif request.param == "plugin":
        yield Answering()
    elif request.param == "etcd":
        etcd_program()
        server = EtcdServer()
        server.start()
        yield get_rendezvous_handler(RendezvousParameters("etcd", server.get_endpoint(), "run", 1, 1))
        server.stop()
    else:
        where = "localhost:0" if request.param == "phalanx" else f"localhost:{free_port()}"
        yield get_rendezvous_handler(RendezvousParameters(request.param, where, "run", 1, 1, rank=0))


def test_the_address_of_a_spec_is_that_of_the_workers_in_every_round(handler: Any, tmp_path: Path) -> None:
    port = free_port()
    spec = WorkerSpec(
        "r", 1, handler, entrypoint=sys.executable, args=("-c", WORKER, str(tmp_path / "said")),
        max_restarts=1, master_addr="127.0.0.1", master_port=port,
    )  # fmt: skip
    result = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path))).run()
    assert not result.is_failed(), result
    for attempt in "01":
        addr, given, agents, keys = json.loads((tmp_path / f"said{attempt}").read_text())
        assert (addr, given, agents) == ("127.0.0.1", str(port), "True")
        assert keys == 0  # each round begins with an empty store


def test_a_busy_health_port_of_the_environment_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(busy.getsockname()[1]))
        spec = WorkerSpec("r", 2, SoloRendezvous("run"), entrypoint="/bin/true")
        result = LocalElasticAgent(spec, DefaultLogsSpecs(str(tmp_path))).run()
    assert not result.is_failed()
    assert caplog.text.count("runs without health endpoints") == 1
    assert "cannot listen on" in caplog.text


class Setting(LocalElasticAgent):
    calls: list[Any]

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        self.calls.append(("watchdog", sorted(envs), self.supervision.services.timers is not None))
        for environ in envs.values():
            environ["MINE"] = "set"
        if "super" in self.calls[0]:
            super()._setup_local_watchdog(envs)

    def _setup_healthcheck(self) -> None:
        self.calls.append(("health", self.supervision.services.health is not None))
        if "super" in self.calls[0]:
            super()._setup_healthcheck()
            health = self.supervision.services.health
            assert health is not None
            with socket.create_connection(("127.0.0.1", health.port)):
                pass


@pytest.mark.parametrize("way", ["super", "alone"])
def test_a_subclass_may_set_up_health_and_watchdog_in_its_own_way(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "0")
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    said = tmp_path / "said"
    script = f'echo "$MINE ${{TORCHELASTIC_TIMER_FILE:+timer}}" >> {said}; test $(wc -l < {said}) = 2'
    spec = WorkerSpec(
        "r", 1, SoloRendezvous("run"), entrypoint="/bin/sh", args=("-c", script), max_restarts=1
    )
    agent = Setting(spec, DefaultLogsSpecs(str(tmp_path)))
    agent.calls = [(way,)]
    assert not agent.run().is_failed()
    ours = way == "super"
    assert agent.calls[1:] == [
        *(("watchdog", [0], False), ("health", False)),
        *(("watchdog", [0], ours), ("health", ours)),  # after the restart they run already
    ]
    assert said.read_text() == ("set timer\n" if ours else "set \n") * 2


EXPIRES = """
import os, signal
from phalanx.elastic import timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(0.1, "step"):
    signal.pause()
"""


def test_a_subclass_learns_of_the_watchdogs_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    told: list[tuple[str, int | None, str | None]] = []

    class Told(LocalElasticAgent):
        def _log_watchdog_event(self, name: str, request: Any) -> None:
            about = (None, None) if request is None else (request.worker_pid, request.scope_id)
            told.append((name, *about))
            super()._log_watchdog_event(name, request)

    spec = WorkerSpec(
        "r", 1, SoloRendezvous("run"), entrypoint=sys.executable, args=("-c", EXPIRES), max_restarts=0
    )
    (failure,) = Told(spec, DefaultLogsSpecs(str(tmp_path))).run().failures.values()
    assert failure.exitcode == -signal.SIGKILL
    assert told == [
        ("watchdog started", None, None),
        ("timer expired", failure.pid, "step"),
        ("kill worker process", failure.pid, "step"),
        ("watchdog stopped", None, None),
    ]


def test_an_object_like_a_spec_will_do(tmp_path: Path) -> None:
    few = types.SimpleNamespace(local_world_size=1, max_restarts=1, rdzv_handler=SoloRendezvous("run"))
    agent = LocalElasticAgent(few, DefaultLogsSpecs(str(tmp_path)))  # type: ignore[arg-type]
    assert agent.get_worker_group().spec.max_restarts == 1
    agent._shutdown(signal.SIGTERM)
    few.entrypoint, few.args = "/bin/sh", ("-c", "exit $LOCAL_RANK")
    result = LocalElasticAgent(few, DefaultLogsSpecs(str(tmp_path))).run()  # type: ignore[arg-type]
    assert (result.is_failed(), result.return_values) == (False, {0: None})
    assert os.listdir(tmp_path)


class Stepping(LocalElasticAgent):
    """With a step of its own, it uses the handler as torch's agents do."""

    def _exit_barrier(self) -> None:
        super()._exit_barrier()


def test_an_agent_with_its_own_steps_runs_all_its_workers(handler: Any, tmp_path: Path) -> None:
    spec = WorkerSpec("r", 3, handler, entrypoint="/bin/sh", args=("-c", "exit $((WORLD_SIZE - 3))"))
    result = Stepping(spec, DefaultLogsSpecs(str(tmp_path))).run()
    assert (result.is_failed(), sorted(result.return_values)) == (False, [0, 1, 2])
