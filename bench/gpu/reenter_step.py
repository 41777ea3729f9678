"""Four ranks train on one GPU; the state of each is on the device. Prints `step RANK NUMBER PID TIME` lines.

Under Phalanx (MODE=reenter) the function re-enters, and the state is kept in memory; under torchrun
(MODE=disk) every rank saves it to a local disk, and loads it after a restart.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from phalanx import worker

BYTES = int(os.environ["STATE_BYTES"])
EVERY = 20  # steps between two saves
FILE = os.path.join(os.environ["SCRATCH"], "state.{rank}")
weights = torch.zeros(BYTES // 4, device="cuda")  # once per process
number = 0


def tell(phase: str) -> None:
    """For the phases of a re-entry."""
    sys.stdout.write(f"phase {os.environ['RANK']} {phase} {os.getpid()} {time.monotonic()}\n")
    sys.stdout.flush()


def take_steps(save) -> None:
    global number
    rank, stop = dist.get_rank(), os.path.join(os.environ["SCRATCH"], "stop")
    while True:
        number += 1
        weights[: 1 << 20] += 1.0
        torch.cuda.synchronize()
        ended = torch.tensor([float(os.path.exists(stop))])
        dist.all_reduce(ended)  # gloo
        sys.stdout.write(f"step {rank} {number} {os.getpid()} {time.monotonic()}\n")
        sys.stdout.flush()
        if ended.item():
            return
        if number % EVERY == 0:
            save(rank)
        time.sleep(0.02)


@worker.reenter
def train(round) -> None:
    global number
    tell("called")
    dist.init_process_group("gloo")
    tell("joined")
    agreed = worker.agree("state")
    tell("agreed")
    if agreed is not None and agreed != number:  # a survivor may be there already
        found = worker.kept("state", device="cuda")
        tell("read")
        weights.copy_(found.tree)
        number = found.step
        torch.cuda.synchronize()
    tell("loaded")
    take_steps(lambda rank: worker.keep("state", weights, step=number))


def main() -> None:
    global number
    if os.environ["MODE"] == "reenter":
        train()
        return
    dist.init_process_group("gloo")
    file = FILE.format(rank=dist.get_rank())
    if os.path.exists(file):
        found = torch.load(file, map_location="cuda", mmap=True)
        weights.copy_(found["weights"])
        number = found["step"]

    def save(rank: int) -> None:
        torch.save({"weights": weights, "step": number}, f"{file}.new")
        os.replace(f"{file}.new", file)
        dist.barrier()

    take_steps(save)


main()
