"""`phalanx run --detach`: the agent goes to the background and survives the end of the terminal."""

from __future__ import annotations

import os
import signal
import sys

from phalanx.job.command_line import usage_error
from phalanx.job.options import JobSpec
from phalanx.trusted_files import make_directory


def detach(job: JobSpec) -> bool:
    """True in the background process that goes on; False in the one that returns to the shell."""
    directory = job.output.log_dir or os.getcwd()
    path = os.path.join(os.path.abspath(directory), f"phalanx-{job.cluster.run_id}.out")
    try:
        make_directory(directory)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise usage_error(
            f"--detach: the output cannot go to {path} ({error.strerror}); name a directory with --log-dir"
        ) from None
    away, tell = os.pipe()
    pid = os.fork()  # before any thread or helper exists
    if pid:
        os.close(log)
        os.close(tell)
        # Until it has left the terminal, whose closing would reach it: a shell may do that once this returns.
        os.read(away, 1)
        os.close(away)
        _tell(f"phalanx: running in the background as pid {pid}; output in {path}; stop it with: kill {pid}")
        return False
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd in (null, log, away, tell):
        os.close(fd)
    if sys.stderr is None:  # it was closed when Python started
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    return True


def _tell(line: str) -> None:
    """The job already runs: a closed stdout must not stop it."""
    try:
        print(line, flush=True)
    except (OSError, ValueError):
        pass
