"""Jobs in containers, from the manifest to the termination log: pods that are killed, deleted, and fail."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.k8s import parse_manifest
from phalanx.platforms.kubernetes.manifest import manifest
from tests.conftest import HUNG
from tests.support.netns import TOKEN
from tests.support.pods import USER, Pod, Pods, containers_possible

TRAIN = """\
import os, select, sys
from phalanx import worker
e, rank, space = os.environ, os.environ["RANK"], os.statvfs("/dev/shm")
try:
    open("/file", "w")
    root = "writable"
except OSError:
    root = "read-only"
about = rank, e["WORLD_SIZE"], os.getuid(), root, space.f_blocks * space.f_frsize >> 20
worker.should_checkpoint()  # from now on, the agent knows that it is asked for
print("ready", *about, e["TORCHELASTIC_RUN_ID"], flush=True)
while not os.path.exists("/data/end"):
    if worker.should_checkpoint():
        open(f"/data/saved.{rank}", "w").close()
        sys.exit(0)
    select.select([], [], [], 0.05)
sys.exit(int(open("/data/end").read()))
"""

pods_possible = pytest.mark.skipif(not containers_possible(), reason="containers need root and runc")


def job(folder: Path, *words: str) -> Pods:
    common = ["--image", "this", "-N", "2", "--no-preflight", "--max-restarts", "0", "--rdzv-conf", "ttl=5"]
    kind, made, _ = parse_manifest([*common, *words, "--", "train.py"], TOKEN)
    pods = Pods(folder, manifest(kind, made))
    (pods.app / "train.py").write_text(TRAIN)
    return pods


def ready(pod: Pod, rank: int, times: int = 1) -> None:
    pod.read_until(f"ready {rank} 2 {USER} read-only 64 train-0a1b2c3d\n", times)


PROBE = """\
import http.client, sys, time
host, path, wanted, until = sys.argv[1], sys.argv[2], int(sys.argv[3]), time.monotonic() + float(sys.argv[4])
status = 0
while status != wanted and time.monotonic() < until:
    try:
        connection = http.client.HTTPConnection(host, 8080, timeout=5)
        connection.request("GET", path)
        status = connection.getresponse().status
    except OSError:
        time.sleep(0.05)  # it does not listen yet
print(status)
"""


def probe(pods: Pods, pod: Pod, path: str, wanted: int) -> None:
    """As the kubelet asks a pod's address, again and again, until it gets this answer."""
    inside = ["ip", "netns", "exec", pods.network.switch, sys.executable, "-c", PROBE]
    said = subprocess.check_output([*inside, pod.address, path, str(wanted), str(HUNG)], text=True)
    assert int(said) == wanted, (path, said)


@pods_possible
def test_pods_come_back_one_by_one_while_the_others_restart_in_place(tmp_path: Path) -> None:
    with job(tmp_path, "--restricted") as pods:
        assert pods.names is not None
        first, second = pods.start(0), pods.start(1)
        second.read_until("(Name or service not known)")  # DNS has no record of a pod that is this young
        probe(pods, first, "/healthz", 200)
        probe(pods, first, "/readyz", 503)
        pods.names.set(first.record)
        ready(first, 0)
        ready(second, 1)
        assert "taken from Kubernetes: --master-addr train-0.train" in second.text
        probe(pods, second, "/readyz", 200)

        second.kill()
        assert second.end().code == 128 + signal.SIGKILL
        second = pods.start(1)
        ready(second, 1)
        ready(first, 0, 2)

        first.kill()  # with the store, and its address
        assert first.end().code == 128 + signal.SIGKILL
        first = pods.start(0)
        pods.names.set(first.record)
        ready(first, 0)
        ready(second, 1, 2)

        (pods.data / "end").write_text("0")
        assert [pod.end().code for pod in (first, second)] == [0, 0]
        assert [pod.termination_log for pod in (first, second)] == ["", ""]


@pods_possible
def test_a_spare_pod_replaces_a_lost_one_and_ends_with_the_job(tmp_path: Path) -> None:
    with job(tmp_path, "--restricted", "--spares", "1") as pods:
        assert pods.names is not None
        first, second = pods.start(0), pods.start(1)
        pods.names.set(first.record)
        ready(first, 0)
        ready(second, 1)
        spare = pods.start(2)
        spare.read_until("spare")
        second.kill()
        assert second.end().code == 128 + signal.SIGKILL
        ready(spare, 1)
        ready(first, 0, 2)
        second = pods.start(1)  # now the spare
        second.read_until("spare")
        (pods.data / "end").write_text("0")
        assert [pod.end().code for pod in (first, spare, second)] == [0, 0, 0]


@pods_possible
def test_a_deleted_pod_saves_its_state_and_each_end_leaves_its_cause(tmp_path: Path) -> None:
    with job(tmp_path) as pods:
        assert pods.names is not None
        first, second = pods.start(0), pods.start(1)
        pods.names.set(first.record)
        ready(first, 0)
        ready(second, 1)
        second.signal(signal.SIGTERM)  # kubectl delete pod
        assert second.end().code == 128 + signal.SIGTERM
        assert (pods.data / "saved.1").exists()
        assert "preempted by SIGTERM" in second.termination_log
        second = pods.start(1)
        ready(second, 1)
        ready(first, 0, 2)
        (pods.data / "end").write_text("7")
        for pod in (first, second):
            assert pod.end().code == 7
            assert "exit code 7" in pod.termination_log or "exitcode 7" in pod.termination_log


# Options of `phalanx run`, the script and its arguments, the exit code, and what the termination log has.
ENDS = [
    ("--no-such x.py", 2, "--no-such"),
    ("--standalone missing.py", 2, "missing.py: no such script"),
    ("--standalone exits.py 93", 93, "93"),
    ("--standalone exits.py 5", 5, "5"),
    ("--standalone --check-command false exits.py 0", 95, "health check"),
    ("--nnodes 2 --rdzv-conf join_timeout=0.5 exits.py 0", 94, "--node-rank"),
]


@pods_possible
def test_whatever_ends_a_pod_is_in_its_termination_log(tmp_path: Path) -> None:
    with job(tmp_path) as pods:
        (pods.app / "exits.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
        for words, code, cause in ENDS:
            pod = pods.start(0, ["phalanx", "run", *words.split()])
            assert pod.end().code == code, pod.text
            assert cause in pod.termination_log, (words, pod.termination_log)
        pod = pods.start(0)  # waits for the other one
        pod.read_until("taken from Kubernetes")
        pod.signal(signal.SIGTERM)
        assert pod.end().code == 128 + signal.SIGTERM
        assert "SIGTERM" in pod.termination_log


@pods_possible
def test_the_page_is_followed_in_a_pod(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    (line,) = re.findall(r"^    (phalanx run .+)$", page, re.MULTILINE)
    with job(tmp_path) as pods:
        ended = pods.start(1, line.split()).end()
        assert ended.code == 0, ended
        first = "train-0.train.default.svc.cluster.local"
        assert "# from Kubernetes: --node-rank 1 (JOB_COMPLETION_INDEX=1)" in ended.out
        assert f"# from Kubernetes: --master-addr {first} (/etc/hosts: train-1.train" in ended.out
        assert f"`{first}`" in page
