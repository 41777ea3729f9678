"""The pages about Kubernetes and containers, and the Dockerfile, followed as far as a cluster is not needed.

The commands for a pod are run in one by tests/system/test_pods.py.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.k8s import with_patches
from phalanx.job.config import parse
from phalanx.platforms.kubernetes.document_text import documents
from phalanx.platforms.kubernetes.manifest import KINDS, failure_policy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
CONTAINERS = (ROOT / "docs" / "containers.md").read_text()
MANIFESTS = re.findall(r"^    (phalanx k8s manifest .+)$", PAGE, re.MULTILINE)
KIND_OF = {"job": "\nkind: Job\n", "jobset": "\nkind: JobSet\n", "trainjob": "\nkind: TrainJob\n"}


@pytest.mark.parametrize("line", MANIFESTS)
def test_the_commands_of_the_page(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line.partition(" | kubectl apply -f -")[0])
    assert main(words[1:]) == 0
    text = capsys.readouterr().out
    kind = words[words.index("--kind") + 1] if "--kind" in words else "job"
    assert KIND_OF[kind] in text
    assert ("kind: Secret\n" in text) == ("--secret" not in words)
    assert ("prometheus.io/scrape" in text) == ("--metrics" in words)


def test_the_page_shows_each_kind() -> None:
    assert len(MANIFESTS) == 9
    for kind in KINDS[1:]:
        assert any(f"--kind {kind} " in line for line in MANIFESTS)
        assert f"| `{kind}` |" in PAGE


def test_the_patch_of_the_page_fits(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = re.search(r"^    kind: Pod\n(?:    .*\n)+", PAGE, re.MULTILINE)
    assert text is not None
    (tmp_path / "patch.yaml").write_text(re.sub("^    ", "", text[0], flags=re.MULTILINE))
    pod = {"spec": {"containers": [{"name": "node"}]}}
    (job,) = with_patches([{"kind": "Job", "spec": {"template": pod}}], [str(tmp_path / "patch.yaml")])
    assert job["metadata"]["annotations"] == {"example.com/owner": "ml"}
    assert set(job["spec"]["template"]["spec"]) == {"affinity", "topologySpreadConstraints", "containers"}


def test_the_failure_policy_is_the_one_that_is_written() -> None:
    indented = "".join(f"    {line}\n" for line in documents([failure_policy()]).splitlines())
    assert indented in PAGE


def test_commands_for_torchruns_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for line in re.findall(r"`(phalanx run [^`…]*)`", PAGE + CONTAINERS):
        words = shlex.split(line)[2:]
        if "--nnodes" not in words:
            parse([word.replace("train.py", str(tmp_path / "train.py")) for word in words], {})


def test_the_dockerfile_copies_what_the_build_needs_and_drops_privileges() -> None:
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    instructions = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    copied = [word for name, rest in instructions if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    assert {"pyproject.toml", "src"} < set(copied)
    allowed = (ROOT / ".dockerignore").read_text().split()
    assert all(f"!{word}" in allowed for word in copied)
    readme = re.search(r'^readme = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert readme is not None
    assert readme[1] in copied
    users = [rest for name, rest in instructions if name == "USER"]
    assert len(users) == 1
    assert users[0].partition(":")[0].isdigit(), "runAsNonRoot can check a number only"
    assert users[0].partition(":")[0] != "0"
    (command,) = (json.loads(rest) for name, rest in instructions if name == "CMD")
    assert command[0] == "phalanx"
    assert main(command[1:]) == 0
