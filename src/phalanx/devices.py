"""How many accelerators and CPUs this machine offers to workers, found without importing a framework.

A framework's own count costs seconds of imports and may open the device in the launcher. What the kernel
shows in /proc, /sys and /dev is enough, together with the variables that hide devices:

- `CUDA_VISIBLE_DEVICES` lists indices or UUID prefixes; the list ends at the first entry that names nothing
  (so `-1` hides the rest), a repeated device makes the whole list invalid, empty hides everything;
- AMD: `ROCR_VISIBLE_DEVICES` filters first, then `HIP_VISIBLE_DEVICES` (or CUDA's variable) counts within;
- Intel: `ZE_AFFINITY_MASK` lists devices or tiles (`0.1`).

A device tree that cannot be read counts as absent. `root` stands for `/`, so that tests can bring a tree of
their own.
"""

from __future__ import annotations

import os

from phalanx.kernel import list_dir, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


class Gpu:
    """One NVIDIA device: its place in PCI order, which is the order CUDA's indices follow."""

    __slots__ = ("index", "minor", "pci", "uuid")

    def __init__(self, index: int, pci: str = "", uuid: str = "", minor: int | None = None) -> None:
        self.index = index
        self.pci = pci
        self.uuid = uuid
        self.minor = minor

    def __repr__(self) -> str:
        return f"Gpu({self.index}, pci={self.pci!r}, uuid={self.uuid!r})"


