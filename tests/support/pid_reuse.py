"""Pid 1 of a fresh pid namespace: a worker dies, a stranger takes its number, the group is stopped."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes


def impostor(number: int) -> subprocess.Popen[bytes]:
    """A process with this pid; the kernel may need a moment before it gives a number out again."""
    for _ in range(1000):
        # The number after this one goes to the next process.
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
        stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
        if stranger.pid == number:
            return stranger
        stranger.kill()
        stranger.wait()
    raise AssertionError(f"pid {number} is not to be had")


def main() -> None:
    group = start_processes(
        "reuse",
        "/bin/sh",
        {0: ("-c", "exit 0"), 1: ("-c", "exec sleep 300")},
        {0: {}, 1: {}},
        DefaultLogsSpecs(),
    )
    dead = group.pids()[0]
    while group.exit_code(0) is None:
        group.advance(1.0)
    stranger = impostor(dead)
    group.close(signal.SIGTERM, timeout=5)
    print("stranger alive" if stranger.poll() is None else f"stranger ended: {stranger.returncode}")
    stranger.kill()
    stranger.wait()


if __name__ == "__main__":
    main()
