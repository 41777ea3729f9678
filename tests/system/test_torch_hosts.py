"""A torch job over two hosts that is killed again and again: it always comes back, with the same weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import gone
from tests.support import netns
from tests.support.jobs import Job, python_with, script
from tests.system.test_torch_jobs import TRAINING

KILLS = pytest.mark.parametrize(
    "kills", [pytest.param(2, id="few"), pytest.param(50, id="many", marks=pytest.mark.long)]
)


@pytest.mark.timeout(900)
@KILLS
def test_two_hosts_come_back_after_every_kill(kills: int, tmp_path: Path) -> None:
    if not netns.possible():
        pytest.skip("needs root and network namespaces, to have two hosts")
    python = python_with("torch")
    plain = train(python, tmp_path / "plain", 0, steps=kills + 3)
    killed = train(python, tmp_path / "killed", kills, steps=kills + 3)
    assert killed == {"weights": plain["weights"], "attempt": kills}


def train(python: str, folder: Path, kills: int, steps: int) -> dict[str, object]:
    """One worker on each of two hosts; as soon as an attempt trains, one of them is SIGKILLed, by turns."""
    folder.mkdir()
    path = script(folder, TRAINING)
    with netns.Network("a", "b") as network:
        jobs = []
        for name, host in network.hosts.items():
            words = ["--nnodes", "2", "--rdzv-backend", "phalanx", "--rdzv-id", "job", "--rdzv-conf", "ttl=4"]
            words += ["--rdzv-endpoint", f"{network.hosts['a'].address}:29400", "--max-restarts", str(kills)]
            words += ["--backoff", "0"]
            job = Job(
                folder / name, *words, path, str(folder), str(steps), str(kills),
                python=python, before=host.inside, PHALANX_TOKEN="secret",
            )  # fmt: skip
            jobs.append(job)
        try:
            for attempt in range(kills):
                ups = [folder / f"up-{attempt}-{rank}" for rank in (0, 1)]
                jobs[0].until(lambda ups=ups: all(up.exists() for up in ups), f"attempt {attempt} trains")
                pids = [int(up.read_text()) for up in ups]
                os.kill(pids[attempt % 2], signal.SIGKILL)
                jobs[0].until(lambda pids=pids: all(gone(pid) for pid in pids), f"attempt {attempt} is gone")
            for job in jobs:
                job.succeeds()
        finally:
            for job in jobs:
                job.__exit__()
    result: dict[str, object] = json.loads((folder / "result.json").read_text())
    return result
