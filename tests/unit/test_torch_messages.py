"""Messages of torch's libraries are kept back for a moment, and only for that."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import subprocess, sys
import torch.distributed as dist
from phalanx.worker.torch_messages import errors_only

server = subprocess.Popen(
    [sys.executable, "-c", "import sys, torch.distributed as d; "
     "s = d.TCPStore('127.0.0.1', 0, is_master=True); print(s.port, flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
port = int(server.stdout.readline())
stores = [dist.TCPStore("127.0.0.1", port) for _ in "ab"]
server.kill()
server.communicate()

def ask(store, word):
    sys.stderr.write(word)
    sys.stderr.flush()
    try:
        store.check(["key"])
    except Exception:
        pass

restore = errors_only()
ask(stores[0], "<muted>")
restore()
ask(stores[1], "<heard>")
"""


def test_warnings_are_kept_back_until_they_are_wanted_again() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    muted, heard = done.stderr.split("<muted>")[1].split("<heard>")
    assert muted == ""
    assert "recvValue failed" in heard or "sendBytes failed" in heard
