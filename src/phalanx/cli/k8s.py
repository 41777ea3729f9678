"""`phalanx k8s manifest`: prints the manifests of a job, for `kubectl apply -f -`."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx.cli.parser import Parser
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

DESCRIPTION = """\
Prints the manifests of a job on NODES pods; give them to kubectl apply -f -.
Options with (*) may be given several times. Every other option is one of
`phalanx run`: --max-restarts 3. With --metrics, the pods have the annotations
by which Prometheus finds them. The text is YAML; without PyYAML, JSON.
"""
# What the manifest or the pods themselves say.
_NOT_HERE = (
    "nnodes", "node_rank", "standalone", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint",
    "rdzv_id", "token_file", "hosts", "hostfile", "detach", "attach", "health_listen",
)  # fmt: skip
# What cannot be looked at here.
_OF_THE_IMAGE = ("module", "no_python", "log_dir", "tls_cert", "tls_key", "tls_ca", "keep_spill", "metrics")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_KEY = r"([-A-Za-z0-9.]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"  # of labels, taints and resources
_MOST_PODS = 1_000_000
_VARIABLE = r"[A-Za-z_.][-A-Za-z0-9_.]*"


def main(argv: Sequence[str]) -> int:
    """Print the documents."""
    if argv[:1] != ["manifest"]:
        make_parser().parse_args(argv[:1])  # prints the help, or refuses
        return 0
    from phalanx.platforms.kubernetes.document_text import documents

    kind, job, patches = parse_manifest(argv[1:])
    print(documents(with_patches(manifest(kind, job), patches)), end="")
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser("k8s", DESCRIPTION)
    parser.usage = "phalanx k8s manifest --image IMAGE -N NODES [options] -- SCRIPT [arguments of the script]"
    parser.add_argument("action", choices=("manifest",), metavar="manifest")
    value = partial(parser.add_value, default="")
    several = partial(parser.add_value, action="append", default=[])
    kinds = "job (an Indexed Job and its Service), jobset, or trainjob (Kubeflow Trainer v2) [job]"
    parser.add_argument("-k", "--kind", choices=KINDS, default="job", metavar="KIND", help=kinds)
    value("--image", _image, "has phalanx, SCRIPT and what it needs", metavar="IMAGE")
    sizes = "pods; with a range the job runs with MIN, and takes more"
    value("-N --nodes", _sizes, sizes, default=None, metavar="N|MIN:MAX")
    value("--spares", "int", "pods that wait and replace lost ones [0]", default=0, metavar="K")
    value("--gpus", "int", "GPUs of each pod [0]", default=0)
    value("--nproc-per-node", "int", "workers of each pod [one for each GPU]", default=None, least=1)
    value("--cpus", _quantity, "CPUs of each pod, as Kubernetes writes them: 8", metavar="C")
    value("--memory", _quantity, "memory of each pod: 64Gi", metavar="M")
    resource = "a further resource of each pod: rdma/hca=1 (*)"
    several("--resource", _pair(_KEY, _QUANTITY.pattern), resource, metavar="NAME=N")
    value("--shm", _quantity, "limit of /dev/shm [the memory limit]", metavar="SIZE")
    source = "SOURCE is a PersistentVolumeClaim, secret/NAME, configmap/NAME, or a machine's /directory (*)"
    several("--volume", _volume, source, metavar="SOURCE:PATH[:ro]")
    several("--env", _pair(_VARIABLE, "(?s:.*)"), "a variable of the workers (*)", metavar="NAME=VALUE")
    key = "the same from a Secret; SECRET alone: all its keys (*)"
    several("--secret-env", _secret_variable, key, metavar="NAME=SECRET:KEY")
    value("--name", "text", "of the job [the script's]", metavar="NAME")
    value("-n --namespace", _name, "of the job [kubectl's]", metavar="NS")
    value("--service-account", _name, "of the pods", metavar="NAME")
    several("--image-pull-secret", _name, "of the pods (*)", metavar="NAME")
    value("--priority-class", _name, "of the pods", metavar="NAME")
    selector = _pair(_KEY, "[-A-Za-z0-9_.]*", "KEY")
    several("--node-selector", selector, "of the pods (*)", metavar="KEY=VALUE")
    several("--toleration", _toleration, "of the pods (*)", metavar="KEY[=VALUE][:EFFECT]")
    value("--queue", _name, "of Kueue", metavar="NAME")
    value("--ttl", _whole_seconds(0), "delete the job this long after its end", default=None, metavar="TIME")
    secret = "an existing Secret whose key `token` is the job's token [the manifest has one, from yours]"
    value("--secret", _name, secret, metavar="NAME")
    retries = "a pod may fail K times by the infrastructure [10]"
    value("--retries", "int", retries, default=10, metavar="K")
    grace = "from SIGTERM to SIGKILL; workers get 10s less [2m]"
    value("--termination-grace", _whole_seconds(1), grace, default=120, metavar="TIME")
    value("--health-port", _port, "of the probes [8080]", default=8080, metavar="PORT")
    parser.add_flag("--no-preflight", "without the init container that runs phalanx check")
    parser.add_flag(
        "--restricted",
        "for namespaces that enforce Kubernetes' restricted pod security: no root, read-only file system",
    )
    patch = "strategic merge patches, of which the kind Pod changes the pods, or a JSON patch (*)"
    several("--patch", "file", f"for everything else: {patch}")
    return parser


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
    options, run, rest = make_parser().parse_job(["manifest", *words])
    if not rest:
        raise usage_error(
            "no script given; write: phalanx k8s manifest --image IMAGE -N NODES -- script.py …"
        )
    for needed in ("image", "nodes"):
        if not getattr(options, needed):
            raise usage_error(f"--{needed} is missing")
    job = _checked(options, run, rest)
    if not options.secret:
        job = job.replace(token=token or _derived_token(job))
    return options.kind, job, options.patch


def _derived_token(job: PodJob) -> str:
    """A token for this job that only its user can make, and makes again: applied twice, nothing changes."""
    import hashlib
    import hmac

    from phalanx.store.net.token import find_token

    what = f"kubernetes {job.namespace}/{job.name}"
    return hmac.new(find_token().key, what.encode(), hashlib.sha256).hexdigest()


def _checked(options: Namespace, run: list[str], rest: list[str]) -> PodJob:
    name = options.name or _name_of(rest[0])
    least, nodes = options.nodes
    job = PodJob(
        name=name,
        image=options.image,
        nodes=nodes,
        least=least,
        spares=options.spares,
        workers=options.nproc_per_node or options.gpus or 1,
        script=rest[0],
        script_args=tuple(rest[1:]),
        run_words=tuple(run),
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        shared_memory=options.shm,
        namespace=options.namespace,
        secret=options.secret or f"{name}-token",
        retries=options.retries,
        termination_grace=options.termination_grace,
        health_port=options.health_port,
        preflight=not options.no_preflight,
        restricted=options.restricted,
        resources=tuple(options.resource),
        volumes=tuple(options.volume),
        variables=tuple(options.env),
        secret_variables=tuple(options.secret_env),
        service_account=options.service_account,
        pull_secrets=tuple(options.image_pull_secret),
        tolerations=tuple(options.toleration),
        node_selector=tuple(options.node_selector),
        priority_class=options.priority_class,
        queue=options.queue,
        ttl=options.ttl,
    )
    host = longest_host_name(options.kind, job)
    if not _LABEL.fullmatch(name) or len(host) > 63:
        raise usage_error(
            f"--name {name}: pods would be named {host}; use small letters, digits and -, a letter first, "
            "at most 63 together"
        )
    if job.spares and job.nodes == 1:
        raise usage_error("--spares with -N 1: the one pod is replaced anyway; leave --spares out")
    if job.ttl is not None and options.kind == "trainjob":
        raise usage_error("--ttl: a TrainJob has no such field; use --kind job or jobset")
    _check_unique(job)
    _check_run_words(run, job.termination_grace)
    return job


def _check_unique(job: PodJob) -> None:
    """Kubernetes refuses two mounts at one path, and takes one of two variables with one name."""
    paths = ["/dev/shm", *(["/tmp"] if job.restricted else []), *(one.path for one in job.volumes)]
    names = [TOKEN_FILE, JOB_UID, *(name for name, _ in job.variables)]
    names += [one.name for one in job.secret_variables if one.name]
    for option, texts in (("volume", paths), ("env", names), ("resource", [one for one, _ in job.resources])):
        for text in texts:
            if texts.count(text) > 1:
                raise usage_error(f"--{option}: {text} is given twice, or set by the manifest itself")


# ---- kinds of value ----------------------------------------------------------------------------------


def _sizes(text: str) -> tuple[int, int]:
    """N or MIN:MAX."""
    least, colon, most = text.partition(":")
    sizes = [int(one) if one.isdecimal() else 0 for one in (least, most if colon else least)]
    if not all(1 <= one <= _MOST_PODS for one in sizes):
        raise ValueError("use a whole number, 1 or more, or two")
    if sizes[0] > sizes[1]:
        raise ValueError("the first number is the larger one")
    return sizes[0], sizes[1]


def _image(text: str) -> str:
    if any(char.isspace() for char in text):
        raise ValueError("an image's name has no blanks")
    return text


def _name(text: str) -> str:
    if text and not _NAME.fullmatch(text):
        raise ValueError("use small letters, digits and -")
    return text


def _quantity(text: str) -> str:
    if text and not _QUANTITY.fullmatch(text):
        raise ValueError("write a quantity of Kubernetes, such as 8 or 64Gi")
    return text


def _port(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise ValueError("use a port, 1 to 65535")
    return int(text)


def _whole_seconds(least: int) -> Callable[[str], int]:
    """A duration as Kubernetes takes it."""

    def read(text: str) -> int:
        seconds = duration(text)
        if not least <= seconds == int(seconds):
            raise ValueError(f"use whole seconds, {least} or more")
        return int(seconds)

    return read


def _volume(text: str) -> Volume:
    kind = r"(?P<kind>secret|configmap)/"
    found = re.fullmatch(rf"(?:{kind})?(?P<source>/?[^:]+):(?P<path>/[^:]+?)/?(?P<ro>:ro|:rw)?", text)
    if found is None or ".." in found["path"].split("/"):
        raise ValueError("write SOURCE:PATH or SOURCE:PATH:ro, as in checkpoints:/data")
    source = found["source"]
    kinds = found["kind"] or ("host" if source.startswith("/") else "claim")
    if kinds != "host" and not _NAME.fullmatch(source):
        raise ValueError(
            f"{source} is not a name; use that of a claim, secret/NAME, configmap/NAME or a /directory"
        )
    return Volume(kinds, source, found["path"], found["ro"] == ":ro")


def _secret_variable(text: str) -> SecretVariable:
    found = re.fullmatch(
        rf"(?:(?P<name>{_VARIABLE})=)?(?P<secret>[^:=]+)(?::(?P<key>[-A-Za-z0-9_.]+))?", text
    )
    if found is None or bool(found["name"]) != bool(found["key"]) or not _NAME.fullmatch(found["secret"]):
        raise ValueError("write NAME=SECRET:KEY, or SECRET for all its keys")
    return SecretVariable(found["secret"], found["name"] or "", found["key"] or "")


def _toleration(text: str) -> Toleration:
    effects = "NoSchedule|PreferNoSchedule|NoExecute"
    found = re.fullmatch(rf"(?P<key>{_KEY})(?:=(?P<value>[-A-Za-z0-9_.]*))?(?::(?P<effect>{effects}))?", text)
    if found is None:
        raise ValueError("write KEY, KEY=VALUE or KEY=VALUE:EFFECT, as in nvidia.com/gpu:NoSchedule")
    return Toleration(found["key"], found["value"], found["effect"] or "")


def _pair(name: str, value: str, word: str = "NAME") -> Callable[[str], tuple[str, str]]:
    """NAME=VALUE, both of which fit a regular expression."""

    def read(text: str) -> tuple[str, str]:
        if re.fullmatch(f"({name})=({value})", text) is None:
            raise ValueError(f"write {word}=VALUE")
        before, _, after = text.partition("=")
        return before, after

    return read


# ---- options of run ----------------------------------------------------------------------------------


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


def _name_of(script: str) -> str:
    base = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", base).strip("-").lstrip("-0123456789")[:40].rstrip("-") or "phalanx"
