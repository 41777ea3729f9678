"""A torch worker with something to build: a transformer and its first step, before it waits for its rank.

It stamps its first all_reduce and then waits for a signal.
"""

import os
import signal
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
worker.wait_for_rank()
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
stamp = time.monotonic()
assert value.item() == dist.get_world_size()
line = f"reduced {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {stamp!r}\n"
events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
os.write(events, line.encode())
while True:
    signal.pause()
