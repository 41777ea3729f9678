"""State that workers keep: it outlives them, is whole at every moment, and is gone with the job."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import LaunchConfig, elastic_launch
from phalanx.worker.state.memory_file import MemoryFile
from phalanx.worker.state.rank_state import RankState, StatePlace
from tests.conftest import HUNG, wait_until
from tests.support.jobs import job, python_with
from tests.support.run_helpers import Running, run, script, unshare

few_or_many = pytest.mark.parametrize(
    "count", [pytest.param(8, id="few"), pytest.param(200, id="many", marks=pytest.mark.long)]
)


def place_in(file: MemoryFile, rank: int = 0, world_size: int = 1) -> StatePlace:
    found = os.fstat(file.fd)
    return StatePlace(file.fd, -1, found.st_dev, found.st_ino, 1, rank, world_size)


# Keeps a tree of its rank and attempt, then fails in the first two attempts.
RESTARTED = """
import os, signal
from phalanx import worker
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = worker.kept("model")
what = found and (found.step, found.tree["rank"], len(found.tree["data"]))
print(f"found {rank} {attempt} {what}", flush=True)
worker.keep("model", {"rank": rank, "data": bytes([attempt]) * 300_000}, step=10 * attempt + rank)
print("kept", worker.kept("model").step, flush=True)
agreed = worker.agree("pair")
worker.keep("pair", attempt, step=attempt)
worker.agree("pair")
if attempt < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print(f"agreed {rank} {attempt} {agreed}", flush=True)
"""


@pytest.mark.parametrize("warm", ["auto", "off", "standby"])
def test_kept_state_is_found_after_a_restart(tmp_path: Path, warm: str) -> None:
    path = script(tmp_path, RESTARTED)
    done = run("--nproc-per-node", "2", "--max-restarts", "2", "--warm", warm, path)
    assert done.code == 0, done
    for rank in (0, 1):
        assert f"found {rank} 0 None" in done.out
        assert f"found {rank} 1 ({rank}, {rank}, 300000)" in done.out, done
        assert f"found {rank} 2 ({10 + rank}, {rank}, 300000)" in done.out, done
        assert f"agreed {rank} 2 1" in done.out, done


# Saves as fast as it can; every byte of a save is that of its step.
SAVES = """
import os, sys
from phalanx.worker.state.rank_state import RankState, StatePlace
fd, first = int(sys.argv[1]), int(sys.argv[2])
file = os.fstat(fd)
state = RankState(StatePlace(fd, -1, file.st_dev, file.st_ino, 1, 0, 1))
for step in range(first, 1 << 40):
    # Of another size every time, so that regions grow, too.
    state.keep("model", [bytes([step % 251]) * (50_000 + step % 7 * 300_000), {"step": step}], step, True)
    os.write(1, b"%d\\n" % step)
