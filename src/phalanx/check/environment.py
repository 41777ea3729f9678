"""`phalanx check --environment`: what belongs in a bug report, as text or JSON.

It imports no framework and opens no GPU. Each section is gathered by itself, so that one broken part of a
machine (which may be the bug) does not hide the others. Values of variables that look like secrets are
masked.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping

from phalanx import devices
from phalanx.kernel import read_text

Section = dict[str, object]

# fmt: off
_PREFIXES = (
    "PHALANX_", "PET_", "TORCH", "NCCL_", "GLOO_", "UCX_", "CUDA_", "HIP_", "ROCR_", "ZE_", "NVIDIA_VISIBLE",
    "OMP_", "MKL_", "KMP_", "XLA_", "JAX_", "PYTHON", "LD_", "MASTER_", "OMPI_", "PMI", "LSB_", "PBS_",
    "SLURM_JOB", "SLURM_PROC", "SLURM_NODE", "SLURM_NTASKS", "SLURM_LOCAL", "KUBERNETES_SERVICE",
)
_NAMES = frozenset((
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "VIRTUAL_ENV", "CONDA_PREFIX",
    "TMPDIR",
))
# fmt: on
_SECRET = ("TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL", "AUTH", "COOKIE")
_PACKAGES = "torch jax jaxlib tensorflow numpy msgspec cloudpickle setproctitle shtab"


def collect(environ: Mapping[str, str]) -> dict[str, Section]:
    """Every section; one that fails holds its error."""
    sections: dict[str, Callable[[Mapping[str, str]], Section]] = {
        "versions": _versions,
        "machine": _machine,
        "devices": _devices,
        "limits": _limits,
        "container": _container,
        "scheduler": _scheduler,
        "packages": _packages,
        "variables": _variables,
    }
    facts: dict[str, Section] = {}
    for name, gather in sections.items():
        try:
            facts[name] = gather(environ)
        except Exception as error:  # noqa: BLE001 - a report about a broken machine must survive the breakage
            facts[name] = {"failed": f"{type(error).__name__}: {error}"}
    return facts


def as_text(facts: Mapping[str, Section]) -> str:
    """The sections for people: name, then aligned pairs."""
    lines: list[str] = []
    for name, section in facts.items():
        lines.append(f"{name}:")
        width = max((len(key) for key in section), default=0)
        lines += [f"  {key:<{width}}  {_one_line(value)}" for key, value in section.items()] or ["  none"]
    return "\n".join(lines) + "\n"


def _one_line(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return " ".join(str(value).split("\n")) if value not in (None, "") else "none"


def _versions(environ: Mapping[str, str]) -> Section:
    from phalanx import __version__

    return {
        "phalanx": __version__,
        "python": sys.version.replace("\n", " "),
        "executable": sys.executable,
        "virtualenv": sys.prefix != sys.base_prefix,
    }


def _machine(environ: Mapping[str, str]) -> Section:
    release = {}
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        pass  # minimal images have none
    memory = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines() if ":" in line)
    return {
        "system": release.get("PRETTY_NAME", platform.system()),
        "kernel": f"{platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "host": platform.node(),
        "cpus": f"{devices.count_cpus()} usable of {os.cpu_count()}",
        "memory": memory.get("MemTotal", "").strip(),
        "memory available": memory.get("MemAvailable", "").strip(),
        "shared memory": _space("/dev/shm"),
        "temporary space": _space(environ.get("TMPDIR", "/tmp")),
    }


def _devices(environ: Mapping[str, str]) -> Section:
    driver = read_text("/proc/driver/nvidia/version").partition("\n")[0].strip()
    return {
        "gpus visible": devices.count_gpus(environ),
        "xpus visible": devices.count_xpus(environ),
        "nvidia devices": [gpu.uuid or gpu.pci or f"nvidia{gpu.minor}" for gpu in devices.nvidia_gpus()],
        "nvidia driver": driver or None,
        "nvidia-smi": _nvidia_smi(),
    }


def _nvidia_smi() -> list[str]:
    """Names, drivers and memory; bounded, because a sick driver makes nvidia-smi hang."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [
        program,
        "--query-gpu=name,driver_version,memory.total,mig.mode.current",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return ["no answer within 10 s"]
    return (done.stdout or done.stderr).strip().splitlines()


def _limits(environ: Mapping[str, str]) -> Section:
    import resource

    names = {"open files": "NOFILE", "processes": "NPROC", "locked memory": "MEMLOCK", "core size": "CORE"}
    found: Section = {}
    for title, name in names.items():
        limits = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        found[title] = " / ".join("unlimited" if n == resource.RLIM_INFINITY else str(n) for n in limits)
    found["pidfd"] = hasattr(os, "pidfd_open")
    found["pid limit"] = read_text("/proc/sys/kernel/pid_max").strip()
    found["core pattern"] = read_text("/proc/sys/kernel/core_pattern").strip()
    return found


def _container(environ: Mapping[str, str]) -> Section:
    hints = [name for name in ("/.dockerenv", "/run/.containerenv") if os.path.exists(name)]
    hints += [f"container={environ['container']}"] if environ.get("container") else []
    hints += ["kubernetes"] if environ.get("KUBERNETES_SERVICE_HOST") else []
    hints += (
        ["apptainer"] if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER") else []
    )
    path = read_text("/proc/self/cgroup").strip().rpartition(":")[2]
    found: Section = {"signs of one": hints, "init": read_text("/proc/1/comm").strip(), "cgroup": path}
    for title, name in (("cpu quota", "cpu.max"), ("memory limit", "memory.max"), ("pids limit", "pids.max")):
        # Inside a cgroup namespace our own group is mounted at the top.
        own = read_text(f"/sys/fs/cgroup{path.rstrip('/')}/{name}") or read_text(f"/sys/fs/cgroup/{name}")
        found[title] = own.strip()
    return found


def _scheduler(environ: Mapping[str, str]) -> Section:
    signs = {
        "slurm": "SLURM_JOB_ID",
        "kubernetes": "KUBERNETES_SERVICE_HOST",
        "indexed job": "JOB_COMPLETION_INDEX",
        "lsf": "LSB_JOBID",
        "pbs": "PBS_JOBID",
        "mpi": "OMPI_COMM_WORLD_SIZE",
        "ray": "RAY_JOB_ID",
    }
    return {name: environ[variable] for name, variable in signs.items() if environ.get(variable)}


def _packages(environ: Mapping[str, str]) -> Section:
    from importlib.metadata import PackageNotFoundError, version

    found: Section = {}
    for name in _PACKAGES.split():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _variables(environ: Mapping[str, str]) -> Section:
    wanted = (name for name in sorted(environ) if name in _NAMES or name.startswith(_PREFIXES))
    return {name: mask(name, environ[name]) for name in wanted}


def mask(name: str, value: str) -> str:
    """The value, unless the name suggests a secret; a password inside a URL is cut out."""
    if value and any(word in name.upper() for word in _SECRET):
        return f"(hidden, {len(value)} characters)"
    if "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        login, _, place = rest.rpartition("@")
        if login and "/" not in login:
            return f"{scheme}://(hidden)@{place}"
    return value


def _space(path: str) -> str:
    try:
        disk = os.statvfs(path)
    except OSError:
        return "absent"
    return f"{disk.f_bavail * disk.f_frsize >> 20} of {disk.f_blocks * disk.f_frsize >> 20} MiB free"
