"""A torch worker that re-enters: builds a transformer once, and stamps the phases of every round.

    recalled  told to re-enter; in a thread
    unwound   the call has ended, and the process groups are destroyed
    called    again, in its next place
    joined    the process group is set up
    reduced   the first all_reduce of all ranks

It then reduces until it is ended, as training does: a rank that is killed leaves the others in a collective.
A rank that finds a file named BENCH_RAISE.rank removes it and raises an exception.
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


def stamp(what: str) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"{what} {os.environ['RANK']} {attempt} {os.getpid()} {time.monotonic()!r}\n"
    events = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
    os.write(events, line.encode())
    os.close(events)


@worker.reenter(abort=lambda: stamp("recalled"), finalize=lambda: stamp("unwound"))
def train(_round: object) -> None:
    stamp("called")
    dist.init_process_group("gloo")
    stamp("joined")
    value = torch.ones(1)
    dist.all_reduce(value)
    stamp("reduced")
    assert value.item() == dist.get_world_size()
    told = f"{os.environ.get('BENCH_RAISE', '')}.{dist.get_rank()}"
    while True:
        time.sleep(0.05)  # a step
        if os.path.exists(told):
            os.unlink(told)
            stamp("raised")
            raise RuntimeError(f"fault {os.environ['TORCHELASTIC_RESTART_COUNT']}")  # another error each time
        dist.all_reduce(value)
        worker.heartbeat()


train()
