"""Kept state of CUDA tensors: what a save costs the training, and how fast a restarted worker has it back.

    python bench/gpu/keep.py [--gb 10] [--runs 5] [--out FILE]

One worker on one GPU holds `--gb` of tensors and computes in between. Taken alternately, in one process:

    raw      the same tensors into one pinned buffer of torch's: the floor
    wait     worker.keep: the time of the call
    beside   worker.keep(wait=False): how much longer the next step takes, the call included; and the time
             until the save is whole

Then the worker kills itself. In the restarted one: kept() mapped and copied by `to`, and kept(device="cuda"),
each checked to the last byte. Then a kill in the middle of a save with wait=False: the save before it must be
found whole. Nothing is asserted about times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_TENSOR = 64 << 20  # bytes of most tensors; a few hundred small ones stand for biases and scalars
_SMALL = 200


def make(torch: Any, size: int, seed: int) -> dict[str, Any]:
    """Tensors of this many bytes in all, which depend on the seed only."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tree = {}
    for number in range(size // _TENSOR):
        tree[f"large.{number}"] = torch.randint(
            0, 1 << 30, (_TENSOR // 4,), dtype=torch.int32, device="cuda", generator=generator
        )
    for number in range(_SMALL):
        tree[f"small.{number}"] = torch.randn(1000, device="cuda", generator=generator)
    torch.cuda.synchronize()
    return tree


def same(torch: Any, found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].to("cuda"), value) for name, value in wanted.items()
    )


class Steps:
    """Something for the GPU to do, and the time it takes."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def take(self) -> float:
        """One step of about 50 ms."""
        begin = time.monotonic()
        b = self._a
        for _ in range(40):
            b = self._a @ b * 1e-2
        # As a loss that is read does; a wait for the whole device would wait for the save, too.
        self._torch.cuda.current_stream().synchronize()
        return time.monotonic() - begin


def measure(torch: Any, size: int, runs: int) -> dict[str, Any]:
    """Everything that one process can measure."""
    from phalanx import worker

    tree = make(torch, size, 1)
    total = sum(t.numel() * t.element_size() for t in tree.values())
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=True)

    def raw() -> float:
        torch.cuda.synchronize()
        begin, at = time.monotonic(), 0
        for tensor in tree.values():
            flat = tensor.view(torch.uint8).reshape(-1)
            buffer[at : at + len(flat)].copy_(flat, non_blocking=True)
            at += len(flat)
        torch.cuda.synchronize()
        return time.monotonic() - begin

    step = 0

    def wait() -> float:
        nonlocal step
        step += 1
        torch.cuda.synchronize()
        begin = time.monotonic()
        worker.keep("state", tree, step)
        return time.monotonic() - begin

    steps = Steps(torch)
    for _ in range(5):
        steps.take()

    def beside() -> tuple[float, float, float]:
        nonlocal step
        step += 1
        plain = statistics.median(steps.take() for _ in range(3))
        begin = time.monotonic()
        save = worker.keep("state", tree, step, wait=False)
        called = time.monotonic() - begin
        steps.take()
        longer = time.monotonic() - begin - plain
        save.wait()
        return called, longer, time.monotonic() - begin

    first = [wait(), wait()]  # reserve and pin, once for each slot
    beside()  # the allocator's first copies
    found: dict[str, list[Any]] = {"raw": [], "wait": [], "beside": []}
    for _ in range(runs):
        found["raw"].append(raw())
        found["wait"].append(wait())
        found["beside"].append(beside())
    return {
        "gb": total / 1e9,
        "first_saves": first,
        "raw": statistics.median(found["raw"]),
        "wait": statistics.median(found["wait"]),
        "wait_over_raw": statistics.median(found["wait"]) / statistics.median(found["raw"]),
        "beside_call": statistics.median(one[0] for one in found["beside"]),
        "beside_stall": statistics.median(one[1] for one in found["beside"]),
        "beside_whole": statistics.median(one[2] for one in found["beside"]),
        "all": found,
    }


def restore(torch: Any, size: int, seed: int) -> dict[str, Any]:
    """What a restarted worker waits for."""
    from phalanx import worker

    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    begin = time.monotonic()
    found = worker.kept("state")
    assert found is not None, "nothing was kept"
    mapped = time.monotonic() - begin
    begin = time.monotonic()
    copies = {name: tensor.to("cuda") for name, tensor in found.tree.items()}
    torch.cuda.synchronize()
    to = time.monotonic() - begin
    del copies
    begin = time.monotonic()
    loaded = worker.kept("state", device="cuda")
    assert loaded is not None
    torch.cuda.synchronize()
    direct = time.monotonic() - begin
    wanted = make(torch, size, seed)
    return {
        "step": found.step,
        "mapped": mapped,
        "to": to,
        "device": direct,
        "whole": same(torch, found.tree, wanted) and same(torch, loaded.tree, wanted),
    }


def work(size: int, runs: int, out: str) -> None:
    """The worker; each attempt does one part."""
    import torch

    from phalanx import worker

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    results = json.loads(Path(out).read_text()) if attempt else {}
    if attempt == 0:
        results["save"] = measure(torch, size, runs)
        results["device"] = torch.cuda.get_device_name()
        results["torch"] = torch.__version__
    elif attempt == 1:
        results["restore"] = restore(torch, size, 1)
        tree = make(torch, size, 2)
        worker.keep("state", tree, 1000)
        other = make(torch, size, 3)
        worker.keep("state", other, 1001, wait=False)
    else:
        found = worker.kept("state")
        assert found is not None
        seed = {1000: 2, 1001: 3}[found.step]
        results["killed_in_a_save"] = {
            "step": found.step,
            "whole": same(torch, found.tree, make(torch, size, seed)),
        }
    Path(out).write_text(json.dumps(results))
    if attempt < 2:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", default="keep.json")
    arguments = parser.parse_args()
    size, out = int(arguments.gb * 1e9), os.path.abspath(arguments.out)
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        work(size, arguments.runs, out)
        return
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    words = [sys.executable, "-m", "phalanx", "run", "--warm", "off", "--max-restarts", "2", __file__]
    words += ["--gb", str(arguments.gb), "--runs", str(arguments.runs), "--out", out]
    code = subprocess.run(words, env=env, check=False).returncode
    results = {"host": platform.node(), "exit_code": code, **json.loads(Path(out).read_text())}
    Path(out).write_text(json.dumps(results, indent=1))
    save, back = results["save"], results["restore"]
    print(f"{results['device']}, torch {results['torch']}: {save['gb']:.1f} GB of CUDA tensors")
    print(f"raw pinned copy          {save['raw'] * 1e3:8.0f} ms")
    print(f"keep                     {save['wait'] * 1e3:8.0f} ms   {save['wait_over_raw']:.2f} of raw")
    print(f"keep(wait=False): call   {save['beside_call'] * 1e3:8.0f} ms")
    print(f"  training stalled for   {save['beside_stall'] * 1e3:8.0f} ms")
    print(f"  whole after            {save['beside_whole'] * 1e3:8.0f} ms")
    print("first two saves          " + ", ".join(f"{one:.2f} s" for one in save["first_saves"]))
    print(
        f"kept, mapped             {back['mapped'] * 1e3:8.0f} ms, then to('cuda') {back['to'] * 1e3:.0f} ms"
    )
    print(f"kept(device='cuda')      {back['device'] * 1e3:8.0f} ms   whole: {back['whole']}")
    print(f"killed in a save         {results['killed_in_a_save']}")


if __name__ == "__main__":
    main()