"""


@few_or_many
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(count: int) -> None:
    file = MemoryFile.create()
    dice = random.Random(count)
    step = 1
    try:
        for _ in range(count):
            saver = subprocess.Popen(
                [sys.executable, "-c", SAVES, str(file.fd), str(step)],
                stdout=subprocess.PIPE,
                pass_fds=[file.fd],
            )
            assert saver.stdout is not None
            said = os.read(saver.stdout.fileno(), 4096)
            select.select([], [], [], dice.random() * 0.02)  # a random moment: nothing is waited for
            saver.kill()
            saver.wait(HUNG)
            while more := os.read(saver.stdout.fileno(), 4096):
                said += more
            saver.stdout.close()
            last = int(said.split(b"\n")[-2])
            found = RankState(place_in(file)).kept("model", None, False)
            assert found is not None
            assert found.step in (last, last + 1)  # it may have been killed before it said so
            data, rest = found.tree
            assert rest == {"step": found.step}
            assert data == bytes([found.step % 251]) * (50_000 + found.step % 7 * 300_000)
            del found, data
            step = last + 2
    finally:
        file.close()


BIG = """
import os
from phalanx import worker
size = 100_000_000
worker.keep("big", bytes(size), step=1)
worker.keep("big", bytes(size), step=2)
found = worker.kept("big")
shm = os.statvfs("/dev/shm")
print("kept", found.step, len(found.tree), shm.f_blocks * shm.f_frsize, flush=True)
"""


def test_the_size_of_dev_shm_does_not_matter(tmp_path: Path) -> None:
    if not unshare():
        pytest.skip("namespaces are not allowed here")
    small = ["unshare", "--mount"] + (["--user", "--map-root-user"] if os.geteuid() else [])
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    path = script(tmp_path, BIG)
    with Running([path], before=[*small, "sh", "-c", mount, "sh"]) as job:
        text = job.read_until("kept ")
        assert f"kept 2 100000000 {64 << 20}" in job.read_until("\n", text.count("\n") + 1)


def holders() -> set[int]:
    """Processes that have a file of kept state open."""
    found = set()
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if "phalanx-state" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    found.add(int(pid))
        except OSError:
            pass
    return found


KEEPS = """
import os, time
from phalanx import worker
worker.keep("model", bytes(1_000_000), step=1)
print("kept", os.getpid(), flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_when_the_agent_is_killed(tmp_path: Path) -> None:
    path = script(tmp_path, KEEPS)
    before = holders()
    with Running(["--nproc-per-node", "2", path]) as job:
        job.read_until("kept", 2)
        mine = holders() - before
        assert len(mine) >= 3  # the agent and two workers
        os.kill(job.agent, signal.SIGKILL)
        wait_until(lambda: not (holders() & mine), "the end of all that held kept state")


HUGE = """
import mmap, os, pickle
from phalanx import worker

class Huge:
    def __reduce_ex__(self, protocol):
        fd = os.memfd_create("huge")
        os.ftruncate(fd, 1 << 42)
        return bytes, (pickle.PickleBuffer(mmap.mmap(fd, 1 << 42)),)

worker.keep("small", "small", step=1)
try:
    worker.keep("model", Huge(), step=2)
except RuntimeError as error:
    print(error, flush=True)
print("small", worker.kept("small").tree, worker.kept("model"), flush=True)
"""


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(script(tmp_path, HUGE))
    assert done.code == 0, done
    line, rest = done.out.splitlines()[-2:]
    assert line.startswith("keep('model'): "), done
    assert "are available" in line
    assert rest == "small small None"


SPILLS = """
import os, sys
from phalanx import worker
rank = os.environ["RANK"]
step = worker.agree("model")
found = worker.kept("model")
print(f"found {rank} {step} {found and found.tree}", flush=True)
worker.keep("model", {"rank": rank}, step=5 if step is None else step + 1)
worker.keep("other", bytes(3_000_000), step=1)
worker.agree("other")
sys.exit(int(sys.argv[1]))
"""


def test_state_is_written_if_the_job_fails_and_found_by_its_next_launch(tmp_path: Path) -> None:
    path = script(tmp_path, SPILLS)
    words = ["--nproc-per-node", "2", "--keep-spill", str(tmp_path / "spill"), "--rdzv-id", "a b"]
    for expected in ("None None", "5 {'rank': '%'}", "6 {'rank': '%'}"):
        done = run(*words, path, "3")
        assert done.code == 3, done
        for rank in "01":
            assert f"found {rank} {expected.replace('%', rank)}" in done.out, done
        assert any("kept state of rank 0, 1 written to" in line for line in done.said), done
    directory = tmp_path / "spill" / "run-a%20.b"
    assert sorted(os.listdir(directory)) == ["rank-0", "rank-1"]
    assert {(directory / name).stat().st_mode & 0o777 for name in ("rank-0", "rank-1")} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    # Of another job: not found.
    assert "found 0 None None" in run(*words[:-1], "a", path, "0").out
    # Damaged, or writable by others: not used, and the line says why.
    good = (directory / "rank-0").read_bytes()
    (directory / "rank-0").write_bytes(good[:280])
    (directory / "rank-1").chmod(0o666)
    done = run(*words, path, "3")
    assert "found 0 None None" in done.out, done
    assert "found 1 None None" in done.out, done
    text = "\n".join(done.said)
    assert "rank 0" in text
    assert "the file is cut short" in text
    assert "can be written by others" in text
    # After success there is nothing to go back to.
    done = run(*words, path, "0")
    assert "found 0 5" in done.out, done
    assert not directory.exists()


def test_state_is_written_when_the_job_is_told_to_end(tmp_path: Path) -> None:
    path = script(tmp_path, KEEPS)
    with Running(["--keep-spill", str(tmp_path), "--rdzv-id", "one", path]) as job:
        job.read_until("kept")
        os.kill(job.agent, signal.SIGTERM)
        job.read_until("written to")
        assert job.end().code == 143
    assert (tmp_path / "run-one" / "rank-0").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--keep-spill", "{}/ok"], "name the job with --rdzv-id"),
        (["--keep-spill", "{}/open", "--rdzv-id", "x"], "can be written by others"),
        (["--keep-spill", "{}/file", "--rdzv-id", "x"], "not a directory"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, words: list[str], why: str) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").write_text("")
    done = run(*(word.format(tmp_path) for word in words), script(tmp_path, "print('ran')"))
    assert done.code == 2, done
    assert why in done.err.lower()
    assert "ran" not in done.out
    assert done.err.count("\n") == 1


OUTSIDE = """
from phalanx import worker
worker.keep("model", {"a": 1}, step=1, wait=False).wait()
print(worker.kept("model"), worker.agree("model"))
"""


def test_outside_phalanx_nothing_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, script(tmp_path, OUTSIDE)], capture_output=True, text=True, timeout=HUNG, check=True
    )
    assert done.stdout == "None None\n"


