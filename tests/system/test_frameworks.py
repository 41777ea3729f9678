"""Workers of every kind get the same environment: shell scripts, compiled programs, and scripts written for
the launchers of Hugging Face Accelerate and PyTorch Lightning."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import Job, job, python_with, script

NAMES = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
]

IN_PYTHON = f"import os\nprint(' '.join(os.environ[name] for name in {NAMES}))\n"

IN_BASH = f"""#!/bin/bash
set -u
echo {" ".join(f"${name}" for name in NAMES)}
"""

IN_C = """
#include <stdio.h>
#include <stdlib.h>
static const char *names[] = {%s};
int main(int argc, char **argv) {
    if (argc == 2 && argv[1][0] == 'f' && getenv("RANK")[0] == '1') return 7;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (!value) { fprintf(stderr, "no %%s\\n", names[i]); return 1; }
        printf("%%s%%s", i ? " " : "", value);
    }
    puts("");
    return 0;
}
""" % ", ".join(f'"{name}"' for name in NAMES)  # noqa: UP031 - braces are C's here


def compiled(folder: Path) -> str:
    """The program in C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler in CI")
        pytest.skip("no C compiler")
    source = script(folder, IN_C, "worker.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-o", str(folder / "worker"), source], check=True)
    return str(folder / "worker")


def test_a_shell_script_a_binary_and_python_get_the_same_environment(tmp_path: Path) -> None:
    bash = script(tmp_path, IN_BASH, "worker.sh")
    os.chmod(bash, 0o755)
    options = ("--nproc-per-node", "3", "--rdzv-id", "same", "--max-restarts", "2")
    seen = []
    for number, words in enumerate(
        ([script(tmp_path, IN_PYTHON)], ["--no-python", bash], ["--no-python", compiled(tmp_path)])
    ):
        rows = [line.split() for line in job(tmp_path / str(number), *options, *words).splitlines()]
        assert all(len(row) == len(NAMES) for row in rows), rows
        found = [dict(zip(NAMES, row, strict=True)) for row in sorted(rows)]
        assert len({row.pop("MASTER_PORT") for row in found}) == 1
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    assert [row["RANK"] for row in seen[0]] == ["0", "1", "2"]
    assert {row["WORLD_SIZE"] for row in seen[0]} == {"3"}
    assert {row["TORCHELASTIC_RUN_ID"] for row in seen[0]} == {"same"}


def test_the_exit_code_of_a_binary(tmp_path: Path) -> None:
    with Job(tmp_path / "job", "--nproc-per-node", "2", "--no-python", compiled(tmp_path), "f") as failing:
        assert failing.wait() == 7
    assert "exit code 7" in failing.err


# torch 2.13 aborts when a thread of gloo releases a tensor while the interpreter exits (pytorch issue
# 190489): the scripts give those threads the time to finish.
LET_GLOO_FINISH = """
import time
time.sleep(1)
"""

ACCELERATE = (
    """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
assert accelerator.num_processes == 2
assert str(accelerator.mixed_precision) == "bf16", accelerator.mixed_precision
torch.manual_seed(accelerator.process_index)
data = TensorDataset(torch.arange(32.0).reshape(32, 1))
model, loader = torch.nn.Linear(1, 1), DataLoader(data, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(x).square().mean())
    optimizer.step()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().reshape(1))
assert weights[0] == weights[1], weights
print("rank", accelerator.process_index, "batches", len(loader))
accelerator.end_training()
"""
    + LET_GLOO_FINISH
)


def test_a_script_for_accelerate(tmp_path: Path) -> None:
    python = python_with("torch", "accelerate")
    words = ("--nproc-per-node", "2", script(tmp_path, ACCELERATE))
    # What `accelerate launch --mixed_precision bf16 --cpu` would set.
    settings = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    said = job(tmp_path / "job", *words, python=python, **settings)
    assert sorted(said.splitlines()) == ["rank 0 batches 4", "rank 1 batches 4"]


LIGHTNING = (
    """
import os
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(torch.arange(32.0).reshape(32, 1)), batch_size=4))
weights = trainer.strategy.all_gather(model.layer.weight.detach())
assert weights[0] == weights[1], weights
print("rank", trainer.global_rank, "of", trainer.world_size, "steps", trainer.global_step)
"""
    + LET_GLOO_FINISH
)


def test_a_script_for_lightning(tmp_path: Path) -> None:
    python = python_with("torch", "lightning")
    said = job(tmp_path / "job", "--nproc-per-node", "2", script(tmp_path, LIGHTNING), python=python)
    ranks = [line for line in said.splitlines() if line.startswith("rank ")]
    assert sorted(ranks) == ["rank 0 of 2 steps 4", "rank 1 of 2 steps 4"]
