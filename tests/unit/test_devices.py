"""Counting GPUs and CPUs from trees that look like /proc, /sys and /dev."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.devices import (
    count_cpus,
    count_gpus,
    count_xpus,
    cpu_quota,
    nvidia_gpus,
    resolve_nproc,
    usable_cpus,
    visible_gpus,
)


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def nvidia(root: Path, *addresses: str, nodes: int | None = None) -> str:
    """A machine with these GPUs; the newest card got the lowest minor, as happens."""
    for position, address in enumerate(addresses):
        minor = len(addresses) - 1 - position
        text = f"Model: \t\t Some GPU\nGPU UUID: \t GPU-{address[5:7]}aa\nDevice Minor: \t {minor}\n"
        write(root / "proc/driver/nvidia/gpus" / address / "information", text)
    for minor in range(len(addresses) if nodes is None else nodes):
        write(root / f"dev/nvidia{minor}")
    write(root / "dev/nvidiactl")
    write(root / "dev/nvidia-uvm")
    return str(root)


@pytest.fixture
def four(tmp_path: Path) -> str:
    return nvidia(tmp_path, "0000:0A:00.0", "0000:1B:00.0", "0000:9C:00.0", "0001:05:00.0")


def test_gpus_come_in_bus_order(four: str) -> None:
    assert [gpu.pci for gpu in nvidia_gpus(four)] == [
        "0000:0a:00.0",
        "0000:1b:00.0",
        "0000:9c:00.0",
        "0001:05:00.0",
    ]


# What one H200 with torch answers for the same values was checked by hand; here there are four devices.
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 3 ", 2),
        ("0,-1,2", 1),
        ("0,4,1", 1),
        ("4", 0),
        ("1,1", 0),
        ("0x1,2", 2),
        ("NoDevFiles", 0),
        ("GPU-0Aaa", 1),
        ("GPU-0A,GPU-9C", 2),
        ("GPU-0A,GPU-zz,GPU-9C", 1),
        ("GPU-", 0),
        ("gpu-0Aaa", 0),
        ("0,GPU-9C", 1),
        ("GPU-9C,0", 1),
        ("GPU-9C,GPU-9Caa", 0),
        ("MIG-a,MIG-b", 1),
    ],
)
def test_cuda_visible_devices(four: str, visible: str | None, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, four) == count


def test_every_mig_slice_counts_when_each_worker_gets_its_own(four: str) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-b"}, four, one_each=True) == 2


def test_visible_devices_keep_the_order_of_the_list(four: str) -> None:
    chosen = visible_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, four)
    assert [gpu.pci for gpu in chosen] == ["0000:9c:00.0", "0000:0a:00.0"]


def test_a_container_sees_only_what_has_a_device_node(tmp_path: Path) -> None:
    root = nvidia(tmp_path, "0000:0A:00.0", "0000:1B:00.0", "0000:9C:00.0", nodes=1)
    assert [gpu.pci for gpu in nvidia_gpus(root)] == ["0000:9c:00.0"]


def test_device_nodes_alone_are_enough(tmp_path: Path) -> None:
    write(tmp_path / "dev/nvidia0")
    write(tmp_path / "dev/nvidia10")
    write(tmp_path / "dev/nvidiactl")
    assert count_gpus({}, str(tmp_path)) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-unknown"}, str(tmp_path)) == 1


def test_a_driver_without_any_node_counts_nothing(tmp_path: Path) -> None:
    assert count_gpus({}, nvidia(tmp_path, "0000:0A:00.0", nodes=0)) == 0


def test_an_empty_machine(tmp_path: Path) -> None:
    assert (count_gpus({}, str(tmp_path)), count_xpus({}, str(tmp_path))) == (0, 0)


@pytest.fixture
def amd(tmp_path: Path) -> str:
    for node, cores in enumerate((0, 0, 304, 304, 304)):
        write(
            tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}/properties",
            f"cpu_cores_count 0\nsimd_count {cores}\n",
        )
    return str(tmp_path)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}, 2),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_amd(amd: str, environ: dict[str, str], count: int) -> None:
    assert count_gpus(environ, amd) == count


def test_intel(tmp_path: Path) -> None:
    for number, vendor in ((128, "0x8086"), (129, "0x8086"), (130, "0x1002")):
        device = tmp_path / f"sys/class/drm/renderD{number}/device"
        write(device / "vendor", vendor + "\n")
        (tmp_path / "drivers/xe").mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(tmp_path / "drivers/xe")
    root = str(tmp_path)
    assert count_xpus({}, root) == 2
    assert count_xpus({"ZE_AFFINITY_MASK": "0"}, root) == 1
    assert count_xpus({"ZE_AFFINITY_MASK": "0.0,0.1,1"}, root) == 3
    composite = {"ZE_AFFINITY_MASK": "0.0,0.1,1,7", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    assert count_xpus(composite, root) == 2
    assert resolve_nproc("auto", {}, root) == 2


def test_words_for_numbers_of_workers(four: str, tmp_path: Path) -> None:
    assert resolve_nproc("gpu", {}, four) == 4
    assert resolve_nproc("auto", {"CUDA_VISIBLE_DEVICES": "0"}, four) == 1
    assert resolve_nproc("auto", {"CUDA_VISIBLE_DEVICES": ""}, four) == count_cpus()
    assert resolve_nproc("3", {}, four) == 3
    assert resolve_nproc("xpu", {}, four) == 0
    with pytest.raises(ValueError):
        resolve_nproc("tpu", {}, four)


def test_cpus_follow_the_affinity_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert count_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert count_cpus() == len(before)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
          "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/x\n0::/\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 0.5),
        ({"proc/self/cgroup": "3:cpu:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_the_quota_of_control_groups(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(str(tmp_path)) == quota
    assert usable_cpus(str(tmp_path)) == (
        count_cpus() if quota is None else max(1, min(count_cpus(), int(quota)))
    )
    assert resolve_nproc("cpu", {}, str(tmp_path)) == usable_cpus(str(tmp_path))
