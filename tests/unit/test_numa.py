"""The CPUs of a rank, on machines described by hand and by trees that look like /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job.numa import (
    AffinityMode,
    NumaOptions,
    Topology,
    choose,
    cpus_for,
    numa_options_from,
    parse_cpu_list,
    place,
    read_topology,
)

# Two sockets, two NUMA nodes each, four cores a node with two threads each (thread 2 of core c is c + 16);
# two cores share a last-level cache.
CPUS = range(32)
TWO_SOCKETS = Topology(
    node_of={cpu: cpu % 16 // 4 for cpu in CPUS},
    socket_of={cpu: cpu % 16 // 8 for cpu in CPUS},
    core_of={cpu: cpu % 16 for cpu in CPUS},
    cache_of={cpu: cpu % 16 // 2 * 2 for cpu in CPUS},
)
MODES = list(AffinityMode)


def test_the_names_are_torchs() -> None:
    binding = pytest.importorskip("torch.numa.binding")
    assert {mode.name: mode.value for mode in AffinityMode} == {m.name: m.value for m in binding.AffinityMode}
    ours, theirs = NumaOptions(AffinityMode.NODE), binding.NumaOptions(binding.AffinityMode.NODE)
    assert vars(ours) == {name: getattr(theirs, name) for name in theirs.__dataclass_fields__}


@pytest.mark.parametrize(
    ("mode", "rank", "cpus"),
    [
        (AffinityMode.NODE, 0, "0-3,16-19"),
        (AffinityMode.NODE, 3, "12-15,28-31"),
        (AffinityMode.SOCKET, 0, "0-7,16-23"),
        (AffinityMode.SOCKET, 3, "8-15,24-31"),
        (AffinityMode.EXCLUSIVE, 0, "0-1,16-17"),
        (AffinityMode.EXCLUSIVE, 1, "2-3,18-19"),
        (AffinityMode.EXCLUSIVE, 2, "12-13,28-29"),
        (AffinityMode.EXCLUSIVE, 3, "14-15,30-31"),
        (AffinityMode.CORE_COMPLEX, 0, "0-1,16-17"),
        (AffinityMode.CORE_COMPLEX, 1, "2-3,18-19"),
    ],
)
def test_modes_with_two_gpus_on_the_first_node_and_two_on_the_last(
    mode: AffinityMode, rank: int, cpus: str
) -> None:
    placed = place(TWO_SOCKETS, 4, [0, 0, 3, 3])
    assert choose(TWO_SOCKETS, placed, rank, mode) == parse_cpu_list(cpus)


def test_without_gpus_ranks_are_spread_in_blocks() -> None:
    assert place(TWO_SOCKETS, 4) == [0, 1, 2, 3]
    assert place(TWO_SOCKETS, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert place(TWO_SOCKETS, 2) == [0, 2]


def test_more_ranks_than_gpus_go_round_and_unknown_places_are_spread() -> None:
    assert place(TWO_SOCKETS, 4, [3, 1]) == [3, 1, 3, 1]
    assert place(TWO_SOCKETS, 4, [None, 3, None, 0]) == [0, 3, 2, 0]


def test_a_gpu_on_a_node_we_may_not_use_is_an_error_that_says_so() -> None:
    small = Topology(node_of={0: 0, 1: 0})
    with pytest.raises(RuntimeError, match="NUMA node 3"):
        place(small, 1, [3])


def test_cores_that_do_not_divide_go_to_the_first_ranks() -> None:
    shares = [choose(TWO_SOCKETS, [0, 0, 0], rank, AffinityMode.EXCLUSIVE) for rank in range(3)]
    assert shares == [parse_cpu_list("0-1,16-17"), {2, 18}, {3, 19}]


def test_too_few_cores_for_exclusive() -> None:
    with pytest.raises(RuntimeError, match="4 usable cores for 5 workers"):
        choose(TWO_SOCKETS, [0] * 5, 0, AffinityMode.EXCLUSIVE)


@given(
    allowed=st.sets(st.integers(0, 31), min_size=1),
    gpus=st.lists(st.none(), max_size=8),
    n=st.integers(1, 12),
    mode=st.sampled_from(MODES),
)
def test_every_rank_gets_something_allowed_and_exclusive_shares_nothing(
    allowed: set[int], gpus: list[None], n: int, mode: AffinityMode
) -> None:
    part = Topology(
        node_of={cpu: TWO_SOCKETS.node_of[cpu] for cpu in allowed},
        socket_of=TWO_SOCKETS.socket_of,
        core_of=TWO_SOCKETS.core_of,
        cache_of=TWO_SOCKETS.cache_of,
    )
    placed = place(part, n, gpus)
    try:
        chosen = [choose(part, placed, rank, mode) for rank in range(n)]
    except RuntimeError:
        assert mode is AffinityMode.EXCLUSIVE
        return
    assert all(cpus and cpus <= allowed for cpus in chosen)
    if mode is AffinityMode.EXCLUSIVE:
        cores = [{TWO_SOCKETS.core_of[cpu] for cpu in cpus} for cpus in chosen]
        assert sum(map(len, cores)) == len(set().union(*cores))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """One socket, two nodes of two cores with one thread each, a GPU on node 1."""
    system = tmp_path / "sys/devices/system"
    for node, cpus in ((0, "0-1"), (1, "2-3")):
        write(system / f"node/node{node}/cpulist", cpus)
        for cpu in parse_cpu_list(cpus):
            home = system / f"cpu/cpu{cpu}"
            write(home / "topology/physical_package_id", "0")
            write(home / "topology/thread_siblings_list", str(cpu))
            for index, (level, shared) in enumerate((("1", str(cpu)), ("3", cpus), ("2", str(cpu)))):
                write(home / f"cache/index{index}/level", level)
                write(home / f"cache/index{index}/shared_cpu_list", shared)
    write(tmp_path / "proc/driver/nvidia/gpus/0000:0A:00.0/information", "Device Minor: 0\nGPU UUID: GPU-1")
    write(tmp_path / "dev/nvidia0", "")
    write(tmp_path / "sys/bus/pci/devices/0000:0a:00.0/numa_node", "1")
    return str(tmp_path)


def test_reading_a_machine(tree: str) -> None:
    topology = read_topology(tree, {0, 1, 2, 3})
    assert topology.node_of == {0: 0, 1: 0, 2: 1, 3: 1}
    assert topology.cache_of == {0: 0, 1: 0, 2: 2, 3: 2}
    assert topology.core_of == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_rank_stays_near_its_gpu(tree: str) -> None:
    everything = {0, 1, 2, 3}
    assert cpus_for(0, 1, "node", {}, tree, everything) == {2, 3}
    assert cpus_for(0, 1, "socket", {}, tree, everything) == everything
    assert cpus_for(0, 1, "core-complex", {}, tree, everything) == {2, 3}
    assert cpus_for(1, 2, "exclusive", {}, tree, everything) == {3}
    assert cpus_for(1, 2, "node", {"CUDA_VISIBLE_DEVICES": ""}, tree, everything) == {2, 3}
    assert cpus_for(0, 2, "node", {"CUDA_VISIBLE_DEVICES": ""}, tree, everything) == {0, 1}


def test_impossible_binding_is_an_error_unless_told_otherwise(tree: str) -> None:
    with pytest.raises(RuntimeError, match="--numa-binding node: local rank 0: its GPU is on NUMA node 1"):
        cpus_for(0, 1, "node", {}, tree, {0})
    lenient = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert cpus_for(0, 1, lenient, {}, tree, {0}) is None


def test_a_machine_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    assert cpus_for(0, 2, "node", {}, str(tmp_path), {4, 5}) == {4, 5}
    assert cpus_for(1, 2, "exclusive", {}, str(tmp_path), {4, 5}) == {5}


def test_this_machine_answers() -> None:
    assert cpus_for(0, 1, "node", {"CUDA_VISIBLE_DEVICES": ""})


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="near"):
        cpus_for(0, 1, "near")
    with pytest.raises(ValueError, match="local rank 2"):
        cpus_for(2, 2, "node")


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("0-2,5", {0, 1, 2, 5}), ("7\n", {7})])
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_torchs_own_options_are_taken_by_their_attributes() -> None:
    binding = pytest.importorskip("torch.numa.binding")
    theirs = binding.NumaOptions(binding.AffinityMode.SOCKET, should_fall_back_if_binding_fails=True)
    assert numa_options_from(theirs) == NumaOptions(AffinityMode.SOCKET, True)
    assert numa_options_from("core-complex") == NumaOptions(AffinityMode.CORE_COMPLEX)
    assert cpus_for(0, 1, theirs, {"CUDA_VISIBLE_DEVICES": ""})
