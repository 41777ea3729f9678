"""Checks of the GPUs: visible, usable, and without errors that the driver or the kernel has reported.

What is tried on a GPU runs in a process of its own for each of them, with a time limit: a device that hangs
or kills the process is unfit, and its neighbours are still looked at. Two things are tried: a pattern in its
memory through the driver, which needs no framework, and a product of matrices where torch is installed.
The matrices hold small whole numbers, so the product is exact, and one wrong bit shows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from phalanx import devices
from phalanx.check.bounded import REPORT, Check, run_checks
from phalanx.check.machine import size
from phalanx.core.diagnosis.fitness import FIT, UNFIT, UNKNOWN, WARN, CheckFinding
from phalanx.job.time_budgets import DEVICE_LIMIT
from phalanx.kernel import read_text

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_SMI_LIMIT = 10.0
_PATTERN, _PATTERN_BYTES = 0xA5C3_3C5A, 64 << 20
_SIDE, _PRODUCTS = 2048, 8
_RECENT = 3600.0
# Errors of the device or its links, not of a program: nvidia.com, "XID errors".
_HARDWARE_XIDS = {48, 62, 64, 74, 79, 92, 95, 109, 110, 119, 120, 136, 140, 143, 154, 155, 156, 158}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),? ?(.*)")
_MACHINE_CHECK = re.compile(r"\[Hardware Error\]|Machine check events logged")
_RESET = "reset the GPU (nvidia-smi -r) or the host; if it comes back, have the GPU replaced"


def visible(environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """How many workers would see."""
    seen, present = devices.count_gpus(environ), len(devices.nvidia_gpus())
    value = f"{seen} visible" + (f" of {present}" if present else "")
    if seen or not present:
        yield CheckFinding("GPUs", value)
        return
    hiding = [name for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES") if name in environ]
    advice = (
        f"unset {' and '.join(hiding)}" if hiding else "there is a driver but no device: docker --gpus all"
    )
    yield CheckFinding("GPUs", value, WARN, advice)


def links(environ: Mapping[str, str], root: str = "/") -> Iterator[CheckFinding]:
    """Whether each GPU has all lanes of its slot; the speed of a lane is lowered while it is idle."""
    for gpu in devices.visible_gpus(environ, root):
        home = f"{root}sys/bus/pci/devices/{gpu.pci}"
        now, most = (read_text(f"{home}/{name}_link_width").strip() for name in ("current", "max"))
        if not (now.isdigit() and most.isdigit() and int(most)):
            continue
        narrow = int(now) < int(most)
        advice = "some lanes have failed: reseat the GPU or its riser" if narrow else ""
        yield CheckFinding(f"GPU {gpu.index} PCIe", f"{now} of {most} lanes", WARN if narrow else FIT, advice)


# ---- what is tried on a GPU ------------------------------------------------------------------------


def compute(environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Use every visible GPU."""
    count = devices.count_gpus(environ)
    if not count:
        return
    if devices.nvidia_gpus():
        yield from on_each(count, "memory", _fill)
    try:
        import torch
    except ImportError:
        yield CheckFinding("GPU compute", "not tried: torch is not installed", UNKNOWN, needed=False)
        return
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        yield CheckFinding("GPU compute", "not tried: torch is built for CPUs", UNKNOWN, needed=False)
        return
    yield from on_each(count, "compute", lambda index: _multiply(torch, index))


def on_each(count: int, what: str, test: Callable[[int], CheckFinding]) -> list[CheckFinding]:
    checks = [
        Check(f"GPU {index} {what}", lambda index=index: [test(index)], DEVICE_LIMIT)  # type: ignore[misc]
        for index in range(count)
    ]
    # A hang or a crash is what a worker would meet: here that is a finding about the device.
    return [
        one.replace(fitness=UNFIT, advice=_RESET)
        if one.fitness == UNKNOWN and one.needed and one.advice != REPORT
        else one
        for one in run_checks(checks)
    ]


