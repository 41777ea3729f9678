"""Chooses the CPUs for a worker (`--numa-binding`).

A worker that feeds a GPU across sockets slows down every copy. `cpus_for` returns the CPUs near a local
rank's GPU; without GPUs, the ranks are spread evenly over the NUMA nodes, in blocks.

The modes:
- `node`: every CPU of the GPU's NUMA node;
- `socket`: every CPU of that node's socket (which may contain several NUMA nodes);
- `exclusive`: the node's physical cores, divided among its ranks;
- `core-complex`: the cores behind one last-level cache, a different one for each rank of the node while there
  are enough.

`choose` is a pure function of a `Topology`; only `read_topology` reads /sys. CPUs outside the launcher's own
affinity (a container's share) are never used. The zygote applies the set before the program starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.record import Record
from phalanx.core.text_enum import TextEnum
from phalanx.devices import visible_gpus
from phalanx.job.environment import variables
from phalanx.kernel import list_dir, read_text


class AffinityMode(TextEnum):
    """The values of --numa-binding."""

    NODE = "node"
    SOCKET = "socket"
    EXCLUSIVE = "exclusive"
    CORE_COMPLEX = "core-complex"


class NumaOptions(Record):
    """How to bind, and whether to ignore a binding that is not possible."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


class Topology(Record):
    """The allowed CPUs, and their nodes, sockets, cores and caches."""

    node_of: Mapping[int, int]  # allowed CPU → NUMA node
    socket_of: Mapping[int, int] = {}  # CPU → socket
    core_of: Mapping[int, int] = {}  # CPU → first CPU of its physical core
    cache_of: Mapping[int, int] = {}  # CPU → first CPU behind its last-level cache

    @property
    def nodes(self) -> list[int]:
        """NUMA nodes with an allowed CPU."""
        return sorted(set(self.node_of.values()))

    def cpus_of(self, node: int) -> list[int]:
        """The CPUs of a node, in order."""
        return sorted(cpu for cpu, where in self.node_of.items() if where == node)


def numa_options_from(binding: Any) -> NumaOptions:
    """The options of a mode, or of an object with the same attributes, such as torch's own `NumaOptions`."""
    mode = getattr(binding, "affinity_mode", binding)
    fall_back = bool(getattr(binding, "should_fall_back_if_binding_fails", False))
    return NumaOptions(AffinityMode(getattr(mode, "value", mode)), fall_back)


def cpus_for(
    local_rank: int,
    n: int,
    binding: NumaOptions | AffinityMode | str,
    environ: Mapping[str, str] | None = None,
    root: str = "/",
    allowed: set[int] | None = None,
) -> set[int] | None:
    """The CPUs for one of `n` local ranks.

    Raises `RuntimeError` if the binding is not possible; with the fall-back option, returns None instead.
    """
    options = numa_options_from(binding)
    if not 0 <= local_rank < n:
        raise ValueError(f"local rank {local_rank}: must be between 0 and {n - 1}")
    try:
        topology = read_topology(root, allowed)
        gpus = gpu_nodes(variables() if environ is None else environ, root)
        return choose(topology, place(topology, n, gpus), local_rank, options.affinity_mode)
    except (RuntimeError, OSError) as error:
        if options.should_fall_back_if_binding_fails:
            return None
        mode = options.affinity_mode.value
        raise RuntimeError(f"--numa-binding {mode}: local rank {local_rank}: {error}") from error


