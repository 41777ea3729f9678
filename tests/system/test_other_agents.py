"""Agents that other projects wrote for torch start, restart and end a job here, with the imports swapped.

The packages are not needed for anything else, so these tests run only where somebody has installed them:

    pip install hyperpod-elastic-agent dlrover kubernetes
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HUNG, wait_until
from tests.support.netns import free_port
from tests.support.run_helpers import Ended, plain_environment, script

pytestmark = [pytest.mark.long, pytest.mark.timeout(8 * HUNG)]  # their imports alone take many seconds

WORKER = """
import os, sys
assert any(type(finder).__name__ == "SwapFinder" for finder in sys.meta_path), "not swapped"
print("worker", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1" and not os.path.exists(os.environ["MARK"]):
    open(os.environ["MARK"], "w").close()
    sys.exit(3)
"""


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def swapped(tmp_path: Path, *words: str, **env: str) -> Ended:
    """Run to the end, in a session of its own, of which nothing is left."""
    everything = plain_environment(MARK=str(tmp_path / "mark"), OMP_NUM_THREADS="1", **env)
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx.swap", *words],
        env=everything,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=6 * HUNG)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return Ended(process.returncode, out, err)


# The operator of a cluster, which the agent waits for: it starts the workers, and again after a fault.
HYPERPOD = """
import json, os, sys, threading, time, urllib.request
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from hyperpod_elastic_agent.config import PrePostTrainConfig, ShutdownConfig
from hyperpod_elastic_agent.elastic_agent import PLRHyperPodElasticAgent
from hyperpod_elastic_agent.rendezvous.hyperpod_rendezvous_backend import HyperPodRendezvousBackend
from hyperpod_elastic_agent.run import start_api_server

worker, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
spec = WorkerSpec(
    role="trainer", local_world_size=2, rdzv_handler=HyperPodRendezvousBackend("job", 2, folder),
    entrypoint=sys.executable, args=(worker,), max_restarts=3, monitor_interval=0.1,
)
agent = PLRHyperPodElasticAgent(
    spec, DefaultLogsSpecs(log_dir=folder + "/logs"), PrePostTrainConfig(), ShutdownConfig(), "1"
)

def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}", data, {"Content-Type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=30).read() or b"null")

def operate():
    start_api_server(agent, {"host": "127.0.0.1", "port": port, "log_level": "warning"})
    faults, last = 0, ""
    place = dict(rank=0, nnodes=1, master_addr="127.0.0.1", master_port=29500, ipVersion="1")
    while last != "completed":
        state = call("status")["status"]
        if state != last:
            print("state", state, flush=True)
            last = state
            if state == "ready":
                call("start", place | dict(faultCount=faults, rankIps=[dict(ip="127.0.0.1", rank=0)]))
            elif state == "faulted":
                faults += 1
                call("stop", dict(restart_mode="plr"))
        time.sleep(0.02)  # the interface is polled, as the operator does it
    call("shutdown", {})

threading.Thread(target=operate, daemon=True).start()
print("result", agent.run("trainer").state.value, flush=True)
"""


@needs("torch", "hyperpod_elastic_agent")
def test_the_agent_of_sagemaker_hyperpod(tmp_path: Path) -> None:
    program = script(tmp_path, HYPERPOD, "operator.py")
    words = [program, script(tmp_path, WORKER), str(tmp_path), str(free_port())]
    done = swapped(tmp_path, *words, NNODES="1", JOB_NAME="job")
    assert done.code == 0, done
    lines = [line for line in done.out.splitlines() if line.startswith(("state", "result"))]
    assert lines[-2:] == ["state completed", "result SUCCEEDED"], done
    assert "state faulted" in lines, done
    workers = [line for line in done.out.splitlines() if "worker" in line]
    assert sum("worker 0 of 2" in line for line in workers) == 2, done
    assert sum("worker 1 of 2" in line for line in workers) == 2, done


@needs("torch", "dlrover", "kubernetes")
def test_the_agent_of_dlrover(tmp_path: Path) -> None:
    port = free_port()
    where = f"127.0.0.1:{port}"
    master = [sys.executable, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "job"]
    serving = subprocess.Popen(
        [*master, "--port", str(port), "--node_num", "1"],
        env=plain_environment(),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: serving.poll() is not None or listens(port), "the master's port", 4 * HUNG)
        words = ["--nnodes", "1", "--nproc_per_node", "2", "--max_restarts", "1", script(tmp_path, WORKER)]
        env = {"DLROVER_MASTER_ADDR": where, "NODE_ID": "0", "NODE_RANK": "0"}
        done = swapped(tmp_path, "dlrover-run", *words, **env)
    finally:
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()
    assert done.code == 0, done
    workers = [line for line in done.out.splitlines() if "worker" in line]
    assert sum("worker 1 of 2" in line for line in workers) == 2, done
    assert sum("worker 0 of 2" in line for line in workers) >= 1, done


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
