"""A script whose restart begins after the slow part: the standby of every worker has done it in advance.

    phalanx run --warm standby --nproc-per-node 2 --max-restarts 1 examples/wait_for_rank.py --kill

Everything above `wait_for_rank()` runs in the standby while the current workers still run; the restarted
worker goes on below it. Above it, only LOCAL_RANK and LOCAL_WORLD_SIZE are known.
"""

import argparse
import os
import signal
import time

from phalanx import worker


def build() -> list[int]:
    """The slow part: imports, the model, the first kernels."""
    end = time.monotonic() + 1.0
    table = [0]
    while time.monotonic() < end:
        table.append(table[-1] + 1)
    return table


def main() -> None:
    """Build, wait for the rank, work."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kill", action="store_true", help="the last rank kills itself once")
    args = parser.parse_args()
    began = time.monotonic()
    table = build()
    built = time.monotonic() - began
    worker.wait_for_rank()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"attempt {attempt}: rank {rank} of {world}, {len(table) > 1} after {built:.1f} s", flush=True)
    if args.kill and attempt == 0:
        time.sleep(4)  # training; the standbys build meanwhile
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


if __name__ == "__main__":
    main()
