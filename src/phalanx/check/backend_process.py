"""Measures pairs of nodes with the backend that a job would use: gloo, or NCCL where there are GPUs.

`BackendProcess` is the check's side of a process that imports torch once, while the nodes meet. It is asked
for one pair after another, a line of JSON each, and answers in the same way; when it does not, the pair has
no result, and another process takes its place. This module's `main` is what runs there.

As in a job, torch's store and the backend's own connections have no authentication: see docs/security.md.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from phalanx.job.time_budgets import COLLECTIVE, TORCH_IMPORT
from phalanx.python_command import python_command

_FIRST, _LARGEST = 1 << 18, 1 << 26  # bytes of a message
_LONG, _ENOUGH = 0.2, 0.6  # seconds of one message, and of all


class BackendProcess:
    """The process with torch; `backend` is nccl, gloo, or empty if there is none."""

    def __init__(self, environ: Mapping[str, str], more: Mapping[str, str]) -> None:
        self._environment = {**environ, **more}
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            python_command("phalanx.check.backend_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        self._data = b""
        self._found: str | None = None

    def backend(self) -> str:
        """What it has found; waits for torch to be imported."""
        if self._found is None:
            self._found = str(self._read(time.monotonic() + TORCH_IMPORT).get("backend", ""))
        return self._found

    def measure(
        self, backend: str, store: tuple[str, int], name: str, rank: int, until: float
    ) -> float | None:
        """Bytes per second of an all_reduce between two nodes; None: it did not work."""
        self.backend()  # after an accident it has been started anew
        pipe = self._process.stdin
        assert pipe is not None
        order = {"backend": backend, "store": store, "name": name, "rank": rank}
        try:
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
        except OSError:
            return None  # it has crashed
        answer = self._read(until)
        if not answer:
            # It hangs, or was ended by the backend itself: the next partner gets one that works.
            self.close()
            self._start()
        rate = answer.get("rate")
        return float(rate) if isinstance(rate, int | float) and rate > 0 else None

    def _read(self, until: float) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._data:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return {}
            data = os.read(pipe.fileno(), 65536)
            if not data:
                return {}
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """End it; idempotent."""
        self._process.kill()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # in the driver, in uninterruptible sleep
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # an order that was not read


# ---- in the process --------------------------------------------------------------------------------


def main() -> None:
    """Import torch, then measure with one partner after another, until the orders end."""
    from phalanx.kernel import die_with_parent

    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(**what: object) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        import torch
        import torch.distributed as dist

        gpu = torch.cuda.is_available() and dist.is_nccl_available()
    except (ImportError, OSError):
        answer(backend="")
        return
    answer(backend="nccl" if gpu else "gloo" if dist.is_gloo_available() else "")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            rate = _all_reduce(torch, order)
        except RuntimeError as error:
            answer(rate=None, error=str(error)[:200])
        else:
            answer(rate=rate)


def _all_reduce(torch: Any, order: dict[str, Any]) -> float:
    """The upper quartile over messages that are large enough: a busy machine makes some of them slow.

    Both sides decide by the same figure when it is enough."""
    from datetime import timedelta

    dist = torch.distributed
    limit = timedelta(seconds=COLLECTIVE)
    device = torch.device("cuda", 0) if order["backend"] == "nccl" else torch.device("cpu")
    store = dist.TCPStore(*order["store"], is_master=False, timeout=limit)
    dist.init_process_group(
        order["backend"],
        store=dist.PrefixStore(order["name"], store),
        rank=order["rank"],
        world_size=2,
        timeout=limit,
    )
    try:
        took = torch.zeros(1, device=device)
        dist.all_reduce(took)  # connects
        spent, size = 0.0, _FIRST
        rates: list[float] = []
        while True:
            data = torch.ones(size // 4, device=device)
            began = time.monotonic()
            dist.all_reduce(data)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took[0] = time.monotonic() - began
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds = max(float(took.item()), 1e-6)
            if float(data[0].item()) != 2.0 or float(data[-1].item()) != 2.0:
                raise RuntimeError("a wrong sum")
            rates.append(size / seconds)
            spent += seconds
            if spent >= _ENOUGH:
                return sorted(rates)[3 * len(rates) // 4]
            if seconds < _LONG / 4 and size < _LARGEST:
                size *= 4
                rates = []
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
