"""A torch worker that re-enters: builds a transformer once, and stamps the first all_reduce of every round.

It then reduces until it is ended, as training does: a rank that is killed leaves the others in a collective.
"""

import os
import time

import torch
import torch.distributed as dist

from phalanx import worker

torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 64, 256)).square().mean().backward()
optimizer.step()


@worker.reenter
def train(_round: object) -> None:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    stamp = time.monotonic()
    assert value.item() == dist.get_world_size()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"reduced {os.environ['RANK']} {attempt} {os.getpid()} {stamp!r}\n"
    events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
    os.write(events, line.encode())
    os.close(events)
    while True:
        time.sleep(0.05)  # a step
        dist.all_reduce(value)
        worker.heartbeat()


train()
