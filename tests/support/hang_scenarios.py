"""Jobs that hang in a collective, for system tests and for recorded traces; each has one guilty rank.

python -m tests.support.hang_scenarios DIRECTORY     records the dumps of all scenarios anew (needs torch)
"""

from __future__ import annotations

BEGIN = """
import ctypes, os, signal, sys, threading, time
import torch, torch.distributed as dist
rank, size, guilty = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["GUILTY"])
dist.init_process_group("gloo")
pairs = dist.new_group(list(range(size)), group_desc="tp")
def step(group=None): dist.all_reduce(torch.ones(4), group=group)
def wait_for_ever(): threading.Event().wait()
for _ in range(3): step()
for _ in range(2): step(pairs)
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
def hold_the_lock(): ctypes.PyDLL(None).sleep(1000)
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
}
