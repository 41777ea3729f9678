"""What an episode does: a pure function of its seed, the backend, the number of agents and the faults.

The same arguments give the same plan on every machine. Times are seconds after the first complete world. If
an action names a victim that does not exist at that moment (no worker runs, no agent is idle), it is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

BACKENDS = ("phalanx", "etcd", "static")
ENDINGS = ("success", "failure", "terminate")
FATAL_CODE = 77  # listed in --no-restart-on: ends the job on all nodes
STORE = -1  # in place of a node


class Fault(NamedTuple):
    """One kind of fault; actions of one `area` never overlap on a node."""

    about: str
    area: str
    needs: str = ""  # network, mount, delay or clock: a facility of the machine
    longest: float = 0.0  # seconds until it is undone; 0: nothing to undo
    host_too: bool = True  # also for the node that hosts the store, whose loss ends the job
    backends: tuple[str, ...] = BACKENDS


_ELASTIC = ("phalanx", "etcd")

FAULTS: dict[str, Fault] = {
    "worker-kill": Fault("SIGKILL to a worker", "worker"),
    "worker-stop": Fault("SIGSTOP to a worker, then SIGCONT", "worker", longest=4.0),
    "worker-exit": Fault("a worker exits with a code", "worker"),
    "agent-kill": Fault("SIGKILL to an agent; it may come back", "life", longest=5.0, host_too=False),
    "agent-stop": Fault("SIGSTOP to an agent, then SIGCONT", "agent", longest=6.0, host_too=False),
    "zygote-kill": Fault("SIGKILL to a zygote", "zygote"),
    "zygote-stop": Fault("SIGSTOP to a zygote, then SIGCONT", "zygote", longest=6.0),
    "keeper-kill": Fault("SIGKILL to a keeper", "keeper"),
    "keeper-stop": Fault("SIGSTOP to a keeper, then SIGCONT", "keeper", longest=6.0),
    "idle-helper-kill": Fault("SIGKILL to the helpers of an agent without workers", "zygote"),
    "node-freeze": Fault("SIGSTOP to every process of a node", "agent", longest=6.0, host_too=False),
    "node-leave": Fault(
        "SIGTERM to an agent; it may come back", "life", longest=4.0, host_too=False, backends=_ELASTIC
    ),
    "node-join": Fault("a node joins late", "life", host_too=False, backends=_ELASTIC),
    "bad-newcomer": Fault(
        "a node joins with a full log disk", "life", "mount", 5.0, host_too=False, backends=_ELASTIC
    ),
    "disk-full": Fault("a node's log disk is full for a while", "disk", "mount", 4.0),
    "cut": Fault("a node's link is cut, without an error", "link", "network", 8.0, host_too=False),
    "cut-one-way": Fault("packets of one direction are lost", "link", "network", 8.0, host_too=False),
    "refuse": Fault("the store's address refuses connections", "link", "network", 8.0, host_too=False),
    "reset": Fault("a node's connections to the store are reset", "link", "network", 0.6, host_too=False),
    "delay": Fault("a node's link is slow", "link", "delay", 6.0, host_too=False),
    "store-kill": Fault("SIGKILL to the store, then a restart", "store", longest=4.0, backends=_ELASTIC),
    "clock": Fault(
        "an agent is killed and comes back with another monotonic clock",
        "life", "clock", 3.0, host_too=False, backends=_ELASTIC,
    ),
}  # fmt: skip
REMOVES = ("agent-kill", "node-leave")  # with seconds == 0 the node does not come back


class ChaosAction(NamedTuple):
    """One fault at one time."""

    at: float
    fault: str
    node: int
    worker: int = 0  # local rank
    seconds: float = 0.0
    value: int = 0  # exit code, direction of a one-way cut, offset of a clock

    def __str__(self) -> str:
        where = "store" if self.node == STORE else f"n{self.node}"
        rank = f" worker {self.worker}" if FAULTS[self.fault].area == "worker" else ""
        code = f" code {self.value}" if self.fault == "worker-exit" else ""
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:.2f} s {self.fault} {where}{rank}{code}{lasts}"


class EpisodePlan(NamedTuple):
    """Everything about one episode that chance decides."""

    seed: int
    backend: str
    nodes: int
    minimum: int
    maximum: int
    workers: int  # per node
    hosted: bool  # node 0 hosts the store, which ends with it; otherwise the store is a process of its own
    linger: float  # seconds a worker takes to exit after SIGTERM
    ending: str
    finish_gap: float  # success: the workers of one node finish this much earlier
    actions: tuple[ChaosAction, ...]

    @property
    def late(self) -> frozenset[int]:
        """Nodes that are not there at the beginning."""
        return frozenset(a.node for a in self.actions if a.fault in ("node-join", "bad-newcomer"))

    @property
    def small_disks(self) -> frozenset[int]:
        """Nodes whose log directory is a small file system of its own."""
        return frozenset(a.node for a in self.actions if a.fault in ("disk-full", "bad-newcomer"))


def plan_episode(
    seed: int, backend: str = "phalanx", agents: int | None = None, faults: Collection[str] = tuple(FAULTS)
) -> EpisodePlan:
    """The plan of one episode."""
    rng = random.Random(f"phalanx-chaos-{seed}")
    nodes = agents or rng.choice((3, 3, 4, 4, 5, 6, 8))
    static = backend == "static"
    spare = not static and nodes > 2 and rng.random() < 0.35
    maximum = nodes - spare
    minimum = nodes if static else rng.randint(1, max(1, maximum - 1))
    hosted = static or (backend == "phalanx" and rng.random() < 0.3)
    usable = [name for name in FAULTS if name in faults and backend in FAULTS[name].backends]
    usable = [name for name in usable if _applies(name, hosted=hosted, spare=spare)]
    actions = _actions(rng, usable, nodes, minimum, static=static, hosted=hosted)
    return EpisodePlan(
        seed=seed,
        backend=backend,
        nodes=nodes,
        minimum=minimum,
        maximum=maximum,
        workers=rng.choice((1, 1, 2)),
        hosted=hosted,
        linger=rng.choice((0.0, 0.0, 0.0, 2.5)),
        ending=rng.choice(("success", "success", "failure", "terminate")),
        finish_gap=rng.choice((0.0, 6.0)),
        actions=tuple(actions),
    )


def _applies(name: str, *, hosted: bool, spare: bool) -> bool:
    return not (name == "store-kill" and hosted) and not (name == "idle-helper-kill" and not spare)


def _actions(
    rng: random.Random, usable: list[str], nodes: int, minimum: int, *, static: bool, hosted: bool
) -> list[ChaosAction]:
    found: list[ChaosAction] = []
    busy: dict[tuple[int, str], float] = {}
    may_go = nodes - max(2, minimum)  # nodes that may be missing at the start or never come back
    now, end = rng.uniform(0.3, 2.0), rng.uniform(8.0, 16.0)
    while usable and now < end:
        name = rng.choice(usable)
        fault = FAULTS[name]
        lowest = 0 if fault.host_too or not hosted else 1
        node = STORE if fault.area == "store" else rng.randrange(lowest, nodes)
        lasts = rng.uniform(0.3, fault.longest) if fault.longest else 0.0
        newcomer = name in ("node-join", "bad-newcomer")
        if name in REMOVES and not static and may_go > 0 and rng.random() < 0.3:
            lasts = 0.0
        removes = newcomer or (name in REMOVES and lasts == 0.0)
        free = busy.get((node, fault.area), 0.0) <= now
        if newcomer:  # it is absent until then, so nothing else may have happened to it
            free = free and not any(node == at for at, _ in busy)
        if free and (not removes or may_go > 0):
            may_go -= removes
            worker, value = rng.randrange(2), rng.randrange(1, 60)
            found.append(ChaosAction(round(now, 2), name, node, worker, round(lasts, 2), value))
            gone = name in REMOVES and lasts == 0.0
            busy[node, fault.area] = 1e9 if gone else now + lasts + 1.5
            now += rng.choice((0.05, 0.05, 0.3, 0.6, 1.0, 2.0, 5.5)) * rng.uniform(0.7, 1.3)
        else:
            now += 0.1
    return found
