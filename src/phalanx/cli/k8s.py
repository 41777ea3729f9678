"""`phalanx k8s manifest`: prints the manifests of a job, for `kubectl apply -f -`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from phalanx.cli.parser import count, split_words
from phalanx.job.command_line import scan, usage_error
from phalanx.job.environment import JOB_UID, TOKEN_FILE
from phalanx.job.options import BY_DEST
from phalanx.job.units import duration, format_duration
from phalanx.platforms.kubernetes.manifest import (
    KINDS,
    PodJob,
    SecretVariable,
    Toleration,
    Volume,
    longest_host_name,
    manifest,
)

HELP = """\
usage: phalanx k8s manifest --image IMAGE -N NODES [options] -- SCRIPT [arguments of the script]

Prints the manifests of a job on NODES pods; give them to kubectl apply -f -.
  -k, --kind KIND        job (an Indexed Job and its Service), jobset, or
                         trainjob (Kubeflow Trainer v2) [job]
      --image IMAGE      has phalanx, SCRIPT and what it needs
  -N, --nodes N|MIN:MAX  pods; with a range the job runs with MIN, and takes more
      --spares K         pods that wait and replace lost ones [0]
      --gpus N           GPUs of each pod, and workers, unless --nproc-per-node
                         says otherwise [0]
      --cpus C; --memory M
                         of each pod, as Kubernetes writes them: 8, 64Gi
      --resource NAME=N  a further resource of each pod: rdma/hca=1 (*)
      --shm SIZE         limit of /dev/shm [the memory limit]
      --volume SOURCE:PATH[:ro]
                         SOURCE is a PersistentVolumeClaim, secret/NAME,
                         configmap/NAME, or a /directory of the machine (*)
      --env NAME=VALUE   a variable of the workers (*)
      --secret-env NAME=SECRET:KEY
                         the same from a Secret; SECRET alone: all its keys (*)
      --name NAME        of the job [the script's]
  -n, --namespace NS     [kubectl's]
      --service-account NAME; --image-pull-secret NAME (*);
      --priority-class NAME; --node-selector KEY=VALUE (*);
      --toleration KEY[=VALUE][:EFFECT] (*)
                         of the pods
      --queue NAME       of Kueue
      --ttl TIME         delete the job this long after its end
      --secret NAME      an existing Secret whose key `token` is the job's
                         token [the manifest has one, made from your own token]
      --retries K        a pod may fail K times by the infrastructure [10]
      --termination-grace TIME
                         from SIGTERM to SIGKILL; workers get 10s less [2m]
      --health-port PORT of the probes [8080]
      --no-preflight     without the init container that runs phalanx check
      --restricted       for namespaces that enforce Kubernetes' restricted pod
                         security: no root, read-only file system
      --patch FILE       for everything else: strategic merge patches, of which
                         the kind Pod changes the pods, or a JSON patch (*)
(*) may be given several times. Every other option is one of `phalanx run`:
--max-restarts 3. With --metrics, the pods have the annotations by which
Prometheus finds them. The text is YAML; without PyYAML, JSON.
"""

_LISTS = (
    "volume", "env", "secret-env", "image-pull-secret", "node-selector", "toleration", "resource", "patch",
)  # fmt: skip
_FLAGS = ("no-preflight", "restricted")
_VALUES = (
    "kind", "image", "nodes", "spares", "gpus", "cpus", "memory", "shm", "name", "namespace", "secret",
    "retries", "termination-grace", "health-port", "nproc-per-node", "service-account", "priority-class",
    "queue", "ttl",
)  # fmt: skip
OPTIONS_HERE = {
    "-k": "kind", "-N": "nodes", "-n": "namespace",
    **{f"--{name}": name for name in (*_LISTS, *_FLAGS, *_VALUES)},
}  # fmt: skip
# What the manifest or the pods themselves say.
_NOT_HERE = (
    "nnodes", "node_rank", "standalone", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint",
    "rdzv_id", "token_file", "hosts", "hostfile", "detach", "attach", "health_listen",
)  # fmt: skip
# What cannot be looked at here.
_NAMES = ("namespace", "secret", "service-account", "priority-class", "queue")
_OF_THE_IMAGE = ("module", "no_python", "log_dir", "tls_cert", "tls_key", "tls_ca", "keep_spill", "metrics")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KEY = r"([-A-Za-z0-9.]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"  # of labels, taints and resources
_VARIABLE = r"[A-Za-z_.][-A-Za-z0-9_.]*"


def main(argv: Sequence[str]) -> int:
    """Print the documents."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]) or words[1:2] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    if words[:1] != ["manifest"]:
        what = f"{words[0]}: no such command" if words else "no command given"
        raise usage_error(f"{what}; there is manifest")
    from phalanx.platforms.kubernetes.document_text import documents

    kind, job, patches = parse_manifest(words[1:])
    print(documents(with_patches(manifest(kind, job), patches)), end="")
    return 0


def with_patches(found: list[dict[str, Any]], files: Sequence[str]) -> list[dict[str, Any]]:
    """The documents with the patches of these files."""
    from phalanx.platforms.kubernetes.patches import load, patched

    for path in files:
        for patch in load(path):
            try:
                found = patched(found, patch)
            except ValueError as error:
                raise usage_error(f"--patch {path}: {error}") from None
    return found


def parse_manifest(words: Sequence[str], token: str = "") -> tuple[str, PodJob, list[str]]:
    """The kind and the job that the words describe, and the files with patches.

    `token`: for the Secret, where the manifest has one [made from the user's]."""
    mine, run, rest = split_words(words, OPTIONS_HERE, _FLAGS)
    own = {name: value or "" for name, value in mine}
    lists = {name: [value or "" for one, value in mine if one == name] for name in _LISTS}
    if not rest:
        raise usage_error(
            "no script given; write: phalanx k8s manifest --image IMAGE -N NODES -- script.py …"
        )
    for needed in ("image", "nodes"):
        if not own.get(needed):
            raise usage_error(f"--{needed} is missing")
    kind, job = _checked(own, lists, run, rest)
    if not own.get("secret"):
        job = job.replace(token=token or _derived_token(job))
    return kind, job, lists["patch"]


def _derived_token(job: PodJob) -> str:
    """A token for this job that only its user can make, and makes again: applied twice, nothing changes."""
    import hashlib
    import hmac

    from phalanx.store.net.token import find_token

    what = f"kubernetes {job.namespace}/{job.name}"
    return hmac.new(find_token().key, what.encode(), hashlib.sha256).hexdigest()


def _checked(
    own: dict[str, str], lists: dict[str, list[str]], run: list[str], rest: list[str]
) -> tuple[str, PodJob]:
    kind = own.get("kind", "job")
    if kind not in KINDS:
        raise usage_error(f"--kind {kind}: choose one of {', '.join(KINDS)}")
    gpus = count("gpus", own.get("gpus", "0"), 0)
    name = own.get("name") or _name_of(rest[0])
    least, nodes = _sizes(own["nodes"])
    job = PodJob(
        name=name,
        image=own["image"],
        nodes=nodes,
        least=least,
        spares=count("spares", own.get("spares", "0"), 0),
        workers=count("nproc-per-node", own.get("nproc-per-node", str(gpus or 1)), 1),
        script=rest[0],
        script_args=tuple(rest[1:]),
        run_words=tuple(run),
        gpus=gpus,
        cpus=own.get("cpus", ""),
        memory=own.get("memory", ""),
        shared_memory=own.get("shm", ""),
        namespace=own.get("namespace", ""),
        secret=own.get("secret") or f"{name}-token",
        retries=count("retries", own.get("retries", "10"), 0),
        termination_grace=_whole_seconds(own, "termination-grace", 1, "2m"),
        health_port=count("health-port", own.get("health-port", "8080"), 1, 65535),
        preflight="no-preflight" not in own,
        restricted="restricted" in own,
        resources=tuple(_pair("resource", text, _KEY, _QUANTITY.pattern) for text in lists["resource"]),
        volumes=tuple(_volume(text) for text in lists["volume"]),
        variables=tuple(_pair("env", text, _VARIABLE, "(?s:.*)") for text in lists["env"]),
        secret_variables=tuple(_secret_variable(text) for text in lists["secret-env"]),
        service_account=own.get("service-account", ""),
        pull_secrets=tuple(lists["image-pull-secret"]),
        tolerations=tuple(_toleration(text) for text in lists["toleration"]),
        node_selector=tuple(
            _pair("node-selector", text, _KEY, "[-A-Za-z0-9_.]*") for text in lists["node-selector"]
        ),
        priority_class=own.get("priority-class", ""),
        queue=own.get("queue", ""),
        ttl=_whole_seconds(own, "ttl", 0) if "ttl" in own else None,
    )
    host = longest_host_name(kind, job)
    if not _LABEL.fullmatch(name) or len(host) > 63:
        raise usage_error(
            f"--name {name}: pods would be named {host}; use small letters, digits and -, a letter first, "
            "at most 63 together"
        )
    names = [(what, own.get(what, "")) for what in _NAMES]
    for what, text in (*names, *(("image-pull-secret", one) for one in lists["image-pull-secret"])):
        if text and not _NAME.fullmatch(text):
            raise usage_error(f"--{what} {text}: use small letters, digits and -")
    if job.spares and job.nodes == 1:
        raise usage_error("--spares with -N 1: the one pod is replaced anyway; leave --spares out")
    if job.ttl is not None and kind == "trainjob":
        raise usage_error("--ttl: a TrainJob has no such field; use --kind job or jobset")
    _check_unique(job)
    for what in ("cpus", "memory", "shm"):
        if own.get(what) and not _QUANTITY.fullmatch(own[what]):
            raise usage_error(f"--{what} {own[what]}: write a quantity of Kubernetes, such as 8 or 64Gi")
    if any(char.isspace() for char in job.image):
        raise usage_error(f"--image {job.image!r}: an image's name has no blanks")
    _check_run_words(run, job.termination_grace)
    return kind, job


def _check_unique(job: PodJob) -> None:
    """Kubernetes refuses two mounts at one path, and takes one of two variables with one name."""
    paths = ["/dev/shm", *(["/tmp"] if job.restricted else []), *(one.path for one in job.volumes)]
    names = [TOKEN_FILE, JOB_UID, *(name for name, _ in job.variables)]
    names += [one.name for one in job.secret_variables if one.name]
    for option, texts in (("volume", paths), ("env", names), ("resource", [one for one, _ in job.resources])):
        for text in texts:
            if texts.count(text) > 1:
                raise usage_error(f"--{option}: {text} is given twice, or set by the manifest itself")


def _sizes(text: str) -> tuple[int, int]:
    """N or MIN:MAX."""
    least, colon, most = text.partition(":")
    sizes = [count("nodes", one, 1, whole=text) for one in ((least, most) if colon else (least, least))]
    if sizes[0] > sizes[1]:
        raise usage_error(f"--nodes {text}: the first number is the larger one")
    return sizes[0], sizes[1]


def _volume(text: str) -> Volume:
    kind = r"(?P<kind>secret|configmap)/"
    found = re.fullmatch(rf"(?:{kind})?(?P<source>/?[^:]+):(?P<path>/[^:]+?)/?(?P<ro>:ro|:rw)?", text)
    if found is None or ".." in found["path"].split("/"):
        raise usage_error(f"--volume {text}: write SOURCE:PATH or SOURCE:PATH:ro, as in checkpoints:/data")
    source = found["source"]
    kinds = found["kind"] or ("host" if source.startswith("/") else "claim")
    if kinds != "host" and not _NAME.fullmatch(source):
        raise usage_error(
            f"--volume {text}: {source} is not a name; use that of a claim, secret/NAME, configmap/NAME or a "
            "/directory"
        )
    return Volume(kinds, source, found["path"], found["ro"] == ":ro")


def _secret_variable(text: str) -> SecretVariable:
    found = re.fullmatch(
        rf"(?:(?P<name>{_VARIABLE})=)?(?P<secret>[^:=]+)(?::(?P<key>[-A-Za-z0-9_.]+))?", text
    )
    if found is None or bool(found["name"]) != bool(found["key"]) or not _NAME.fullmatch(found["secret"]):
        raise usage_error(f"--secret-env {text}: write NAME=SECRET:KEY, or SECRET for all its keys")
    return SecretVariable(found["secret"], found["name"] or "", found["key"] or "")


def _toleration(text: str) -> Toleration:
    effects = "NoSchedule|PreferNoSchedule|NoExecute"
    found = re.fullmatch(rf"(?P<key>{_KEY})(?:=(?P<value>[-A-Za-z0-9_.]*))?(?::(?P<effect>{effects}))?", text)
    if found is None:
        raise usage_error(
            f"--toleration {text}: write KEY, KEY=VALUE or KEY=VALUE:EFFECT, as in nvidia.com/gpu:NoSchedule"
        )
    return Toleration(found["key"], found["value"], found["effect"] or "")


def _pair(option: str, text: str, name: str, value: str) -> tuple[str, str]:
    found = re.fullmatch(f"({name})=({value})", text)
    if found is None:
        raise usage_error(f"--{option} {text}: write {'KEY' if 'node' in option else 'NAME'}=VALUE")
    before, _, after = text.partition("=")
    return before, after


def _check_run_words(run: list[str], termination_grace: int) -> None:
    """What `phalanx run` would refuse in the pod is refused here; the script is in the image, not here."""
    from phalanx.job.config import parse

    words = []
    for dest, value in scan([*run, "script"]).values.items():
        option = BY_DEST[dest]
        if dest in _NOT_HERE:
            raise usage_error(f"{option.name}: the manifest and the pods see to that; leave it out")
        if dest not in _OF_THE_IMAGE:
            words.append(option.name if option.kind == "flag" else f"{option.name}={value}")
    asked = parse([*words, __file__], {}).restarts.shutdown_timeout
    if (
        any(word.startswith(("--grace=", "--shutdown-timeout=")) for word in words)
        and asked >= termination_grace
    ):
        raise usage_error(
            f"--grace {format_duration(asked)}: the pod is killed after --termination-grace "
            f"{format_duration(termination_grace)}; choose less"
        )


def _whole_seconds(own: dict[str, str], name: str, least: int, default: str = "") -> int:
    """A duration as Kubernetes takes it."""
    text = own.get(name, default)
    try:
        seconds = duration(text)
        if not least <= seconds == int(seconds):
            raise ValueError(f"use whole seconds, {least} or more")
    except ValueError as error:
        raise usage_error(f"--{name} {text}: {error}") from None
    return int(seconds)


def _name_of(script: str) -> str:
    base = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", base).strip("-").lstrip("-0123456789")[:40].rstrip("-") or "phalanx"
