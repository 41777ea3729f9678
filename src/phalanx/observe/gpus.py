"""Which processes use which NVIDIA devices: memory and utilisation, from NVML, if it is installed.

The library is loaded when asked for and given back at once, and only by programs that show a job, never by an
agent: its first call may take seconds and its pages would stay. Without it, without a device or without
permission the answer is empty.
"""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_NAME = 96
_MOST = 256  # devices, and processes of one
_UNKNOWN = 2**64 - 1


class NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlUse(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class NvmlProcess(ctypes.Structure):
    """The third version of the structure, with the instances of a divided device."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def by_process() -> dict[int, list[dict[str, Any]]]:
    """The devices of each process, as `observe.snapshot.GpuSnapshot` has them."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        if nvml.nvmlInit_v2() != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    try:
        return _read(nvml)
    except AttributeError:  # an old driver
        return {}
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return {}
    for index in range(min(count.value, _MOST)):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        name, memory, use = ctypes.create_string_buffer(_NAME), NvmlMemory(), NvmlUse()
        nvml.nvmlDeviceGetName(device, name, _NAME)
        has_memory = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
        has_use = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0
        about = {
            "index": index,
            "name": name.value.decode("utf-8", "replace"),
            "total": memory.total if has_memory else None,
            "busy": float(use.gpu) if has_use else None,
        }
        processes, size = (NvmlProcess * _MOST)(), ctypes.c_uint(_MOST)
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(size), processes) != 0:
            continue
        for process in processes[: size.value]:
            used = None if process.memory == _UNKNOWN else int(process.memory)
            found.setdefault(int(process.pid), []).append({**about, "memory": used})
    return found


if __name__ == "__main__":
    import json

    print(json.dumps(by_process()))
