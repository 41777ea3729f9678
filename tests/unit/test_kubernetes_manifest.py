"""The manifests of `phalanx k8s manifest`: as they are meant to be, and as Kubernetes' own schemas want them.

To write the golden files anew: python -m tests.unit.test_kubernetes_manifest
"""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.k8s import main, parse_manifest, with_patches
from phalanx.core.exit_codes import DO_NOT_RETRY, HANG, NO_MEETING, UNFIT_NODE, USAGE, retry
from phalanx.errors import UsageError
from phalanx.platforms.kubernetes.document_text import documents
from phalanx.platforms.kubernetes.manifest import KINDS, failure_policy, manifest
from phalanx.platforms.kubernetes.patches import merged

GOLDEN = sorted((Path(__file__).parent / "manifests").glob("*.yaml"))
TOKEN = "0123456789abcdef" * 4
EVERYDAY = (
    "--volume checkpoints:/data --volume secret/keys:/keys:ro --volume configmap/settings:/etc/settings "
    "--volume /mnt/nvme:/scratch:rw --env NCCL_DEBUG=WARN --env 'A=$(B)=1e-4' "
    "--secret-env WANDB_API_KEY=wandb:key --secret-env team "
    "--service-account trainer --image-pull-secret registry --priority-class high "
    "--node-selector example.com/pool=h200 --toleration nvidia.com/gpu:NoSchedule --toleration team=ml "
    "--toleration spot= --queue research --resource rdma/hca=1 --resource hugepages-2Mi=5Gi "
)
COMMANDS = {
    "job_everyday": f"--image train -N 2:4 --spares 1 --gpus 8 --ttl 3600 {EVERYDAY} -- train.py",
    "jobset_everyday": f"-k jobset --image train -N 4 --spares 1 --gpus 8 --ttl 0 {EVERYDAY} -- train.py",
    "trainjob_everyday": f"-k trainjob --image train -N 2:4 --gpus 8 {EVERYDAY} -- train.py",
    "job": "-k job --image registry.example/train:7 -N 4 --gpus 8 --max-restarts 3 -- train.py --lr 0.1",
    "job_restricted": "--image=train -N2 --nproc-per-node 2 --cpus 8 --memory 64Gi --shm 8Gi --name demo "
    "-n team --secret mine --retries 0 --termination-grace 40 --health-port 9000 --no-preflight --restricted "
    "--metrics --grace 20 -m trainer '$(HOME)' 'a \"b\"\n'",
    "jobset": "--kind jobset --image registry.example/train:7 -N 4 --gpus 8 -- train.py",
    "trainjob": "--kind trainjob --image registry.example/train:7 -N 4 --gpus 8 --metrics -- train.py",
}


def made(words: list[str]) -> list[dict[str, Any]]:
    kind, job, patches = parse_manifest(words, TOKEN)
    return with_patches(manifest(kind, job), patches)


def golden_words(name: str) -> list[str]:
    return shlex.split(COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(name: str) -> None:
    assert documents(made(golden_words(name))) == golden_file(name).read_text()


def golden_file(name: str) -> Path:
    return Path(__file__).parent / "manifests" / f"{name}.yaml"


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_is_the_documents(name: str) -> None:
    yaml = package("yaml")
    assert list(yaml.safe_load_all(golden_file(name).read_text())) == made(golden_words(name))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_kubernetes_own_schemas(name: str, version: str) -> None:
    validate = package("kubernetes_validate").validate
    for document in made(golden_words(name)):
        if document["apiVersion"] in ("v1", "batch/v1"):
            validate(document, version, strict=True)
        else:  # a Job in a set
            for one in jobs_in(document):
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": one}
                validate(whole, version, strict=True)


def jobs_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    inner = spec.get("template", {}).get("spec", spec)
    return [one["template"]["spec"] for one in inner.get("replicatedJobs", [])]


MODELS = {
    "JobSet": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime",
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}


@pytest.mark.parametrize("name", ["jobset", "trainjob", "jobset_everyday", "trainjob_everyday"])
def test_jobset_and_trainjob_have_only_fields_that_kubeflow_knows(name: str) -> None:
    package("kubeflow_trainer_api")
    for document in made(golden_words(name)):
        if document["kind"] in MODELS:
            module, model = MODELS[document["kind"]].split(".")
            known = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), model)
            # A field that the model does not have is left out of what it gives back; defaults are added.
            assert lost(document, known.from_dict(document).to_dict()) == []


