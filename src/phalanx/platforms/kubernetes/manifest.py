"""The manifests of a job: a typed description in, Kubernetes' documents out; pure.

What all three kinds have in common is an Indexed Job whose pods come back one by one, while the agents in the
others restart their workers in place:

- `backoffLimitPerIndex` counts the failures of each pod for itself, `maxFailedIndexes: 0` ends the Job once
  one of them cannot come back: the others would wait for it.
- `podReplacementPolicy: Failed` makes the next pod of an index when the last has ended: there are never two
  agents of one rank.
- `podFailurePolicy` follows core/exit_codes.py: a pod that was evicted costs nothing; after failures of the
  infrastructure and kills it comes back; every other code is final.
- The Service publishes addresses that are not ready: readiness needs the workers, and those need the names.
- With spares or a range of sizes, pods that have no part may be pending, or fail for good: the Job has
  succeeded with pod 0, which hosts the store and exits with 0 only after every worker has succeeded.
- The Secret cannot be changed (`immutable`), and its token follows from the user's own: the same command
  gives the same documents, and a running job keeps its token whoever applies them again.
"""

from __future__ import annotations

from typing import Any

from phalanx.core.exit_codes import INFRASTRUCTURE, SIGNALED, UNFIT_NODE
from phalanx.core.record import Record
from phalanx.job.environment import JOB_UID, STATIC_PORT, TOKEN_FILE
from phalanx.job.time_budgets import POD_LEFT

KINDS = ("job", "jobset", "trainjob")
CONTAINER = "node"  # Kubeflow's name for the container that trains, and for its Job
_SECRET_AT = "/var/run/secrets/phalanx"
_KILLED = (SIGNALED + 9, SIGNALED + 15)  # by the kernel's memory limit or a lost machine; by a deletion
_RECREATED = 3  # times that a JobSet makes all its pods anew
_KUEUE = "kueue.x-k8s.io"
_JOB_LABEL, _UID_LABEL = "batch.kubernetes.io/job-name", "batch.kubernetes.io/controller-uid"


class Volume(Record):
    """A mount; `kind` is claim, host (a directory of the machine), secret or configmap."""

    kind: str
    source: str
    path: str
    read_only: bool = False


class SecretVariable(Record):
    """A variable of the workers from a key of a Secret; without a name, every key is a variable."""

    secret: str
    name: str = ""
    key: str = ""


class Toleration(Record):
    """Of a taint: without a value any value, without an effect every effect."""

    key: str
    value: str | None = None
    effect: str = ""


class PodJob(Record):
    """What runs where; `token`: the content of the Secret to make, empty where it exists already."""

    name: str
    image: str
    nodes: int  # that run workers, at most
    workers: int  # on each node
    script: str
    script_args: tuple[str, ...] = ()
    run_words: tuple[str, ...] = ()  # options of `phalanx run`
    least: int = 0  # nodes that are enough; 0: all
    spares: int = 0  # pods beyond `nodes`
    gpus: int = 0
    resources: tuple[tuple[str, str], ...] = ()  # further ones, such as rdma/hca
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""  # the size of /dev/shm; empty: up to the memory limit
    namespace: str = ""
    secret: str = ""
    token: str = ""
    retries: int = 10
    termination_grace: int = 120
    health_port: int = 8080
    preflight: bool = True
    restricted: bool = False
    volumes: tuple[Volume, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    secret_variables: tuple[SecretVariable, ...] = ()
    service_account: str = ""
    pull_secrets: tuple[str, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    priority_class: str = ""
    queue: str = ""  # of Kueue
    ttl: int | None = None  # seconds until a Job that has ended is deleted

    @property
    def pods(self) -> int:
        """All of them."""
        return self.nodes + self.spares

    @property
    def needed(self) -> int:
        """Pods without which the job cannot run."""
        return self.least or self.nodes


def manifest(kind: str, job: PodJob) -> list[dict[str, Any]]:
    """The documents of a job of one of KINDS."""
    made = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[kind](job)
    return [*([_secret(job)] if job.token else []), *made]


def longest_host_name(kind: str, job: PodJob) -> str:
    """The host name of the last pod, which must be a valid label of DNS."""
    between = "" if kind == "job" else f"-{CONTAINER}-0"
    return f"{job.name}{between}-{job.pods - 1}"


# ---- the kinds ---------------------------------------------------------------------------------------


def _job(job: PodJob) -> list[dict[str, Any]]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_JOB_LABEL: job.name},
            "ports": [
                {"name": "rendezvous", "port": STATIC_PORT},
                {"name": "health", "port": job.health_port},
            ],
        },
    }
    spec = {**_ttl(job), **_job_spec(job, command(job), resources(job))}
    spec["template"]["spec"]["subdomain"] = job.name
    return [
        service,
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(job, partial=True), "spec": spec},
    ]


