"""What a pod of an Indexed Job says about its place in a job: `look` makes settings with their origin of it.

Kubernetes gives each pod of such a Job an index (JOB_COMPLETION_INDEX) and the host name `JOB-INDEX`; with a
`subdomain` and a headless Service, /etc/hosts has the full name, and the others are found by DNS under the
same name with another index. JobSets and Kubeflow's TrainJobs are made of such Jobs. The number of pods is
nowhere: it is --nnodes or PET_NNODES. What the user has given is left alone. The cases:

| pod | what follows |
|---|---|
| not of an Indexed Job, or a worker of a job | nothing |
| one node (`--standalone`, `--nnodes 1`) | nothing: each pod runs a job of its own |
| a number of nodes | rank by index; the nodes meet at pod 0, which may be replaced (static) |
| the same, with an address that is not pod 0's | rank by index (static); nothing (elastic) |
| a range of nodes, or --rdzv-backend c10d | the same with an elastic store, in pod 0 |
| several nodes, pods without names, no address given | refused: they could not meet |
| no number of nodes | refused if the pods have names for each other; else alone, which a line points out |
"""

from __future__ import annotations

from phalanx.job.environment import (
    COMPLETION_INDEX,
    JOB_UID,
    JOBSET_INDEX,
    JOBSET_REPLICAS,
    RUN_ID,
    STORE_PORT,
)
from phalanx.job.surroundings import Surroundings, Taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTS = "/etc/hosts"
_RETURN = "600"  # seconds for pod 0 to come back: it is scheduled again, and may pull its image
_ELASTIC = ("phalanx", "c10d")


def look(
    environ: Mapping[str, str], given: Mapping[str, str], host: str, hosts_file: str
) -> Surroundings | None:
    """What the pod says; `given`: the options that the user has set, `host`: this pod's name. None: not one.

    `hosts_file`: the text of /etc/hosts, which has the domain of a pod."""
    if not environ.get(COMPLETION_INDEX) or RUN_ID in environ:
        return None
    try:
        return _Pod(environ, given, host, domain_of(host, hosts_file)).look()
    except ValueError as error:  # a variable that nobody but Kubernetes sets
        return Surroundings("Kubernetes", warnings=(f"Kubernetes: {error}; nothing is taken from it",))


def domain_of(host: str, hosts_file: str) -> str:
    """`train.default.svc.cluster.local` where /etc/hosts has `train-0.train.default…` for this host."""
    for line in hosts_file.splitlines():
        for name in line.partition("#")[0].split()[1:]:
            if name.startswith(f"{host}."):
                return name.removeprefix(f"{host}.").rstrip(".")
    return ""


class _Pod:
    def __init__(self, environ: Mapping[str, str], given: Mapping[str, str], host: str, domain: str) -> None:
        self._environ, self._given = environ, given
        self._host, self._domain = host, domain
        self._settings: dict[str, Taken] = {}
        self._index = self._number(COMPLETION_INDEX)
        end = f"-{self._index}"
        self._job = host.removesuffix(end) if host.endswith(end) else ""  # not with the node's own network

    def look(self) -> Surroundings:
        least, colon, most = self._given.get("nnodes", "").partition(":")
        if "standalone" in self._given or (most or least) == "1":
            return Surroundings("Kubernetes")
        if not least:
            return self._without_number()
        backend = self._given.get("rdzv_backend", "phalanx" if colon and most != least else "static")
        conf = {"return_timeout": _RETURN} if backend == "static" else {}
        place = self._given_place(backend)
        if not place:
            if not (self._first and self._domain):
                return Surroundings("Kubernetes", refusal=self._cannot_meet())
            self._take_place(backend)
        # Nodes that meet elsewhere may be pods of several Jobs, and an index then says nothing.
        meets_here = not place or place.partition(":")[0].partition(".")[0] == self._first
        if meets_here or backend == "static":
            self._take("node_rank", str(self._rank(least)), f"{COMPLETION_INDEX}={self._index}")
        if meets_here:
            self._take_run_id()
            if backend in _ELASTIC:
                conf["is_host"] = str(int(self._host == self._first))
        return Surroundings("Kubernetes", self._settings, conf, lasting_id=self._job)

    def _take_place(self, backend: str) -> None:
        """Pod 0 is where the nodes meet."""
        first, origin = f"{self._first}.{self._domain}", f"{HOSTS}: {self._host}.{self._domain}"
        if backend == "static":
            self._take("master_addr", first, origin)
        else:
            self._take("rdzv_backend", "phalanx", f"--nnodes {self._given['nnodes']}")
            self._take("rdzv_endpoint", f"{first}:{STORE_PORT}", origin)

    def _without_number(self) -> Surroundings:
        pod = f"this is pod {self._index} of a Kubernetes Job"
        if self._given_place(self._given.get("rdzv_backend", "static")):
            return Surroundings("Kubernetes")  # the user knows of other nodes
        how = "write --nnodes with the number of its pods"
        if self._first and self._domain:
            alone = "or --standalone for a job of its own in each of them"
            return Surroundings(
                "Kubernetes", refusal=f"{pod}, which does not say how many it has; {how}, {alone}"
            )
        line = f"{pod}, and runs a job of its own; for one job of all its pods, {how}"
        return Surroundings("Kubernetes", warnings=(line,))

    def _given_place(self, backend: str) -> str:
        """Where the user, or Kubeflow's PET_MASTER_ADDR, says that the nodes meet; empty: nowhere."""
        place = self._given.get("rdzv_endpoint", "")
        if backend == "static":
            return place or self._given.get("master_addr", "")
        return place or ("" if backend in _ELASTIC else backend)  # others know by themselves

    def _cannot_meet(self) -> str:
        return (
            f"--nnodes {self._given['nnodes']} in pod {self._index} of a Kubernetes Job, whose pods have no "
            "names for each other: give the pod template a subdomain and make a headless Service of that "
            "name (`phalanx k8s manifest` writes both), or name where the nodes meet with --master-addr"
        )

    @property
    def _first(self) -> str:
        """The host name of the pod that has node rank 0; empty: not known."""
        job, number = self._job, self._number(JOBSET_INDEX)
        if job and number:
            job = job.removesuffix(f"-{number}") + "-0"
        return f"{job}-0" if job else ""

    def _rank(self, nodes: str) -> int:
        """The index in the Job; in a JobSet with several Jobs, they come one after the other."""
        job, jobs = self._number(JOBSET_INDEX), self._number(JOBSET_REPLICAS) or 1
        if not job or not nodes.isdigit():
            return self._index
        if int(nodes) % jobs:
            raise ValueError(f"--nnodes {nodes} cannot be divided by {JOBSET_REPLICAS}={jobs}")
        return job * (int(nodes) // jobs) + self._index

    def _take_run_id(self) -> None:
        """The Job's name and the beginning of its uid: a Job of the same name is another one."""
        uid = self._environ.get(JOB_UID, "")
        if self._number(JOBSET_REPLICAS) > 1:
            return  # each Job has its own name and uid
        short, origin = uid.partition("-")[0], f"{JOB_UID}={uid}" if uid else f"host name {self._host}"
        self._take("rdzv_id", f"{self._job}-{short}" if uid else self._job, origin)

    def _take(self, dest: str, value: str, origin: str) -> None:
        if dest not in self._given:
            self._settings[dest] = Taken(value, origin)

    def _number(self, name: str) -> int:
        text = self._environ.get(name, "") or "0"
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ValueError(f"{name}={text}: not a number")
        return int(text)
