"""What can be tried of NCCL with one GPU: re-entry, the verdict on a hang, and two ranks on the same device.

    python bench/gpu/nccl.py [reenter] [hang] [share]

    reenter   four ranks train together over gloo, each with an NCCL group of its own; one is killed
    hang      the same; one rank starts a kernel that does not end, before its NCCL operation
    share     one NCCL group of two ranks on one device: what NCCL says

Shows what the job prints, and NCCL's own report of the hang. Nothing is asserted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTLE = 12.0  # seconds of training before the kill: standbys are ready then
VICTIM = 2


def run(what: str, scratch: str, ranks: int, *flags: str) -> None:
    """One job; its lines are shown, except the steps."""
    env = {
        **os.environ,
        "TRY": what,
        "SCRATCH": scratch,
        "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "phalanx", "run", "--nproc-per-node", str(ranks), *flags]
    job = subprocess.Popen(
        [*command, str(HERE / "nccl_step.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert job.stdout is not None
    pids: dict[int, int] = {}
    killed = began = 0.0
    try:
        for line in job.stdout:
            found = re.match(r"step (\d+) (\d+) (\d+) ([\d.]+)$", line)
            if line.startswith("phase "):
                _, where, *phase, at = line.split()
                if killed:
                    print(f"    {float(at) - killed:.3f} s: rank {where} {' '.join(phase)}")
            elif found is None:
                print("   ", line.rstrip(), flush=True)
            if found is None:
                continue
            rank, pid, moment = int(found[1]), int(found[3]), float(found[4])
            began = began or moment
            if what != "reenter":
                continue
            if not killed and len(pids) == ranks and moment > began + SETTLE:
                killed = time.monotonic()
                os.kill(pids[VICTIM], signal.SIGKILL)
            elif not killed:
                pids[rank] = pid
            elif rank == VICTIM and pid != pids[VICTIM] and not os.path.exists(f"{scratch}/stop"):
                print(f"    SIGKILL → next step of the killed rank: {moment - killed:.3f} s")
                Path(scratch, "stop").touch()
            elif rank != VICTIM and pid != pids[rank]:
                print(f"    rank {rank} has a new process")
        print("    exit code", job.wait(30))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def main() -> None:
    """All of it, or what is asked for."""
    for what in sys.argv[1:] or ["reenter", "hang", "share"]:
        print(f"{what}:", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            if what == "reenter":
                run(what, scratch, 4, "--warm", "standby", "--max-restarts", "1")
            elif what == "hang":
                run(what, scratch, 4, "--hang-timeout", "3", "--log-dir", f"{scratch}/logs")
                for report in Path(scratch).rglob("nccl_ras.txt"):
                    print("    NCCL's own report:")
                    print("\n".join(f"    | {line}" for line in report.read_text().splitlines()))
            else:
                run(what, scratch, 2)


if __name__ == "__main__":
    main()
