"""What `phalanx doctor` checks on this machine: shared memory, limits, cgroup, GPUs, variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from phalanx import devices
from phalanx.cli.doctor import OK, PROBLEM, WARN, Finding
from phalanx.kernel import read_text

_INTERFACES = "/sys/class/net"
# Variable, harmful values ("": any), and what they do. All are meant for debugging.
_HURTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel waits for the one before it; only for debugging"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs of one machine do not communicate directly"),
    ("NCCL_SHM_DISABLE", ("1",), "GPUs of one machine communicate over the network"),
    ("NCCL_IB_DISABLE", ("1",), "InfiniBand is not used"),
    ("NCCL_DEBUG", ("TRACE", "trace"), "NCCL writes a line for every call"),
    ("NCCL_ALGO", ("",), "NCCL cannot choose the best algorithm itself"),
    ("NCCL_PROTO", ("",), "NCCL cannot choose the best protocol itself"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL", "detail"), "every collective is checked by another one"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that waits for a lost one never stops waiting"),
    ("NCCL_ASYNC_ERROR_HANDLING", ("0",), "a rank that waits for a lost one never stops waiting"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "collectives block the CPU until they are over"),
    ("TORCH_CPP_LOG_LEVEL", ("INFO", "info"), "torch logs a lot, which slows many ranks down"),
    ("CUDA_VISIBLE_DEVICES", ("-1", "NoDevFiles"), "every GPU is hidden"),
)  # fmt: skip
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    """Data loaders and NCCL use it; containers have 64 MiB by default."""
    advice = "docker: --shm-size=8g or --ipc=host; kubernetes: an emptyDir with medium Memory on /dev/shm"
    try:
        disk = os.statvfs(path)
    except OSError as error:
        yield Finding("shared memory", f"{path}: {error.strerror}", PROBLEM, advice)
        return
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    value = f"{_size(free)} of {_size(total)} free"
    if not os.access(path, os.W_OK):
        yield Finding("shared memory", f"{path} cannot be written to", PROBLEM, advice)
    elif total < 1 << 30:
        yield Finding("shared memory", value, WARN, advice)
    elif free < 256 << 20:
        yield Finding("shared memory", value, WARN, f"clear old files out of {path}")
    else:
        yield Finding("shared memory", value)


def limits() -> Iterator[Finding]:
    """Per user and process."""
    import resource

    def soft(name: int) -> float:
        value = resource.getrlimit(name)[0]
        return float("inf") if value == resource.RLIM_INFINITY else value

    def row(check: str, value: float, low: float, enough: float, advice: str) -> Finding:
        verdict = PROBLEM if value < low else WARN if value < enough else OK
        shown = "unlimited" if value == float("inf") else f"{value:.0f}"
        return Finding(check, shown, verdict, advice if verdict != OK else "")

    files = "raise it: ulimit -n 65536, LimitNOFILE= (systemd) or docker --ulimit nofile=65536"
    yield row("open files", soft(resource.RLIMIT_NOFILE), 256, 4096, files)
    tasks = "raise it: ulimit -u unlimited; threads count too, a torch worker has dozens"
    yield row("processes", soft(resource.RLIMIT_NPROC), 256, 2048, tasks)
    locked = soft(resource.RLIMIT_MEMLOCK)
    rdma = os.path.isdir("/dev/infiniband")
    shown = "unlimited" if locked == float("inf") else _size(int(locked))
    if rdma and locked < float("inf"):
        advice = "RDMA pins memory: ulimit -l unlimited, or docker --ulimit memlock=-1"
        yield Finding("locked memory", shown, PROBLEM if locked < 1 << 26 else WARN, advice)
    else:
        yield Finding("locked memory", shown)


def cgroup(root: str = "/sys/fs/cgroup") -> Iterator[Finding]:
    """What the container or the scheduler allows."""
    path = read_text("/proc/self/cgroup").strip().rpartition(":")[2].rstrip("/")

    def value(name: str) -> str:
        # Inside a cgroup namespace our own group is mounted at the top.
        return (read_text(f"{root}{path}/{name}") or read_text(f"{root}/{name}")).strip()

    memory, pids, cpu = value("memory.max"), value("pids.max"), value("cpu.max").split()
    if memory.isdigit():
        used = int(value("memory.current") or 0)
        left = int(memory) - used
        tight = left < 1 << 30
        advice = "a worker that exceeds it is killed (137); ask the scheduler for more" if tight else ""
        yield Finding(
            "memory limit", f"{_size(int(memory))}, {_size(left)} left", WARN if tight else OK, advice
        )
    if pids.isdigit():
        few = int(pids) < 2048
        advice = "threads count too: docker --pids-limit=-1, or the kubelet's podPidsLimit" if few else ""
        yield Finding("tasks limit", pids, WARN if few else OK, advice)
    if len(cpu) == 2 and cpu[0].isdigit():
        share = int(cpu[0]) / int(cpu[1])
        few = share < devices.count_cpus()
        advice = f"workers see {devices.count_cpus()} CPUs but are stopped at this much" if few else ""
        yield Finding("CPU limit", f"{share:.1f} CPUs", WARN if few else OK, advice)
    if not memory.isdigit() and not pids.isdigit() and not cpu:
        yield Finding("cgroup", "no limits")


def gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    """How many are visible to workers."""
    visible, present = devices.count_gpus(environ), len(devices.nvidia_gpus())
    value = f"{visible} visible" + (f" of {present}" if present else "")
    if visible or not present:
        yield Finding("GPUs", value)
        return
    hiding = [name for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if name in environ]
    advice = (
        f"unset {' and '.join(hiding)}" if hiding else "there is a driver but no device: docker --gpus all"
    )
    yield Finding("GPUs", value, WARN, advice)


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings left over from an earlier debugging session."""
    clean = True
    for name, values, what in _HURTS:
        value = environ.get(name, "")
        if value and (value in values or "" in values):
            clean = False
            yield Finding(name, value, WARN, f"{what}; unset it unless that is intended")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for finding in _interfaces(name, environ.get(name, "")):
            clean = False
            yield finding
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > devices.count_cpus():
        clean = False
        advice = f"more threads than the {devices.count_cpus()} CPUs here, in every worker; lower it"
        yield Finding("OMP_NUM_THREADS", threads, WARN, advice)
    left_over = [name for name in _OURS if name in environ]
    if left_over:
        clean = False
        advice = "left over from another launcher? the agent sets them for each worker; unset them here"
        yield Finding("rank variables", " ".join(left_over), WARN, advice)
    if clean:
        yield Finding("variables", "none that are known to be harmful")


def _interfaces(name: str, value: str) -> Iterator[Finding]:
    if not value or value.startswith("^"):
        return
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    present = os.listdir(_INTERFACES) if os.path.isdir(_INTERFACES) else []
    fits = [i for i in present for w in wanted if w and (i == w if exact else i.startswith(w))]
    if present and not fits:
        yield Finding(name, value, PROBLEM, f"no such interface here; there are {' '.join(sorted(present))}")


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "bytes" else f"{value:.1f} {units[0]}"