def place(topology: Topology, n: int, gpus: Sequence[int | None] = ()) -> list[int]:
    """The NUMA node of each of `n` ranks: its GPU's node if known, else an even spread in blocks.

    Rank r uses GPU r, modulo the number of GPUs.
    """
    nodes = topology.nodes
    if not nodes:
        raise RuntimeError("no CPU is allowed; check the CPU affinity of this command")
    spread = [nodes[rank * len(nodes) // n] for rank in range(n)]
    if not gpus:
        return spread
    placed: list[int] = []
    for rank in range(n):
        node = gpus[rank % len(gpus)]
        if node is not None and node not in nodes:
            raise RuntimeError(
                f"its GPU is on NUMA node {node}, which has no allowed CPU (only nodes "
                f"{', '.join(map(str, nodes))} have); widen the CPU affinity or drop the binding"
            )
        placed.append(spread[rank] if node is None else node)
    return placed


def choose(topology: Topology, placed: Sequence[int], local_rank: int, mode: AffinityMode) -> set[int]:
    """The CPUs of a rank, given the node of every rank."""
    node = placed[local_rank]
    cpus = topology.cpus_of(node)
    if mode is AffinityMode.NODE:
        return set(cpus)
    if mode is AffinityMode.SOCKET:
        sockets = {topology.socket_of.get(cpu, 0) for cpu in cpus}
        return {cpu for cpu in topology.node_of if topology.socket_of.get(cpu, 0) in sockets}
    peers = [rank for rank, where in enumerate(placed) if where == node]
    turn = peers.index(local_rank)
    if mode is AffinityMode.EXCLUSIVE:
        return _share(_groups(cpus, topology.core_of), turn, len(peers), node)
    # Largest first: a container's share may contain only parts of some.
    complexes = sorted(_groups(cpus, topology.cache_of), key=lambda group: (-len(group), group))
    return set(complexes[turn % len(complexes)])


def _share(cores: list[list[int]], turn: int, peers: int, node: int) -> set[int]:
    """An even, contiguous part of the cores; the first ranks get the remainder."""
    if len(cores) < peers:
        raise RuntimeError(
            f"NUMA node {node} has {len(cores)} usable cores for {peers} workers; "
            "start fewer workers or use --numa-binding node"
        )
    each, extra = divmod(len(cores), peers)
    start = turn * each + min(turn, extra)
    return {cpu for core in cores[start : start + each + (turn < extra)] for cpu in core}


def _groups(cpus: Sequence[int], leader_of: Mapping[int, int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(leader_of.get(cpu, cpu), []).append(cpu)
    return [groups[leader] for leader in sorted(groups)]


def read_topology(root: str = "/", allowed: set[int] | None = None) -> Topology:
    """The topology of the allowed CPUs from /sys; CPUs that it does not list count as node 0."""
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    node_of = dict.fromkeys(sorted(usable), 0)
    base = os.path.join(root, "sys/devices/system/node")
    for name in list_dir(base):
        if name.startswith("node") and name[4:].isdigit():
            for cpu in parse_cpu_list(read_text(os.path.join(base, name, "cpulist"))) & usable:
                node_of[cpu] = int(name[4:])
    socket_of: dict[int, int] = {}
    core_of: dict[int, int] = {}
    cache_of: dict[int, int] = {}
    for cpu in usable:
        home = os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}")
        package = read_text(os.path.join(home, "topology/physical_package_id")).strip()
        socket_of[cpu] = int(package) if package.isdigit() else 0
        siblings = parse_cpu_list(read_text(os.path.join(home, "topology/thread_siblings_list")))
        core_of[cpu] = min(siblings, default=cpu)
        cache_of[cpu] = min(_last_level_sharers(home), default=cpu)
    return Topology(node_of, socket_of, core_of, cache_of)


def _last_level_sharers(cpu_home: str) -> set[int]:
    best, sharers = -1, set[int]()
    for name in list_dir(os.path.join(cpu_home, "cache")):
        level = read_text(os.path.join(cpu_home, "cache", name, "level")).strip()
        if name.startswith("index") and level.isdigit() and int(level) > best:
            best = int(level)
            sharers = parse_cpu_list(read_text(os.path.join(cpu_home, "cache", name, "shared_cpu_list")))
    return sharers


def gpu_nodes(environ: Mapping[str, str], root: str = "/") -> list[int | None]:
    """The NUMA node of each visible GPU in device order; None if not known."""
    found: list[int | None] = []
    for gpu in visible_gpus(environ, root):
        path = os.path.join(root, "sys/bus/pci/devices", gpu.pci, "numa_node") if gpu.pci else ""
        raw = read_text(path).strip()
        found.append(int(raw) if raw.isdigit() else None)  # -1 in virtual machines
    return found


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation: 0-3,8,10-11."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            cpus.update(range(int(low), int(high if high.isdigit() else low) + 1))
    return cpus