def _jobset(job: PodJob) -> list[dict[str, Any]]:
    spec = {
        **_ttl(job),
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": _RECREATED,
            "rules": [
                {
                    "name": "final-exit-code",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": CONTAINER,
                "replicas": 1,
                "template": {"spec": _job_spec(job, command(job), resources(job))},
            }
        ],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**kind, "metadata": _queued(job), "spec": spec}]


def _trainjob(job: PodJob) -> list[dict[str, Any]]:
    """A runtime of the job's own; Kubeflow's controller adds the number of pods and PET_* variables."""
    inner = _job_spec(job, [], {})
    del inner["completions"], inner["parallelism"]
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(job, job.name), "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.pods, "torch": {}},
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": CONTAINER,
                            "template": {
                                "metadata": {
                                    "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                                },
                                "spec": inner,
                            },
                        }
                    ]
                }
            },
        },
    }
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": command(job, sizes=job.pods > job.needed, workers=False),
        "numNodes": job.pods,
        "numProcPerNode": job.workers,
    }
    if resources(job):
        trainer["resourcesPerNode"] = resources(job)
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(job),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [runtime, train]


# ---- parts -------------------------------------------------------------------------------------------


def command(job: PodJob, *, sizes: bool = True, workers: bool = True) -> list[str]:
    """`phalanx run …` as a container's command; `sizes`, `workers`: with the numbers of nodes, of workers."""
    words = ["phalanx", "run"]
    if sizes:
        words += ["--nnodes", str(job.nodes) if job.needed == job.nodes else f"{job.needed}:{job.nodes}"]
        words += ["--rdzv-backend", "phalanx"] if job.pods > job.needed == job.nodes else []
    if workers:
        words += ["--nproc-per-node", str(job.workers)]
    given = _given(job)
    if "--preempt-signal" not in given:
        words += ["--preempt-signal", "SIGTERM"]
    if not given & {"--grace", "--shutdown-timeout"}:
        words += ["--grace", str(max(1, job.termination_grace - POD_LEFT))]
    words += ["--health-listen", f"0.0.0.0:{job.health_port}"]
    words += [*job.run_words, job.script, *job.script_args]
    return [_literal(word) for word in words]


def _literal(text: str) -> str:
    """A text in which Kubernetes replaces no $(NAME)."""
    return text.replace("$(", "$$(")


def _given(job: PodJob) -> set[str]:
    """The options of `phalanx run` that the user gave."""
    return {word.partition("=")[0].replace("_", "-") for word in job.run_words}


def resources(job: PodJob) -> dict[str, Any]:
    """What each pod needs."""
    limits: dict[str, Any] = {**({"nvidia.com/gpu": job.gpus} if job.gpus else {}), **dict(job.resources)}
    asked = {name: text for name, text in (("cpu", job.cpus), ("memory", job.memory)) if text}
    # The same as request and limit: the pod is then the last to be evicted.
    return {"limits": {**limits, **asked}, **({"requests": asked} if asked else {})} if limits | asked else {}


def failure_policy() -> dict[str, Any]:
    """Which ends of a pod are final."""
    back = sorted((*INFRASTRUCTURE, *_KILLED))
    disruption = [{"type": "DisruptionTarget", "status": "True"}]
    codes = {"containerName": CONTAINER, "operator": "NotIn", "values": back}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": disruption},
            {"action": "FailJob", "onExitCodes": codes},
        ]
    }


def _secret(job: PodJob) -> dict[str, Any]:
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, job.secret)}
    return {**kind, "type": "Opaque", "immutable": True, "stringData": {"token": job.token}}


def _metadata(job: PodJob, name: str) -> dict[str, Any]:
    return {"name": name, **({"namespace": job.namespace} if job.namespace else {})}


def _queued(job: PodJob, *, partial: bool = False) -> dict[str, Any]:
    """The job's own metadata; `partial`: Kueue may admit a part of the pods."""
    found = _metadata(job, job.name)
    if job.queue:
        found["labels"] = {f"{_KUEUE}/queue-name": job.queue}
        if partial and job.pods > job.needed:
            sizes = {"job-min-parallelism": str(job.needed), "job-completions-equal-parallelism": "true"}
            found["annotations"] = {f"{_KUEUE}/{name}": value for name, value in sizes.items()}
    return found


def _ttl(job: PodJob) -> dict[str, Any]:
    return {} if job.ttl is None else {"ttlSecondsAfterFinished": job.ttl}


