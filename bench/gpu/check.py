"""`phalanx check` on a machine with GPUs: what it finds, how long it takes, and whether it sees a busy GPU.

    python bench/gpu/check.py

Also which of the fields that the check reads are in this driver's report.
"""

import json
import os
import subprocess
import sys
import time
from xml.etree import ElementTree

PHALANX = [sys.executable, "-m", "phalanx"]
HOLD = """
import torch
x = torch.zeros(20 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
input()
"""
FIELDS = (
    "ecc_errors/volatile/sram_uncorrectable_parity",
    "ecc_errors/volatile/sram_uncorrectable_secded",
    "ecc_errors/volatile/dram_uncorrectable",
    "ecc_errors/volatile/dram_correctable",
    "remapped_rows/remapped_row_pending",
    "remapped_rows/remapped_row_failure",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown",
    "clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown",
    "clocks_throttle_reasons/clocks_throttle_reason_hw_thermal_slowdown",
)


def check(what: str, *words: str, env: dict[str, str] | None = None) -> None:
    """Run it and show the findings on GPUs."""
    begin = time.monotonic()
    done = subprocess.run(
        [*PHALANX, "check", "--json", *words], stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    took = time.monotonic() - begin
    told = json.loads(done.stdout)
    print(f"{what}: {told['fitness']} (exit code {done.returncode}), {took:.2f} s  {told['reason']}")
    for row in told["checks"]:
        if row["check"].startswith(("GPU", "kernel", "NUMA")):
            print(f"    {row['check']:<16} {row['fitness']:<15} {row['value']}")


check("everything")
check("again", "--only", "gpus,links,errors,kernel,compute")
check("without compute", "--only", "gpus,links,errors,kernel,memory,shm,disk,clock,limits,numa,cpus")
check("no GPU visible", env={"CUDA_VISIBLE_DEVICES": ""})
holder = subprocess.Popen(
    [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert holder.stdout is not None
holder.stdout.readline()
check("20 GiB in use by another process (expected: warn)", "--only", "compute")
holder.communicate("\n")

for options in ([], ["--check"]):
    begin = time.monotonic()
    words = [*PHALANX, "run", "-q", *options, "--no-python", "/bin/true"]
    code = subprocess.run(words, check=False).returncode
    print(f"phalanx {' '.join(words[3:])}: exit code {code}, {time.monotonic() - begin:.2f} s")

report = subprocess.run(["nvidia-smi", "-q", "-x"], stdout=subprocess.PIPE, check=False).stdout
for gpu in ElementTree.fromstring(report).findall("gpu"):
    print(gpu.get("id"), gpu.findtext("product_name"), gpu.findtext("ecc_mode/current_ecc"))
    for field in FIELDS:
        print(f"    {field}: {gpu.findtext(field)}")
