"""`phalanx run --detach`: the agent goes to the background and survives the end of the terminal."""

from __future__ import annotations

import os
import signal
import sys

from phalanx.config import RunConfig


def detach(config: RunConfig) -> bool:
    """True in the process that goes on, in the background; False in the one that returns to the shell."""
    directory = config.log_dir or os.getcwd()
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(os.path.abspath(directory), f"phalanx-{config.run_id}.out")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()  # before any thread or helper exists
    if pid:
        os.close(log)
        print(f"phalanx: running in the background as pid {pid}; output in {path}; stop it with: kill {pid}")
        return False
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    return True
