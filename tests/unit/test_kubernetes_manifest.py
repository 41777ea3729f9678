"""The manifests of `phalanx k8s manifest`: as they are meant to be, and as Kubernetes' own schemas want them.

To write the golden files anew: python -m tests.unit.test_kubernetes_manifest
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.k8s import main, parse_manifest
from phalanx.core.exit_codes import DO_NOT_RETRY, HANG, NO_MEETING, UNFIT_NODE, USAGE, retry
from phalanx.errors import UsageError
from phalanx.integrations.kubernetes.manifest import KINDS, failure_policy, manifest
from phalanx.integrations.kubernetes.yaml_text import documents, scalar

GOLDEN = sorted((Path(__file__).parent / "manifests").glob("*.yaml"))
TOKEN = "0123456789abcdef" * 4
COMMANDS = {
    "job": "-k job --image registry.example/train:7 -N 4 --gpus 8 --max-restarts 3 -- train.py --lr 0.1",
    "job_restricted": "--image=train -N2 --nproc-per-node 2 --cpus 8 --memory 64Gi --shm 8Gi --name demo "
    "-n team --secret mine --retries 0 --termination-grace 40 --health-port 9000 --no-preflight --restricted "
    "--metrics --grace 20 -m trainer '$(HOME)' 'a \"b\"\n'",
    "jobset": "--kind jobset --image registry.example/train:7 -N 4 --gpus 8 -- train.py",
    "trainjob": "--kind trainjob --image registry.example/train:7 -N 4 --gpus 8 --metrics -- train.py",
}


def made(words: list[str]) -> list[dict[str, Any]]:
    kind, job = parse_manifest(words, TOKEN)
    return manifest(kind, job)


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


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
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


@pytest.mark.parametrize(("code", "starts"), [(0, True), (10, True), (20, False), (30, True), (2, True)])
def test_only_an_unfit_machine_keeps_the_pod_from_starting(tmp_path: Path, code: int, starts: bool) -> None:
    """0: fit, 10: to look at, 20: unfit, 30: could not tell; 2: a phalanx without `check`."""
    (tmp_path / "phalanx").write_text(f"#!/bin/sh\ntest $1 = check && exit {code}\n")
    (tmp_path / "phalanx").chmod(0o755)
    (found,) = (one for one in made(golden_words("job")) if one["kind"] == "Job")
    (preflight,) = found["spec"]["template"]["spec"]["initContainers"]
    done = subprocess.run(preflight["command"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    assert (done.returncode == 0) == starts


def test_the_secret_is_new_each_time_and_in_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert main(["manifest", "--image", "x", "-N", "2", "--", "train.py"]) == 0
        text = capsys.readouterr().out
        found.append(text.partition("  token: ")[2].partition("\n")[0].strip('"'))
        assert len(found[-1]) == 64
        assert text.count(found[-1]) == 1
    assert found[0] != found[1]


BAD = [
    ("", "no script given"),
    ("--image x -N 2", "no script given"),
    ("-N 2 -- t.py", "--image is missing"),
    ("--image x -- t.py", "--nodes is missing"),
    ("--image x -N 0 -- t.py", "--nodes 0: use a whole number, 1 or more"),
    ("--image x -N 9999999999 -- t.py", "--nodes 9999999999: use a whole number"),
    ("--image x -N 2 --gpus x -- t.py", "--gpus x: use a whole number"),
    ("--image x -N 2 --nproc-per-node gpu -- t.py", "--nproc-per-node gpu: use a whole number"),
    ("--image x -N 2 --kind pod -- t.py", "--kind pod: choose one of job, jobset, trainjob"),
    ("--image x -N 2 --name A_b -- t.py", "--name A_b: pods would be named A_b-1"),
    (f"--image x -N 2 --name {'a' * 62} -- t.py", "at most 63"),
    (f"--image x -N 2 -k jobset --name {'a' * 55} -- t.py", "a-node-0-1; use"),
    ("--image x -N 2 -n a/b -- t.py", "--namespace a/b: use small letters"),
    ("--image x -N 2 --secret A -- t.py", "--secret A: use small letters"),
    ("--image x -N 2 --memory lots -- t.py", "--memory lots: write a quantity"),
    ("--image 'x y' -N 2 -- t.py", "an image's name has no blanks"),
    ("--image x -N 2 --nnodes 4 -- t.py", "--nnodes: the manifest and the pods see to that"),
    ("--image x -N 2 --rdzv_backend=c10d -- t.py", "--rdzv-backend: the manifest and the pods see to that"),
    ("--image x -N 2 --max-restarts -1 -- t.py", "--max-restarts -1: must be"),
    ("--image x -N 2 --no-such -- t.py", "--no-such"),
    ("--image x -N 2 --grace 120 -- t.py", "--grace 120: the pod is killed after --termination-grace 120"),
    ("--image x -N 2 --health-port 70000 -- t.py", "--health-port 70000"),
    ("--image", "--image needs a value"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[words for words, _ in BAD])
def test_bad_usage(words: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_manifest(shlex.split(words), TOKEN)
    assert line in str(refused.value)


@pytest.mark.parametrize(("words", "line"), [([], "no command given"), (["apply"], "apply: no such command")])
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
    "0o7", "...", "---", "/a", "a:", "<<", "0",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_is_read_back_as_it_was(text: str) -> None:
    yaml = package("yaml")
    assert yaml.safe_load(f"a: {scalar(text)}\n") == {"a": text}
    assert yaml.safe_load(f"- {scalar(text)}\n") == [text]
    assert yaml.safe_load(f"{scalar(text)}: 1\n") == {text: 1}


def test_kinds_have_golden_files() -> None:
    assert {path.stem for path in GOLDEN} == set(COMMANDS)
    assert set(KINDS) <= set(COMMANDS)


if __name__ == "__main__":
    for each in COMMANDS:
        golden_file(each).write_text(documents(made(golden_words(each))))