def lost(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """What of our document is not in theirs."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        parts = [(f"{where}.{key}", ours[key], theirs.get(key)) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        parts = [(f"{where}[{n}]", a, b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return [] if ours == theirs else [where]
    return [one for part, a, b in parts for one in lost(a, b, part)]


def test_each_exit_code_has_the_end_that_the_contract_promises() -> None:
    ignored, final = failure_policy()["rules"]
    assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert final["action"] == "FailJob"
    back = final["onExitCodes"]["values"]
    killed = {137, 143}  # a machine that is lost or taken away: the pod comes back
    for code in set(range(1, 256)) - killed:
        assert (code in back) == retry(code).again, code
    assert killed < set(back)
    assert {NO_MEETING, UNFIT_NODE, HANG} < set(back)
    assert not {DO_NOT_RETRY, USAGE, 1} & set(back)


@pytest.mark.parametrize(("code", "starts"), [(0, True), (1, True), (95, False), (2, True)])
def test_only_an_unfit_machine_keeps_the_pod_from_starting(tmp_path: Path, code: int, starts: bool) -> None:
    """0: fit, 95: unfit, 1: could not tell; 2: a phalanx without `check`."""
    (tmp_path / "phalanx").write_text(f"#!/bin/sh\ntest $1 = check && exit {code}\n")
    (tmp_path / "phalanx").chmod(0o755)
    (found,) = (one for one in made(golden_words("job")) if one["kind"] == "Job")
    (preflight,) = found["spec"]["template"]["spec"]["initContainers"]
    done = subprocess.run(preflight["command"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert (done.returncode == 0) == starts


def test_the_same_command_gives_the_same_documents_and_each_job_a_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl apply` of them a second time changes nothing: the Job's pods keep their token."""
    monkeypatch.delenv("PHALANX_TOKEN", raising=False)
    monkeypatch.delenv("PHALANX_TOKEN_FILE", raising=False)

    def printed(home: str, name: str) -> tuple[str, str]:
        (tmp_path / home).mkdir(exist_ok=True)
        monkeypatch.setenv("HOME", str(tmp_path / home))
        assert main(["manifest", "--image", "x", "-N", "2", "--name", name, "--", "train.py"]) == 0
        text = capsys.readouterr().out
        token = text.partition("  token: ")[2].partition("\n")[0].strip('"')
        assert len(token) == 64
        assert text.count(token) == 1  # in no argument and no variable
        return text, token

    first, second = printed("ann", "a"), printed("ann", "a")
    assert first == second
    assert "\nimmutable: true\n" in first[0]  # another user's is refused, and does not replace this one
    tokens = [printed(*who)[1] for who in (("ann", "a"), ("ann", "b"), ("bob", "a"))]
    assert len(set(tokens)) == 3
    own = (tmp_path / "ann" / ".phalanx" / "token").read_text().strip()
    assert own not in first[0]


POD_PATCH = """\
kind: Pod
metadata:
  annotations: {team: ml}
spec:
  affinity:
    nodeAffinity: {}
  tolerations: null
  topologySpreadConstraints:
  - {maxSkew: 1, topologyKey: rack, whenUnsatisfiable: ScheduleAnyway}
  containers:
  - name: node
    env:
    - {name: NCCL_DEBUG, value: INFO}
    - {name: NEW, value: "1"}
    volumeMounts:
    - {mountPath: /data, $patch: delete}
  - name: exporter
    image: exporter
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_patch_of_the_kind_pod_changes_the_pods_of_each_kind(tmp_path: Path, kind: str) -> None:
    package("yaml")
    patch = tmp_path / "patch.yaml"
    patch.write_text(POD_PATCH)
    words = ["-k", kind, "--image", "x", "-N", "2", *shlex.split(EVERYDAY), "--patch", str(patch), "t.py"]
    texts = [text for text in map(json.dumps, made(words)) if '"containers"' in text]
    template = json.loads(texts[0])
    while "containers" not in template.get("spec", {}):
        inner = template["spec"]
        template = inner.get("replicatedJobs", [inner])[0]["template"]
    spec = template["spec"]
    assert template["metadata"]["annotations"] == {"team": "ml"}
    assert "tolerations" not in spec
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert [one["topologyKey"] for one in spec["topologySpreadConstraints"]] == ["rack"]
    node, exporter = spec["containers"]
    assert (node["name"], exporter) == ("node", {"name": "exporter", "image": "exporter"})
    variables = {one["name"]: one.get("value") for one in node["env"]}
    assert (variables["NCCL_DEBUG"], variables["NEW"], variables["A"]) == ("INFO", "1", "$$(B)=1e-4")
    assert [one["mountPath"] for one in node["volumeMounts"]][2:] == ["/keys", "/etc/settings", "/scratch"]


def test_patches_by_kind_and_json_patches(tmp_path: Path) -> None:
    package("jsonpatch")
    merge, operations = tmp_path / "merge.json", tmp_path / "operations.json"
    merge.write_text('{"kind": "Service", "spec": {"ports": [{"port": 8080, "name": "probes"}]}}')
    operations.write_text('[{"op": "replace", "path": "/spec/backoffLimitPerIndex", "value": 3}]')
    words = f"--image x -N 2 --patch {merge} --patch {operations} -- t.py"
    _, service, job = made(shlex.split(words))
    assert [one["name"] for one in service["spec"]["ports"]] == ["rendezvous", "probes"]
    assert job["spec"]["backoffLimitPerIndex"] == 3


MERGES: list[tuple[Any, Any, Any]] = [
    ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
    ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
    ({"a": {"b": 1}}, {"a": {"c": 2, "$patch": "replace"}}, {"a": {"c": 2}}),
    ({"a": [1]}, {"a": [2]}, {"a": [2]}),
    ({}, {"env": [{"name": "a"}]}, {"env": [{"name": "a"}]}),
    ({"env": [{"name": "a", "x": 1}]}, {"env": [{"name": "a", "x": 2}]}, {"env": [{"name": "a", "x": 2}]}),
    ({"env": [{"name": "a"}]}, {"env": [{"name": "b"}]}, {"env": [{"name": "a"}, {"name": "b"}]}),
    ({"env": [{"name": "a"}]}, {"env": [{"name": "a", "$patch": "delete"}]}, {"env": []}),
    ({"a": "text"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "change", "found"), MERGES)
def test_strategic_merge(base: Any, change: Any, found: Any) -> None:
    before = json.dumps(base)
    assert merged(base, change) == found
    assert json.dumps(base) == before


BAD_PATCHES = [
    ("", "write part of a document"),
    ("3", "write part of a document"),
    ("{", ""),
    ("{}", "kind None: choose one of Pod, Secret, Service, Job"),
    ('{"kind": "Deployment"}', "kind Deployment: choose one of Pod, Secret, Service, Job"),
    ('{"kind": "Pod", "spec": {"containers": [{"image": "y"}]}}', "containers: an item has no name"),
    ('[{"op": "remove", "path": "/spec/nothing"}]', "nothing"),
    ('[{"op": "fly", "path": "/spec"}]', "fly"),
    ("[3]", ""),
    ('[{"op": "replace", "path": "", "value": 3}]', "the document is removed"),
]


@pytest.mark.parametrize(("text", "line"), BAD_PATCHES)
def test_a_patch_that_does_not_fit(tmp_path: Path, text: str, line: str) -> None:
    package("yaml")
    package("jsonpatch")
    (tmp_path / "patch").write_text(text)
    with pytest.raises(UsageError) as refused:
        made(["--image", "x", "-N", "2", "--patch", str(tmp_path / "patch"), "t.py"])
    assert str(refused.value).startswith(f"--patch {tmp_path / 'patch'}: ")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is JSON, patches may be JSON; what needs a package names it."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.setitem(sys.modules, "jsonpatch", None)
    found = json.loads(documents(made(golden_words("job_everyday"))))
    assert (found["kind"], found["items"]) == ("List", made(golden_words("job_everyday")))
    patch, words = tmp_path / "patch", ["--image", "x", "-N", "2", "--patch", str(tmp_path / "patch"), "t.py"]
    patch.write_text('{"kind": "Job", "metadata": {"labels": {"a": "b"}}}')
    assert made(words)[2]["metadata"]["labels"] == {"a": "b"}
    for text, line in (("kind: Job", "write JSON, or install PyYAML"), ("[]", "needs the package jsonpatch")):
        patch.write_text(text)
        with pytest.raises(UsageError, match=line):
            made(words)


BAD = [
    ("", "no script given"),
    ("--image x -N 2", "no script given"),
    ("-N 2 -- t.py", "--image is missing"),
    ("--image x -- t.py", "--nodes is missing"),
    ("--image x -N 0 -- t.py", "-N/--nodes: 0: use a whole number, 1 or more"),
    ("--image x -N 9999999999 -- t.py", "-N/--nodes: 9999999999: use a whole number"),
    ("--image x -N 2 --gpus x -- t.py", "--gpus: x: not a whole number"),
    ("--image x -N 2 --nproc-per-node gpu -- t.py", "--nproc-per-node: gpu: not a whole number"),
    ("--image x -N 2 --kind pod -- t.py", "-k/--kind: invalid choice: 'pod' (choose from "),
    ("--image x -N 2 --name A_b -- t.py", "--name A_b: pods would be named A_b-1"),
    (f"--image x -N 2 --name {'a' * 62} -- t.py", "at most 63"),
    (f"--image x -N 2 -k jobset --name {'a' * 55} -- t.py", "a-node-0-1; use"),
    ("--image x -N 2 -n a/b -- t.py", "-n/--namespace: a/b: use small letters"),
    ("--image x -N 2 --secret A -- t.py", "--secret: A: use small letters"),
    ("--image x -N 2 --memory lots -- t.py", "--memory: lots: write a quantity"),
    ("--image 'x y' -N 2 -- t.py", "an image's name has no blanks"),
    ("--image x -N 2 --nnodes 4 -- t.py", "--nnodes: the manifest and the pods see to that"),
    ("--image x -N 2 --rdzv_backend=c10d -- t.py", "--rdzv-backend: the manifest and the pods see to that"),
    ("--image x -N 2 --max-restarts -1 -- t.py", "--max-restarts -1: must be"),
    ("--image x -N 2 --no-such -- t.py", "--no-such"),
    ("--image x -N 2 --grace 120 -- t.py", "--grace 2m: the pod is killed after --termination-grace 2m"),
    ("--image x -N 2 --health-port 70000 -- t.py", "--health-port: 70000: use a port"),
    ("--image", "--image: expected one argument"),
    ("--image x -N 4:2 -- t.py", "-N/--nodes: 4:2: the first number is the larger one"),
    ("--image x -N 2: -- t.py", "-N/--nodes: 2:: use a whole number"),
    ("--image x -N 1 --spares 1 -- t.py", "--spares with -N 1"),
    ("--image x -N 2 -k trainjob --ttl 3 -- t.py", "--ttl: a TrainJob has no such field"),
    ("--image x -N 2 --ttl soon -- t.py", "--ttl: soon: not a duration"),
    ("--image x -N 2 --volume data -- t.py", "--volume: data: write SOURCE:PATH"),
    ("--image x -N 2 --volume data:here -- t.py", "--volume: data:here: write SOURCE:PATH"),
    ("--image x -N 2 --volume data:/a:xx -- t.py", "--volume: data:/a:xx: write SOURCE:PATH"),
    ("--image x -N 2 --volume data:/a/../b -- t.py", "--volume: data:/a/../b: write SOURCE:PATH"),
    ("--image x -N 2 --volume nfs/a:/a -- t.py", "--volume: nfs/a:/a: nfs/a is not a name"),
    ("--image x -N 2 --volume a:/dev/shm -- t.py", "--volume: /dev/shm is given twice"),
    ("--image x -N 2 --volume a:/a --volume b:/a/ -- t.py", "--volume: /a is given twice"),
    ("--image x -N 2 --env A -- t.py", "--env: A: write NAME=VALUE"),
    ("--image x -N 2 --env 1A=x -- t.py", "--env: 1A=x: write NAME=VALUE"),
    ("--image x -N 2 --env PHALANX_TOKEN_FILE=x -- t.py", "--env: PHALANX_TOKEN_FILE is given twice"),
    ("--image x -N 2 --env A=1 --secret-env A=s:k -- t.py", "--env: A is given twice"),
    ("--image x -N 2 --secret-env A=s -- t.py", "--secret-env: A=s: write NAME=SECRET:KEY"),
    ("--image x -N 2 --secret-env s:k -- t.py", "--secret-env: s:k: write NAME=SECRET:KEY"),
    ("--image x -N 2 --toleration a:Never -- t.py", "--toleration: a:Never: write KEY"),
    ("--image x -N 2 --node-selector a -- t.py", "--node-selector: a: write KEY=VALUE"),
    ("--image x -N 2 --resource rdma/hca=some -- t.py", "--resource: rdma/hca=some: write NAME=VALUE"),
    ("--image x -N 2 --resource a/b=1 --resource a/b=2 -- t.py", "--resource: a/b is given twice"),
    ("--image x -N 2 --queue A_B -- t.py", "--queue: A_B: use small letters"),
    ("--image x -N 2 --image-pull-secret A -- t.py", "--image-pull-secret: A: use small letters"),
    ("--image x -N 2 --patch /no/such -- t.py", "--patch /no/such: No such file or directory"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[words for words, _ in BAD])
def test_bad_usage(words: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        made(shlex.split(words))
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("words", "line"), [([], "required: manifest"), (["apply"], "invalid choice: 'apply'")]
)
def test_no_such_command(words: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        main(words)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("a/train_llama.py", "train-llama"),
        ("7B.py", "b"),
        ("-", "phalanx"),
        ("ü", "phalanx"),
        ("x" * 99, "x" * 40),
    ],
)
def test_the_name_of_a_job_comes_from_its_script(script: str, name: str) -> None:
    assert parse_manifest(["--image", "x", "-N", "2", "--", script], TOKEN)[1].name == name


TEXTS = [
    "", " ", "a", "a b", "a: b", "a #b", "- a", "yes", "No", "null", "~", "1", "1.5", "0x10", "1e3", ".5",
    ".inf", "-", "--x", "=", "a'b", 'a"b', "a\\b", "a\nb", "\t", "\x00\x1b\x7f\x85\ufeff\u2028", "ü",
    "\U0001f600", "*a", "&a", "!a", "%a", "@a", "`a", "{a}", "[a]", "a,", "?", "|", ">", "2001-01-01", "1:30",
    "0o7", "...", "---", "/a", "a:", "<<", "0", "y", "n", "1e-4",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_it_was(text: str) -> None:
    yaml = package("yaml")
    document = {"a": text, "b": [text], f"{text}c": 1}
    written = documents([document])
    assert list(yaml.safe_load_all(written)) == [document]
    if text in ("y", "n", "1e-4", "1e3", "0o7"):  # numbers and booleans for kubectl
        assert f'a: "{text}"' in written


def test_kinds_have_golden_files() -> None:
    assert {path.stem for path in GOLDEN} == set(COMMANDS)
    assert set(KINDS) <= set(COMMANDS)


if __name__ == "__main__":
    for each in COMMANDS:
        golden_file(each).write_text(documents(made(golden_words(each))))
