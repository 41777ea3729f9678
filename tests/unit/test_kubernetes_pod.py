"""A pod's variables and names: what `phalanx run` makes of them, case by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.dry_run import plan
from phalanx.errors import UsageError
from phalanx.job import config
from phalanx.job.config import parse
from phalanx.job.kubernetes_pod import domain_of, look

DOMAIN = "train.default.svc.cluster.local"
HOSTS = f"""\
# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
10.1.2.3\ttrain-1.{DOMAIN}\ttrain-1
10.1.2.3\tset-workers-1-1.set.ns.svc.cluster.local\tset-workers-1-1
"""
POD = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
UID = {"PHALANX_JOB_UID": "0a1b2c3d-1111-2222-3333-444444444444"}
STATIC = {"node_rank": "1", "rdzv_id": "train", "master_addr": f"train-0.{DOMAIN}"}
ELASTIC = {"node_rank": "1", "rdzv_id": "train", "rdzv_endpoint": f"train-0.{DOMAIN}:29400"}
BACKEND = {"rdzv_backend": "phalanx"}
KUBEFLOW = {
    "nnodes": "4",
    "nproc_per_node": "8",
    "node_rank": "1",
    "master_addr": "train-node-0-0.train",
    "master_port": "29500",
}
JOBSET = {**POD, "PHALANX_JOBSET_INDEX": "1", "PHALANX_JOBSET_REPLICAS": "2"}

# What it is, the pod's name, its variables, the options that the user gave, and the settings that follow.
CASES: list[tuple[str, str, dict[str, str], dict[str, str], dict[str, str]]] = [
    ("fixed", "train-1", POD, {"nnodes": "4"}, STATIC),
    ("fixed, as a range", "train-1", POD, {"nnodes": "4:4"}, STATIC),
    ("another port", "train-1", POD, {"nnodes": "4", "master_port": "1234"}, STATIC),
    ("with the uid", "train-1", {**POD, **UID}, {"nnodes": "4"}, {**STATIC, "rdzv_id": "train-0a1b2c3d"}),
    ("elastic", "train-1", POD, {"nnodes": "2:4"}, {**ELASTIC, **BACKEND}),
    ("c10d", "train-1", POD, {"nnodes": "1:4", "rdzv_backend": "c10d"}, ELASTIC),
    ("c10d, fixed", "train-1", POD, {"nnodes": "4", "rdzv_backend": "c10d"}, ELASTIC),
    (
        "c10d with an endpoint",
        "train-1",
        POD,
        {"nnodes": "1:4", "rdzv_backend": "c10d", "rdzv_endpoint": "a:1"},
        {},
    ),
    (
        "c10d at pod 0",
        "train-1",
        POD,
        {"nnodes": "1:4", "rdzv_backend": "c10d", "rdzv_endpoint": "train-0.train:1"},
        {"node_rank": "1", "rdzv_id": "train"},
    ),
    (
        "etcd",
        "train-1",
        POD,
        {"nnodes": "4", "rdzv_backend": "etcd", "rdzv_endpoint": "e:2379"},
        {},
    ),
    (
        "a place is given",
        "train-1",
        POD,
        {"nnodes": "4", "master_addr": "a"},
        {"node_rank": "1"},
    ),
    ("all is given", "train-1", POD, {**KUBEFLOW, "rdzv_id": "x"}, {}),
    ("Kubeflow", "train-node-0-1", POD, KUBEFLOW, {"rdzv_id": "train-node-0"}),
    (
        "a leader in another Job",
        "set-workers-0-1",
        POD,
        {**KUBEFLOW, "master_addr": "set-leader-0-0.set"},
        {},
    ),
    ("alone", "train-1", POD, {"standalone": "1"}, {}),
    ("one node", "train-1", POD, {"nnodes": "1"}, {}),
    ("one node at most", "train-1", POD, {"nnodes": "1:1"}, {}),
    (
        "the node's network",
        "gpu-7",
        {**POD, **UID},
        {"nnodes": "4", "master_addr": "a"},
        {"node_rank": "1"},
    ),
    (
        "the second Job of a JobSet",
        "set-workers-1-1",
        JOBSET,
        {"nnodes": "8"},
        {"node_rank": "5", "master_addr": "set-workers-0-0.set.ns.svc.cluster.local"},
    ),
]


@pytest.mark.parametrize(
    ("host", "environ", "given", "settings"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_settings(
    host: str, environ: dict[str, str], given: dict[str, str], settings: dict[str, str]
) -> None:
    found = look(environ, given, host, HOSTS)
    assert found is not None
    assert not found.refusal
    assert not found.warnings
    assert {dest: taken.value for dest, taken in found.settings.items()} == settings


@pytest.mark.parametrize(("index", "hosts"), [("0", "1"), ("1", "0")])
def test_the_first_pod_hosts_an_elastic_store(index: str, hosts: str) -> None:
    names = f"10.1.2.3 train-{index}.{DOMAIN} train-{index}"
    found = look({"JOB_COMPLETION_INDEX": index}, {"nnodes": "1:2"}, f"train-{index}", names)
    assert found is not None
    assert found.conf == {"is_host": hosts}


def test_pod_0_of_a_fixed_job_has_time_to_come_back() -> None:
    found = look(POD, {"nnodes": "2"}, "train-1", HOSTS)
    assert found is not None
    assert found.conf == {"return_timeout": "600"}
    assert found.lasting_id == "train"


@pytest.mark.parametrize(
    "environ", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {**POD, "TORCHELASTIC_RUN_ID": "x"}]
)
def test_not_a_pod_of_an_indexed_job(environ: dict[str, str]) -> None:
    assert look(environ, {"nnodes": "4"}, "train-1", HOSTS) is None


REFUSED = [
    (
        "no number, names",
        "train-1",
        {},
        "pod 1 of a Kubernetes Job, which does not say how many it has; write --nnodes",
    ),
    (
        "no names",
        "other-1",
        {"nnodes": "4"},
        "--nnodes 4 in pod 1 of a Kubernetes Job, whose pods have no names",
    ),
    ("no names, c10d", "other-1", {"nnodes": "1:4", "rdzv_backend": "c10d"}, "make a headless Service"),
    ("the node's network", "gpu-7", {"nnodes": "4"}, "name where the nodes meet with --master-addr"),
]


@pytest.mark.parametrize(("host", "given", "line"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_cannot_work_is_refused(host: str, given: dict[str, str], line: str) -> None:
    found = look(POD, given, host, HOSTS)
    assert found is not None
    assert line in found.refusal


WARNED = [
    ("no number, no names", {}, {}, "runs a job of its own; for one job of all its pods, write --nnodes"),
    ("no index", {"JOB_COMPLETION_INDEX": "x"}, {}, "JOB_COMPLETION_INDEX=x: not a number; nothing is taken"),
    ("a huge index", {"JOB_COMPLETION_INDEX": "9" * 5000}, {}, "not a number; nothing is taken"),
    (
        "an odd JobSet",
        {**JOBSET, "PHALANX_JOBSET_REPLICAS": "3"},
        {"nnodes": "4", "master_addr": "a"},
        "cannot be divided",
    ),
]


@pytest.mark.parametrize(("environ", "given", "line"), [c[1:] for c in WARNED], ids=[c[0] for c in WARNED])
def test_lines(environ: dict[str, str], given: dict[str, str], line: str) -> None:
    found = look({**POD, **environ}, given, "other-1", HOSTS)
    assert found is not None
    assert not found.settings
    assert any(line in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("host", "text", "domain"),
    [
        ("a-0", "", ""),
        ("a-0", "10.0.0.1 a-0", ""),
        ("a-0", "10.0.0.1 a-0 a-0.x.y.", "x.y"),
        ("a-0", "#10.0.0.1 a-0.x.y", ""),
        ("a-0", "10.0.0.1 a-0.x.y a-0\n10.0.0.2 a-0.z", "x.y"),
        ("a-0", "10.0.0.1 ba-0.x.y", ""),
        ("a-0", "\x00\n10.0.0.1\n", ""),
    ],
)  # fmt: skip
def test_the_domain_of_a_pod(host: str, text: str, domain: str) -> None:
    assert domain_of(host, text) == domain


def test_the_job_and_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(config, "_text_of", lambda path: HOSTS)
    monkeypatch.setattr("os.uname", lambda: type("uname", (), {"nodename": "train-1"}))
    job = parse(["--nnodes", "4", str(tmp_path / "train.py")], {**POD, **UID})
    assert (job.cluster.rdzv_backend, job.cluster.rdzv_endpoint) == ("static", f"train-0.{DOMAIN}:29500")
    assert (job.cluster.run_id, job.state.keep_id, job.cluster.master_addr) == (
        "train-0a1b2c3d",
        "train",
        f"train-0.{DOMAIN}",
    )
    assert job.cluster.rdzv_conf == {"return_timeout": "600", "rank": 1}
    text = plan(job)
    assert "# from Kubernetes: --node-rank 1 (JOB_COMPLETION_INDEX=1)" in text
    assert f"# from Kubernetes: --master-addr train-0.{DOMAIN} (/etc/hosts: train-1.{DOMAIN})" in text
    assert f"# from Kubernetes: --rdzv-id train-0a1b2c3d (PHALANX_JOB_UID={UID['PHALANX_JOB_UID']})" in text
    with pytest.raises(UsageError, match="does not say how many it has"):
        parse([str(tmp_path / "train.py")], POD)
