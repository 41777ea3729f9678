"""What a pod does not have in its first seconds: names in DNS, a token. Both are waited for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from phalanx.core.exit_codes import NO_MEETING
from tests.support.late_names import LateNames
from tests.support.netns import TOKEN, WORKER, Job, Network, Node, free_port, possible
from tests.support.run_helpers import plain_environment, run, script
from tests.system.test_cluster import everybody, succeed

hosts_possible = pytest.mark.skipif(not possible(), reason="network namespaces need root")
NAME = "train-0.train"
FULL = "train-0.train.default.svc.cluster.local"


@hosts_possible
@pytest.mark.parametrize("backend", ["phalanx", "static"])
def test_nodes_meet_at_a_name_that_comes_later(tmp_path: Path, backend: str) -> None:
    words = ("--rdzv-backend", backend) if backend == "static" else ()
    with (
        Network("a", "b") as network,
        LateNames(network.switch, tmp_path) as names,
        Job(tmp_path, "2", f"{NAME}:29400", *words) as job,
    ):
        nodes = []
        for rank, name in enumerate("ab"):
            host = names.on(network.hosts[name].inside)
            nodes.append(job.node(name, "--node-rank", str(rank), host=host))  # type: ignore[arg-type]
        said = nodes[1].read_until("s left")
        assert NAME in said
        assert "Name or service not known" in said
        names.set(f"{FULL} {network.hosts['a'].address}")
        succeed(nodes, everybody(nodes, 2))


@hosts_possible
def test_a_server_for_names_that_does_not_answer_holds_up_no_signal(tmp_path: Path) -> None:
    with (
        Network("a") as network,
        LateNames(network.switch, tmp_path) as names,
        Job(tmp_path, "2", f"{NAME}:29400") as job,
    ):
        names.set("silent")
        node = job.node("a", host=names.on(network.hosts["a"].inside))  # type: ignore[arg-type]
        names.wait_for(NAME)
        node.read_until(f"looking up {NAME}")
        node.signal(signal.SIGTERM)
        assert node.end().code == 128 + signal.SIGTERM  # within HUNG: the question alone takes longer


def pod(home: Path) -> dict[str, str]:
    home.mkdir()
    return plain_environment(HOME=str(home), KUBERNETES_SERVICE_HOST="10.0.0.1", PET_RDZV_BACKEND="c10d")


def test_pods_without_a_common_token_wait_for_one_instead_of_training_alone(tmp_path: Path) -> None:
    script(tmp_path, WORKER)
    conf = "ttl=5,last_call_timeout=0.3,join_timeout=100"
    words = ["--nnodes", "1:2", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    homes = [tmp_path / name for name in ("a", "b")]
    with (
        Node(
            "a",
            [*words, "--rdzv-conf", f"{conf},is_host=1", str(tmp_path / "train.py")],
            1,
            env=pod(homes[0]),
        ) as a,
        Node(
            "b",
            [*words, "--rdzv-conf", f"{conf},is_host=0", str(tmp_path / "train.py")],
            1,
            env=pod(homes[1]),
        ) as b,
    ):
        for node in (a, b):
            said = node.read_until("s left")
            assert "mount a Secret and name its file with PHALANX_TOKEN_FILE" in said
            assert "ready" not in said
        for home in homes:
            make_token(home)
        succeed([a, b], everybody([a, b], 2))


def test_pods_without_a_token_do_not_wait_for_longer_than_for_each_other(tmp_path: Path) -> None:
    train = script(tmp_path, WORKER)
    words = [
        "--nnodes",
        "1:2",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-conf",
        "join_timeout=0.5",
    ]
    ended = run(*words, train, env=pod(tmp_path / "home"))
    assert ended.code == NO_MEETING
    assert "mount a Secret and name its file with PHALANX_TOKEN_FILE" in ended.said[-1]


def make_token(home: Path) -> None:
    (home / ".phalanx").mkdir(mode=0o700, exist_ok=True)
    draft = home / ".phalanx" / "draft"
    draft.touch(0o600)
    draft.write_text(TOKEN)
    draft.rename(home / ".phalanx" / "token")