def count_cpus() -> int:
    """CPUs this process may run on (a container's or taskset's share, not the machine's)."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def cpu_quota(root: str = "/") -> float | None:
    """The CPUs' worth of time that control groups allow this process, of both versions; None: no limit."""
    found = []
    top = os.path.join(root, "sys/fs/cgroup")
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "cpu" not in kinds.split(","):
            continue
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for depth in range(len(names), -1, -1):  # the groups above limit, too
            where = "/".join([f"{top}/cpu" if kinds else top, *names[:depth]])
            if kinds:
                share = [read_text(f"{where}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            else:
                share = read_text(f"{where}/cpu.max").split()
            if len(share) == 2 and all(one.isdigit() for one in share) and int(share[1]):
                found.append(int(share[0]) / int(share[1]))
    return min(found) if found else None


def usable_cpus(root: str = "/") -> int:
    """CPUs that this process can keep busy: those it may run on, at most its quota, and at least one."""
    quota = cpu_quota(root)
    return count_cpus() if quota is None else max(1, min(count_cpus(), int(quota)))


def count_gpus(environ: Mapping[str, str], root: str = "/", one_each: bool = False) -> int:
    """GPUs that a worker started with this environment would see.

    A process sees one MIG slice at most, however many are listed; with `one_each` (every worker is given its
    own entry of the list) all of them count.
    """
    nvidia = nvidia_gpus(root)
    if nvidia:
        return _visible_nvidia(environ.get("CUDA_VISIBLE_DEVICES"), nvidia, one_each)
    amd = _amd_gpus(root)
    if amd:
        rocr = _visible(environ.get("ROCR_VISIBLE_DEVICES"), list(range(amd)))
        hip = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
        return len(_visible(hip, rocr))
    return 0


def count_xpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Intel GPUs that a worker started with this environment would see."""
    total = _intel_gpus(root)
    mask = environ.get("ZE_AFFINITY_MASK", "").strip()
    if not total or not mask:
        return total
    tiles = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() != "COMPOSITE"
    seen: set[str] = set()
    for entry in mask.split(","):
        card, _, tile = entry.strip().partition(".")
        # In the flat view a card's tiles are devices of their own and the index counts tiles, whose number
        # /sys does not show: only a plain index of a composite view can be checked against the cards.
        if card.isdigit() and (tiles or int(card) < total):
            seen.add(f"{card}.{tile}" if tiles else card)
    return len(seen)


def visible_gpus(environ: Mapping[str, str], root: str = "/") -> list[Gpu]:
    """The NVIDIA devices behind a worker's device indices 0, 1, …, where they are known (not MIG)."""
    gpus = nvidia_gpus(root)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if wanted is None else _select(wanted, gpus)


def resolve_nproc(value: str, environ: Mapping[str, str], root: str = "/", one_each: bool = False) -> int:
    """The number of workers that `auto`, `gpu`, `xpu`, `cpu` or a number stands for; 0 when there is none.

    Raises `ValueError` for any other word. The caller refuses 0, with a message that names the source.
    """
    if value == "gpu":
        return count_gpus(environ, root, one_each)
    if value == "xpu":
        return count_xpus(environ, root)
    if value == "cpu":
        return usable_cpus(root)
    if value == "auto":
        return count_gpus(environ, root, one_each) or count_xpus(environ, root) or usable_cpus(root)
    return int(value)


def nvidia_gpus(root: str = "/") -> list[Gpu]:
    """NVIDIA devices that this process can open, in PCI order, whatever the variables say."""
    nodes = {
        int(n[6:]) for n in list_dir(os.path.join(root, "dev")) if n.startswith("nvidia") and n[6:].isdigit()
    }
    listed: list[Gpu] = []
    base = os.path.join(root, "proc/driver/nvidia/gpus")
    for pci in sorted(list_dir(base), key=_pci_key):
        path = os.path.join(base, pci, "information")
        pairs = (line.partition(":") for line in read_text(path).splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        minor = fields.get("Device Minor", "")
        uuid = fields.get("GPU UUID", "")
        # A container's /proc shows every GPU of the host; only those with a node in /dev can be opened.
        if minor.isdigit() and int(minor) not in nodes:
            continue
        listed.append(Gpu(len(listed), pci.lower(), uuid, int(minor) if minor.isdigit() else None))
    if listed:
        # Without minors in /proc, /dev still limits the number.
        return listed[: len(nodes)] if nodes else []
    if nodes:
        return [Gpu(index, minor=minor) for index, minor in enumerate(sorted(nodes))]
    if root == "/" and os.path.exists("/dev/dxg"):
        return _nvml_gpus()  # WSL: the driver is outside, only its library knows
    return []


def _nvml_gpus() -> list[Gpu]:
    """What NVIDIA's management library lists; it opens no compute context."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        gpus = []
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
            nvml.nvmlDeviceGetUUID(handle, text, ctypes.c_uint(96))
            gpus.append(Gpu(index, uuid=text.value.decode("ascii", "replace")))
        return gpus
    finally:
        nvml.nvmlShutdown()


def _visible_nvidia(wanted: str | None, gpus: list[Gpu], one_each: bool) -> int:
    if wanted is None:
        return len(gpus)
    slices: list[str] = []
    for entry in wanted.split(","):
        if not entry.strip().startswith("MIG-"):
            break
        slices.append(entry.strip())
    if slices:
        return len(set(slices)) if one_each else 1
    return len(_select(wanted, gpus))


def _select(wanted: str, gpus: list[Gpu]) -> list[Gpu]:
    """The devices a CUDA list names, up to its first entry that names none; its first entry sets the kind."""
    entries = [entry.strip() for entry in wanted.split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[Gpu] = []
    for entry in entries:
        match: Gpu | None = None
        if by_uuid and entry.startswith("GPU-"):
            known = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
            # An unreadable UUID (hidden /proc) cannot be checked: take the devices in order.
            blind = [gpu for gpu in gpus if not gpu.uuid and gpu not in chosen]
            match = known[0] if len(known) == 1 else (blind[0] if blind and not known else None)
        elif not by_uuid:
            index = _leading_number(entry)
            match = gpus[index] if 0 <= index < len(gpus) else None
        if match is None:
            break
        if match in chosen:
            return []
        chosen.append(match)
    return chosen


def _leading_number(entry: str) -> int:
    """CUDA reads as many digits as there are and ignores what follows; -1 when there are none."""
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    return int(digits) if digits else -1


def _visible(wanted: str | None, present: list[int]) -> list[int]:
    """The same rule for AMD's variables, whose entries are indices or UUIDs."""
    if wanted is None:
        return present
    chosen: list[int] = []
    for entry in wanted.split(","):
        entry = entry.strip()
        if entry.startswith("GPU-"):
            spare = [gpu for gpu in present if gpu not in chosen]
            if not spare:
                break
            chosen.append(spare[0])  # which one it is does not matter for a count
            continue
        if not entry.isdigit() or int(entry) >= len(present):
            break
        if present[int(entry)] in chosen:
            return []
        chosen.append(present[int(entry)])
    return chosen


def _amd_gpus(root: str) -> int:
    """KFD topology nodes with shader cores; those without are CPUs."""
    base = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    found = 0
    for node in list_dir(base):
        for line in read_text(os.path.join(base, node, "properties")).splitlines():
            key, _, value = line.partition(" ")
            if key == "simd_count" and value.strip().isdigit() and int(value) > 0:
                found += 1
    return found


def _intel_gpus(root: str) -> int:
    """Render nodes of Intel's compute-capable drivers."""
    base = os.path.join(root, "sys/class/drm")
    found = 0
    for name in list_dir(base):
        device = os.path.join(base, name, "device")
        if name.startswith("renderD") and read_text(os.path.join(device, "vendor")).strip() == "0x8086":
            driver = os.path.basename(os.path.realpath(os.path.join(device, "driver")))
            found += driver in ("i915", "xe")
    return found


def _pci_key(address: str) -> tuple[int, ...]:
    try:
        return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))
    except ValueError:
        return (1 << 32,)