def _job_spec(job: PodJob, words: list[str], needs: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = {"spec": _pod_spec(job, words, needs)}
    if "--metrics" in _given(job):
        port = str(job.health_port)
        found = {"prometheus.io/scrape": "true", "prometheus.io/port": port, "prometheus.io/path": "/metrics"}
        template = {"metadata": {"annotations": found}, **template}
    beyond = job.pods - job.needed
    return {
        "completionMode": "Indexed",
        "completions": job.pods,
        "parallelism": job.pods,
        "backoffLimitPerIndex": job.retries,
        # Not above the number of pods, which Kueue may reduce to those that are needed.
        "maxFailedIndexes": min(beyond, job.needed),
        **({"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if beyond else {}),
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": failure_policy(),
        "template": template,
    }


def _pod_spec(job: PodJob, words: list[str], needs: dict[str, Any]) -> dict[str, Any]:
    memory: dict[str, Any] = {"medium": "Memory"}
    if job.shared_memory:
        memory["sizeLimit"] = job.shared_memory
    secret = {"secretName": job.secret, "defaultMode": 0o444}  # whichever user the image has
    volumes: list[dict[str, Any]] = [
        {"name": "token", "secret": secret},
        {"name": "shm", "emptyDir": memory},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "token", "mountPath": _SECRET_AT, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    safety: dict[str, Any] = {"allowPrivilegeEscalation": False}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.termination_grace,
    }
    if job.restricted:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})
        safety |= {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    elif any(name.startswith("rdma/") for name, _ in job.resources):
        safety["capabilities"] = {"add": ["IPC_LOCK"]}  # RDMA registers memory, which must stay in place
    given = [(f"volume-{n}", volume) for n, volume in enumerate(job.volumes)]
    if job.preflight:
        check = f"phalanx check --only machine || test $? -ne {UNFIT_NODE}"
        pod["initContainers"] = [
            {
                "name": "preflight",
                "image": job.image,
                "command": ["sh", "-c", check],
                **({"resources": resources(job)} if resources(job) else {}),
                "securityContext": safety,
                "volumeMounts": mounts,
            }
        ]
    uid = {"fieldRef": {"fieldPath": f"metadata.labels['{_UID_LABEL}']"}}
    container: dict[str, Any] = {"name": CONTAINER, "image": job.image}
    if words:
        container["command"] = words
    named = [one for one in job.secret_variables if one.name]
    whole = [{"secretRef": {"name": one.secret}} for one in job.secret_variables if not one.name]
    container |= {
        "env": [
            {"name": TOKEN_FILE, "value": f"{_SECRET_AT}/token"},
            {"name": JOB_UID, "valueFrom": uid},
            *({"name": name, "value": _literal(value)} for name, value in job.variables),
            *(
                {"name": one.name, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
                for one in named
            ),
        ],
        **({"envFrom": whole} if whole else {}),
        "ports": [
            {"name": "rendezvous", "containerPort": STATIC_PORT},
            {"name": "health", "containerPort": job.health_port},
        ],
        **({"resources": needs} if needs else {}),
        "securityContext": safety,
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "health"},
            "initialDelaySeconds": 60,  # the launcher of a cold image may take its time to be imported
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 5},
        "volumeMounts": [*mounts, *(_mount(name, volume) for name, volume in given)],
    }
    volumes += [{"name": name, **_source(volume)} for name, volume in given]
    return {**pod, **_own_fields(job), "containers": [container], "volumes": volumes}


def _own_fields(job: PodJob) -> dict[str, Any]:
    """Where the pods run, and as whom; only the fields that were asked for."""
    found = {
        "serviceAccountName": job.service_account,
        "imagePullSecrets": [{"name": name} for name in job.pull_secrets],
        "priorityClassName": job.priority_class,
        "nodeSelector": dict(job.node_selector),
        "tolerations": [_tolerated(one) for one in job.tolerations],
    }
    return {name: value for name, value in found.items() if value}


def _tolerated(one: Toleration) -> dict[str, Any]:
    value = {"operator": "Exists"} if one.value is None else {"operator": "Equal", "value": one.value}
    return {"key": one.key, **value, **({"effect": one.effect} if one.effect else {})}


def _source(volume: Volume) -> dict[str, Any]:
    fields = {
        "claim": ("persistentVolumeClaim", "claimName"),
        "host": ("hostPath", "path"),
        "secret": ("secret", "secretName"),
        "configmap": ("configMap", "name"),
    }
    kind, name = fields[volume.kind]
    return {kind: {name: volume.source}}


def _mount(name: str, volume: Volume) -> dict[str, Any]:
    return {"name": name, "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})}
