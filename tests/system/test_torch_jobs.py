"""torch under `phalanx run`: process groups of every kind, checkpoints, and restarts that come back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.spec import Worker, WorkerGroup, WorkerSpec
from phalanx.agent.workers.environment import worker_environment
from phalanx.cluster.solo import SoloRendezvous
from phalanx.job.options import OPTIONS
from tests.conftest import gone
from tests.support.jobs import Job, job, python_with, script
from tests.support.netns import free_port


@pytest.fixture
def python() -> str:
    return python_with("torch")


KINDS = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

assert "phalanx" not in sys.modules
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

dist.barrier()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == world * (world + 1) / 2
for members in ([0], list(range(world))[::-1]):
    group = dist.new_group(members)
    if rank in members:
        count = torch.ones(1)
        dist.all_reduce(count, group=group)
        assert count.item() == len(members)
said = [None] * world
dist.all_gather_object(said, {"pid": os.getpid()})
assert len({one["pid"] for one in said}) == world

def step(model, seed):
    torch.manual_seed(seed)
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()

def fresh():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

plain = fresh()
parallel = DistributedDataParallel(fresh())
step(parallel, rank)
for other in range(world):
    step(plain, other)
for a, b in zip(plain.parameters(), parallel.parameters()):
    torch.testing.assert_close(a.grad / world, b.grad)
print("ddp", rank, flush=True)

sharded = fresh()
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
step(sharded, rank)
weight = sharded[0].weight
assert isinstance(weight, DTensor) and weight.to_local().shape[0] == 32 // world
torch.testing.assert_close(weight.grad.full_tensor(), plain[0].weight.grad / world)
optimizer.step()
print("fsdp", rank, flush=True)

state = {"model": get_model_state_dict(sharded)}
checkpoint.save(state, checkpoint_id=sys.argv[1])
again = fresh()
fully_shard(again)
empty = {"model": get_model_state_dict(again)}
checkpoint.load(empty, checkpoint_id=sys.argv[1])
set_model_state_dict(again, empty["model"])
for name, value in get_model_state_dict(again).items():
    torch.testing.assert_close(value.full_tensor(), state["model"][name].full_tensor(), rtol=0, atol=0)
print("checkpoint", rank, flush=True)
dist.barrier()
dist.destroy_process_group()
# torch 2.13 now and then aborts in its own tidying up at exit, under torchrun too; that is no subject here.
os._exit(0)
"""


def test_process_groups_ddp_fsdp_and_checkpoints(python: str, tmp_path: Path) -> None:
    said = job(
        tmp_path, "--nproc-per-node", "2", script(tmp_path, KINDS), str(tmp_path / "dcp"), python=python
    )
    assert sorted(said.split("\n")[:-1]) == sorted(
        f"{what} {rank}" for what in ("ddp", "fsdp", "checkpoint") for rank in (0, 1)
    )


OWN_PORT = """
import os
import torch, torch.distributed as dist

assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# As scripts do that know nothing of launchers: rank 0 is the server.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == world
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.abort()
dist.barrier()
print("bound by", "rank 0" if store.port == int(os.environ["MASTER_PORT"]) else store.port)
dist.destroy_process_group()
"""

INIT_ONLY = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value.item()))
dist.destroy_process_group()
"""


def test_a_script_that_binds_the_port_itself(python: str, tmp_path: Path) -> None:
    switch = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    path = script(tmp_path, OWN_PORT)
    # The restart too: the port was the first attempt's until a moment ago.
    said = job(
        tmp_path / "own", "--nproc-per-node", "2", "--max-restarts", "1", path, python=python, **switch
    )
    assert said == "bound by rank 0\n" * 2
    path = script(tmp_path, INIT_ONLY, "init.py")
    assert job(tmp_path / "init", "--nproc-per-node", "2", path, python=python, **switch) == "sum 2\n" * 2


NAMES = """
import os, socket, sys
import torch, torch.distributed as dist

rank, world, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
env = next(dist.rendezvous("env://"))[0]
for host in ("localhost", "127.0.0.1", "127.0.0.2", "[::1]", socket.gethostname(), socket.getfqdn()):
    store = next(dist.rendezvous(f"tcp://{host}:{port}", rank, world))[0]
    store.set(f"{host}/{rank}", "")
    env.wait([f"{host}/{other}" for other in range(world)])
dist.init_process_group("gloo", init_method=f"tcp://[::1]:{port}", rank=rank, world_size=world)
value = torch.ones(1)
dist.all_reduce(value)
print(os.environ["MASTER_ADDR"], "sum", int(value.item()))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("address", ["localhost", "127.0.0.3"])
def test_every_name_of_the_host_leads_to_the_agents_store(python: str, tmp_path: Path, address: str) -> None:
    where = ("--master-addr", address, "--master-port", str(free_port())) if address != "localhost" else ()
    words = (*where, "--nproc-per-node", "2", script(tmp_path, NAMES))
    with Job(tmp_path / "job", *words, python=python) as running:
        assert running.succeeds() == f"{address} sum 2\n" * 2
        assert "failed to bind" not in running.err