# Two FSDP2 ranks whose state goes through torch.distributed.checkpoint; the first attempt is killed.
SHARDED = """
import os, signal
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from phalanx import worker
from phalanx.worker import torch_checkpoint

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(attempt)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments, "plain": torch.full((3,), float(rank)), "note": f"of {rank}"}

def total():
    return [round(p.full_tensor().sum().item(), 5) for p in model.parameters()]

if attempt == 0:
    for step in range(3):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch_checkpoint.save(state(), "model", 3)
    if rank == 0:
        print("saved", total(), flush=True)
    else:
        total()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
optimizer.zero_grad()
found = state()
assert worker.agree("model") == 3
step = torch_checkpoint.load(found, "model")
set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
text = f"loaded {total()}"
if rank == 0:
    print(text, flush=True)
assert (step, found["note"], found["plain"][0].item()) == (3, f"of {rank}", float(rank))
assert torch_checkpoint.load({}, "other") is None
dist.destroy_process_group()
"""


def test_shards_go_through_torchs_checkpoints(tmp_path: Path) -> None:
    python = python_with("torch")
    path = script(tmp_path, SHARDED)
    out = job(tmp_path / "job", "--nproc-per-node", "2", "--max-restarts", "1", path, python=python)
    saved, loaded = (next(line for line in out.splitlines() if word in line) for word in ("saved", "loaded"))
    assert saved.split(" ", 1)[1] == loaded.split(" ", 1)[1]


PREEMPTED = """
import select
from phalanx import worker
found = worker.kept("model")
print("found", found and found.step, flush=True)
if found is None:
    worker.keep("model", 1, step=7)
    worker.should_checkpoint()  # from here on the worker is asked, not killed
    print("kept", flush=True)
    while not worker.should_checkpoint():
        select.select([], [], [], 0.01)
    worker.keep("model", 1, step=8)
"""


def test_state_is_written_when_the_job_is_preempted(tmp_path: Path) -> None:
    path = script(tmp_path, PREEMPTED)
    words = ["--preempt-signal", "SIGUSR1", "--keep-spill", str(tmp_path), "--rdzv-id", "one", path]
    with Running(words) as preempted:
        preempted.read_until("kept")
        os.kill(preempted.agent, signal.SIGUSR1)
        assert preempted.end().code == 128 + signal.SIGUSR1
    assert "found 8" in run(*words).out


def _keep_and_fail() -> tuple[object, int | None]:
    from phalanx import worker

    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    step, found = worker.agree("model"), worker.kept("model")
    worker.keep("model", {"rank": rank}, step=attempt)
    worker.agree("model")
    if attempt == 0:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    return found and found.tree, step


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_functions_keep_state_too(start_method: str) -> None:
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method=start_method,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    results = elastic_launch(config, _keep_and_fail)()
    assert results == {0: ({"rank": 0}, 0), 1: ({"rank": 1}, 0)}
