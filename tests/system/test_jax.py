"""JAX under `phalanx run`: `jax.distributed.initialize()` with no arguments, collectives, and a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from phalanx.store.tcpstore.server import TorchStoreServer
from phalanx.worker import jax as integration
from tests.support.jobs import job, python_with, script

COLLECTIVES = """
import os, socket, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if sys.argv[1:] == ["below a shell"]:
    from phalanx.worker.jax import offer
    offer()
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_Hook"]
# Slurm's variables describe the agents, not the workers: the class for Phalanx must come first.
os.environ |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "elsewhere", "SLURM_NTASKS": "1"}
os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
jax.distributed.initialize()
rank, world = jax.process_index(), jax.process_count()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), (rank, world)
gathered = multihost_utils.process_allgather(np.array([rank]))
assert gathered.ravel().tolist() == list(range(world)), gathered

mesh = Mesh(np.array(jax.devices()), ("all",))
spread = NamedSharding(mesh, PartitionSpec("all"))
mine = jax.make_array_from_process_local_data(spread, np.array([rank + 1.0], np.float32))
add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=PartitionSpec("all"),
                            out_specs=PartitionSpec()))
total = float(add(mine)[0])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == world - 1 and sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), 9)
sync = multihost_utils.sync_global_devices("before the end")
print(f"psum {total}", flush=True)
jax.distributed.shutdown()
"""


@pytest.fixture
def python() -> str:
    return python_with("jax")


def without_gloo(said: str) -> list[str]:
    """gloo prints its connections in pieces."""
    return [line for line in said.splitlines() if line.startswith("psum")]


def test_no_arguments_collectives_and_a_restart(python: str, tmp_path: Path) -> None:
    path = script(tmp_path, COLLECTIVES)
    words = ("--nproc-per-node", "2", "--max-restarts", "1", path, "killed")
    # The service would catch SIGTERM, and a restart would wait for the grace period.
    env = {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}
    assert without_gloo(job(tmp_path / "job", *words, python=python, **env)) == ["psum 3.0"] * 2


def test_without_the_agents_store_and_below_a_shell(python: str, tmp_path: Path) -> None:
    path = script(tmp_path, COLLECTIVES)
    shell = script(tmp_path, f"#!/bin/sh\nexec {python} {path} 'below a shell'\n", "start.sh")
    os.chmod(shell, 0o755)
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("--nproc-per-node", "2", "--no-python", shell)
    assert without_gloo(job(tmp_path / "job", *words, python=python, **env)) == ["psum 3.0"] * 2


# -- the class itself, without JAX --------------------------------------------------------------------


def fake_clusters() -> Any:
    """The part of JAX's module that the integration uses."""

    class ClusterEnv:
        name = ""
        _cluster_types: ClassVar[list[type]] = []

        def __init_subclass__(cls) -> None:
            cls._cluster_types.append(cls)

    class Slurm(ClusterEnv):
        name = "slurm"

    module = types.ModuleType("clusters")
    module.ClusterEnv = ClusterEnv  # type: ignore[attr-defined]
    return module


def worker(rank: int, port: int, **more: str) -> dict[str, str]:
    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return env | {"GROUP_WORLD_SIZE": "1"} | more


def test_the_class_comes_first_and_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = fake_clusters()
    integration.register(clusters)
    integration.register(clusters)
    kinds = clusters.ClusterEnv._cluster_types
    assert [kind.name for kind in kinds] == ["phalanx", "slurm"]
    assert not kinds[0].is_env_present()
    for name, value in worker(1, 1234).items():
        monkeypatch.setenv(name, value)
    assert kinds[0].is_env_present()
    assert (kinds[0].get_process_id(), kinds[0].get_process_count()) == (1, 2)
    assert kinds[0].get_local_process_id() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert kinds[0].get_local_process_id() is None  # alone on its machine: all devices are its own


def test_a_changed_jax_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="coordinator_address, num_processes and process_id"):
        integration.register(types.ModuleType("clusters"))


def test_the_address_goes_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchStoreServer("127.0.0.1") as server:
        for name, value in worker(1, server.port).items():
            monkeypatch.setenv(name, value)
        asked: list[str] = []
        waiting = threading.Thread(target=lambda: asked.append(integration.coordinator(30)))
        waiting.start()
        # Environments belong to processes: rank 0 is another process.
        code = "import json; from phalanx.worker import jax; print(json.dumps(jax.coordinator(30)))"
        env = os.environ | worker(0, server.port)
        said = subprocess.run(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True
        ).stdout
        waiting.join(30)
        assert asked == [json.loads(said)]
        host, _, port = asked[0].partition(":")
        assert host == "127.0.0.1"
        assert int(port) not in (0, server.port)


def test_without_rank_0_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchStoreServer("127.0.0.1") as server:
        for name, value in worker(1, server.port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RuntimeError, match=f"rank 0 in the store at 127.0.0.1:{server.port}"):
            integration.coordinator(0.05)


def test_a_given_port_and_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker(0, 4242, TORCHELASTIC_USE_AGENT_STORE="False", MASTER_ADDR="fd00::1").items():
        monkeypatch.setenv(name, value)
    assert integration.coordinator() == "[fd00::1]:4242"
    assert integration.coordinator(None, "99") == "[fd00::1]:99"


def test_the_import_hook_waits_for_jax_and_removes_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in worker(0, 1).items():
        monkeypatch.setenv(name, value)
    package = tmp_path / "jax" / "_src"
    (package / "clusters").mkdir(parents=True)
    for folder in (tmp_path / "jax", package):
        (folder / "__init__.py").write_text("")
    (package / "clusters" / "__init__.py").write_text(
        "class ClusterEnv:\n    name, _cluster_types = '', []\n"
        "    def __init_subclass__(cls):\n        cls._cluster_types.append(cls)\n"
    )
    found = [name for name in sys.modules if name == "jax" or name.startswith("jax.")]
    assert not found, f"this test needs a process without JAX: {found[:3]}"
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    try:
        integration.offer()
        integration.offer()
        assert len(sys.meta_path) == len(before) + 1
        import jax._src.clusters  # type: ignore[import-not-found]

        assert [kind.name for kind in jax._src.clusters.ClusterEnv._cluster_types] == ["phalanx"]
        assert sys.meta_path == before
    finally:
        sys.meta_path[:] = before
        for name in ("jax", "jax._src", "jax._src.clusters"):
            sys.modules.pop(name, None)
