"""The example for Ray, in a cluster of two nodes on this machine: a kill, a lost actor, a failure."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest

from tests.conftest import gone, wait_until
from tests.support.jobs import EXAMPLES, python_with

pytestmark = pytest.mark.long  # Ray's own processes alone take ten seconds

# Two nodes; the end of stdin is theirs.
CLUSTER = """\
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
# The last rank kills its actor, the nearest ancestor that is Ray's; all ranks of the next round succeed.
LOSES_ITS_ACTOR = """\
import os, psutil, signal
again = os.path.exists("lost")
with open(f"pid.{os.getpid()}", "w"): pass
if os.environ["RANK"] == "3" and not again:
    open("lost", "w").close()
    next(one for one in psutil.Process().parents() if one.name().startswith("ray::")).kill()
if not again:
    signal.pause()
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""


class RayCluster:
    """Runs the example in a cluster."""

    def __init__(self, python: str, address: str, environ: dict[str, str], folder: Path) -> None:
        self._python, self._address, self._environ, self._folder = python, address, environ, folder

    def launch(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [self._python, str(EXAMPLES / "ray_launch.py"), "--address", self._address]
        command += ["--nodes", "2", "--nproc-per-node", "2", *words]
        return subprocess.run(
            command, env=self._environ, cwd=self._folder, capture_output=True, text=True, timeout=110
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    python = python_with("ray", "psutil")
    short = mkdtemp(prefix="ray", dir="/tmp")  # for the names of sockets
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": short, "RAY_DEDUP_LOGS": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen([python, "-c", CLUSTER], env=environ, stdin=pipe, stdout=pipe, text=True) as nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        yield RayCluster(python, nodes.stdout.readline().strip(), environ, tmp_path)
        nodes.stdin.close()
        nodes.stdout.read()
    rmtree(short, ignore_errors=True)


def test_the_example_for_ray(cluster: RayCluster, tmp_path: Path) -> None:
    example = str(EXAMPLES / "elastic_cpu.py")
    results = []
    for name, more in {"plain": (), "killed": ("--kill-at", "70")}.items():
        done = cluster.launch(example, "--checkpoint", f"{name}.json", *more)
        assert done.returncode == 0, done
        results.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert "4 workers again" in done.stdout + done.stderr, done
    assert results[0] == results[1], "a kill changes no bit of the result"
    # A lost actor: Ray starts it again, and its node joins the job.
    (tmp_path / "lose.py").write_text(LOSES_ITS_ACTOR)
    done = cluster.launch("lose.py")
    assert done.returncode == 0, done
    assert all(f"rank {rank} of 4" in done.stdout + done.stderr for rank in range(4)), done
    # A failure ends it, with the report.
    (tmp_path / "fail.py").write_text("import os\nassert os.environ['RANK'] != '1', 'no data'\n")
    done = cluster.launch("--max-restarts", "0", "fail.py")
    assert done.returncode == 1, done
    assert "AssertionError: no data" in done.stderr, done
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
    assert len(pids) == 8
    for pid in pids:
        wait_until(lambda pid=pid: gone(pid), f"the end of worker {pid}")
