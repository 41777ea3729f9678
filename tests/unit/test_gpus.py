"""What `observe/gpus.py` reads from NVML: a library with its functions takes the place of the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.observe import gpus
from tests.conftest import HUNG

LIBRARY = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Use;
typedef struct { unsigned pid; unsigned long long memory; unsigned instance, compute; } Process;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return index == 1 ? 15 : 0;  /* one is lost */
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) { strncpy(name, "H200", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) { memory->total = 150ULL << 30; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, Use *use) {
    use->gpu = 97;
    return device == (void *)3 ? 3 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *size, Process *found) {
    found[0].pid = 41;
    found[0].memory = 7ULL << 30;
    found[1].pid = 42;
    found[1].memory = ~0ULL;  /* not known, as in a container */
    *size = device == (void *)3 ? 1 : 2;
    return 0;
}
"""


def read(env: dict[str, str]) -> dict[str, list[dict[str, object]]]:
    command = [sys.executable, "-I", "-S", gpus.__file__]
    done = subprocess.run(command, env=env, capture_output=True, timeout=HUNG, check=True)
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found


def test_the_devices_of_each_process(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler in CI")
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(LIBRARY)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "nvml.c")], check=True)
    found = read({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    first = {"index": 0, "name": "H200", "total": 150 << 30, "busy": 97.0}
    assert found == {
        "41": [
            {**first, "memory": 7 << 30},
            {**first, "index": 2, "busy": None, "memory": 7 << 30},
        ],
        "42": [{**first, "memory": None}],
    }


def test_without_the_library_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    assert read({"LD_LIBRARY_PATH": str(tmp_path)}) == {}
