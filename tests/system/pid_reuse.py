"""Runs as pid 1 of a fresh pid namespace: a worker dies, a stranger takes its number, the group is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from phalanx.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from phalanx.processes.spawner import Exit


def main() -> None:
    group = start_processes(
        "reuse",
        "/bin/sh",
        {0: ("-c", "exit 0"), 1: ("-c", "sleep 300")},
        {0: {}, 1: {}},
        DefaultLogsSpecs(),
    )
    dead = group.pids()[0]
    assert group.spawner is not None
    while not any(isinstance(event, Exit) and event.pid == dead for event in group.spawner.events()):
        pass
    # The kernel gives the number after this one to the next process.
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(dead - 1))
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    assert stranger.pid == dead, f"the stranger is {stranger.pid}, not {dead}"
    group.close(signal.SIGTERM, timeout=5)
    os.kill(group.pids()[1], 0) if False else None
    print("stranger alive" if stranger.poll() is None else f"stranger ended: {stranger.returncode}")
    stranger.kill()
    stranger.wait()


if __name__ == "__main__":
    main()
