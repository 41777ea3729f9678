"""How long the kernel takes to end a process that uses the GPU: SIGKILL → waitpid. A floor for restarts."""

import os
import signal
import subprocess
import sys
import time

CODE = """
import sys, time, torch
x = torch.randn(4096, 4096, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(60)
"""

for _ in range(5):
    child = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    begin = time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    print(f"{(time.monotonic() - begin) * 1000:.0f} ms")
    child.stdout.close()
