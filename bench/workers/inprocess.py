"""A torch worker under nvidia-resiliency-ext's in-process wrapper: the counterpart of reentered.py.

It reduces at every step, and stamps the first all_reduce after each call. A rank that finds a file named
BENCH_RAISE.rank removes it and raises an exception. The wrapper has the intervals that BENCH_INTERVAL names,
in seconds; empty: its defaults.
"""

import os
import time
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

from phalanx.worker.reentry import torch_groups

torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 64, 256)).square().mean().backward()
optimizer.step()

calls = -1
first_rank = int(os.environ["RANK"])
interval = timedelta(seconds=float(os.environ["BENCH_INTERVAL"] or 1))
names = "monitor_thread_interval monitor_process_interval heartbeat_interval progress_watchdog_interval"
faster = dict.fromkeys([*names.split(), "last_call_wait"], interval)


def stamp(what: str) -> None:
    line = f"{what} {first_rank} {calls} {os.getpid()} {time.monotonic()!r}\n"
    events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
    os.write(events, line.encode())
    os.close(events)


class FreeGloo(inprocess.abort.Abort):
    """The wrapper's own abort does not free a rank that waits in gloo: it is made for NCCL."""

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        torch_groups.shut_gloo()
        return state


@inprocess.Wrapper(
    abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), FreeGloo()),
    **(faster if os.environ["BENCH_INTERVAL"] else {}),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    global calls
    calls += 1
    assert call_wrapper is not None
    # The wrapper has a store of its own at MASTER_PORT.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        int(os.environ["WORLD_SIZE"]),
        os.environ["RANK"] == "0",
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    value = torch.ones(1)
    dist.all_reduce(value)
    stamp("reduced")
    told = f"{os.environ['BENCH_RAISE']}.{first_rank}"
    while True:
        time.sleep(0.05)  # a step
        if os.path.exists(told):
            os.unlink(told)
            stamp("raised")
            raise RuntimeError("a fault")
        dist.all_reduce(value)


train()
