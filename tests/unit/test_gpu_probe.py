"""The process that reads the devices of a node: asked rarely, not waited for, killed when it hangs."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent import gpu_probe
from phalanx.agent.gpu_probe import GpuProbe
from phalanx.core.group.group import Phase
from tests.conftest import HUNG

TELLS = """
import json, os, sys
with open(sys.argv[1], "a") as file:
    file.write("read ")
device = {"index": 0, "name": "H200", "total": 1 << 37, "busy": 50.0, "memory": 1 << 30}
print(json.dumps({"17": [device] * 40}))
"""


def turn(probe: GpuProbe, until: float) -> None:
    """What the owner's loop does with its parts, once."""
    poll = select.poll()
    for fd, mask in probe.fds(Phase.RUNNING):
        poll.register(fd, mask)
    deadline = probe.deadline(Phase.RUNNING)
    assert deadline is not None
    poll.poll(max(0.0, min(deadline, until) - time.monotonic()) * 1000 + 1)
    probe.look(Phase.RUNNING, time.monotonic())


def asked(probe: GpuProbe) -> list[Any]:
    told: list[Any] = []
    probe.ask(time.monotonic(), told.append)
    end = time.monotonic() + HUNG
    while not told and time.monotonic() < end:
        turn(probe, end)
    return told


def test_figures_come_from_one_process_and_serve_for_a_while(tmp_path: Path) -> None:
    device, count = tmp_path / "device", tmp_path / "count"
    probe = GpuProbe(str(device), [sys.executable, "-c", TELLS, str(count)])
    assert asked(probe) == [{}]  # no device: no process
    device.touch()
    (first,) = asked(probe)
    assert [one["name"] for one in first[17]] == ["H200"] * 16
    assert asked(probe) == [first]
    assert count.read_text() == "read "
    assert probe.fds(Phase.RUNNING) == []
    assert probe.deadline(Phase.RUNNING) is None


@pytest.mark.parametrize(
    "program", ["print('nonsense')", "print('[]')", "raise SystemExit(1)", "print('x' * 3000000)"]
)
def test_a_process_that_tells_nothing_gives_no_figures(tmp_path: Path, program: str) -> None:
    assert asked(GpuProbe(str(tmp_path), [sys.executable, "-c", program])) == [{}]
    assert asked(GpuProbe(str(tmp_path), [str(tmp_path / "missing")])) == [{}]


def test_a_process_that_hangs_is_not_waited_for_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probe, "DEVICES", 0.1)
    monkeypatch.setattr(gpu_probe, "_HUNG", 0.3)
    probe = GpuProbe(str(tmp_path), [sys.executable, "-c", "import time; time.sleep(1000)"])
    assert asked(probe) == [{}]
    end = time.monotonic() + HUNG
    while probe.fds(Phase.RUNNING) and time.monotonic() < end:
        turn(probe, end)
    assert not probe.fds(Phase.RUNNING)
    monkeypatch.setattr(gpu_probe, "_HUNG", HUNG)
    monkeypatch.setattr(gpu_probe, "_FRESH", 0.0)
    assert asked(probe) == [{}]
    probe.close()
    assert probe.fds(Phase.RUNNING) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
