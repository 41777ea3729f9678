"""`phalanx k8s manifest`: prints the manifests of a job, for `kubectl apply -f -`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from phalanx.integrations.kubernetes.manifest import KINDS, PodJob, longest_host_name, manifest
from phalanx.options import BY_DEST, InformationRequested, scan, take_words, usage_error

HELP = """\
usage: phalanx k8s manifest --image IMAGE -N NODES [options] -- SCRIPT [arguments of the script]

Prints the manifests of a job on NODES pods; give them to kubectl apply -f -.
  -k, --kind KIND        job (an Indexed Job and its Service), jobset, or
                         trainjob (Kubeflow Trainer v2) [job]
      --image IMAGE      has phalanx, SCRIPT and what it needs
  -N, --nodes N          pods
      --gpus N           GPUs of each pod, and workers, unless --nproc-per-node
                         says otherwise [0]
      --cpus C; --memory M
                         of each pod, as Kubernetes writes them: 8, 64Gi
      --shm SIZE         limit of /dev/shm [the memory limit]
      --name NAME        of the job [the script's]
  -n, --namespace NS     [kubectl's]
      --secret NAME      an existing Secret whose key `token` is the job's
                         token; without it, the manifest has a new one
      --retries K        a pod may fail K times by the infrastructure [10]
      --termination-grace SECONDS
                         from SIGTERM to SIGKILL; workers get 10 less [120]
      --health-port PORT of the probes [8080]
      --no-preflight     without the init container that runs phalanx check
      --restricted       for namespaces that enforce Kubernetes' restricted pod
                         security: no root, read-only file system
Every other option is one of `phalanx run`: --max-restarts 3. With --metrics, the
pods have the annotations by which Prometheus finds them.
"""

_OWN = {
    "-k": "kind", "--kind": "kind", "--image": "image", "-N": "nodes", "--nodes": "nodes", "--gpus": "gpus",
    "--cpus": "cpus", "--memory": "memory", "--shm": "shm", "--name": "name", "-n": "namespace",
    "--namespace": "namespace", "--secret": "secret", "--retries": "retries", "--nproc-per-node": "workers",
    "--termination-grace": "termination-grace", "--health-port": "health-port",
    "--no-preflight": "no-preflight", "--restricted": "restricted",
}  # fmt: skip
_FLAGS = ("no-preflight", "restricted")
# What the manifest or the pods themselves say.
_NOT_HERE = (
    "nnodes", "node_rank", "standalone", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint",
    "rdzv_id", "token_file", "hosts", "hostfile", "detach", "attach",
)  # fmt: skip
# What cannot be looked at here.
_OF_THE_IMAGE = ("module", "no_python", "log_dir", "tls_cert", "tls_key", "tls_ca", "keep_spill", "metrics")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")


def main(argv: Sequence[str]) -> int:
    """Print the documents."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]) or words[1:2] in (["-h"], ["--help"]):
        print(HELP, end="")
        return 0
    if words[:1] != ["manifest"]:
        what = f"{words[0]}: no such command" if words else "no command given"
        raise usage_error(f"{what}; there is manifest")
    from phalanx.integrations.kubernetes.yaml_text import documents

    kind, job = parse_manifest(words[1:], secrets.token_hex(32))
    print(documents(manifest(kind, job)), end="")
    return 0


def parse_manifest(words: Sequence[str], token: str) -> tuple[str, PodJob]:
    """The kind and the job that the words describe; `token`: for the Secret, where a new one is needed."""
    rest, own, run = list(words), dict[str, str](), list[str]()
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") and len(name) > 2 and name[:2] in _OWN:
            name, equals, value = name[:2], "=", word[2:]  # -N4
        if name in ("-h", "--help"):
            raise InformationRequested("help")
        dashed = name.replace("_", "-")
        if dashed not in _OWN:
            run += take_words(word, rest)
        elif _OWN[dashed] in _FLAGS:
            own[_OWN[dashed]] = "1"
        else:
            own[_OWN[dashed]] = value if equals else _value(name, rest)
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if not rest:
        raise usage_error(
            "no script given; write: phalanx k8s manifest --image IMAGE -N NODES -- script.py …"
        )
    for needed in ("image", "nodes"):
        if not own.get(needed):
            raise usage_error(f"--{needed} is missing")
    return _checked(own, run, rest, token)


def _checked(own: dict[str, str], run: list[str], rest: list[str], token: str) -> tuple[str, PodJob]:
    kind = own.get("kind", "job")
    if kind not in KINDS:
        raise usage_error(f"--kind {kind}: choose one of {', '.join(KINDS)}")
    gpus = _count(own, "gpus", 0, 0)
    name = own.get("name") or _name_of(rest[0])
    job = PodJob(
        name=name,
        image=own["image"],
        nodes=_count(own, "nodes", 1, 1),
        workers=_count(own, "workers", 1, gpus or 1),
        script=rest[0],
        script_args=tuple(rest[1:]),
        run_words=tuple(run),
        gpus=gpus,
        cpus=own.get("cpus", ""),
        memory=own.get("memory", ""),
        shared_memory=own.get("shm", ""),
        namespace=own.get("namespace", ""),
        secret=own.get("secret") or f"{name}-token",
        token="" if own.get("secret") else token,
        retries=_count(own, "retries", 0, 10),
        termination_grace=_count(own, "termination-grace", 1, 120),
        health_port=_count(own, "health-port", 1, 8080, 65535),
        preflight="no-preflight" not in own,
        restricted="restricted" in own,
    )
    host = longest_host_name(kind, job)
    if not _LABEL.fullmatch(name) or len(host) > 63:
        raise usage_error(
            f"--name {name}: pods would be named {host}; use small letters, digits and -, a letter first, "
            "at most 63 together"
        )
    for what, text in (("namespace", job.namespace), ("secret", own.get("secret", ""))):
        if text and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", text):
            raise usage_error(f"--{what} {text}: use small letters, digits and -")
    for what in ("cpus", "memory", "shm"):
        if own.get(what) and not _QUANTITY.fullmatch(own[what]):
            raise usage_error(f"--{what} {own[what]}: write a quantity of Kubernetes, such as 8 or 64Gi")
    if any(char.isspace() for char in job.image):
        raise usage_error(f"--image {job.image!r}: an image's name has no blanks")
    _check_run_words(run, job.termination_grace)
    return kind, job


def _check_run_words(run: list[str], termination_grace: int) -> None:
    """What `phalanx run` would refuse in the pod is refused here; the script is in the image, not here."""
    from phalanx.config import parse

    words = []
    for dest, value in scan([*run, "script"]).values.items():
        option = BY_DEST[dest]
        if dest in _NOT_HERE:
            raise usage_error(f"{option.name}: the manifest and the pods see to that; leave it out")
        if dest not in _OF_THE_IMAGE:
            words.append(option.name if option.kind == "flag" else f"{option.name}={value}")
        if dest in ("grace", "shutdown_timeout") and _seconds(value) >= termination_grace:
            raise usage_error(
                f"{option.name} {value}: the pod is killed after --termination-grace {termination_grace} "
                "seconds; choose less"
            )
    parse([*words, __file__], {})


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # which is refused as such


def _value(name: str, rest: list[str]) -> str:
    if not rest:
        raise usage_error(f"{name} needs a value")
    return rest.pop(0)


def _count(own: dict[str, str], name: str, least: int, default: int, most: int = 1_000_000) -> int:
    text = own.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 8) or not least <= int(text) <= most:
        option = "nproc-per-node" if name == "workers" else name
        raise usage_error(f"--{option} {text}: use a whole number, {least} or more")
    return int(text)


def _name_of(script: str) -> str:
    base = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", base).strip("-").lstrip("-0123456789")[:40].rstrip("-") or "phalanx"
