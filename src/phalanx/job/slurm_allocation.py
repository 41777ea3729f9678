"""What Slurm's variables say about a job: `look` turns an environment into settings with their origin.

A job runs where `srun` started it: each task of the step is one agent. Whatever the user has given as an
option or a PET_* variable is left alone. The cases:

| where | what follows |
|---|---|
| not in a job, or in a worker of a job | nothing: a launch within a job's worker is a job of its own |
| a step of several tasks | one agent for each task, the first one has the store |
| a step of one task | one node; a line says so if the allocation has more |
| a batch script on a node, without srun | one node; refused if the allocation has several |
| a shell of salloc, perhaps on another machine | nothing is taken; refused in the same case |

A world of one on each node never comes of it unless the user asks for that (`--standalone`, `--nnodes 1`),
and then a line says so.
"""

from __future__ import annotations

from phalanx.job.environment import RUN_ID
from phalanx.job.slurm_host_list import first_host, parse_counts, parse_host_list
from phalanx.job.surroundings import Surroundings, Taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MEETING = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
"""Options by which the user says where the nodes meet."""
_NODES = ("nnodes", "standalone", "node_rank", *MEETING)
_NOT_TASKS = ("4294967290", "4294967291", "interactive", "batch")  # step ids that srun did not make
_STEP_LIST = "SLURM_STEP_NODELIST"
_MOST_GROUPS = 128  # as in Slurm
_FIRST_PORT, _PORTS = 16384, 13000  # below the ports that Linux gives to clients, and below our own defaults


def is_inside(environ: Mapping[str, str]) -> bool:
    """Whether there is an allocation to look at; cheap."""
    return bool(environ.get("SLURM_JOB_ID")) and RUN_ID not in environ


def look(environ: Mapping[str, str], given: Mapping[str, str]) -> Surroundings | None:
    """What the allocation says; `given`: the options that the user has set, with values. None: not in one."""
    if not is_inside(environ):
        return None
    try:
        return _Allocation(environ, given).look()
    except ValueError as error:  # a variable that nobody but Slurm sets
        return Surroundings("Slurm", warnings=(f"Slurm: {error}; nothing is taken from it",))


def run_id(environ: Mapping[str, str]) -> str:
    """`JOB`, `JOB_TASK` of an array; with the step, if it is not the first, and the number of requeues."""
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    name, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if name and task:
        job = f"{name}_{task}"
    again = environ.get("SLURM_RESTART_COUNT", "0")
    return job + f".{step}" * (step != "0") + f"-r{again}" * (again not in ("", "0"))


