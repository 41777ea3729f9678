"""The torch worker: imports torch, forms a gloo group, and stamps its first all_reduce.

By default it then exits; with `wait` it waits for a signal.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
stamp = time.monotonic()
assert value.item() == dist.get_world_size()
line = f"reduced {os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()} {stamp!r}\n"
events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
os.write(events, line.encode())
if sys.argv[1:] == ["wait"]:
    while True:
        signal.pause()
dist.destroy_process_group()