def _fill(index: int) -> CheckFinding:
    """Write a pattern into the device's memory and read it back, through the driver alone."""
    import ctypes

    check = f"GPU {index} memory"
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return CheckFinding(check, f"the driver's library: {error}", UNKNOWN, needed=False)

    def call(name: str, *args: Any) -> None:
        code = getattr(cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'error').decode()} ({code})")

    device, context, place = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    back = (ctypes.c_uint32 * (_PATTERN_BYTES // 4))()
    try:
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(_PATTERN_BYTES))
        call("cuMemsetD32_v2", place, ctypes.c_uint32(_PATTERN), ctypes.c_size_t(len(back)))
        call("cuMemcpyDtoH_v2", back, place, ctypes.c_size_t(_PATTERN_BYTES))
    except OSError as error:
        return CheckFinding(check, str(error), UNFIT, _RESET)
    if bytes(back) != _PATTERN.to_bytes(4, "little") * len(back):
        return CheckFinding(check, "what was read is not what was written", UNFIT, _RESET)
    used = total.value - free.value
    value = f"{size(free.value)} of {size(total.value)} free"
    if used > max(4 << 30, total.value // 10):
        advice = "another process uses it: nvidia-smi shows which"
        return CheckFinding(check, value, WARN, advice)
    return CheckFinding(check, value)


def _multiply(torch: Any, index: int) -> CheckFinding:
    check = f"GPU {index} compute"
    try:
        device = torch.device("cuda", index)
        wrong, took = multiply(torch, device)
        name = torch.cuda.get_device_name(device)
    except RuntimeError as error:
        return CheckFinding(check, str(error).splitlines()[0], UNFIT, _RESET)
    if wrong:
        return CheckFinding(check, f"{wrong} wrong results", UNFIT, _RESET)
    return CheckFinding(check, f"{name}: right, {took * 1000:.1f} ms for a product")


def multiply(torch: Any, device: Any, side: int = _SIDE) -> tuple[int, float]:
    """Products of matrices of whole numbers, in 32 and 16 bits: how many results are wrong, and seconds."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    generator = torch.Generator().manual_seed(side)
    one, two = (torch.randint(-8, 9, (side, side), generator=generator) for _ in range(2))
    left, right = one.to(device, torch.half), two.to(device, torch.half)
    _finish(torch, device)
    began = time.monotonic()
    for _ in range(_PRODUCTS):
        product = left.float() @ right.float()  # sums below 2**24: exact
    fast = left @ right  # tensor cores
    _finish(torch, device)
    took = (time.monotonic() - began) / (_PRODUCTS + 1)
    return wrong_results(torch, one, two, product, fast), took


def wrong_results(torch: Any, one: Any, two: Any, product: Any, fast: Any) -> int:
    """Rows of the exact product, and elements of the fast one, that cannot be right: (AB)x = A(Bx)."""
    vector = torch.randint(1, 9, (one.shape[1], 1), generator=torch.Generator().manual_seed(1)).double()
    expected = one.double() @ (two.double() @ vector)
    wrong = (product.cpu().double() @ vector != expected).sum().item()
    # 16 bits hold whole numbers up to 2048 exactly; larger ones are rounded.
    far = ((fast.float() - product).abs() > product.abs() * 2**-10 + 1).sum().item()
    return int(wrong) + int(far)


def _finish(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- what the driver and the kernel have reported --------------------------------------------------


def driver_errors(environ: Mapping[str, str]) -> Iterator[CheckFinding]:
    """What nvidia-smi reports of each GPU: memory errors, rows to be remapped, a forced slow-down."""
    if not devices.nvidia_gpus():
        return
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        yield CheckFinding("GPU errors", "not known: nvidia-smi is not in PATH", UNKNOWN, needed=False)
        return
    try:
        done = subprocess.run(
            [program, "-q", "-x"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SMI_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield CheckFinding("GPU errors", f"nvidia-smi: no answer within {_SMI_LIMIT:g} s", UNFIT, _RESET)
        return
    if done.returncode:
        lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        said = lines[-1][:200] if lines else f"exit code {done.returncode}"
        yield CheckFinding("GPU errors", f"nvidia-smi: {said}", UNFIT, _RESET)
        return
    wanted = {gpu.pci: gpu.index for gpu in devices.visible_gpus(environ) if gpu.pci}
    yield from read_smi(done.stdout, wanted)


def read_smi(text: bytes, wanted: Mapping[str, int]) -> Iterator[CheckFinding]:
    """Findings from `nvidia-smi -q -x`; `wanted`: PCI address → index (empty: all, in their order)."""
    from xml.etree import ElementTree

    try:
        gpus = ElementTree.fromstring(text).findall("gpu")
    except ElementTree.ParseError as error:
        yield CheckFinding("GPU errors", f"nvidia-smi: {error}", UNKNOWN, needed=False)
        return
    for number, gpu in enumerate(gpus):
        address = gpu.get("id", "").lower()
        # 00000000:3B:00.0 there is 0000:3b:00.0 in /proc.
        index = wanted.get(address[4:] if len(address) == 16 else address, None if wanted else number)
        if index is not None:
            yield _of_gpu(f"GPU {index} errors", gpu)


def _of_gpu(check: str, gpu: Element) -> CheckFinding:
    def number(*paths: str) -> int:
        texts = [(found.text or "").strip() for path in paths for found in gpu.findall(path)]
        return sum(int(text) for text in texts if text.isdigit())

    def active(*paths: str) -> bool:
        return any((gpu.findtext(path) or "").strip() in ("Active", "Yes") for path in paths)

    reasons = ("clocks_event_reasons/clocks_event_reason", "clocks_throttle_reasons/clocks_throttle_reason")
    uncorrected = number(
        "ecc_errors/volatile/sram_uncorrectable_parity",
        "ecc_errors/volatile/sram_uncorrectable_secded",
        "ecc_errors/volatile/sram_uncorrectable",
        "ecc_errors/volatile/dram_uncorrectable",
        "ecc_errors/volatile/double_bit/total",
    )
    corrected = number("ecc_errors/volatile/sram_correctable", "ecc_errors/volatile/dram_correctable")
    if active("remapped_rows/remapped_row_failure"):
        return CheckFinding(check, "bad memory that cannot be remapped", UNFIT, "have the GPU replaced")
    if uncorrected:
        return CheckFinding(check, f"{uncorrected} uncorrectable memory errors", UNFIT, _RESET)
    if active("remapped_rows/remapped_row_pending", "retired_pages/pending_retirement"):
        return CheckFinding(check, "bad memory waits to be remapped", UNFIT, "reset the GPU: nvidia-smi -r")
    for name, what in (("hw_thermal_slowdown", "heat"), ("hw_power_brake_slowdown", "its power supply")):
        if active(*(f"{reason}_{name}" for reason in reasons)):
            return CheckFinding(
                check, f"slowed down by {what}", WARN, "look at cooling and power of the host"
            )
    if corrected > 1000:
        return CheckFinding(check, f"{corrected} corrected memory errors", WARN, "have an eye on it")
    return CheckFinding(check, "none")


def kernel_log(path: str = "/dev/kmsg") -> Iterator[CheckFinding]:
    """Errors of GPUs and of the machine that the kernel has logged since boot."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        yield CheckFinding("kernel log", f"not readable: {error.strerror}", UNKNOWN, needed=False)
        return
    records: list[str] = []
    try:
        while record := os.read(fd, 1 << 16):
            records.append(record.decode("utf-8", "replace"))
    except BlockingIOError:
        pass  # that was the last one
    except BrokenPipeError:
        pass  # records were overwritten while they were read
    except OSError as error:
        yield CheckFinding("kernel log", f"not readable: {error.strerror}", UNKNOWN, needed=False)
        return
    finally:
        os.close(fd)
    yield from read_kernel_log("".join(records).splitlines(), time.monotonic())


def read_kernel_log(lines: list[str], now: float) -> Iterator[CheckFinding]:
    """Findings from the records of /dev/kmsg; `now`: seconds since boot."""
    hardware: dict[str, tuple[float, str]] = {}  # device → the last error that is not a program's
    others, machine_checks = 0, 0
    for line in lines:
        head, _, text = line.partition(";")
        fields = head.split(",")
        age = now - int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else now
        if found := _XID.search(text):
            if int(found[2]) in _HARDWARE_XIDS:
                hardware[found[1]] = age, f"Xid {found[2]} at {found[1]}, {_ago(age)}: {found[3][:80]}"
            else:
                others += 1
        machine_checks += bool(_MACHINE_CHECK.search(text))
    for age, what in hardware.values():
        yield CheckFinding("kernel log", what.rstrip(" :"), UNFIT if age < _RECENT else WARN, _RESET)
    if machine_checks:
        value = f"{machine_checks} machine checks since boot"
        yield CheckFinding("kernel log", value, WARN, "look at dmesg: memory, CPU or PCIe reports errors")
    if not hardware and not machine_checks:
        value = f"{others} GPU errors of programs" if others else "no hardware errors"
        yield CheckFinding("kernel log", value)


def _ago(seconds: float) -> str:
    return f"{seconds / 3600:.0f} h ago" if seconds >= _RECENT else f"{seconds / 60:.0f} min ago"