def test_two_nodes_with_static_ranks(python: str, tmp_path: Path) -> None:
    port = str(free_port())
    address = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1")
    path = script(tmp_path, INIT_ONLY)
    with (
        Job(tmp_path / "1", *address, "--node-rank", "1", path, python=python) as second,
        Job(tmp_path / "0", *address, "--node-rank", "0", path, python=python) as first,
    ):
        assert first.succeeds() == second.succeeds() == "sum 2\n"


TRAINING = """
import hashlib, json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, steps, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
path, done = os.path.join(folder, "state.pt"), 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
dist.barrier()
parallel = DistributedDataParallel(model)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while done < steps:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(done * 100 + rank))
    optimizer.zero_grad()
    (parallel(x).squeeze(1) - x.sum(1)).square().mean().backward()
    optimizer.step()
    done += 1
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    if attempt < kills:  # one step an attempt, then tell that training is under way, and be killed
        with open(os.path.join(folder, f"up-{attempt}-{rank}.new"), "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, file.name[:-4])
        while True:
            dist.barrier()
if rank == 0:
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"weights": weights, "attempt": attempt}, file)
dist.barrier()
# One after the other: a thread of gloo's aborts now and then when both ends of a connection close at once.
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.wait([f"left-{other}" for other in range(1, dist.get_world_size())])
dist.destroy_process_group()
store.set(f"left-{rank}", "1")
"""


def train_with_kills(python: str, folder: Path, steps: int, kills: int, *options: str) -> dict[str, Any]:
    """One job; as soon as an attempt trains, one of its workers is SIGKILLed, by turns. The result."""
    folder.mkdir(parents=True)
    words = ["--nproc-per-node", "2", "--max-restarts", str(kills), "--backoff", "0", *options]
    path = script(folder, TRAINING)
    with Job(folder / "job", *words, path, str(folder), str(steps), str(kills), python=python) as running:
        for attempt in range(kills):
            ups = [folder / f"up-{attempt}-{rank}" for rank in (0, 1)]
            running.until(lambda ups=ups: all(up.exists() for up in ups), f"attempt {attempt} trains")
            pids = [int(up.read_text()) for up in ups]
            os.kill(pids[attempt % 2], signal.SIGKILL)
            running.until(lambda pids=pids: all(gone(pid) for pid in pids), f"attempt {attempt} is gone")
        running.succeeds()
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def check_restarts(python: str, folder: Path, kills: int) -> None:
    """Every restart comes back, and the weights do not know of any."""
    steps = kills + 3
    plain = train_with_kills(python, folder / "plain", steps, 0)
    killed = train_with_kills(python, folder / "killed", steps, kills)
    assert killed == {"weights": plain["weights"], "attempt": kills}


def test_every_restart_comes_back(python: str, tmp_path: Path) -> None:
    check_restarts(python, tmp_path, 5)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_restarts_come_back(python: str, tmp_path: Path) -> None:
    check_restarts(python, tmp_path, 200)


# -- the page for people who come from torchrun --------------------------------------------------------

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"


def rows(page: str) -> set[str]:
    """Everything in code marks in the first column of a table."""
    return {
        word
        for line in page.splitlines()
        if line.startswith("| ")
        for word in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    }


def test_every_option_of_torchrun_is_on_the_page() -> None:
    python = python_with("torch")
    code = (
        "from torch.distributed.run import get_args_parser\n"
        "print(*(s for a in get_args_parser()._actions for s in a.option_strings if '_' not in s))"
    )
    said = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert len(said.split()) > 25
    assert set(said.split()) - rows(MIGRATING.read_text()) == set()


def test_the_page_names_no_option_that_is_none() -> None:
    page = MIGRATING.read_text().partition("## Hugging Face Accelerate")[0]
    flags = {flag for option in OPTIONS for flag in option.flags}
    named = {
        word for code in re.findall(r"`([^`\n]+)`", page) for word in code.split() if word.startswith("-")
    }
    assert len(named) > 30
    assert named - flags == {"-", "-u", "--redirect"}  # a sign, an option of Python's, and a shortened one


def test_every_variable_of_a_worker_is_on_the_page() -> None:
    group = WorkerGroup(WorkerSpec("default", 2, SoloRendezvous("id"), entrypoint="x"))
    env = worker_environment(
        group,
        Worker(0),
        run_id="id",
        attempt=0,
        use_agent_store=True,
        environ={"OMP_NUM_THREADS": "1"},
    )
    named = rows(MIGRATING.read_text())
    assert {name for name in env if not name.startswith("PHALANX_")} - named == set()