class _Allocation:
    def __init__(self, environ: Mapping[str, str], given: Mapping[str, str]) -> None:
        self._environ = environ
        self._given = given
        self._settings: dict[str, Taken] = {}
        self._warnings: list[str] = []

    def look(self) -> Surroundings:
        step = self._environ.get("SLURM_STEP_ID", "")
        tasks = self._number("SLURM_STEP_NUM_TASKS")
        rank = self._number("SLURM_PROCID")
        if not step or step in _NOT_TASKS or tasks is None or rank is None:
            return self._without_srun()
        if tasks == 1:
            return self._one_task()
        return self._several_tasks(tasks, rank)

    # -- the three places -----------------------------------------------------------------------------

    def _without_srun(self) -> Surroundings:
        job, here = self._environ["SLURM_JOB_ID"], self._environ.get("SLURMD_NODENAME", "")
        nodes = self._nodes_of_job
        if nodes > 1 and not self._gave(*_NODES):
            what = (
                f"Slurm job {job} has {nodes} nodes, and this is not a task of srun: only this machine would "
                "run workers; write srun --ntasks-per-node=1 phalanx run …, or --standalone to use it alone"
            )
            return Surroundings("Slurm", refusal=what)
        if not here and not self._gave(*_NODES):
            self._warnings.append(
                f"Slurm job {job} is not used: this shell is not one of its tasks; write srun phalanx run …"
            )
        if here:
            self._take_workers(1)
        return self._found({})

    def _one_task(self) -> Surroundings:
        nodes = self._nodes_of_job
        if nodes > 1 and not self._gave(*_NODES):
            self._warnings.append(
                f"this step has one task: one of the {nodes} nodes of Slurm job "
                f"{self._environ['SLURM_JOB_ID']} is used; for all of them write "
                f"srun -N {nodes} --ntasks-per-node=1 phalanx run …"
            )
        if not self._gave(*_NODES):
            # With nodes of other steps, all of them must have the same.
            self._take("rdzv_id", run_id(self._environ), "SLURM_JOB_ID")
        self._take_workers(1)
        return self._found({})

    def _several_tasks(self, tasks: int, rank: int) -> Surroundings:
        mine = self._tasks_here
        refusal = self._take_workers(mine)
        if refusal:
            return Surroundings("Slurm", refusal=refusal)
        least, _, most = self._given.get("nnodes", "").partition(":")
        if self._gave("standalone") or (most or least) == "1":
            what = "--standalone" if self._gave("standalone") else f"--nnodes {self._given['nnodes']}"
            self._warnings.append(f"{what} in a step of {tasks} tasks: each of them runs a job of its own")
            return self._found({})
        if least.isdigit() and int(least) > tasks:
            self._warnings.append(
                f"--nnodes {self._given['nnodes']}: this step of Slurm has {tasks} tasks only"
            )
        self._take("nnodes", str(tasks), "SLURM_STEP_NUM_TASKS")
        self._take("node_rank", str(rank), "SLURM_PROCID")
        self._take_role()
        if self._gave(*MEETING):
            return self._found({})
        self._take("rdzv_id", run_id(self._environ), "SLURM_JOB_ID")
        self._take("rdzv_backend", "phalanx", "SLURM_JOB_ID")
        self._take("rdzv_endpoint", self._endpoint(), self._list_name)
        name = self._name(mine)
        # srun starts each task once: a lost node does not come back.
        conf = {"is_host": str(int(rank == 0)), "all_nodes": str(tasks)}
        return self._found({**conf, **({"name": name} if name else {})})

    def _found(self, conf: dict[str, str]) -> Surroundings:
        lasting = run_id({**self._environ, "SLURM_RESTART_COUNT": "0"})
        return Surroundings("Slurm", self._settings, conf, tuple(self._warnings), lasting_id=lasting)

    # -- values ----------------------------------------------------------------------------------------

    def _take(self, dest: str, value: str, origin: str) -> None:
        if dest not in self._given:
            self._settings[dest] = Taken(value, f"{origin}={self._environ.get(origin, '')}")

    def _gave(self, *dests: str) -> bool:
        return any(dest in self._given for dest in dests)

    def _number(self, name: str) -> int | None:
        text = self._environ.get(name, "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text}: not a number")
        return int(text)

    @property
    def _nodes_of_job(self) -> int:
        known = self._number("SLURM_JOB_NUM_NODES") or self._number("SLURM_NNODES")
        listed = self._environ.get("SLURM_JOB_NODELIST") or self._environ.get("SLURM_NODELIST", "")
        return known or len(parse_host_list(listed))

    @property
    def _groups(self) -> dict[int, str]:
        """The components of a heterogeneous job that this step spans: number → variable of its host list."""
        step = set(parse_host_list(self._environ.get(_STEP_LIST, "")))
        found = {}
        for number in range(min(self._number("SLURM_HET_SIZE") or 0, _MOST_GROUPS)):
            for kind in ("HET", "PACK"):  # PACK: where srun itself made the allocation
                name = f"SLURM_JOB_NODELIST_{kind}_GROUP_{number}"
                hosts = parse_host_list(self._environ.get(name, ""))
                if hosts and step.issuperset(hosts):
                    found[number] = name
                    break
        return found

    @property
    def _list_name(self) -> str:
        """Whose first host has the first task: the list of a step is sorted, whatever its components."""
        return next(iter(self._groups.values()), _STEP_LIST)

    def _take_role(self) -> None:
        groups = self._groups
        here = self._environ.get("SLURMD_NODENAME", "")
        for number, name in groups.items() if len(groups) > 1 else ():
            if here in parse_host_list(self._environ[name]):
                self._take("role", f"group{number}", name)

    @property
    def _tasks_here(self) -> int:
        counts = parse_counts(self._environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = self._number("SLURM_NODEID") or 0
        return counts[node] if node < len(counts) else 1

    def _name(self, tasks_here: int) -> str:
        node = self._environ.get("SLURMD_NODENAME", "")
        return f"{node}.{self._environ.get('SLURM_LOCALID', '0')}" if node and tasks_here > 1 else node

    def _endpoint(self) -> str:
        """The first host of the list, and a port that other jobs on it are unlikely to have."""
        hosts = self._environ.get(self._list_name, "")
        host = first_host(hosts)
        if not host:
            raise ValueError(f"{self._list_name}={hosts}: no host in it")
        step = self._environ.get("SLURM_STEP_ID", "0")
        number = (self._number("SLURM_JOB_ID") or 0) * 31 + (int(step) if step.isdigit() else 0)
        # Another one for each attempt: the last may have failed because of it.
        port = _FIRST_PORT + (number + 7 * (self._number("SLURM_RESTART_COUNT") or 0)) % _PORTS
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _take_workers(self, tasks_here: int) -> str:
        """Workers from the GPUs that Slurm gave to this task; the reason, if that cannot be told."""
        if self._gave("nproc_per_node"):
            return ""
        for name, found in (
            ("SLURM_GPUS_PER_TASK", _gpus(self._environ.get("SLURM_GPUS_PER_TASK", ""))),
            ("SLURM_TRES_PER_TASK", _gpus_of_tres(self._environ.get("SLURM_TRES_PER_TASK", ""))),
        ):
            if found:
                self._take("nproc_per_node", str(found), name)
                return ""
        gpus = _gpus(self._environ.get("SLURM_GPUS_ON_NODE", ""))
        if not gpus:
            return ""
        if tasks_here > 1:
            return (
                f"{tasks_here} tasks of srun share the {gpus} GPUs of this node; write "
                "srun --ntasks-per-node=1, and one agent runs a worker for each GPU, or --gpus-per-task, or "
                "--nproc-per-node"
            )
        self._take("nproc_per_node", str(gpus), "SLURM_GPUS_ON_NODE")
        return ""


def _gpus(text: str) -> int:
    """`4`, `a100:4` or `a100:2,v100:2`: the sum."""
    ends = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(end) for end in ends if end.isascii() and end.isdigit())


def _gpus_of_tres(text: str) -> int:
    """The same of `cpu:4,gres/gpu:2` or `cpu=4,gres/gpu:a100=2`."""
    parts = [part.replace("=", ":") for part in text.split(",")]
    return _gpus(",".join(part for part in parts if part.startswith("gres/gpu")))
