"""Jobs that hang in a collective, for system tests and for recorded traces; each has one guilty rank.

One launch plays a whole plan, one scenario per restart, so that torch is imported once.

    python -m tests.support.hang_scenarios DIRECTORY     records the dumps of all scenarios anew (needs torch)
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

BEGIN = """
import ctypes, os, signal, sys, threading, time
plan = PLAN
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt >= len(plan): sys.exit(0)
print("started", flush=True)
import torch, torch.distributed as dist
print("imported", flush=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
name, guilty = plan[attempt]
dist.init_process_group("gloo")
pairs = dist.new_group(list(range(size)), group_desc="tp")
def step(group=None): dist.all_reduce(torch.ones(4), group=group)
def wait_for_ever(): threading.Event().wait()
for _ in range(3): step()
for _ in range(2): step(pairs)
print("stepped", flush=True)
"""
SCENARIOS = {
    "missing": """
    def lost(): wait_for_ever()
    if rank == guilty: lost()
    step()
""",
    "missing_in_group": """
    def lost(): wait_for_ever()
    if rank == guilty: lost()
    step(pairs)
""",
    "operation": """
    def other(): dist.all_gather([torch.ones(4) for _ in range(size)], torch.ones(4))
    other() if rank == guilty else step()
""",
    "group": """
    step(pairs) if rank == guilty else step()
""",
    "ahead": """
    def wait_elsewhere(): wait_for_ever()
    if rank != guilty: wait_elsewhere()
    step()
""",
    "stopped": """
    if rank == guilty: os.kill(os.getpid(), signal.SIGSTOP)
    step()
""",
    "locked": """
    def hold_the_lock():
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    if rank == guilty: hold_the_lock()
    step()
""",
    "loader": """
    lock = threading.Lock()
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, index):
            with lock: return torch.ones(1)
    def load():
        for _ in torch.utils.data.DataLoader(Data(), num_workers=1): pass
    if rank == guilty:
        lock.acquire()  # the loader's process inherits it, and it is never released there
        load()
    step()
""",
    "evaluation": """
    def evaluate():
        end = time.monotonic() + 3
        while time.monotonic() < end: pass
    def lost(): wait_for_ever()
    if rank == guilty: evaluate()
    step()
    if rank == guilty: lost()
    step()
""",
    "slow": """
    def compute(): time.sleep(0.8)
    for _ in range(4):
        if rank == guilty: compute()
        step()
    if rank == guilty: time.sleep(1000)
    step()
""",
    "dead": """
    if rank == guilty: os.kill(os.getpid(), signal.SIGKILL)
    step()
""",
}
EXPECTED = {
    "missing": "rank {} never entered all_reduce #4 of the default group (last was all_reduce #3)",
    "missing_in_group": "rank {} never entered all_reduce #3 of group tp (last was all_reduce #2)",
    "operation": "rank {} calls all_gather as #4 of the default group",
    "group": "rank {} in all_reduce #3 of group tp",
    "ahead": "rank {} is ahead: in all_reduce #4 of the default group",
    "stopped": "rank {} is stopped by a signal; ",
    "locked": "rank {} never entered all_reduce #4 of the default group (last was all_reduce #3)",
    "loader": "rank {} never entered all_reduce #4 of the default group (last was all_reduce #3)",
    "evaluation": "rank {} never entered all_reduce #5 of the default group (last was all_reduce #4)",
    # On a busy machine one of its first three steps may already take longer than the timeout.
    "slow": "rank {} is slow: it comes to all_reduce #",
    "dead": "rank {}: SIGKILL",
}
"""What a line of the launcher contains; with three ranks or more, because of two none is the odd one."""
OF_TWO = {
    "operation": "the ranks disagree on #4 of the default group: rank 0 calls ",
    "group": "the ranks are in different groups: ",
    "ahead": "never entered all_reduce #4 of the default group",
}
"""The same with two ranks, where it differs."""

Plan = list[tuple[str, int]]


def program(plan: Plan) -> str:
    """A script that plays one item of the plan after each restart, and then ends well."""
    used = dict.fromkeys(name for name, _ in plan)
    return BEGIN.replace("PLAN", repr(plan)) + "".join(
        f"if name == {name!r}:{SCENARIOS[name]}" for name in used
    )


def expected(name: str, guilty: int, size: int) -> str:
    """What the launcher says of an item of the plan."""
    return (OF_TWO.get(name, EXPECTED[name]) if size == 2 else EXPECTED[name]).format(guilty)


def record(directory: str) -> None:
    """Run every scenario and keep what the ranks had recorded."""
    hangs: Plan = [(name, 1) for name in SCENARIOS if name not in ("dead", "evaluation")]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "train.py")
        path.write_text(program(hangs))
        launcher = [str(Path(sys.executable).with_name("phalanx")), "run", "--nproc-per-node", "3"]
        flags = ["--grace", "1", "--hang-timeout", "3", "--max-restarts", str(len(hangs))]
        flags += ["--restart-always", "--backoff", "0"]
        subprocess.run([*launcher, "--log-dir", f"{scratch}/logs", *flags, str(path)], check=False)
        for attempt, (name, guilty) in enumerate(hangs):
            dumps = {
                int(found.name.removeprefix("rank_")): pickle.loads(found.read_bytes())
                for found in sorted(Path(scratch).glob(f"logs/*/attempt_{attempt}/flight_recorder/rank_*"))
            }
            latest = max(entry["time_created_ns"] for dump in dumps.values() for entry in dump["entries"])
            recorded = {"now": latest + 3 * 10**9, "guilty": guilty, "ranks": dumps}
            Path(directory, f"{name}.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
