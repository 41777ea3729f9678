"""The checks of a machine: trees, logs and reports of machines that are not here, and checks that fail."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from phalanx.agent.supervision.agent_services import read_verdict
from phalanx.check import gpus, machine
from phalanx.check.bounded import Check, run_checks
from phalanx.check.harmful_variables import harmful
from phalanx.check.local import NAMES, examine
from phalanx.core.diagnosis.fitness import FIT, UNFIT, UNKNOWN, WARN, CheckFinding
from tests.conftest import HUNG, gone, wait_until


def fitness(found: Iterator[CheckFinding]) -> dict[str, str]:
    return {one.check: one.fitness for one in found}


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{root}/"


# ---- checks that fail ------------------------------------------------------------------------------


def test_checks_that_hang_crash_or_raise_cost_one_finding_each(tmp_path: Path) -> None:
    def hang() -> Iterator[CheckFinding]:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(child.pid))
        child.wait()
        yield CheckFinding("never", "")

    def crash() -> Iterator[CheckFinding]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield CheckFinding("never", "")

    def leave() -> Iterator[CheckFinding]:
        os._exit(3)

    def fail() -> Iterator[CheckFinding]:
        yield CheckFinding("one", "fine")
        raise LookupError("no such thing")

    def talk() -> Iterator[CheckFinding]:
        print("on the screen", flush=True)
        yield from (CheckFinding(f"row {number}", "x" * 1000) for number in range(200))

    descriptors = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    found = run_checks(
        [
            Check("hangs", hang, 1.0),
            Check("crashes", crash),
            Check("leaves", leave),
            Check("fails", fail),
            Check("talks", talk, HUNG),
            Check("works", lambda: [CheckFinding("works", "fine")], HUNG),
        ]
    )
    assert time.monotonic() - began < HUNG
    by_name = {one.check: one for one in found}
    assert by_name["hangs"] == CheckFinding("hangs", "no answer within 1 s", UNKNOWN, "try it by hand")
    assert by_name["crashes"].value == "the check was killed by signal 9"
    assert by_name["leaves"].value == "the check ended with exit code 3"
    assert by_name["fails"].value == "LookupError: no such thing"
    assert by_name["works"].fitness == FIT
    assert len(found) == 5 + 200
    assert len(os.listdir("/proc/self/fd")) == descriptors
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: gone(pid), "the end of what the hanging check had started")


def test_this_machine() -> None:
    found = examine(os.environ)
    names = {one.check.partition(" /")[0] for one in found}
    assert {"GPUs", "memory", "shared memory", "disk", "clock", "open files", "NUMA", "CPUs"} <= names
    assert all(one.fitness == FIT or one.advice or not one.needed for one in found), found
    assert [one.value for one in examine({}, ["compute"])] == ["nothing here to look at"] or gpus_here()
    assert "compute" in NAMES


def gpus_here() -> bool:
    return os.path.exists("/dev/nvidiactl")


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert fitness(machine.shared_memory(str(tmp_path / "none"))) == {"shared memory": UNFIT}


def test_limits_of_a_control_group(tmp_path: Path) -> None:
    tree(tmp_path, {"memory.max": str(1 << 29), "pids.max": "100", "cpu.max": "50000 100000"})
    expected = {"memory limit": WARN, "tasks limit": WARN, "CPU limit": WARN}
    assert fitness(machine.cgroup(str(tmp_path))) == expected


# ---- variables -------------------------------------------------------------------------------------


def test_variables_that_hurt() -> None:
    assert fitness(harmful({})) == {"variables": FIT}
    hurt = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_DEBUG": "TRACE",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "nosuch0",
        "OMP_NUM_THREADS": "100000",
        "RANK": "3",
    }
    found = fitness(harmful(hurt))
    assert found.pop("NCCL_SOCKET_IFNAME") == UNFIT
    assert set(found) == {
        "CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "NCCL_ALGO", "OMP_NUM_THREADS", "rank variables",
    }  # fmt: skip
    assert set(found.values()) == {WARN}
    fine = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "^docker0"}
    assert fitness(harmful(fine)) == {"variables": FIT}


# ---- memory, disks, clock, CPUs --------------------------------------------------------------------


EDAC = "sys/devices/system/edac/mc/mc0"


@pytest.mark.parametrize(
    ("available", "more", "verdicts"),
    [
        (500_000_000, {}, {"memory": FIT}),
        (800_000, {}, {"memory": WARN}),
        (100_000, {}, {"memory": UNFIT}),
        (500_000_000, {f"{EDAC}/ue_count": "1"}, {"memory": FIT, "memory errors": UNFIT}),
        (500_000_000, {f"{EDAC}/ce_count": "5"}, {"memory": FIT}),
        (500_000_000, {f"{EDAC}/ce_count": "5000"}, {"memory": FIT, "memory errors": WARN}),
    ],
)  # fmt: skip
def test_memory(available: int, more: dict[str, str], verdicts: dict[str, str], tmp_path: Path) -> None:
    text = f"MemTotal: 1000000000 kB\nMemAvailable: {available} kB\nHardwareCorrupted: 0 kB\n"
    assert fitness(machine.memory(tree(tmp_path, {"proc/meminfo": text, **more}))) == verdicts


def test_memory_that_cannot_be_read(tmp_path: Path) -> None:
    (found,) = machine.memory(f"{tmp_path}/")
    assert (found.fitness, found.needed) == (UNKNOWN, False)


def test_a_disk(tmp_path: Path) -> None:
    (found,) = machine.disk(str(tmp_path / "not" / "yet"), "logs")  # the job makes them
    assert found.check == f"logs {tmp_path}"
    assert "synced in" in found.value
    assert list(tmp_path.iterdir()) == []
    (missing,) = machine.disk(str(tmp_path / "none"))
    assert (missing.value, missing.fitness) == ("No such file or directory", UNFIT)
    (refused,) = machine.disk("/proc")  # where no file can be made, even by root
    assert (refused.fitness, bool(refused.advice)) == (UNFIT, True)


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    def write() -> Iterator[CheckFinding]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        yield from machine.disk(str(tmp_path))

    (found,) = run_checks([Check("disk", write, HUNG)])
    assert (found.value, found.fitness) == ("File too large", UNFIT)
    assert list(tmp_path.iterdir()) == []


def test_a_clock_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.check.machine.time.time", lambda: 3600.0)
    (found,) = machine.clock()
    assert (found.value, found.fitness) == ("1970-01-01 01:00:00 UTC", UNFIT)
    monkeypatch.setattr("phalanx.check.machine.time.time", lambda: 1_800_000_000.0)
    for state, expected in ((None, UNKNOWN), ((True, 0.004), FIT), ((False, 16.0), WARN)):
        monkeypatch.setattr("phalanx.check.machine._kernel_clock", lambda state=state: state)
        (found,) = machine.clock()
        assert found.fitness == expected
    assert found.value == "not synchronised"


def test_cpus_that_are_busy_hot_or_capped(tmp_path: Path) -> None:
    quiet = tree(tmp_path / "quiet", {"proc/loadavg": "0.0 0 0 1/2 3"})
    assert fitness(machine.cpus(quiet)) == {"CPUs": FIT}
    cpu = "sys/devices/system/cpu/cpu0"
    loud = tree(
        tmp_path / "loud",
        {
            "proc/loadavg": "100000.0 0 0 1/2 3",
            f"{cpu}/thermal_throttle/core_throttle_count": "7",
            f"{cpu}/cpufreq/scaling_max_freq": "800000",
            f"{cpu}/cpufreq/cpuinfo_max_freq": "3200000",
        },
    )
    assert fitness(machine.cpus(loud, 0.0)) == {"CPUs": WARN, "CPU heat": FIT, "CPU speed": WARN}


def test_numa(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    node = "sys/devices/system/node"
    gpu = "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    files = {
        f"{node}/node0/cpulist": ",".join(map(str, mine)),
        f"{node}/node1/cpulist": "900-901",
        gpu: "GPU UUID: GPU-1\nDevice Minor: 0\n",
        "dev/nvidia0": "",
        "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1",
        "sys/bus/pci/devices/0000:3b:00.0/current_link_width": "8",
        "sys/bus/pci/devices/0000:3b:00.0/max_link_width": "16",
    }
    root = tree(tmp_path, files)
    (found,) = machine.numa({}, root)
    assert (found.value, found.fitness) == ("2 nodes, CPUs of 1 allowed; GPUs at node 1", WARN)
    (link,) = gpus.links({}, root)
    assert (link.check, link.value, link.fitness) == ("GPU 0 PCIe", "8 of 16 lanes", WARN)
    assert list(gpus.links({"CUDA_VISIBLE_DEVICES": ""}, root)) == []


# ---- what is tried on a GPU ------------------------------------------------------------------------


def test_a_device_that_hangs_or_crashes_is_unfit_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "DEVICE_LIMIT", 1.0)

    def use(index: int) -> CheckFinding:
        if index == 0:
            signal.pause()
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise TypeError("a mistake in the check")
        return CheckFinding(f"GPU {index} compute", "right")

    found = gpus.on_each(4, "compute", use)
    assert [one.check for one in found] == [f"GPU {index} compute" for index in range(4)]
    assert [one.fitness for one in found] == [UNFIT, UNFIT, UNKNOWN, FIT]
    assert [one.value for one in found[:2]] == ["no answer within 1 s", "the check was killed by signal 9"]


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_one_wrong_bit_in_a_product_is_seen() -> None:
    import torch

    assert gpus.multiply(torch, torch.device("cpu"), 64)[0] == 0
    one, two = torch.randint(-8, 9, (64, 64)), torch.randint(-8, 9, (64, 64))
    product = (one @ two).float()
    assert gpus.wrong_results(torch, one, two, product, product.half()) == 0
    for row in range(0, 64, 7):
        bad = product.clone()
        bad[row, 63 - row] += 1
        assert gpus.wrong_results(torch, one, two, bad, product.half()) == 1
        bad[row, 63 - row] += 1000
        assert gpus.wrong_results(torch, one, two, product, bad.half()) == 1


# ---- what driver and kernel report -----------------------------------------------------------------


def smi(address: str, inside: str) -> str:
    return f'<gpu id="{address}"><product_name>a GPU</product_name>{inside}</gpu>'


ECC = "<ecc_errors><volatile>{}</volatile></ecc_errors>"


@pytest.mark.parametrize(
    ("inside", "expected", "words"),
    [
        ("", FIT, "none"),
        (ECC.format("<dram_uncorrectable>N/A</dram_uncorrectable>"), FIT, "none"),
        (ECC.format("<dram_uncorrectable>2</dram_uncorrectable>"), UNFIT, "2 uncorrectable"),
        (ECC.format("<sram_uncorrectable_parity>1</sram_uncorrectable_parity>"), UNFIT, "1 uncorrectable"),
        (ECC.format("<dram_correctable>3</dram_correctable>"), FIT, "none"),
        (ECC.format("<dram_correctable>30000</dram_correctable>"), WARN, "30000 corrected"),
        ("<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>", UNFIT, "waits"),
        ("<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>", UNFIT, "cannot"),
        ("<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>Active"
         "</clocks_event_reason_hw_thermal_slowdown></clocks_event_reasons>", WARN, "heat"),
        ("<clocks_throttle_reasons><clocks_throttle_reason_hw_power_brake_slowdown>Active"
         "</clocks_throttle_reason_hw_power_brake_slowdown></clocks_throttle_reasons>", WARN, "power"),
    ],
)  # fmt: skip
def test_what_the_driver_reports(inside: str, expected: str, words: str) -> None:
    text = f"<nvidia_smi_log>{smi('00000000:3B:00.0', inside)}{smi('00000000:5E:00.0', '')}</nvidia_smi_log>"
    first, second = gpus.read_smi(text.encode(), {})
    assert (first.check, first.fitness) == ("GPU 0 errors", expected)
    assert words in first.value
    assert (second.check, second.fitness) == ("GPU 1 errors", FIT)
    (hidden,) = gpus.read_smi(text.encode(), {"0000:5e:00.0": 0})  # by CUDA_VISIBLE_DEVICES=1
    assert (hidden.check, hidden.fitness) == ("GPU 0 errors", FIT)


def test_a_report_that_cannot_be_read() -> None:
    (found,) = gpus.read_smi(b"<nvidia_smi_log", {})
    assert (found.fitness, found.needed) == (UNKNOWN, False)


def record(seconds: float, text: str) -> str:
    return f"3,100,{int(seconds * 1e6)},-;{text}"


LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
PROGRAM = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, MMU Fault"


@pytest.mark.parametrize(
    ("lines", "expected", "words"),
    [
        ([], FIT, "no hardware errors"),
        (["not,a;record", ";", "x"], FIT, "no hardware errors"),
        ([record(10, PROGRAM)], FIT, "1 GPU errors of programs"),
        ([record(9_000, LOST)], UNFIT, "Xid 79 at 0000:3b:00, 17 min ago: pid=1234, GPU has fallen"),
        ([record(10, LOST), record(9_999, PROGRAM)], WARN, "Xid 79 at 0000:3b:00, 3 h ago"),
        ([record(10, "mce: [Hardware Error]: Machine check events logged")], WARN, "1 machine checks"),
    ],
)
def test_the_kernel_log(lines: list[str], expected: str, words: str) -> None:
    (found,) = gpus.read_kernel_log(lines, 10_000.0)
    assert found.fitness == expected
    assert words in found.value


def test_a_kernel_log_that_is_not_there(tmp_path: Path) -> None:
    (found,) = gpus.kernel_log(str(tmp_path / "none"))
    assert (found.fitness, found.needed) == (UNKNOWN, False)


# ---- what an agent makes of it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output", "expected", "reason"),
    [
        (0, '{"fitness": "fit", "reason": ""}', FIT, ""),
        (95, '{"fitness": "unfit", "reason": "GPU 3: lost"}', UNFIT, "GPU 3: lost"),
        (0, '{"fitness": "unfit", "reason": "x"}', UNKNOWN, "the check failed (exit code 0): "),
        (0, '{"fitness": "splendid", "reason": "x"}', UNKNOWN, "the check failed (exit code 0)"),
        (1, "Traceback\nImportError: no", UNKNOWN, "the check failed (exit code 1): ImportError: no"),
        (-9, "", UNKNOWN, "the check failed (exit code -9): no output"),
        (0, "[1]", UNKNOWN, "the check failed"),
        (0, "", FIT, ""),  # the agent ends, and has ended the check
    ],
)
def test_what_an_agent_makes_of_the_check(code: int, output: str, expected: str, reason: str) -> None:
    verdict = read_verdict("a", code, output.encode())
    assert (verdict.node, verdict.fitness) == ("a", expected)
    assert verdict.reason.startswith(reason)
