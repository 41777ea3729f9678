"""Checks of a machine without its GPUs: memory, disks, clock, limits, CPUs.

Every function returns findings and changes nothing (the disk check removes the file it has written). `root`
stands for `/`, so that tests can bring a tree of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from phalanx import devices
from phalanx.core.diagnosis.fitness import FIT, UNFIT, UNKNOWN, WARN, CheckFinding
from phalanx.kernel import list_dir, read_text

_MIB, _GIB = 1 << 20, 1 << 30
_SAMPLE = b"phalanx check: written, synced, read back.\n"
_SLOW_WRITE = 2.0  # seconds for one MiB
_EARLIEST, _LATEST = 1_700_000_000, 4_100_000_000  # 2023, 2099
_ADJTIMEX_SIZE, _STATUS_AT, _MAX_ERROR_AT = 256, 40, 24  # struct timex of 64-bit Linux
_UNSYNCHRONISED = 0x40
_THROTTLE_WATCH = 0.2  # seconds between two looks at the counters


def size(count: float) -> str:
    """`3.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in ("B", "KiB") or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def memory(root: str = "/") -> Iterator[CheckFinding]:
    """What is available now, and errors that the hardware has reported."""
    fields = {}
    for line in read_text(f"{root}proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            fields[name] = int(number[0]) * 1024
    if "MemTotal" not in fields:
        yield CheckFinding("memory", "/proc/meminfo cannot be read", UNKNOWN, needed=False)
        return
    total, available = fields["MemTotal"], fields.get("MemAvailable", 0)
    value = f"{size(available)} of {size(total)} available"
    if available < 256 * _MIB:
        yield CheckFinding("memory", value, UNFIT, "end what else runs here, or take another node")
    elif available < min(_GIB, total // 4):
        yield CheckFinding("memory", value, WARN, "something else uses most of it")
    else:
        yield CheckFinding("memory", value)
    bad = fields.get("HardwareCorrupted", 0)
    counts = {"ue_count": 0, "ce_count": 0}
    controllers = f"{root}sys/devices/system/edac/mc"
    for controller in list_dir(controllers):
        for name in counts:
            text = read_text(f"{controllers}/{controller}/{name}").strip()
            counts[name] += int(text) if text.isdigit() else 0
    if counts["ue_count"] or bad:
        value = f"{counts['ue_count']} uncorrectable since boot, {size(bad)} out of use"
        yield CheckFinding("memory errors", value, UNFIT, "replace the memory module; take another node")
    elif counts["ce_count"] > 1000:
        value = f"{counts['ce_count']} corrected since boot"
        yield CheckFinding("memory errors", value, WARN, "a module that begins to fail: have it looked at")


def shared_memory(path: str = "/dev/shm") -> Iterator[CheckFinding]:
    """Data loaders and NCCL use it; containers have 64 MiB by default."""
    advice = "docker: --shm-size=8g or --ipc=host; kubernetes: an emptyDir with medium Memory on /dev/shm"
    try:
        disk = os.statvfs(path)
    except OSError as error:
        yield CheckFinding("shared memory", f"{path}: {error.strerror}", UNFIT, advice)
        return
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    value = f"{size(free)} of {size(total)} free"
    if not os.access(path, os.W_OK):
        yield CheckFinding("shared memory", f"{path} cannot be written to", UNFIT, advice)
    elif total < _GIB:
        yield CheckFinding("shared memory", value, WARN, advice)
    elif free < 256 * _MIB:
        yield CheckFinding("shared memory", value, WARN, f"clear old files out of {path}")
    else:
        yield CheckFinding("shared memory", value)


def disk(path: str, what: str = "disk") -> Iterator[CheckFinding]:
    """Write, sync and read back one MiB; for logs, in the nearest directory that exists."""
    where = os.path.abspath(path)
    while what == "logs" and not os.path.isdir(where) and os.path.dirname(where) != where:
        where = os.path.dirname(where)
    check = f"{what} {where}"
    data = (_SAMPLE * (_MIB // len(_SAMPLE) + 1))[:_MIB]
    began = time.monotonic()
    try:
        back = _write_and_read(where, data)
        took = time.monotonic() - began
        there = os.statvfs(where)
    except OSError as error:
        advice = "free some space, mount it writable, or name another directory"
        yield CheckFinding(check, error.strerror or str(error), UNFIT, advice)
        return
    free = there.f_bavail * there.f_frsize
    value = f"{size(free)} free, 1 MiB synced in {took * 1000:.0f} ms"
    if back != data:
        yield CheckFinding(check, "what was read is not what was written", UNFIT, "replace this disk")
    elif free < 256 * _MIB or (there.f_files and there.f_favail < 1000):
        left = "" if free < 256 * _MIB else f", {there.f_favail} files left"
        yield CheckFinding(check, value + left, UNFIT, "free some space")
    elif took > _SLOW_WRITE:
        yield CheckFinding(check, value, WARN, "slow: checkpoints will take long; look at its server")
    elif free < 2 * _GIB:
        yield CheckFinding(check, value, WARN, "little space for logs and checkpoints")
    else:
        yield CheckFinding(check, value)


def _write_and_read(where: str, data: bytes) -> bytes:
    import tempfile

    with tempfile.TemporaryFile(prefix=".phalanx-check-", dir=where, buffering=0) as file:
        fd = file.fileno()
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
        back = b""
        while part := os.pread(fd, _MIB, len(back)):
            back += part
        return back


def clock() -> Iterator[CheckFinding]:
    """Whether the time is possible, and synchronised as far as the kernel knows."""
    now = time.time()
    if not _EARLIEST < now < _LATEST:
        shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
        yield CheckFinding("clock", shown, UNFIT, "set the clock: certificates and file times depend on it")
        return
    state = _kernel_clock()
    if state is None:
        yield CheckFinding("clock", "not known whether synchronised", UNKNOWN, needed=False)
    elif state[0]:
        yield CheckFinding("clock", "synchronised" + f", within {state[1] * 1000:.0f} ms" * (state[1] < 1))
    else:
        yield CheckFinding("clock", "not synchronised", WARN, "set up NTP or chrony on this host")


def _kernel_clock() -> tuple[bool, float] | None:
    """Whether something keeps the clock in step, and the largest error in seconds."""
    import ctypes
    import struct
    import sys

    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    buffer = ctypes.create_string_buffer(_ADJTIMEX_SIZE)  # modes 0: it only reads
    try:
        if ctypes.CDLL(None).adjtimex(buffer) < 0:
            return None
    except (OSError, AttributeError):
        return None
    (status,) = struct.unpack_from("=i", buffer, _STATUS_AT)
    (error,) = struct.unpack_from("=q", buffer, _MAX_ERROR_AT)
    return not status & _UNSYNCHRONISED, error / 1e6


def limits() -> Iterator[CheckFinding]:
    """Per user and process."""
    import resource

    def soft(name: int) -> float:
        value = resource.getrlimit(name)[0]
        return float("inf") if value == resource.RLIM_INFINITY else value

    def row(check: str, value: float, low: float, enough: float, advice: str) -> CheckFinding:
        fitness = UNFIT if value < low else WARN if value < enough else FIT
        shown = "unlimited" if value == float("inf") else f"{value:.0f}"
        return CheckFinding(check, shown, fitness, advice if fitness != FIT else "")

    files = "raise it: ulimit -n 65536, LimitNOFILE= (systemd) or docker --ulimit nofile=65536"
    yield row("open files", soft(resource.RLIMIT_NOFILE), 256, 4096, files)
    tasks = "raise it: ulimit -u unlimited; threads count too, a torch worker has dozens"
    yield row("processes", soft(resource.RLIMIT_NPROC), 256, 2048, tasks)
    locked = soft(resource.RLIMIT_MEMLOCK)
    rdma = os.path.isdir("/dev/infiniband")
    shown = "unlimited" if locked == float("inf") else size(int(locked))
    if rdma and locked < float("inf"):
        advice = "RDMA pins memory: ulimit -l unlimited, or docker --ulimit memlock=-1"
        yield CheckFinding("locked memory", shown, UNFIT if locked < 1 << 26 else WARN, advice)
    else:
        yield CheckFinding("locked memory", shown)


def cgroup(root: str = "/sys/fs/cgroup") -> Iterator[CheckFinding]:
    """What the container or the scheduler allows."""
    path = read_text("/proc/self/cgroup").strip().rpartition(":")[2].rstrip("/")

    def value(name: str) -> str:
        # Inside a cgroup namespace our own group is mounted at the top.
        return (read_text(f"{root}{path}/{name}") or read_text(f"{root}/{name}")).strip()

    memory, pids, cpu = value("memory.max"), value("pids.max"), value("cpu.max").split()
    if memory.isdigit():
        used = int(value("memory.current") or 0)
        left = int(memory) - used
        tight = left < _GIB
        advice = "a worker that exceeds it is killed (137); ask the scheduler for more" if tight else ""
        yield CheckFinding(
            "memory limit", f"{size(int(memory))}, {size(left)} left", WARN if tight else FIT, advice
        )
    if pids.isdigit():
        few = int(pids) < 2048
        advice = "threads count too: docker --pids-limit=-1, or the kubelet's podPidsLimit" if few else ""
        yield CheckFinding("tasks limit", pids, WARN if few else FIT, advice)
    if len(cpu) == 2 and cpu[0].isdigit():
        share = int(cpu[0]) / int(cpu[1])
        few = share < devices.count_cpus()
        advice = f"workers see {devices.count_cpus()} CPUs but are stopped at this much" if few else ""
        yield CheckFinding("CPU limit", f"{share:.1f} CPUs", WARN if few else FIT, advice)
    if not memory.isdigit() and not pids.isdigit() and not cpu:
        yield CheckFinding("cgroup", "no limits")


def numa(environ: Mapping[str, str], root: str = "/") -> Iterator[CheckFinding]:
    """Whether this process may use the CPUs near each GPU."""
    from phalanx.job.numa import gpu_nodes, read_topology

    there = [name for name in list_dir(f"{root}sys/devices/system/node") if name[4:].isdigit()]
    nodes = read_topology(root).nodes
    value = f"{len(there)} nodes, CPUs of {len(nodes)} allowed" if len(there) > 1 else "one node"
    far = sorted({node for node in gpu_nodes(environ, root) if node is not None and node not in nodes})
    if far and len(there) > 1:
        value += f"; GPUs at node {', '.join(map(str, far))}"
        advice = "no CPU near these GPUs may be used: widen the CPU affinity (cpuset, taskset)"
        yield CheckFinding("NUMA", value, WARN, advice)
    else:
        yield CheckFinding("NUMA", value)


def cpus(root: str = "/", watch: float = _THROTTLE_WATCH) -> Iterator[CheckFinding]:
    """Whether the CPUs are free, and run at their speed."""
    count = devices.count_cpus()
    load = read_text(f"{root}proc/loadavg").split()[:1]
    busy = float(load[0]) if load else 0.0
    present = os.cpu_count() or count
    value = f"{count} usable, load {busy:.1f}"
    if busy > 1.5 * present:
        yield CheckFinding("CPUs", value, WARN, "something else runs here: end it, or take another node")
    else:
        yield CheckFinding("CPUs", value)
    before = _throttled(root)
    if before:
        time.sleep(watch)  # the counters are since boot: only what they gain now counts
        gained = _throttled(root) - before
        hot = gained > 0
        value = f"throttled {gained} times in {watch:g} s" if hot else "none now"
        yield CheckFinding("CPU heat", value, WARN if hot else FIT, "too hot: look at its cooling" * hot)
    capped = _capped(root)
    if capped:
        advice = "a power limit or a governor: cpupower frequency-set, or the BIOS"
        yield CheckFinding("CPU speed", capped, WARN, advice)


def _throttled(root: str) -> int:
    """How often cores and packages were slowed down for their heat, since boot."""
    base, total = f"{root}sys/devices/system/cpu", 0
    for name in list_dir(base):
        if name.startswith("cpu") and name[3:].isdigit():
            for counter in ("core_throttle_count", "package_throttle_count"):
                text = read_text(f"{base}/{name}/thermal_throttle/{counter}").strip()
                total += int(text) if text.isdigit() else 0
    return total


def _capped(root: str) -> str:
    """The lowest share of its own speed that a CPU is allowed, if that is well below all of it."""
    base, least, where = f"{root}sys/devices/system/cpu", 1.0, ""
    for name in list_dir(base):
        allowed = read_text(f"{base}/{name}/cpufreq/scaling_max_freq").strip()
        possible = read_text(f"{base}/{name}/cpufreq/cpuinfo_max_freq").strip()
        if allowed.isdigit() and possible.isdigit() and int(possible):
            share = int(allowed) / int(possible)
            if share < least:
                least, where = share, name
    return f"{where} is limited to {least:.0%} of its speed" if least < 0.75 else ""
