"""A rank of nccl.py: prints `step RANK NUMBER PID TIME`, and `phase RANK WHAT TIME` around a re-entry."""

import os
import sys
import time

import torch
import torch.distributed as dist

from phalanx import worker

TRY, STOP = os.environ["TRY"], os.path.join(os.environ["SCRATCH"], "stop")
GUILTY = 2  # of a hang
numbers = torch.ones(1 << 20, device="cuda")


def tell(phase: str) -> None:
    sys.stdout.write(f"phase {os.environ['RANK']} {phase} {time.monotonic()}\n")
    sys.stdout.flush()


def take_steps() -> None:
    dist.init_process_group("nccl" if TRY == "share" else "gloo")
    rank, own = dist.get_rank(), None
    if TRY != "share":
        own = [dist.new_group([one], backend="nccl") for one in range(dist.get_world_size())][rank]
    for step in range(1, 1_000_000):
        if TRY == "hang" and step == 50 and rank == GUILTY:
            torch.cuda._sleep(1 << 50)
        dist.all_reduce(numbers, group=own)
        torch.cuda.synchronize()
        ended = torch.tensor([float(os.path.exists(STOP))])
        if TRY != "share":
            dist.all_reduce(ended)
        sys.stdout.write(f"step {rank} {step} {os.getpid()} {time.monotonic()}\n")
        sys.stdout.flush()
        if ended.item():
            break
        time.sleep(0.02)
    dist.destroy_process_group()


@worker.reenter(abort=lambda: tell("recalled"), finalize=lambda: tell("groups destroyed"))
def train(round) -> None:
    tell("called")
    try:
        take_steps()
    finally:
        tell("unwound")


train()
